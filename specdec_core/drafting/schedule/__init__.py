"""The drafter depends on the load."""

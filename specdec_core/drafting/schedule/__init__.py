"""Who drafts depends on the load."""

"""Training: heads, the bundled pair, datastores."""

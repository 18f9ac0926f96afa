"""Building datastores from texts."""

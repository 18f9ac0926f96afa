"""A ranking by replay compared with the server itself."""

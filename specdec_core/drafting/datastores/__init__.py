"""The datastore of retrieval-based speculative decoding (REST, He et al., 2024)."""

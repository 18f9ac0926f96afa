"""Attention of packed rows, each to its own part of the cache."""

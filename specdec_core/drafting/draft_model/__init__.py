"""A small language model drafts a chain."""

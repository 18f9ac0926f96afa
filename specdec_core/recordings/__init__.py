"""Recordings of real prompts, and the exact replay of any configuration from them."""

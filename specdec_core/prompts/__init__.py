"""Prompts to measure with, and where they come from."""

"""Experiments that answer a question; each returns data."""

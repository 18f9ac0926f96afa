"""Servers under load: what is asked of them, what they answered, and who is faster."""

"""Drafted tokens that were useful are used again (Post-use & Pre-cut, §5.1)."""

"""A pair served over HTTP."""

"""The HTTP face of an engine: a FastAPI application."""

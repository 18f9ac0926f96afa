"""Requests and answers of the HTTP protocols, as values."""

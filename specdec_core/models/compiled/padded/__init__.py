"""Forwards of rows that are padded to one width."""

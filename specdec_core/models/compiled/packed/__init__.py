"""Forwards of rows that are packed into one sequence, by a graph for any number of tokens."""

"""Forwards of a model shape with random weights, beside what the memory allows."""

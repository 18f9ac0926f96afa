"""Forwards of a target in one process and split over several, eager and compiled."""

"""Sweeps: plan, search space and results."""

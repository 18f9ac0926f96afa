"""Drafting on a device of its own while the target verifies (PEARL, Liu et al., 2025)."""

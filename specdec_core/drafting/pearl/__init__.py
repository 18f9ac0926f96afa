"""Drafting on another device while the target verifies (PEARL, Liu et al., 2025)."""

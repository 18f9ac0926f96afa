"""A bandit chooses who drafts, anew for every round of a slot (BanditSpec, Hou et al., 2025)."""

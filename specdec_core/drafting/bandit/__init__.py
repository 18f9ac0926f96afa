"""A bandit chooses a drafter for every round of a slot (BanditSpec, Hou et al., 2025)."""

"""Ouroboros: phrases speed up and lengthen drafts (Zhao et al., 2024)."""

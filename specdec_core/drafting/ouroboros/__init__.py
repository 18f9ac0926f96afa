"""Ouroboros: drafts are made and lengthened phrase by phrase (Zhao et al., 2024)."""

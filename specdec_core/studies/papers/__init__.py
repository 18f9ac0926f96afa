"""The papers' comparison tables."""

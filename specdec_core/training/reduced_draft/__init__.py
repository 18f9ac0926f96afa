"""Drafts with a reduced vocabulary, distilled from what their target answers."""

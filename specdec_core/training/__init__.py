"""Training: heads, EAGLE heads, reduced drafts."""

"""EAGLE heads, trained on features of the target's own answers."""

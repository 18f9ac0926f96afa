"""EAGLE heads: the target's own answers, and training on its features of them."""

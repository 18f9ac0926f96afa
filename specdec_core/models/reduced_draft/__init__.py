"""Draft models with an output layer over some tokens of their target's vocabulary."""

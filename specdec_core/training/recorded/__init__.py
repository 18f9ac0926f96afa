"""Training on what a target answers and computes: texts, features, loss, the loop."""

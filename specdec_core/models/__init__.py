"""Models: loading a pair, and the runners that execute it."""

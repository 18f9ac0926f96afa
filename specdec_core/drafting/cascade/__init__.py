"""A draft model's chain that is itself sped up: a lookup guesses its tokens."""

"""A small language model drafts a chain, alone or sped up by a lookup that guesses its tokens."""

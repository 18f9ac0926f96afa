"""transformers: its `generate`, which decodes one sequence at a time, and our plug-in for it."""

ASSISTANT = "assistant_model"  # an argument of `generate`, not a generation setting

"""transformers, whose `generate` decodes one sequence at a time."""

ASSISTANT = "assistant_model"  # an argument of `generate`, not a generation setting

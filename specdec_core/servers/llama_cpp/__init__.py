"""llama.cpp's server."""

DRAFT = "spec-draft-model"  # the option with a mode's draft

"""The benchmark: this engine and what people use instead, on the same prompts, in turns."""

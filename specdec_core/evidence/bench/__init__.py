"""The benchmark: this engine and other libraries, interleaved on the same prompts."""

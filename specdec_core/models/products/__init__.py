"""Products with a model's matrices in bfloat16, by an operator of the project's own."""

"""Trees that grow where the draft model is confident (EAGLE-2: expand, then rerank)."""

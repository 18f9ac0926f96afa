"""Other libraries behind one interface: transformers and vLLM."""

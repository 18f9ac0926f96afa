"""What people use instead, behind one interface: transformers and vLLM."""

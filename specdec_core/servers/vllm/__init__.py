"""vLLM: its settings, its processes, its step costs, its metrics, and our plug-in for it."""

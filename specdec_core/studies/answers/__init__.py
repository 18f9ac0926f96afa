"""Tasks whose answers can be judged, and what share of them a configuration gets right."""

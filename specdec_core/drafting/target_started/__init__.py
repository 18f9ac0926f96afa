"""Trees of the draft model that begin with tokens drawn by the target (improved MCSD, §3)."""

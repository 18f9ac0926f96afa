"""Target-initialised trees of dynamic depth: improved MCSD's framework as a whole (§3)."""

"""Target-initialised multi-candidate trees: the target begins them (improved MCSD, §3.1)."""

"""Fork-shaped trees: several chains side by side (improved MCSD, §3.2 and §3.3)."""

"""A draft model grows a token tree of one shape: static trees, and forks (MCSD; Sequoia)."""

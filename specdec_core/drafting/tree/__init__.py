"""Multi-candidate speculative decoding: a draft model grows a static tree (MCSD; Sequoia)."""

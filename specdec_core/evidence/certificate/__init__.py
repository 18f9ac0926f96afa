"""Proof that a configuration changes nothing but the speed of a pair."""

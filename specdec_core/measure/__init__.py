"""Everything that uses a clock: profiles, interleaved timing, paired comparison."""

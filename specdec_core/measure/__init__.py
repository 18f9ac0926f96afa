"""Everything that uses a clock: profiles, step times, interleaved timing, paired comparison."""

"""Training and judging the heads that predict acceptance."""

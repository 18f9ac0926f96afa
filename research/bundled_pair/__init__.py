"""The recipe of the bundled pair, whose weights are part of the package."""

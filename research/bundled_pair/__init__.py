"""The recipe of the bundled pair. Its weights are part of the package."""

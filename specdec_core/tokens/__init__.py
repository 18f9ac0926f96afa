"""Token trees: sampling, coupling, verification, and the statistics of rounds."""

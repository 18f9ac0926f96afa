"""Training the bundled pair."""

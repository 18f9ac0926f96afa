"""What a claim rests on: benches, loads on servers, certificates."""

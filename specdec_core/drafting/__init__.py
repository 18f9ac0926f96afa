"""What proposes candidate tokens, and when a draft ends: a file or folder for each kind."""

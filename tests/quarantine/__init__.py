"""Fatal errors, and messages that kill their workers: real processes, and a supervisor that restarts them."""

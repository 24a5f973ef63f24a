"""Fatal errors, and messages that kill their workers: real `dramatiq` processes, and a supervisor that restarts them."""

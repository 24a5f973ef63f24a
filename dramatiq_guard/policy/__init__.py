"""Pure decisions: standard library only, no clock, no randomness, no I/O, nothing of Dramatiq."""

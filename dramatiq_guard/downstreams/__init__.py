"""What a process knows of the downstreams that its actors call, and who may call them now."""

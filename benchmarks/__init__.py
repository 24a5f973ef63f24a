"""What the stack costs, measured against stock Dramatiq: one command per table."""

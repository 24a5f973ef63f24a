"""The idempotency guard and dead workers: real processes on real brokers and stores, and what an outsider counted."""

"""The same storm for others: Celery, and BullMQ on node; run by the nox session `bench_peers`, which installs them."""

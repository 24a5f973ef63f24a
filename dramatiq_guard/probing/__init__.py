"""Whether a worker process is well, and telling those who ask: files, HTTP, systemd."""

"""How a worker process is, and how that is said: to probes, to systemd."""

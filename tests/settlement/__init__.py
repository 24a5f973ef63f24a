"""That nothing is lost: settlement under outages, kills and lost replies, on real brokers."""

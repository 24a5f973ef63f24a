"""Stores on Redis and Valkey."""

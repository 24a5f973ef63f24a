"""Stores that live in one process, for tests and the StubBroker."""

"""Breakers in this process's memory: for tests, and for a single worker process."""

from __future__ import annotations

from threading import Lock

from ... import clock
from ..breaker import Found

__all__ = ["MemoryBreakers"]


class MemoryBreakers:
    """`BreakerRecords` in memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._records: dict[str, tuple[int, str]] = {}

    def read(self, key: str) -> Found:
        version, record = self._records.get(key, (0, None))
        return Found(version, record, clock.now())

    def write(self, key: str, version: int, record: str) -> bool:
        with self._lock:
            if self._records.get(key, (0, ""))[0] != version:
                return False
            self._records[key] = version + 1, record
            return True

    def keys(self) -> list[str]:
        return sorted(self._records)

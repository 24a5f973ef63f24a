"""Deliveries in a dictionary: the plainest statement of what the other stores do on their servers."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from ..protocols import DELIVERIES_KEPT
from .crashes import MemoryCrashes

__all__ = ["MemoryDeliveries"]


@dataclass(slots=True)
class _Record:
    sequence: int
    fork: str | None
    at: int


class MemoryDeliveries:
    """A `DeliveryStore` that is gone with its process."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._lock = Lock()
        self.crashes = MemoryCrashes()

    def __repr__(self) -> str:
        return f"<MemoryDeliveries with {len(self._records)} records>"

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool:
        with self._lock:
            known = self._known(message_id, now)
            if known is None or known.sequence < sequence:
                self._records[message_id] = _Record(sequence, fork, max(now, known.at if known else now))
                return True
            if known.sequence > sequence or known.fork not in (None, fork):
                return False
            known.fork, known.at = fork, max(known.at, now)
            return True

    def advance(self, message_id: str, sequence: int, *, now: int) -> None:
        with self._lock:
            known = self._known(message_id, now)
            if known is None:
                self._records[message_id] = _Record(sequence, None, now)
                return
            if known.sequence < sequence:
                known.sequence, known.fork = sequence, None
            known.at = max(known.at, now)

    def purge(self, *, now: int, limit: int = 1_000) -> int:
        with self._lock:
            over = [each for each, record in self._records.items() if record.at <= now - DELIVERIES_KEPT][:limit]
            for message_id in over:
                del self._records[message_id]
            return len(over)

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _known(self, message_id: str, now: int) -> _Record | None:
        record = self._records.get(message_id)
        return record if record is not None and record.at > now - DELIVERIES_KEPT else None

"""Crashes in dictionaries: the plainest statement of what the other stores do on their servers."""

from __future__ import annotations

from threading import RLock

from ..crashes import Crash, History

__all__ = ["MemoryCrashes"]


class MemoryCrashes:
    """A `CrashStore` that is gone with its process, and so for tests only."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._alive: dict[str, tuple[str, int, int]] = {}
        self._starts: dict[str, dict[str, int]] = {}
        self._crashes: dict[str, list[Crash]] = {}

    def live(self, process: str, *, host: str, pid: int, now: int, ttl: int) -> None:
        with self._lock:
            self._alive[process] = (host, pid, now + ttl)

    def leave(self, process: str) -> None:
        with self._lock:
            self._alive.pop(process, None)
            self._starts.pop(process, None)

    def starter(self, process: str) -> MemoryStarter:
        return MemoryStarter(self, process)

    def inquest(self, *, now: int) -> int:
        found = 0
        with self._lock:
            for process, (host, pid, until) in list(self._alive.items()):
                if until > now:
                    continue
                del self._alive[process]
                for message_id, at in self._starts.pop(process, {}).items():
                    self._crashes.setdefault(message_id, []).append(Crash(at, process, host, pid))
                    found += 1
        return found

    def suspects(self, *, since: int, limit: int = 1_000) -> dict[str, int]:
        with self._lock:
            for message_id in [each for each, crashes in self._crashes.items() if max(crashes).at < since]:
                del self._crashes[message_id]
            latest = sorted(self._crashes, key=lambda each: max(self._crashes[each]), reverse=True)[:limit]
            return {each: len(self._crashes[each]) for each in latest}

    def history(self, message_id: str, *, since: int) -> History:
        with self._lock:
            crashes = tuple(sorted(each for each in self._crashes.get(message_id, ()) if each.at >= since))
            open_ = tuple(
                sorted(
                    (Crash(self._starts[process][message_id], process, host, pid), until)
                    for process, (host, pid, until) in self._alive.items()
                    if message_id in self._starts.get(process, {})
                )
            )
            return History(crashes, open_)

    def forgive(self, message_id: str) -> None:
        with self._lock:
            self._crashes.pop(message_id, None)


class MemoryStarter:
    """A `Starter` in a dictionary."""

    def __init__(self, crashes: MemoryCrashes, process: str) -> None:
        self._all = crashes
        self._process = process
        self._closed = False

    def start(self, message_id: str, *, now: int) -> bool:
        if self._closed:
            return False
        with self._all._lock:
            self._all._starts.setdefault(self._process, {})[message_id] = now
        return True

    def finish(self, message_id: str) -> None:
        with self._all._lock:
            self._all._starts.get(self._process, {}).pop(message_id, None)

    def flush(self) -> bool:
        return not self._closed

    def close(self) -> None:
        self._closed = True

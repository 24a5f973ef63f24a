"""A ledger: a file of JSON lines that is only ever appended to, and synced line by line.

It must survive its writer: a line that was written is on the disk before anything else happens, and a torn last line
is no line.
"""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Ledger", "read_ledger"]


class Ledger:
    """The writing end of a ledger; safe to share between threads.

    Parameters:
      path(Path): The file; created where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()

    def write(self, **entry: Any) -> None:
        """Append one entry and sync it to the disk."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            os.write(self._file, line)
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Read what a ledger holds so far; it may still be written to.

    Parameters:
      path(Path): The file.

    Returns:
      list[dict[str, Any]]: Its entries, oldest first; none where there is no file yet.
    """
    if not path.exists():
        return []
    whole, _, _torn = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]

"""To be written."""

from __future__ import annotations

from typing import Any


class MemoryIdempotency:
    def __init__(self) -> None: ...

    def close(self) -> None: ...

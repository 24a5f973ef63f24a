"""To be written."""

from __future__ import annotations

from typing import Any


class RedisIdempotency:
    def __init__(self, connection: Any, *, prefix: str) -> None: ...

    def close(self) -> None: ...

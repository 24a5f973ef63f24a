"""To be written."""

from __future__ import annotations

from typing import Any


class PostgresIdempotency:
    def __init__(self, connection: Any) -> None: ...

    def close(self) -> None: ...

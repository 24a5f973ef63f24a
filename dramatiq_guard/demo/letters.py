"""The dead letters as the demo sees them: those of the stack's store, or the broker's own where there is no stack."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from .queues import look
from .report import Group

if TYPE_CHECKING:
    import redis

    from .accounting import Letter

__all__ = ["Graveyard", "StockGraveyard"]


class Graveyard(Protocol):
    """Where the dead letters lie."""

    def letters(self) -> list[Letter]:
        """Read every letter that is still dead."""
        ...

    def groups(self) -> list[Group]:
        """Group them by bug, the biggest group first."""
        ...

    def replay(self, reasons: tuple[str, ...]) -> tuple[int, int] | None:
        """Replay those that died of these reasons.

        Returns:
          tuple[int, int] | None: How many there were and how many were sent; ``None`` where nothing can replay them.
        """
        ...


class StockGraveyard:
    """The broker's own dead letters: the message as it was last enqueued, without a word on why it died."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def letters(self) -> list[Letter]:
        """Read every entry."""
        return list(look(self._client).buried)

    def groups(self) -> list[Group]:
        """Group them by the last line of the traceback that some of them carry: that of the attempt before the last."""
        titles = Counter(_title(letter) for letter in self.letters())
        return [Group(count, "", title) for title, count in titles.most_common()]

    def replay(self, reasons: tuple[str, ...]) -> None:
        """There is nothing in Dramatiq to replay them with."""


def _title(letter: Letter) -> str:
    traceback = json.loads(letter.evidence).get("traceback")
    if not traceback:
        return "(no error was kept)"
    line = traceback.strip().splitlines()[-1]
    return f"{line.partition(':')[0]} (of an earlier attempt)"

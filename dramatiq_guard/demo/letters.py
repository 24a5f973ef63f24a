"""The dead letters as the demo sees them: those of the stack's store, or the broker's own where there is no stack."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from ..dead_letters.operations import DeadLetters
from ..stores.protocols import Filter
from .accounting import Letter
from .plan import job_of
from .queues import look
from .report import Group

if TYPE_CHECKING:
    import redis
    from dramatiq import Broker

    from ..dead_letters.letter import Letter as Stored
    from ..stores.protocols import DeadLetterStore
    from ..stores.protocols import Group as StoredGroup

__all__ = ["Graveyard", "StackGraveyard", "StockGraveyard"]


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


class StackGraveyard:
    """The stack's own dead letters.

    Parameters:
      store(DeadLetterStore): Where they are kept.
      broker(Broker): Where replays are sent to.
    """

    def __init__(self, store: DeadLetterStore, broker: Broker) -> None:
        self._store = store
        self._broker = broker

    def letters(self) -> list[Letter]:
        """Read every letter that is dead."""
        found: list[Letter] = []
        cursor = None
        while True:
            page = self._store.page(limit=500, cursor=cursor)
            found += (_as_evidence(letter) for letter in page.letters)
            cursor = page.cursor
            if cursor is None:
                return found

    def groups(self) -> list[Group]:
        """Group them by fingerprint, as the store does."""
        return [self._describe(group) for group in self._store.groups()]

    def _describe(self, group: StoredGroup) -> Group:
        latest = self._store.get(group.latest)
        error = latest.error if latest else None
        if error is None:
            title = f"(no error) actor {', '.join(group.actors)}"
        else:
            text = error.message.strip().splitlines()
            title = f"{error.type}: {text[0] if text else ''}"
        return Group(group.count, ", ".join(group.reasons), title, group.fingerprint)

    def replay(self, reasons: tuple[str, ...]) -> tuple[int, int] | None:
        """Replay those that died of these reasons."""
        operations = DeadLetters(self._store, self._broker)
        reports = [
            operations.replay(Filter(reason=reason), by="the demo", why="the downstream was fixed")
            for reason in reasons
        ]
        return sum(report.selected for report in reports), sum(len(report.replayed) for report in reports)


def _as_evidence(letter: Stored) -> Letter:
    error = "" if letter.error is None else f"{letter.error.message}\n{letter.error.traceback}"
    return Letter(job_of(letter.actor, letter.args), letter.reason, error)


def _title(letter: Letter) -> str:
    traceback = json.loads(letter.evidence).get("traceback")
    if not traceback:
        return "(no error was kept)"
    line = traceback.strip().splitlines()[-1]
    return f"{line.partition(':')[0]} (of an earlier attempt)"

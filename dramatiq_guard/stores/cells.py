"""How letters are indexed so that every look-up costs the same at a thousand as at a million letters.

Letters that agree in queue, actor, reason, error type and fingerprint lie in one *cell*.  There are about as many cells
as there are bugs, however many letters there are, so a filter first picks cells and then merges their letters, which
each cell keeps in order of death; and a group is a few counts added up.  This module does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha1
from typing import TYPE_CHECKING, NamedTuple, Self

from .protocols import Group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..dead_letters.letter import Letter
    from .protocols import Filter

__all__ = ["Cell", "Tally", "clean", "decode_cursor", "encode_cursor", "group"]


class Cell(NamedTuple):
    """What letters of one kind have in common."""

    queue: str
    actor: str
    reason: str
    error_type: str
    fingerprint: str

    @classmethod
    def of(cls, letter: Letter) -> Self:
        """The cell of a letter."""
        return cls(
            *map(clean, (letter.queue, letter.actor, letter.reason, letter.error_type, letter.fingerprint)),
        )

    @property
    def id(self) -> str:
        """A short name for the cell, the same in every process."""
        return sha1("\0".join(self).encode(), usedforsecurity=False).hexdigest()[:16]

    def matches(self, where: Filter) -> bool:
        """Whether the letters of this cell are of the kind that a filter asks for."""
        return all(asked is None or clean(asked) == ours for asked, ours in zip(where.kinds, self, strict=True))


class Tally(NamedTuple):
    """The letters of one cell that a filter matches, in numbers."""

    cell: Cell
    size: int
    first_seen: int
    last_seen: int
    latest: str


def clean(text: str) -> str:
    """A name without what PostgreSQL and UTF-8 cannot hold; a message may carry anything for its actor."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def group(tallies: Iterable[Tally]) -> tuple[Group, ...]:
    """Add cells up to groups by fingerprint, the biggest first."""
    by_fingerprint: defaultdict[str, list[Tally]] = defaultdict(list)
    for tally in tallies:
        if tally.size:
            by_fingerprint[tally.cell.fingerprint].append(tally)
    groups = [
        Group(
            fingerprint=fingerprint,
            count=sum(tally.size for tally in members),
            first_seen=min(tally.first_seen for tally in members),
            last_seen=max(tally.last_seen for tally in members),
            actors=tuple(sorted({tally.cell.actor for tally in members})),
            queues=tuple(sorted({tally.cell.queue for tally in members})),
            reasons=tuple(sorted({tally.cell.reason for tally in members})),
            error_types=tuple(sorted({tally.cell.error_type for tally in members if tally.cell.error_type})),
            latest=max((tally.last_seen, tally.latest) for tally in members)[1],
        )
        for fingerprint, members in by_fingerprint.items()
    ]
    return tuple(sorted(groups, key=lambda each: (-each.count, -each.last_seen, each.fingerprint)))


def encode_cursor(died_at: int, letter_id: str) -> str:
    """Where a page ended: the death and id of its last letter."""
    return f"{died_at}:{letter_id}"


def decode_cursor(cursor: str) -> tuple[int, str]:
    """Read a cursor.

    Raises:
      ValueError: It is none.
    """
    died_at, colon, letter_id = cursor.partition(":")
    if not colon or not letter_id or not died_at.lstrip("-").isdigit():
        raise ValueError(f"not a cursor of a page of letters: {cursor!r}; give back what the former page returned")
    return int(died_at), letter_id

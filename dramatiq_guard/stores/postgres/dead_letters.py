"""Letters on PostgreSQL: a letter is put in one round trip, and every method is one transaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from ...dead_letters.letter import DEAD, REPLAYING, Event, Letter, Replay, Standing
from ..cells import Cell, Tally, clean, decode_cursor, encode_cursor, group
from ..protocols import DAY, MAX_AGE, MAX_COUNT, NOTES_KEPT, Begun, Filter, Group, Page, Purged, Ref, Unsettled
from .connection import PostgresConnection, Queries
from .schema import check_version

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PostgresDeadLetters"]

_LETTER: Final = (
    "l.record, l.state, l.since, l.by_whom, l.why, l.events, l.n, l.token, l.owner, l.lease_until, l.enqueued_at, "
    "l.delivered_at, l.outcome, l.outcome_at, l.died_as"
)
_ASKED: Final = " AND ".join(
    f"(%({kind})s::text IS NULL OR c.{kind} = %({kind})s)"
    for kind in ("queue", "actor", "reason", "error_type", "fingerprint")
)
_FORGOTTEN: Final = ", ".join(
    f"{field} = NULL"
    for field in (
        *("n", "token", "owner", "lease_until", "enqueued_at", "delivered_at"),
        *("outcome", "outcome_at", "died_as"),
    )
)
_EVER: Final = 2**62
_NUMBER_KEPT: Final = 400 * DAY


class PostgresDeadLetters:
    """A `DeadLetterStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        parts = {"letter": _LETTER, "asked": _ASKED, "forgotten": _FORGOTTEN}
        self._queries = Queries(connection.schema, **parts, wanted=f"l.died_at, l.letter_id, {_LETTER}")
        self._refs = Queries(connection.schema, **parts, wanted="l.died_at, l.letter_id, l.message_timestamp")

    def __repr__(self) -> str:
        return f"<PostgresDeadLetters at {self._connection.name}, schema {self._connection.schema}>"

    def put(self, letter: Letter) -> bool:
        cell = Cell.of(letter)
        new = self._connection.rows(
            "writing a letter",
            self._queries["put"],
            {
                **cell._asdict(),
                "cell": cell.id,
                "letter_id": clean(letter.letter_id),
                "message_id": clean(letter.message_id),
                "died_at": letter.died_at,
                "message_timestamp": letter.message_timestamp,
                "replay_of": clean(letter.replay_of or ""),
                "replay_n": letter.replay_n,
                "record": letter.record(),
                "searched": letter.searchable,
                "event": _event(letter.died_at, "died again"),
            },
        )
        return bool(new)

    def settled(self, letter_ids: Sequence[str], *, now: int) -> int:
        if not letter_ids:
            return 0
        asked = {"ids": [clean(each) for each in letter_ids]}
        return self._connection.change("settling letters", self._queries["settled"], asked)

    def unsettled(self, *, before: int, limit: int = 1_000) -> tuple[Unsettled, ...]:
        asked = {"before": before, "limit": limit}
        rows = self._connection.rows("reading unsettled letters", self._queries["unsettled"], asked)
        return tuple(Unsettled(*row) for row in rows)

    def withdraw(self, letter_id: str, *, now: int) -> bool:
        with self._connection.using("withdrawing a letter") as connection:
            gone = connection.execute(self._queries["withdraw"], {"id": clean(letter_id)}).fetchall()
            self._empty_cells(connection, gone)
        return bool(gone)

    def get(self, letter_id: str) -> Letter | None:
        rows = self._connection.rows("reading a letter", self._queries["get"], {"letter_id": clean(letter_id)})
        return _letter(rows[0]) if rows else None

    def page(self, where: Filter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        rows, cursor = self._page(self._queries, where, limit, cursor)
        return Page(tuple(_letter(row[2:]) for row in rows), cursor)

    def refs(
        self, where: Filter | None = None, *, limit: int = 1_000, cursor: str | None = None
    ) -> tuple[tuple[Ref, ...], str | None]:
        rows, cursor = self._page(self._refs, where, limit, cursor)
        return tuple(Ref(row[2], row[1]) for row in rows), cursor

    def _page(
        self, queries: Queries, where: Filter | None, limit: int, cursor: str | None
    ) -> tuple[list[tuple[Any, ...]], str | None]:
        if limit < 1:
            raise ValueError(f"a page holds at least one letter, not {limit}")
        where = where or Filter()
        at, letter_id = decode_cursor(cursor) if cursor is not None else (_EVER, "")
        by_cell = any(kind is not None for kind in where.kinds)
        rows = self._connection.rows(
            "reading letters",
            queries["page_of_cells" if by_cell else "page_of_states"],
            {**_bounds(where), "at": at, "id": clean(letter_id), "limit": limit + 1},
        )
        more = len(rows) > limit
        rows = rows[:limit]
        return rows, encode_cursor(rows[-1][0], rows[-1][1]) if more else None

    def groups(self, where: Filter | None = None) -> tuple[Group, ...]:
        return group(self._tallies(where or Filter()))

    def count(self, where: Filter | None = None) -> int:
        return sum(tally.size for tally in self._tallies(where or Filter()))

    def _tallies(self, where: Filter) -> Sequence[Tally]:
        narrowed = where.text is not None or where.died_after is not None or where.died_before is not None
        rows = self._connection.rows(
            "counting letters", self._queries["tallies_counted" if narrowed else "tallies"], _bounds(where)
        )
        return [Tally(Cell(*row[:5]), *row[5:]) for row in rows]

    def begin_replay(
        self, letter_ids: Sequence[str], *, owner: str, now: int, lease: int = 60_000, by: str = "", why: str = ""
    ) -> Begun:
        ids = [clean(each) for each in letter_ids]
        if not ids:
            return Begun((), ())
        with self._connection.using("beginning a replay") as connection, connection.transaction():
            known = {row[0]: row[1:] for row in connection.execute(self._queries["lock"], {"ids": ids})}
            messages = [message_id for _, _, _, message_id, _ in known.values()]
            numbers = dict(connection.execute(self._queries["numbers"], {"ids": messages}).fetchall())
            taken: dict[str, int] = {}
            refused = []
            for letter_id in ids:
                state, n, lease_until, message_id, replay_n = known.get(letter_id, ("missing", 0, 0, "", 0))
                if letter_id in taken:
                    state = REPLAYING
                elif state == DEAD:
                    numbers[message_id] = taken[letter_id] = max(numbers.get(message_id, 0), replay_n) + 1
                    continue
                elif state == REPLAYING and lease_until <= now:
                    taken[letter_id] = n
                    continue
                refused.append((letter_id, state))
            connection.execute(
                self._queries["keep_numbers"], {"ids": list(numbers), "ns": list(numbers.values()), "now": now}
            )
            rows = connection.execute(
                self._queries["begin_replay"],
                {
                    "ids": list(taken),
                    "ns": list(taken.values()),
                    "now": now,
                    "token": uuid4().hex,
                    "owner": clean(owner),
                    "lease_until": now + lease,
                    "by": clean(by),
                    "why": clean(why),
                    "event": _event(now, "replay", by, why),
                },
            ).fetchall()
        letters = {letter.letter_id: letter for letter in map(_letter, rows)}
        return Begun(tuple(letters[each] for each in taken if each in letters), tuple(refused))

    def finish_replay(self, tokens: Sequence[tuple[str, str]], *, now: int) -> int:
        return self._settle("finish_replay", tokens, {"now": now})

    def abandon_replay(self, tokens: Sequence[tuple[str, str]], *, now: int, why: str = "") -> int:
        event = _event(now, "abandoned", "", why)
        return self._settle("abandon_replay", tokens, {"now": now, "why": clean(why), "event": event})

    def _settle(self, verb: str, tokens: Sequence[tuple[str, str]], known: dict[str, Any]) -> int:
        if not tokens:
            return 0
        asked = {"ids": [clean(each) for each, _ in tokens], "tokens": [clean(token) for _, token in tokens]}
        return self._connection.change("settling a replay", self._queries[verb], {**known, **asked})

    def admit_replay(self, letter_id: str, token: str, *, now: int) -> bool:
        asked = {"id": clean(letter_id), "token": clean(token), "now": now}
        ((there, holds),) = self._connection.rows("admitting a replay", self._queries["admit_replay"], asked)
        return bool(holds or not there)

    def record_outcome(self, letter_id: str, token: str, outcome: str, *, now: int) -> bool:
        asked = {"id": clean(letter_id), "token": clean(token), "outcome": outcome, "now": now}
        return self._connection.change("noting an outcome", self._queries["record_outcome"], asked) > 0

    def discard(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        return self._lay_aside("discard", letter_ids, now, by, why, _event(now, "discarded", by, why))

    def restore(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        return self._lay_aside("restore", letter_ids, now, by, why, _event(now, "restored", by, why))

    def _lay_aside(
        self, verb: str, letter_ids: Sequence[str], now: int, by: str, why: str, event: str
    ) -> tuple[str, ...]:
        ids = [clean(each) for each in letter_ids]
        if not ids:
            return ()
        asked = {"ids": ids, "now": now, "by": clean(by), "why": clean(why), "event": event}
        moved = {row[0] for row in self._connection.rows(f"a {verb}", self._queries[verb], asked)}
        return tuple(each for each in dict.fromkeys(ids) if each in moved)

    def purge(self, *, now: int, max_age: int = MAX_AGE, max_count: int = MAX_COUNT, limit: int = 1_000) -> Purged:
        cut = {"cut": now - max_age}
        with self._connection.using("purging letters") as connection:
            with connection.transaction():
                aged = connection.execute(self._queries["purge_old"], {**cut, "limit": limit}).fetchall()
                total, aged_left = connection.execute(self._queries["total"], cut).fetchone()
                excess, room = (0 if aged_left else total - max_count), limit - len(aged)
                over = []
                if excess > 0 and room > 0:
                    asked = {"limit": min(excess, room)}
                    over = connection.execute(self._queries["purge_excess"], asked).fetchall()
                gone = [*aged, *over]
                forgotten = {"ids": [row[0] for row in gone], "cut": now - NOTES_KEPT}
                connection.execute(self._queries["forget_notes"], forgotten)
                if gone:
                    connection.execute(self._queries["forget_numbers"], {"cut": now - _NUMBER_KEPT})
            self._empty_cells(connection, gone)
        return Purged(
            by_age=len(aged),
            by_count=len(over),
            never_handled=sum(row[1] == DEAD for row in gone),
            letter_ids=tuple(row[0] for row in gone),
            more=aged_left or (excess > len(over) and len(gone) >= limit),
        )

    def _empty_cells(self, connection: Any, gone: Sequence[tuple[Any, ...]]) -> None:
        """Remove the cells whose last letters are gone: in a transaction of its own, for nobody can put meanwhile."""
        if gone:
            with connection.transaction():
                connection.execute(self._queries["lock_cells"])
                connection.execute(self._queries["empty_cells"], {"cells": list({row[2] for row in gone})})

    def depth(self, state: str = DEAD) -> int:
        ((found,),) = self._connection.rows("counting letters", self._queries["depth"], {"state": state})
        return int(found)

    def oldest(self, state: str = DEAD) -> int | None:
        ((found,),) = self._connection.rows("looking for the oldest letter", self._queries["oldest"], {"state": state})
        return None if found is None else int(found)

    def ping(self) -> None:
        check_version(self._connection)

    def close(self) -> None:
        self._connection.close()


def _letter(row: Sequence[Any]) -> Letter:
    record, state, since, by, why, events, n, token, owner, lease_until, *rest = row
    sent = None
    if token is not None:
        enqueued_at, delivered_at, outcome, outcome_at, died_as = rest
        sent = Replay(
            n=n,
            token=token,
            owner=owner,
            lease_until=lease_until,
            enqueued_at=enqueued_at,
            delivered_at=delivered_at,
            outcome=outcome,
            outcome_at=outcome_at,
            died_as=died_as,
        )
    known = tuple(Event(**event) for event in events)
    standing = Standing(state=state, since=since, by=by, why=why, replay=sent, events=known)
    return Letter.from_json(record, standing)


def _event(at: int, what: str, by: str = "", why: str = "") -> str:
    return json.dumps({"at": at, "what": what, "by": clean(by), "why": clean(why)})


def _bounds(where: Filter) -> dict[str, Any]:
    kinds = zip(Cell._fields, where.kinds, strict=True)
    return {
        **{name: None if kind is None else clean(kind) for name, kind in kinds},
        "states": list(where.states),
        "after": -_EVER if where.died_after is None else where.died_after,
        "before": _EVER if where.died_before is None else where.died_before,
        "text": clean((where.text or "").lower()),
    }

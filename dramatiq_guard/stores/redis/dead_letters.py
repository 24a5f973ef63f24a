"""Letters on Redis or Valkey: every method is one script, and so one round trip and one atomic step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from ...dead_letters.letter import DEAD, Event, Letter, Replay, Standing
from ..cells import Cell, Tally, clean, decode_cursor, encode_cursor, group
from ..protocols import DAY, MAX_AGE, MAX_COUNT, NOTES_KEPT, Begun, Filter, Group, Page, Purged, Ref, Unsettled
from .connection import RedisConnection, Script

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RedisDeadLetters"]

PUT: Final = Script("put")
READ: Final = Script("read")
GROUPS: Final = Script("groups")
BEGIN_REPLAY: Final = Script("begin_replay")
SETTLE_REPLAY: Final = Script("settle_replay")
LAY_ASIDE: Final = Script("lay_aside")
PURGE: Final = Script("purge")
UNSETTLED: Final = Script("unsettled")
WITHDRAW: Final = Script("withdraw")

#: How many letters one search may read before it lets other clients have the server.
SEARCH_STEP: Final = 2_000
_NUMBER_KEPT: Final = 400 * DAY


class RedisDeadLetters:
    """A `DeadLetterStore` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        # The braces make it one slot of a cluster.
        self._base = f"{{{prefix}}}:dead-letters"

    def __repr__(self) -> str:
        return f"<RedisDeadLetters at {self._connection.name}, {self._base}>"

    def put(self, letter: Letter) -> bool:
        cell = Cell.of(letter)
        return bool(
            self._run(
                PUT,
                clean(letter.letter_id),
                letter.died_at,
                cell.id,
                json.dumps(cell),
                letter.record(),
                letter.searchable,
                clean(letter.message_id),
                letter.message_timestamp,
                letter.replay_n,
                clean(letter.replay_of or ""),
                _event(letter.died_at, "died again"),
            )
        )

    def settled(self, letter_ids: Sequence[str], *, now: int) -> int:
        if not letter_ids:
            return 0
        key, ids = f"{self._base}:unsettled", [clean(each) for each in letter_ids]
        return int(self._connection.call("settling letters", lambda client: client.zrem(key, *ids)))

    def unsettled(self, *, before: int, limit: int = 1_000) -> tuple[Unsettled, ...]:
        return tuple(Unsettled(*found) for found in self._run(UNSETTLED, before, limit))

    def withdraw(self, letter_id: str, *, now: int) -> bool:
        return bool(self._run(WITHDRAW, clean(letter_id)))

    def get(self, letter_id: str) -> Letter | None:
        key = f"{self._base}:letter:{clean(letter_id)}"
        fields = self._connection.call("reading a letter", lambda client: client.hmget(key, LETTER_FIELDS))
        return _letter(fields) if fields[0] is not None else None

    def page(self, where: Filter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        found, cursor = self._read("letters", where, limit, cursor)
        return Page(tuple(_letter(fields) for fields in found), cursor)

    def refs(
        self, where: Filter | None = None, *, limit: int = 1_000, cursor: str | None = None
    ) -> tuple[tuple[Ref, ...], str | None]:
        found, cursor = self._read("refs", where, limit, cursor)
        return tuple(Ref(int(timestamp), letter_id) for letter_id, timestamp in found), cursor

    def _read(self, want: str, where: Filter | None, limit: int, cursor: str | None) -> tuple[list[Any], str | None]:
        if limit < 1:
            raise ValueError(f"a page holds at least one letter, not {limit}")
        where = where or Filter()
        died_at, letter_id = decode_cursor(cursor) if cursor is not None else ("", "")
        rows: list[Any] = []
        while True:
            found, died_at, letter_id = self._run(
                READ,
                want,
                limit - len(rows),
                died_at,
                letter_id,
                _bound(where.died_after),
                _bound(where.died_before),
                clean((where.text or "").lower()),
                SEARCH_STEP,
                len(where.states),
                *where.states,
                *_asked(where),
            )
            rows += found
            if died_at == "":
                return rows, None
            if len(rows) >= limit:
                return rows, encode_cursor(int(died_at), letter_id)

    def groups(self, where: Filter | None = None) -> tuple[Group, ...]:
        where = where or Filter()
        if where.text is None:
            return group(self._tallies(where))
        return group(
            Tally(Cell.of(letter), 1, letter.died_at, letter.died_at, letter.letter_id)
            for page in self._pages(where)
            for letter in page.letters
        )

    def count(self, where: Filter | None = None) -> int:
        where = where or Filter()
        if where.text is None:
            return sum(tally.size for tally in self._tallies(where))
        total, cursor = 0, None
        while True:
            refs, cursor = self.refs(where, cursor=cursor)
            total += len(refs)
            if cursor is None:
                return total

    def _pages(self, where: Filter) -> Iterator[Page]:
        cursor = None
        while True:
            page = self.page(where, limit=200, cursor=cursor)
            yield page
            cursor = page.cursor
            if cursor is None:
                return

    def _tallies(self, where: Filter) -> list[Tally]:
        rows = self._run(
            GROUPS,
            _bound(where.died_after),
            _bound(where.died_before),
            len(where.states),
            *where.states,
            *_asked(where),
        )
        return [
            Tally(Cell(*json.loads(cell)), size, int(first), int(last), latest)
            for cell, size, first, last, latest in rows
        ]

    def begin_replay(
        self, letter_ids: Sequence[str], *, owner: str, now: int, lease: int = 60_000, by: str = "", why: str = ""
    ) -> Begun:
        if not letter_ids:
            return Begun((), ())
        event = _event(now, "replay", by, why)
        ids = map(clean, letter_ids)
        answers = self._run(
            BEGIN_REPLAY, now, uuid4().hex, clean(owner), now + lease, clean(by), clean(why), event, _NUMBER_KEPT, *ids
        )
        return Begun(
            tuple(_letter(fields) for _, refused, fields in answers if not refused),
            tuple((letter_id, refused) for letter_id, refused, _ in answers if refused),
        )

    def finish_replay(self, tokens: Sequence[tuple[str, str]], *, now: int) -> int:
        return self._settle("finish", tokens, now)

    def abandon_replay(self, tokens: Sequence[tuple[str, str]], *, now: int, why: str = "") -> int:
        return self._settle("abandon", tokens, now, _event(now, "abandoned", "", why), why)

    def admit_replay(self, letter_id: str, token: str, *, now: int) -> bool:
        return self._settle("admit", [(letter_id, token)], now) != 0

    def record_outcome(self, letter_id: str, token: str, outcome: str, *, now: int) -> bool:
        return self._settle("outcome", [(letter_id, token)], now, "", "", outcome) != 0

    def _settle(
        self, verb: str, tokens: Sequence[tuple[str, str]], now: int, event: str = "", why: str = "", outcome: str = ""
    ) -> int:
        if not tokens:
            return 0
        flat = [clean(each) for pair in tokens for each in pair]
        return int(self._run(SETTLE_REPLAY, verb, now, event, clean(why), outcome, *flat))

    def discard(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        return self._lay_aside("discard", letter_ids, now, by, why, _event(now, "discarded", by, why))

    def restore(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        return self._lay_aside("restore", letter_ids, now, by, why, _event(now, "restored", by, why))

    def _lay_aside(
        self, verb: str, letter_ids: Sequence[str], now: int, by: str, why: str, event: str
    ) -> tuple[str, ...]:
        if not letter_ids:
            return ()
        return tuple(self._run(LAY_ASIDE, verb, now, clean(by), clean(why), event, *map(clean, letter_ids)))

    def purge(self, *, now: int, max_age: int = MAX_AGE, max_count: int = MAX_COUNT, limit: int = 1_000) -> Purged:
        by_age, by_count, never_handled, more, letter_ids = self._run(
            PURGE, now - max_age, max_count, limit, now - NOTES_KEPT
        )
        return Purged(by_age, by_count, never_handled, tuple(letter_ids), bool(more))

    def depth(self, state: str = DEAD) -> int:
        key = f"{self._base}:state:{state}"
        return int(self._connection.call("counting letters", lambda client: client.zcard(key)))

    def oldest(self, state: str = DEAD) -> int | None:
        key = f"{self._base}:state:{state}"
        found = self._connection.call(
            "looking for the oldest letter",
            lambda client: [list(each) for each in client.zrange(key, 0, 0, withscores=True)],
        )
        return int(found[0][1]) if found else None

    def ping(self) -> None:
        self._connection.call("saying hello", lambda client: client.ping())

    def close(self) -> None:
        self._connection.close()

    def _run(self, script: Script, *arguments: str | int) -> Any:
        return self._connection.run(script, self._base, *arguments)


LETTER_FIELDS: Final = (
    *("record", "state", "since", "by", "why", "events", "n", "token", "owner", "lease_until"),
    *("enqueued_at", "delivered_at", "outcome", "outcome_at", "died_as"),
)


def _letter(fields: Sequence[Any]) -> Letter:
    known = dict(zip(LETTER_FIELDS, fields, strict=True))
    sent = None
    if known["token"] is not None:
        sent = Replay(
            n=int(known["n"]),
            token=known["token"],
            owner=known["owner"],
            lease_until=int(known["lease_until"]),
            enqueued_at=_integer(known["enqueued_at"]),
            delivered_at=_integer(known["delivered_at"]),
            outcome=known["outcome"],
            outcome_at=_integer(known["outcome_at"]),
            died_as=known["died_as"],
        )
    standing = Standing(
        state=known["state"],
        since=int(known["since"]),
        by=known["by"] or "",
        why=known["why"] or "",
        replay=sent,
        events=tuple(Event(**json.loads(line)) for line in (known["events"] or "").splitlines() if line),
    )
    return Letter.from_json(known["record"], standing)


def _event(at: int, what: str, by: str = "", why: str = "") -> str:
    return json.dumps({"at": at, "what": what, "by": by, "why": why}, separators=(",", ":"))


def _asked(where: Filter) -> list[str]:
    return ["" if kind is None else f"={clean(kind)}" for kind in where.kinds]


def _bound(at: int | None) -> str | int:
    return "" if at is None else at


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)

"""Letters in a dictionary: the plainest statement of what the other stores do on their servers."""

from __future__ import annotations

from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...dead_letters.letter import DEAD, DISCARDED, REPLAYED, REPLAYING, Event, Letter, Replay
from ..cells import Cell, Tally, decode_cursor, encode_cursor, group
from ..protocols import MAX_AGE, MAX_COUNT, NOTES_KEPT, Begun, Filter, Group, Page, Purged, Ref, Unsettled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryDeadLetters"]


class MemoryDeadLetters:
    """A `DeadLetterStore` that is gone with its process."""

    def __init__(self) -> None:
        self._letters: dict[str, Letter] = {}
        self._numbers: dict[str, int] = {}
        self._unsettled: dict[str, int] = {}
        self._lock = RLock()

    def __repr__(self) -> str:
        return f"<MemoryDeadLetters with {len(self._letters)} letters>"

    def put(self, letter: Letter) -> bool:
        with self._lock:
            known = self._letters.get(letter.letter_id)
            if known is None:
                # What is kept is what was written: a caller who changes its arguments later does not reach it.
                self._letters[letter.letter_id] = Letter.from_json(letter.record())
            elif known.state in (DEAD, REPLAYING) or known.died_at == letter.died_at:
                return False
            else:
                self._letters[letter.letter_id] = replace(Letter.from_json(letter.record()), standing=known.standing)
                self._move(letter.letter_id, letter.died_at, DEAD, "died again")
            self._unsettled[letter.letter_id] = letter.died_at
            self._note_death_of_replay(letter)
            return True

    def _note_death_of_replay(self, letter: Letter) -> None:
        parent = self._letters.get(letter.replay_of or "")
        if parent is not None and (sent := parent.standing.replay) is not None and sent.n == letter.replay_n:
            self._note(parent.letter_id, outcome="died", outcome_at=letter.died_at, died_as=letter.letter_id)
            if parent.state == REPLAYING:
                self._move(parent.letter_id, letter.died_at, REPLAYED)

    def settled(self, letter_ids: Sequence[str], *, now: int) -> int:
        with self._lock:
            return sum(self._unsettled.pop(letter_id, None) is not None for letter_id in letter_ids)

    def unsettled(self, *, before: int, limit: int = 1_000) -> tuple[Unsettled, ...]:
        with self._lock:
            found = [(at, letter_id) for letter_id, at in self._unsettled.items() if at < before]
            found.sort(reverse=True)
            return tuple(Unsettled(each, self._letters[each].message_id) for _, each in found[:limit])

    def withdraw(self, letter_id: str, *, now: int) -> bool:
        with self._lock:
            letter = self._letters.get(letter_id)
            if letter is None or letter.state != DEAD or letter_id not in self._unsettled:
                return False
            self._remove(letter_id)
            return True

    def get(self, letter_id: str) -> Letter | None:
        with self._lock:
            return self._letters.get(letter_id)

    def page(self, where: Filter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        if limit < 1:
            raise ValueError(f"a page holds at least one letter, not {limit}")
        before = decode_cursor(cursor) if cursor is not None else None
        with self._lock:
            found = [
                letter
                for letter in self._matching(where or Filter())
                if before is None or (letter.died_at, letter.letter_id) < before
            ]
        found.sort(key=lambda letter: (letter.died_at, letter.letter_id), reverse=True)
        page = tuple(found[:limit])
        return Page(page, encode_cursor(page[-1].died_at, page[-1].letter_id) if len(found) > limit else None)

    def refs(
        self, where: Filter | None = None, *, limit: int = 1_000, cursor: str | None = None
    ) -> tuple[tuple[Ref, ...], str | None]:
        page = self.page(where, limit=limit, cursor=cursor)
        return tuple(Ref(letter.message_timestamp, letter.letter_id) for letter in page.letters), page.cursor

    def groups(self, where: Filter | None = None) -> tuple[Group, ...]:
        with self._lock:
            return group(
                Tally(Cell.of(letter), 1, letter.died_at, letter.died_at, letter.letter_id)
                for letter in self._matching(where or Filter())
            )

    def count(self, where: Filter | None = None) -> int:
        with self._lock:
            return sum(1 for _ in self._matching(where or Filter()))

    def begin_replay(
        self, letter_ids: Sequence[str], *, owner: str, now: int, lease: int = 60_000, by: str = "", why: str = ""
    ) -> Begun:
        taken, refused, token = [], [], uuid4().hex
        with self._lock:
            for letter_id in letter_ids:
                letter = self._letters.get(letter_id)
                if letter is None:
                    refused.append((letter_id, "missing"))
                    continue
                before = letter.standing.replay
                if letter.state == DEAD:
                    n = max(self._numbers.get(letter.message_id, 0), letter.replay_n) + 1
                    self._numbers[letter.message_id] = n
                elif letter.state == REPLAYING and before is not None and before.lease_until <= now:
                    n = before.n
                else:
                    refused.append((letter_id, letter.state))
                    continue
                sent = Replay(n=n, token=token, owner=owner, lease_until=now + lease)
                self._letters[letter_id] = replace(letter, standing=replace(letter.standing, replay=sent))
                taken.append(self._move(letter_id, now, REPLAYING, "replay", by, why))
        return Begun(tuple(taken), tuple(refused))

    def finish_replay(self, tokens: Sequence[tuple[str, str]], *, now: int) -> int:
        held = 0
        with self._lock:
            for letter_id, token in tokens:
                letter = self._holding(letter_id, token)
                if letter is not None:
                    held += 1
                    self._note(letter_id, enqueued_at=now)
                    if letter.state == REPLAYING:
                        self._move(letter_id, now, REPLAYED)
        return held

    def abandon_replay(self, tokens: Sequence[tuple[str, str]], *, now: int, why: str = "") -> int:
        back = 0
        with self._lock:
            for letter_id, token in tokens:
                letter = self._holding(letter_id, token)
                if letter is not None and letter.state == REPLAYING:
                    back += 1
                    self._forget_replay(letter_id)
                    self._move(letter_id, now, DEAD, "abandoned", "", why)
        return back

    def admit_replay(self, letter_id: str, token: str, *, now: int) -> bool:
        with self._lock:
            if letter_id not in self._letters:
                return True
            letter = self._holding(letter_id, token)
            if letter is None:
                return False
            if letter.standing.replay is not None and letter.standing.replay.delivered_at is None:
                self._note(letter_id, delivered_at=now)
            if letter.state == REPLAYING:
                self._move(letter_id, now, REPLAYED)
            return True

    def record_outcome(self, letter_id: str, token: str, outcome: str, *, now: int) -> bool:
        with self._lock:
            letter = self._holding(letter_id, token)
            if letter is None:
                return False
            self._note(letter_id, outcome=outcome, outcome_at=now, died_as=None)
            if letter.state == REPLAYING:
                self._move(letter_id, now, REPLAYED)
            return True

    def discard(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        done = []
        with self._lock:
            for letter_id in letter_ids:
                letter = self._letters.get(letter_id)
                if letter is not None and letter.state == DEAD:
                    self._move(letter_id, now, DISCARDED, "discarded", by, why)
                    done.append(letter_id)
        return tuple(done)

    def restore(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        done = []
        with self._lock:
            for letter_id in letter_ids:
                letter = self._letters.get(letter_id)
                if letter is None or not _may_return(letter):
                    continue
                if letter.state == REPLAYED:
                    self._forget_replay(letter_id)
                self._move(letter_id, now, DEAD, "restored", by, why)
                done.append(letter_id)
        return tuple(done)

    def purge(self, *, now: int, max_age: int = MAX_AGE, max_count: int = MAX_COUNT, limit: int = 1_000) -> Purged:
        with self._lock:
            ranks = {REPLAYED: 0, DISCARDED: 1, DEAD: 2}
            by_age = sorted(
                (letter.died_at, letter.letter_id)
                for letter in self._letters.values()
                if letter.died_at < now - max_age
            )
            aged = [letter_id for _, letter_id in by_age[:limit]]
            removed = [self._remove(letter_id) for letter_id in aged]
            excess = len(self._letters) - max_count - (len(by_age) - len(aged))
            by_count = sorted(
                (ranks[letter.state], letter.died_at, letter.letter_id)
                for letter in self._letters.values()
                if letter.state in ranks and letter.died_at >= now - max_age
            )[: max(0, excess)]
            over = [letter_id for _, _, letter_id in by_count[: limit - len(aged)]]
            removed += [self._remove(letter_id) for letter_id in over]
            for letter_id, at in [*self._unsettled.items()]:
                if at < now - NOTES_KEPT:
                    del self._unsettled[letter_id]
        return Purged(
            by_age=len(aged),
            by_count=len(over),
            never_handled=sum(letter.state == DEAD for letter in removed),
            letter_ids=(*aged, *over),
            more=len(by_age) > len(aged) or len(by_count) > len(over),
        )

    def depth(self, state: str = DEAD) -> int:
        with self._lock:
            return sum(letter.state == state for letter in self._letters.values())

    def oldest(self, state: str = DEAD) -> int | None:
        with self._lock:
            return min((letter.died_at for letter in self._letters.values() if letter.state == state), default=None)

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _matching(self, where: Filter) -> Iterator[Letter]:
        for letter in self._letters.values():
            if (
                letter.state in where.states
                and Cell.of(letter).matches(where)
                and (where.died_after is None or letter.died_at >= where.died_after)
                and (where.died_before is None or letter.died_at < where.died_before)
                and (where.text is None or where.text.lower() in letter.searchable)
            ):
                yield letter

    def _remove(self, letter_id: str) -> Letter:
        self._unsettled.pop(letter_id, None)
        return self._letters.pop(letter_id)

    def _holding(self, letter_id: str, token: str) -> Letter | None:
        letter = self._letters.get(letter_id)
        sent = letter.standing.replay if letter is not None else None
        return letter if sent is not None and sent.token == token else None

    def _note(self, letter_id: str, **changes: Any) -> None:
        letter = self._letters[letter_id]
        if letter.standing.replay is not None:
            sent = replace(letter.standing.replay, **changes)
            self._letters[letter_id] = replace(letter, standing=replace(letter.standing, replay=sent))

    def _forget_replay(self, letter_id: str) -> None:
        letter = self._letters[letter_id]
        self._letters[letter_id] = replace(letter, standing=replace(letter.standing, replay=None))

    def _move(self, letter_id: str, now: int, state: str, what: str = "", by: str = "", why: str = "") -> Letter:
        letter = self._letters[letter_id]
        standing = letter.standing
        if what:
            standing = replace(
                standing, by=by, why=why, events=(*standing.events, Event(at=now, what=what, by=by, why=why))
            )
        moved = replace(letter, standing=replace(standing, state=state, since=now))
        self._letters[letter_id] = moved
        return moved


def _may_return(letter: Letter) -> bool:
    if letter.state == REPLAYED:
        sent = letter.standing.replay
        return sent is None or (sent.delivered_at is None and sent.outcome is None)
    return letter.state == DISCARDED

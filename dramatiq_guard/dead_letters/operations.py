"""What people do with dead letters: look, replay, discard, restore.  The command line and pages are faces of this.

A replay in four steps, none of which can lose or double a message:

1. the letter is marked ``replaying``, with an owner, a lease and a token: whoever else tries finds it taken;
2. the message is enqueued, clean as on its first day, with the token in its options;
3. the letter is marked ``replayed``, and the broker's own copy in ``.XQ`` is removed;
4. the worker that receives it asks the store whether this token still counts.

Whoever dies between 1 and 3 leaves a letter whose lease runs out; the next replay takes it over with another token, and
should the first copy have got through after all, step 4 turns it away.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass, replace
from os import getpid
from typing import TYPE_CHECKING, Any, Final

from dramatiq import Message

from .. import clock
from ..errors import GuardError, StoreError
from ..stores.idempotency import IdempotencyStore
from ..stores.protocols import Filter, Group, Page
from .broker_copies import exact_payload, remove_copies
from .letter import DEAD, REPLAYING, Letter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dramatiq import Broker

    from ..stores.protocols import DeadLetterStore, Ref

__all__ = ["DeadLetters", "LetterMissing", "Moved", "ReplayReport", "ReplayStopped", "replay_message"]

#: How many letters are taken at once: so many at most are in doubt when a replay is killed.
BATCH: Final = 25
LEASE: Final = 60_000

_FORGOTTEN: Final = (
    "the record of its key {key} has expired, so nobody can tell whether its effect happened: look, and replay it by "
    "force if it did not"
)

#: What earlier deliveries left in the options.
SPENT_OPTIONS: Final = frozenset({"eta", "redis_message_id", "requeue_timestamp", "retries", "traceback"})


class LetterMissing(GuardError, LookupError):
    """There is no such letter."""


class ReplayStopped(GuardError):
    """A replay could not go on; what was not sent is dead as before.

    Parameters:
      message(str): What happened, and what to do.
      report(ReplayReport): How far it came.
    """

    def __init__(self, message: str, report: ReplayReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay did, or in a dry run would do.

    Parameters:
      selected(int): How many letters were meant.
      replayed(tuple[str, ...]): The letters whose messages were enqueued (or would be), in that order.
      refused(tuple[tuple[str, str], ...]): The others, with the reason of each.
      per_actor(dict[str, int]): How many of the replayed for each actor.
      forgotten(tuple[str, ...]): Of both, those whose idempotency key's record has expired, so that nobody can tell any
        more whether the effect happened: refused, or replayed by force.
      copies_removed(int): How many copies were removed from the broker's own ``.XQ``.
      dry_run(bool): Whether nothing was done.
    """

    selected: int
    replayed: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    per_actor: dict[str, int]
    forgotten: tuple[str, ...] = ()
    copies_removed: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a discard or a restore did.

    Parameters:
      selected(int): How many letters were meant.
      moved(tuple[str, ...]): Those that it was done to.
      copies_removed(int): How many copies were removed from the broker's own ``.XQ``.
    """

    selected: int
    moved: tuple[str, ...]
    copies_removed: int = 0


class DeadLetters:
    """The letters of a store, and the broker to replay them on.

    Parameters:
      store(DeadLetterStore): Where they are, e.g. ``connect(url).dead_letters``.
      broker(Broker | None): Where their messages go; needed by `replay` only.
      keys(IdempotencyStore | None): Where idempotency keys are kept; by default that of the broker's IdempotencyGuard.

    Example:
      ``DeadLetters(stores.dead_letters, broker).replay(Filter(actor="charge"), by="ada", why="fixed in 2.1")``
    """

    def __init__(
        self, store: DeadLetterStore, broker: Broker | None = None, keys: IdempotencyStore | None = None
    ) -> None:
        self.store = store
        self.broker = broker
        self.keys = keys
        if keys is None and broker is not None:
            stores = (getattr(middleware, "store", None) for middleware in broker.middleware)
            self.keys = next((each for each in stores if isinstance(each, IdempotencyStore)), None)

    def list(self, where: Filter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        """Read letters, the latest death first; see `DeadLetterStore.page`."""
        return self.store.page(where, limit=limit, cursor=cursor)

    def show(self, letter_id: str) -> Letter:
        """Read one letter.

        Raises:
          LetterMissing: There is none of this id.
        """
        letter = self.store.get(letter_id)
        if letter is None:
            raise LetterMissing(f"there is no dead letter {letter_id!r}: it never died, or retention removed it")
        return letter

    def groups(self, where: Filter | None = None) -> tuple[Group, ...]:
        """Count letters by fingerprint, the biggest group first."""
        return self.store.groups(where)

    def replay(
        self, what: Filter | Sequence[str], *, by: str = "", why: str = "", dry_run: bool = False, force: bool = False
    ) -> ReplayReport:
        """Send dead messages again, in the order in which they were first enqueued.

        Each keeps its message id and goes to its canonical queue, with its retries and everything that earlier
        deliveries left in its options taken off.  A letter that was redacted is sent from the broker's own exact copy
        where there is one, and refused otherwise.

        A message whose actor is guarded meets the record of its key: work that is done is not done again, and work that
        is parked stays parked until the key is resolved.  When the record has expired, nobody can tell any more whether
        the effect happened, and the letter is refused, unless by force.

        Parameters:
          what(Filter | Sequence[str]): The letters: all that match now, or these.
          by(str): Who replays.
          why(str): Why.
          dry_run(bool): Only say what would be done.
          force(bool): Replay those whose idempotency keys are forgotten, too: their work may be done a second time.

        Returns:
          ReplayReport: What was done.

        Raises:
          GuardError: There is no broker.
          ReplayStopped: The broker could not be reached; its `report` says how far it came.
          StoreUnavailable: The store could not; what was taken just then is free again a minute later.
        """
        if self.broker is None:
            raise GuardError("to replay, give the broker too: DeadLetters(store, broker)")
        if isinstance(what, Filter) and what.states == (DEAD,):
            what = replace(what, states=(DEAD, REPLAYING))  # those that a replay left behind when it was killed
        ids = [ref.letter_id for ref in sorted(self._refs(what))] if isinstance(what, Filter) else self._in_order(what)
        progress = _Progress(selected=len(ids))
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            if dry_run:
                self._foresee(batch, progress, force=force)
            else:
                self._replay_batch(batch, by, why, progress, force=force)
        return progress.report(dry_run=dry_run)

    def discard(self, what: Filter | Sequence[str], *, by: str = "", why: str = "") -> Moved:
        """Lay dead letters aside, and remove the broker's own copies of them.  `restore` takes them back.

        Parameters:
          what(Filter | Sequence[str]): The letters: all that match now, or these.
          by(str): Who discards.
          why(str): Why.

        Returns:
          Moved: What was done.
        """
        selected, copies = 0, 0
        moved: list[str] = []
        for letters in self._letters(what):
            selected += len(letters)
            done = set(self.store.discard([each.letter_id for each in letters], now=clock.now(), by=by, why=why))
            moved += [each.letter_id for each in letters if each.letter_id in done]
            copies += remove_copies(self.broker, [each for each in letters if each.letter_id in done])
        return Moved(selected=selected, moved=tuple(moved), copies_removed=copies)

    def restore(self, letter_ids: Sequence[str], *, by: str = "", why: str = "") -> Moved:
        """Take letters back: discarded ones, and replayed ones of which nothing was ever heard.

        Parameters:
          letter_ids(Sequence[str]): The letters.
          by(str): Who restores.
          why(str): Why.

        Returns:
          Moved: What was done.
        """
        moved = self.store.restore(letter_ids, now=clock.now(), by=by, why=why)
        return Moved(selected=len(letter_ids), moved=moved)

    def _replay_batch(self, ids: Sequence[str], by: str, why: str, progress: _Progress, *, force: bool) -> None:
        begun = self.store.begin_replay(
            ids, owner=f"{socket.gethostname()}:{getpid()}", now=clock.now(), lease=LEASE, by=by, why=why
        )
        progress.refused += [(letter_id, _obstacle(state)) for letter_id, state in begun.refused]
        waiting = list(begun.letters)
        sent: list[Letter] = []
        try:
            while waiting:
                message, obstacle = self._message_for(waiting[0])
                if message is not None and self._is_forgotten(waiting[0], progress) and not force:
                    message, obstacle = None, _FORGOTTEN.format(key=waiting[0].key)
                if message is None:
                    letter = waiting.pop(0)
                    self.store.abandon_replay([_token(letter)], now=clock.now(), why=obstacle)
                    progress.refused.append((letter.letter_id, obstacle))
                    continue
                self._send(message)
                sent.append(waiting.pop(0))
        except StoreError:
            raise  # nothing can be noted: what was taken is free again when its lease is over
        except Exception as error:
            self._close_batch(sent, waiting, f"not sent: {error}", progress)
            raise ReplayStopped(
                f"the replay stopped after {len(progress.replayed)} of {progress.selected} letters, because the "
                f"broker could not take {waiting[0].letter_id!r}: {error}; what was not sent is dead as before, so "
                "replay again when the broker is back",
                progress.report(),
            ) from error
        except BaseException:
            self._close_batch(sent, waiting, "interrupted", progress)
            raise
        self._close_batch(sent, waiting, "", progress)

    def _close_batch(self, sent: Sequence[Letter], waiting: Sequence[Letter], why: str, progress: _Progress) -> None:
        now = clock.now()
        self.store.finish_replay([_token(each) for each in sent], now=now)
        self.store.abandon_replay([_token(each) for each in waiting], now=now, why=why)
        progress.replayed += [each.letter_id for each in sent]
        progress.per_actor.update(each.actor for each in sent)
        progress.copies_removed += remove_copies(self.broker, sent)

    def _message_for(self, letter: Letter) -> tuple[Message[Any] | None, str]:
        obstacle = letter.unreplayable
        if obstacle is None:
            return replay_message(letter), ""
        exact = exact_payload(self.broker, letter)
        if exact is None:
            return None, obstacle
        return replay_message(replace(letter, args=exact.args, kwargs=exact.kwargs, options=exact.options)), ""

    def _send(self, message: Message[Any]) -> None:
        assert self.broker is not None  # noqa: S101 - `replay` looked
        self.broker.declare_queue(message.queue_name)
        self.broker.enqueue(message)

    def _is_forgotten(self, letter: Letter, progress: _Progress) -> bool:
        """Whether the record that could tell what became of a letter's work has expired."""
        until = letter.remembered_until
        if until is None or clock.now() < until:
            return False
        try:
            if self.keys is not None and self.keys.get(letter.key) is not None:
                return False  # it was claimed again since
        except StoreError:
            pass  # nobody can tell now
        progress.forgotten.append(letter.letter_id)
        return True

    def _foresee(self, ids: Sequence[str], progress: _Progress, *, force: bool) -> None:
        now = clock.now()
        for letter_id in ids:
            letter = self.store.get(letter_id)
            if letter is None:
                obstacle: str | None = _obstacle("missing")
            elif letter.state == REPLAYING and letter.standing.replay and letter.standing.replay.lease_until <= now:
                obstacle = None
            elif letter.state != DEAD:
                obstacle = _obstacle(letter.state)
            else:
                obstacle = letter.unreplayable
                if obstacle is not None and exact_payload(self.broker, letter) is not None:
                    obstacle = None
            if obstacle is None and letter is not None and self._is_forgotten(letter, progress) and not force:
                obstacle = _FORGOTTEN.format(key=letter.key)
            if obstacle is not None or letter is None:
                progress.refused.append((letter_id, obstacle or ""))
            else:
                progress.replayed.append(letter_id)
                progress.per_actor[letter.actor] += 1

    def _in_order(self, letter_ids: Sequence[str]) -> Sequence[str]:
        found = {each: self.store.get(each) for each in letter_ids}
        return sorted(found, key=lambda each: (letter.message_timestamp if (letter := found[each]) else 0, each))

    def _refs(self, where: Filter) -> Iterator[Ref]:
        cursor = None
        while True:
            refs, cursor = self.store.refs(where, cursor=cursor)
            yield from refs
            if cursor is None:
                return

    def _letters(self, what: Filter | Sequence[str]) -> Iterator[Sequence[Letter]]:
        if not isinstance(what, Filter):
            yield [letter for each in what if (letter := self.store.get(each)) is not None]
            return
        cursor = None
        while True:
            page = self.store.page(what, limit=200, cursor=cursor)
            yield page.letters
            cursor = page.cursor
            if cursor is None:
                return


class _Progress:
    """How far a replay has come."""

    def __init__(self, selected: int) -> None:
        self.selected = selected
        self.replayed: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.per_actor: Counter[str] = Counter()
        self.forgotten: list[str] = []
        self.copies_removed = 0

    def report(self, *, dry_run: bool = False) -> ReplayReport:
        return ReplayReport(
            selected=self.selected,
            replayed=tuple(self.replayed),
            refused=tuple(self.refused),
            per_actor=dict(self.per_actor),
            forgotten=tuple(self.forgotten),
            copies_removed=self.copies_removed,
            dry_run=dry_run,
        )


def replay_message(letter: Letter) -> Message[Any]:
    """Make the message that a replay sends.

    Its timestamp is that of the replay, so that an age limit and `retry_for` count from now; the first one goes along
    in the options.  Of what the stack had put there only the trace context of the message's creation stays.

    Parameters:
      letter(Letter): A letter that is ``replaying``.

    Returns:
      Message: The message.
    """
    sent = letter.standing.replay
    if sent is None:
        raise GuardError(f"letter {letter.letter_id!r} is not being replayed")
    options = {name: value for name, value in letter.options.items() if name not in SPENT_OPTIONS}
    carried = options.pop("dramatiq_guard", None)
    marker = {"of": letter.letter_id, "n": sent.n, "token": sent.token, "enqueued_at": letter.message_timestamp}
    options["dramatiq_guard"] = {"replay": marker}
    if isinstance(carried, dict) and "tp" in carried:
        options["dramatiq_guard"]["tp"] = carried["tp"]
    return Message(
        queue_name=letter.queue,
        actor_name=letter.actor,
        args=tuple(letter.args),
        kwargs=dict(letter.kwargs),
        options=options,
        message_id=letter.message_id,
        message_timestamp=clock.now(),
    )


def _token(letter: Letter) -> tuple[str, str]:
    sent = letter.standing.replay
    return letter.letter_id, sent.token if sent else ""


def _obstacle(state: str) -> str:
    return {
        "missing": "there is no such letter",
        "replaying": "another replay has it now",
        "replayed": "it was replayed already",
        "discarded": "it was discarded; restore it first",
    }.get(state, state)

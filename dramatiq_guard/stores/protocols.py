"""What a store must do for the stack, and the plain values that go in and out.

A store does storage only: every method is one atomic step, knows neither Dramatiq nor telemetry, takes the time as an
argument, and raises `StoreUnavailable` when it cannot be reached or cannot write now, `StoreError` for all else.

The rules of the letters' states, which every store keeps alike:

========== ============================= ===========================================================================
from       by                            to
========== ============================= ===========================================================================
(nothing)  `put`                         ``dead``
dead       `begin_replay`                ``replaying``, with a new token and a lease
replaying  `begin_replay`, lease over    ``replaying``, with another token: a copy with the former one is turned away
replaying  `finish_replay`               ``replayed``
replaying  `admit_replay`                ``replayed``: the copy arrived, whatever became of who sent it
replaying  `abandon_replay`              ``dead``
replaying  `put` of the replay's death   ``replayed``, outcome ``died``; the new letter is ``dead``
dead       `discard`                     ``discarded``
discarded  `restore`                     ``dead``
replayed   `restore`                     ``dead``, if nothing is known to have become of the replay
replayed,  `put` of another death        ``dead`` again: a copy that no replay sent died later
discarded
dead       `withdraw`, if unsettled      (nothing): its message was delivered again, and did not die
========== ============================= ===========================================================================

A letter is written before its message is buried by the broker, and a process may die in between.  So `put` also notes
a new death as *unsettled*, until `settled` says that the message is buried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..dead_letters.letter import DEAD, STATES
from ..errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..dead_letters.letter import Letter
    from .breakers import BreakerStore
    from .crashes import CrashStore
    from .idempotency import IdempotencyStore

__all__ = [
    "Begun",
    "DeadLetterStore",
    "DeliveryStore",
    "Filter",
    "Group",
    "Page",
    "Purged",
    "Ref",
    "Stores",
    "Unsettled",
]

DAY = 24 * 60 * 60 * 1000
MAX_AGE = 30 * DAY
MAX_COUNT = 100_000
#: Longer than any message is on its way: Dramatiq delays one by 7 days at most.
DELIVERIES_KEPT = 8 * DAY
#: After so long no broker delivers a message again whose letter was left unsettled.
NOTES_KEPT = 8 * DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which letters are meant; what is ``None`` does not matter.

    Parameters:
      states(tuple[str, ...]): Where they stand.
      queue(str | None): The canonical queue.
      actor(str | None): The actor.
      reason(str | None): The reason code.
      error_type(str | None): The qualified name of the error's class.
      fingerprint(str | None): The bug.
      died_after(int | None): Died at this time or later, in UNIX milliseconds.
      died_before(int | None): Died before this time, in UNIX milliseconds.
      text(str | None): Stands in the arguments, whatever the case.  Every letter that matches otherwise is read.

    Raises:
      SetupError: There is no such state.
    """

    states: tuple[str, ...] = (DEAD,)
    queue: str | None = None
    actor: str | None = None
    reason: str | None = None
    error_type: str | None = None
    fingerprint: str | None = None
    died_after: int | None = None
    died_before: int | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        unknown = [state for state in self.states if state not in STATES]
        if unknown or not self.states:
            raise SetupError(f"no such state of a letter: {', '.join(unknown)!r}; write one of {', '.join(STATES)}")
        if self.error_type is not None:
            object.__setattr__(self, "error_type", self.error_type.removeprefix("builtins."))

    @property
    def kinds(self) -> tuple[str | None, str | None, str | None, str | None, str | None]:
        """The five dimensions that `Cell` groups letters by."""
        return (self.queue, self.actor, self.reason, self.error_type, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Page:
    """Some letters, the latest death first, and where to go on.

    Parameters:
      letters(tuple[Letter, ...]): The letters.
      cursor(str | None): Give it to the next call; ``None`` at the end.  Letters that come or go meanwhile neither
        shift the pages nor repeat.
    """

    letters: tuple[Letter, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """A letter by its id, with what a replay is ordered by.

    Parameters:
      message_timestamp(int): When its message was first enqueued.
      letter_id(str): Its id.
    """

    message_timestamp: int
    letter_id: str


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A letter whose message may be delivered again.

    Parameters:
      letter_id(str): The letter.
      message_id(str): Its message.
    """

    letter_id: str
    message_id: str


@dataclass(frozen=True, slots=True)
class Group:
    """All letters of one bug.

    Parameters:
      fingerprint(str): The bug.
      count(int): How many letters.
      first_seen(int): The earliest death among them, in UNIX milliseconds.
      last_seen(int): The latest.
      actors(tuple[str, ...]): The actors they were for.
      queues(tuple[str, ...]): The queues they came from.
      reasons(tuple[str, ...]): Their reason codes.
      error_types(tuple[str, ...]): The classes of their errors.
      latest(str): The id of the latest.
    """

    fingerprint: str
    count: int
    first_seen: int
    last_seen: int
    actors: tuple[str, ...]
    queues: tuple[str, ...]
    reasons: tuple[str, ...]
    error_types: tuple[str, ...]
    latest: str


@dataclass(frozen=True, slots=True)
class Begun:
    """What `begin_replay` took and what it did not.

    Parameters:
      letters(tuple[Letter, ...]): Now ``replaying``, each with its token and number in ``standing.replay``; in the
        order in which they were asked for.
      refused(tuple[tuple[str, str], ...]): Ids with the state that stood in the way; ``missing`` where there is no
        such letter.
    """

    letters: tuple[Letter, ...]
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Purged:
    """What retention removed.

    Parameters:
      by_age(int): How many were too old.
      by_count(int): How many were too many.
      never_handled(int): How many of all these were still ``dead``: nobody replayed or discarded them.
      letter_ids(tuple[str, ...]): Their ids.
      more(bool): Whether there is more to remove; call again.
    """

    by_age: int = 0
    by_count: int = 0
    never_handled: int = 0
    letter_ids: tuple[str, ...] = ()
    more: bool = False

    @property
    def total(self) -> int:
        """How many letters were removed."""
        return self.by_age + self.by_count


@runtime_checkable
class DeadLetterStore(Protocol):
    """Keeps letters.  Safe to use from many threads, and from processes forked after it was made."""

    def put(self, letter: Letter) -> bool:
        """Write a letter, unsettled; the same death written again changes nothing.

        If it is the death of a replay, the letter that was replayed learns of it in the same step.

        Returns:
          bool: Whether it was new.
        """
        ...

    def settled(self, letter_ids: Sequence[str], *, now: int) -> int:
        """Note that the messages of these letters are buried: they will not be delivered again.

        Returns:
          int: How many of them were unsettled.
        """
        ...

    def unsettled(self, *, before: int, limit: int = 1_000) -> tuple[Unsettled, ...]:
        """Read which letters are unsettled, the latest death first.  Notes older than 8 days may be gone.

        Parameters:
          before(int): Only what died before this time, in UNIX milliseconds.
          limit(int): How many at most.
        """
        ...

    def withdraw(self, letter_id: str, *, now: int) -> bool:
        """Remove a letter whose message did not die after all: it was delivered again, and went on.

        Returns:
          bool: Whether it was removed: it was ``dead`` and unsettled still.
        """
        ...

    def get(self, letter_id: str) -> Letter | None:
        """Read one letter."""
        ...

    def page(self, where: Filter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        """Read letters, the latest death first; all that are ``dead`` by default.

        Raises:
          ValueError: The cursor is none of this store's, or the limit is below 1.
        """
        ...

    def refs(
        self,
        where: Filter | None = None,
        *,
        limit: int = 1_000,
        cursor: str | None = None,
    ) -> tuple[tuple[Ref, ...], str | None]:
        """Like `page`, but ids only."""
        ...

    def groups(self, where: Filter | None = None) -> tuple[Group, ...]:
        """Count letters by fingerprint, the biggest group first."""
        ...

    def count(self, where: Filter | None = None) -> int:
        """Count letters."""
        ...

    def begin_replay(
        self, letter_ids: Sequence[str], *, owner: str, now: int, lease: int = 60_000, by: str = "", why: str = ""
    ) -> Begun:
        """Take letters for a replay: each is taken by one caller only.

        Parameters:
          letter_ids(Sequence[str]): The letters.
          owner(str): Who holds the lease.
          now(int): The time, in UNIX milliseconds.
          lease(int): For how many milliseconds nobody else may take them.
          by(str): The person.
          why(str): The reason given.
        """
        ...

    def finish_replay(self, tokens: Sequence[tuple[str, str]], *, now: int) -> int:
        """Note that messages were handed to the broker: pairs of letter id and token.

        Returns:
          int: How many of the tokens still held.
        """
        ...

    def abandon_replay(self, tokens: Sequence[tuple[str, str]], *, now: int, why: str = "") -> int:
        """Note that messages were not handed to the broker: their letters are dead as before.

        Returns:
          int: How many went back.
        """
        ...

    def admit_replay(self, letter_id: str, token: str, *, now: int) -> bool:
        """Ask whether the copy of a replay that has arrived at a worker may run.

        Returns:
          bool: ``False`` if another copy has taken its place; ``True`` for the copy that counts, each time it arrives,
            and where the letter is no more.
        """
        ...

    def record_outcome(self, letter_id: str, token: str, outcome: str, *, now: int) -> bool:
        """Note what became of a replay: ``succeeded``.  (Its death is noted by `put`, and taken back by this.)

        Returns:
          bool: Whether the token held.
        """
        ...

    def discard(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        """Lay dead letters aside.

        Returns:
          tuple[str, ...]: Those that were dead and now are discarded.
        """
        ...

    def restore(self, letter_ids: Sequence[str], *, now: int, by: str = "", why: str = "") -> tuple[str, ...]:
        """Take letters back: discarded ones, and replayed ones of which nothing was heard.

        Returns:
          tuple[str, ...]: Those that are dead again.
        """
        ...

    def purge(self, *, now: int, max_age: int = MAX_AGE, max_count: int = MAX_COUNT, limit: int = 1_000) -> Purged:
        """Remove what is too old or too much, so many at a time.  Of too many, those that were dealt with go first.

        Parameters:
          now(int): The time, in UNIX milliseconds.
          max_age(int): How many milliseconds after its death a letter is kept.
          max_count(int): How many letters are kept.
          limit(int): How many are removed by one call.
        """
        ...

    def depth(self, state: str = DEAD) -> int:
        """How many letters are in a state."""
        ...

    def oldest(self, state: str = DEAD) -> int | None:
        """When the oldest letter in a state died, in UNIX milliseconds."""
        ...

    def ping(self) -> None:
        """Make sure that the store answers and is set up.

        Raises:
          StoreUnavailable: It does not answer.
          SetupError: It answers, but is not set up.
        """
        ...

    def close(self) -> None:
        """Give back this process's connections."""
        ...


@runtime_checkable
class DeliveryStore(Protocol):
    """Remembers how far each message has been settled, and which copy of it runs.

    The record of a message is its *sequence*, how often it has been settled, and the *fork*, the mark of the copy that
    took this sequence; none, where no copy has arrived yet.  It is kept for 8 days from its last write, longer than
    Dramatiq's longest delay of 7; after that there is none, as for a message never heard of.  A record is a row or hash
    of its own, so that more can be noted of a message beside these two.

    Each method is one atomic step and one round trip.  Safe to use from many threads, and from processes forked after
    the store was made.
    """

    @property
    def crashes(self) -> CrashStore:
        """What is remembered of processes that died at a message; see `dramatiq_guard.stores.crashes`."""
        ...

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool:
        """Ask whether a copy of a message may run: of the copies of one sequence, the first that asks.

        Parameters:
          message_id(str): The message.
          sequence(int): How often it had been settled when this copy was sent.
          fork(str): The mark of this copy; the same when it is delivered again.
          now(int): The time, in UNIX milliseconds.

        Returns:
          bool: ``True`` if the record has no sequence as high, and so takes this one and the fork; or the same one, and
            no fork, which then is this, or this very fork.  ``False`` if the message has been settled further, or
            another fork has the sequence; nothing is written then.
        """
        ...

    def advance(self, message_id: str, sequence: int, *, now: int) -> None:
        """Note that a message has been settled: copies of a lower sequence are stale from now on.

        Parameters:
          message_id(str): The message.
          sequence(int): How often it has been settled.  The record takes it, without a fork, if it is higher.
          now(int): The time, in UNIX milliseconds.
        """
        ...

    def purge(self, *, now: int, limit: int = 1_000) -> int:
        """Remove records that are over, so many at a time; where the server does that by itself, nothing.

        Returns:
          int: How many were removed; call again if it is the limit.
        """
        ...

    def ping(self) -> None:
        """Make sure that the store answers and is set up.

        Raises:
          StoreUnavailable: It does not answer.
          SetupError: It answers, but is not set up.
        """
        ...

    def close(self) -> None:
        """Give back this process's connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The stores of one server; they share their connections.

    Parameters:
      dead_letters(DeadLetterStore): Keeps letters.
      deliveries(DeliveryStore): Tells the copies of a message apart.
      idempotency(IdempotencyStore): Keeps the keys whose work is done or being done.
      breakers(BreakerStore): Keeps what is known of downstreams.
    """

    dead_letters: DeadLetterStore
    deliveries: DeliveryStore
    idempotency: IdempotencyStore
    breakers: BreakerStore

    def close(self) -> None:
        """Give back this process's connections."""
        self.dead_letters.close()
        self.deliveries.close()
        self.idempotency.close()
        self.breakers.close()

"""Letters that may have to be withdrawn: their messages were not buried, and may succeed after all.

Between the writing of a letter and the broker's nack the worker may be killed.  The broker then delivers the message
again; if it succeeds, or goes on in any other way, its letter must not stay.

1. The store notes each new letter as unsettled, in the same step.
2. The message is nacked; some seconds later a thread tells the store that its letter is settled, many at a time.
3. The same thread reads which letters are unsettled and not just being settled: their messages are *suspects*, as is
   whatever the broker says it has delivered before.
4. A suspect that ends without dying owes the withdrawal of its letter, at its settle barrier.

All others cost a look into a set.  This module must not know any middleware or broker.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger

from .. import clock
from ..errors import StoreUnavailable

if TYPE_CHECKING:
    from ..stores.protocols import DeadLetterStore

__all__ = ["Withdrawals"]

#: How often, in milliseconds, letters are settled and suspects looked for; also how old an unsettled letter is before
#: its message becomes a suspect.  More often where a broker takes workers for dead sooner.
_EVERY: Final = 5_000

#: How many letters are settled by one call, how many suspects are known, and how many of either kind are remembered
#: while the store is out.
_AT_ONCE: Final = 1_000
_REMEMBERED: Final = 10_000

#: For how many milliseconds a letter that was settled may still be on its way to the store.
_UNDER_WAY: Final = 10 * 60 * 1000


class Withdrawals:
    """Settles the letters of one worker process, and withdraws those whose messages did not die.

    Parameters:
      store(DeadLetterStore): Where the letters are.
    """

    def __init__(self, store: DeadLetterStore) -> None:
        self.logger = get_logger("dramatiq_guard", "withdrawals")
        self.store = store
        self.every = _EVERY
        self._suspects: frozenset[str] = frozenset()
        #: Letters whose messages were nacked, with the consumers that did it: since the last round, and before it.
        self._fresh: deque[tuple[str, Any]] = deque(maxlen=_REMEMBERED)
        self._ripe: list[tuple[str, Any]] = []
        #: Letters that were settled, and when: one that travels with the messages reaches the store after that.
        self._settled: dict[str, int] = {}
        #: Letters to withdraw that the store was out for.
        self._owed: deque[str] = deque(maxlen=_REMEMBERED)
        #: Whether the store did not answer when it was last asked; then only the thread asks it.
        self._out = False
        self._shutting_down = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what the middleware asks and says ---------------------------------------------------------------------------

    def suspects(self, letter_id: str) -> bool:
        """Whether an earlier delivery of the message that this would be the letter of may have left it behind."""
        return letter_id in self._suspects

    def buried(self, letter_id: str, consumer: Any = None) -> None:
        """Take note that a message was nacked, by a consumer whose `alive` tells whether the broker heard of it."""
        self._fresh.append((letter_id, consumer))

    def withdraw(self, letter_id: str, *, ended: bool) -> None:
        """Withdraw the letter that a message may have left behind; nothing waits for a store that is out.

        Parameters:
          letter_id(str): The letter.
          ended(bool): Whether the message has come to its end.  Then the letter is withdrawn later, by the thread; one
            that goes on will be a suspect again.

        Raises:
          StoreError: The store refuses.
        """
        if not self._out:
            try:
                self._withdraw(letter_id)
            except StoreUnavailable as error:
                self._is_out(error)
            else:
                return
        if ended:
            self._owed.append(letter_id)

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self, heartbeat_timeout: int | None = None) -> None:
        """Start, after the fork.  What is unsettled now is known before the first message comes.

        Parameters:
          heartbeat_timeout(int | None): After how many milliseconds the broker delivers a dead worker's messages again.
        """
        self.every = max(50, min(_EVERY, (heartbeat_timeout or _EVERY * 4) // 4))
        self._shutting_down = False
        self._closed = threading.Event()
        self.round()
        self._thread = threading.Thread(target=self._run, name="dramatiq-guard-withdrawals", daemon=True)
        self._thread.start()

    def shut_down(self) -> None:
        """Shutdown has begun: from now on consumers are closed, and that says nothing about their nacks any more."""
        self._shutting_down = True

    def close(self) -> None:
        """End, and settle what was nacked last, if the store answers at once."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(1)

    def round(self) -> None:
        """Settle what has been buried, withdraw what is owed, and find the suspects; whatever fails comes again."""
        try:
            self._settle()
            while self._owed:
                self._withdraw(self._owed[0])
                self._owed.popleft()
            self._look()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next round tries again
            self._is_out(error)
        else:
            self._out = False

    def _run(self) -> None:
        while not clock.wait(self._closed, self.every):
            self.round()
        self._ripe += self._drained()
        self.round()

    def _settle(self) -> None:
        """Settle what was buried before the last round, unless its consumer has lost its connection since."""
        self._ripe = [each for each in self._ripe if self._heard(each)][-_REMEMBERED:]
        now = clock.monotonic()
        while self._ripe:
            some = [letter_id for letter_id, _ in self._ripe[:_AT_ONCE]]
            self.store.settled(some, now=clock.now())
            del self._ripe[:_AT_ONCE]
            self._settled.update(dict.fromkeys(some, now))
        recent = [(each, at) for each, at in self._settled.items() if at > now - _UNDER_WAY]
        self._settled = dict(recent[-_REMEMBERED:])
        self._ripe = self._drained()

    def _look(self) -> None:
        found = {each.letter_id for each in self.store.unsettled(before=clock.now() - self.every, limit=_AT_ONCE)}
        late = sorted(found & self._settled.keys())
        if late:
            self.store.settled(late, now=clock.now())
        self._suspects = frozenset(found.difference(late))

    def _is_out(self, why: Exception) -> None:
        known, self._out = self._out, True
        if not known:
            self.logger.warning("Letters can be neither settled nor withdrawn now (%s); it goes on trying.", why)

    def _drained(self) -> list[tuple[str, Any]]:
        return [self._fresh.popleft() for _ in range(len(self._fresh))]

    def _heard(self, buried: tuple[str, Any]) -> bool:
        """Whether the broker has heard of a nack: the connection that it went over still stands some seconds later."""
        _, consumer = buried
        return self._shutting_down or consumer is None or bool(consumer.alive())

    def _withdraw(self, letter_id: str) -> None:
        if self.store.withdraw(letter_id, now=clock.now()):
            self.logger.warning("Letter %r is withdrawn: its message was delivered again, and went on.", letter_id)

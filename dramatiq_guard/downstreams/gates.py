"""The gates of one process, one a downstream, and the one thread that reports for them.

A message passes its gate just before its actor runs, and its outcome is told to the gate just after; neither talks to
the store.  The thread does that: every few seconds while all is well, at once when something fails, and a few times a
second while a downstream recovers.  While the store is out everything is let through.

This module must not know any middleware, nor how a breaker judges.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from .. import clock, telemetry
from ..errors import HeldBack, StoreError, StoreUnavailable
from ..policy.breaker import Limits, Mode, State, step
from ..policy.gate import Gate, Move

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..policy.breaker import Lease, Report
    from ..policy.gate import Answer
    from ..stores.breakers import BreakerStore

__all__ = ["Gates"]

#: Milliseconds for which a message waits in its thread for its turn, and the longest sleep of whoever waits or reports.
_PATIENCE: Final = 2_000
_NAP: Final = 1_000
#: A downstream that is well and from which nothing has come for so long is not reported of, and asked about anew by the
#: next message; and after the longer time it is forgotten.
_IDLE, _FORGOTTEN = 15_000, 3_600_000

#: What the log says of a downstream that comes into a mode.
_SAID: Final = {
    Mode.CLOSED: "is well: its messages go freely",
    Mode.OPEN: "fails: its messages are held back, and a probe is sent now and then",
    Mode.RECOVERING: "answers again: its messages come back at a pace that it bears",
    Mode.FORCED_OPEN: "is paused by an operator: its messages are held back",
    Mode.FORCED_CLOSED: "is let alone by an operator: its messages go freely, whatever happens",
}


class _Downstream:
    """One downstream, as this process knows it."""

    __slots__ = ("answers", "called_at", "changed", "free", "gate", "meeting", "met", "mode", "name", "out")

    def __init__(self, name: str, gate: Gate) -> None:
        self.name = name
        self.gate = gate
        self.mode: Mode | None = None
        #: When a report had something to tell last, and whether the last one failed.
        self.called_at = clock.monotonic()
        self.out = False
        #: Held while the gate is asked or told something; whoever waits for a turn waits for it to be notified.
        self.changed = threading.Condition(threading.Lock())
        #: The period in which messages go without asking; and one entry for each that was answered in it.  Neither
        #: takes a lock: that is all that a downstream that is well costs a message.
        self.free: int | None = None
        self.answers: list[None] = []
        #: Whether this process has asked the store about it; held while it does.
        self.met = False
        self.meeting = threading.Lock()


class Gates:
    """The gates of one worker process.

    Parameters:
      store(BreakerStore): What the processes share.
      limits(Limits): How the breakers judge.
    """

    def __init__(self, store: BreakerStore, limits: Limits) -> None:
        self.logger = get_logger("dramatiq_guard", "downstreams")
        self.store = store
        self.limits = limits
        self.room = 1
        self._known: dict[str, _Downstream] = {}
        self._adding = threading.Lock()
        self._news = threading.Event()
        self._workers = 0
        self._store_is_out = False
        self._thread: threading.Thread | None = None

    def start(self, room: int) -> None:
        """Begin; called when the worker boots, after the fork.

        Parameters:
          room(int): How many threads may wait for one downstream at a time.
        """
        self.room = room
        with self._adding:
            self._workers += 1
            if self._workers > 1 and self._thread is not None and self._thread.is_alive():
                return  # a second worker of this process: one thread reports for both
            self._known = {}
            self._news = threading.Event()
            self._store_is_out = False
            self._thread = threading.Thread(
                target=self._run, args=(self._news, self._known), name="dramatiq-guard-breakers", daemon=True
            )
        self._thread.start()

    def close(self) -> None:
        """End; the worker has shut down."""
        with self._adding:
            self._workers = max(0, self._workers - 1)
            news = self._news
            if not self._workers:
                # What ends its thread, and no later one.
                self._known = {}
        news.set()

    def admitted(self, name: str) -> int | None:
        """Whether messages go to a downstream without asking; gives what `answered` is to be told."""
        downstream = self._known.get(name)
        return None if downstream is None else downstream.free

    def answered(self, name: str, period: int) -> None:
        """Note that the downstream answered a message that was admitted without asking."""
        downstream = self._known.get(name)
        if downstream is not None and downstream.free == period:
            downstream.answers.append(None)
        else:
            self.left(name, period, ok=True)

    def enter(self, name: str, *, again: bool, hurried: Callable[[], bool]) -> int:
        """Pass the gate of a downstream; it may take a moment.

        Parameters:
          name(str): The downstream.
          again(bool): Whether the message has been put off before.
          hurried(Callable[[], bool]): Whether nobody should wait any more, since the worker is told to stop.

        Returns:
          int: The period that the message was admitted in, to be given to `left`.

        Raises:
          HeldBack: It is not its turn; says for how long it is put off.
        """
        downstream = self._known.get(name) or self._add(name)
        if not downstream.met:
            self._meet(downstream)
        gate = downstream.gate
        with downstream.changed:
            now = clock.monotonic()
            answer = gate.arrive(now, clock.uniform(), again=again)
            if answer.move is Move.WAIT:
                answer = self._wait(downstream, now, hurried)
            mode = gate.mode
        if answer.move is Move.ADMIT:
            if mode is not Mode.CLOSED:
                telemetry.breaker_passed(name, mode.value, admitted=True)
            return answer.period
        telemetry.breaker_passed(name, mode.value, admitted=False)
        raise HeldBack(f"downstream {name!r} is {mode.value}", delay=answer.delay)

    def hold(self, name: str, taken: int) -> int:
        """Whether nothing more is to be taken from a queue whose messages all go to one downstream.

        Parameters:
          name(str): The downstream.
          taken(int): How many were taken from the queue, and have not passed the gate yet.

        Returns:
          int: Milliseconds until it is to be asked again; 0 if the next one may be taken.
        """
        downstream = self._known.get(name)
        if downstream is None or not downstream.met:
            if not taken:
                return 0  # nobody is asked before there is a message
            downstream = downstream or self._add(name)
            self._meet(downstream)
        return 0 if downstream.free is not None else downstream.gate.hold(taken)

    def left(self, name: str, period: int, *, ok: bool, retry_after: int | None = None) -> None:
        """Tell a gate how it ended.

        Parameters:
          name(str): The downstream.
          period(int): What `enter` gave.
          ok(bool): Whether the downstream answered, be it with a permanent error.
          retry_after(int | None): For how many milliseconds it asked to be left alone.
        """
        downstream = self._known.get(name)
        if downstream is None:
            return  # the worker was booted anew meanwhile
        with downstream.changed:
            now = clock.monotonic()
            downstream.called_at = now
            downstream.met = True  # if it was at rest: what began before has ended now
            downstream.gate.done(period, now, ok=ok, retry_after=retry_after)
            news = downstream.gate.due(now) or downstream.gate.look_at < now + _NAP
        if news:
            self._news.set()

    def report(self) -> int:
        """Report for every gate whose time has come.

        Returns:
          int: In how many milliseconds the next one's has.
        """
        next_at = clock.monotonic() + _NAP
        for downstream in list(self._known.values()):
            if not downstream.met:
                self._forget(downstream)
                continue  # whoever meets it is asking, or nobody calls it
            with downstream.changed:
                now = clock.monotonic()
                report = self._ask(downstream, now) if downstream.gate.due(now) else None
            if report is not None:
                if downstream.free is not None and not downstream.out and self._idle(downstream, report):
                    continue
                self._exchange(downstream, report)
            next_at = min(next_at, downstream.gate.look_at)
        return max(1, next_at - clock.monotonic())

    def _idle(self, downstream: _Downstream, report: Report) -> bool:
        """Let a downstream rest that is well and that nobody calls: names made of messages have no end."""
        now = clock.monotonic()
        if report.ok or report.bad or report.retry_after is not None:
            downstream.called_at = now
        if now - downstream.called_at < _IDLE:
            return False
        with downstream.changed:
            downstream.gate.asking = False
            downstream.free = None
            downstream.met = False
        return True

    def _forget(self, downstream: _Downstream) -> None:
        if clock.monotonic() - downstream.called_at >= _FORGOTTEN and not downstream.meeting.locked():
            with self._adding:
                self._known.pop(downstream.name, None)

    def _add(self, name: str) -> _Downstream:
        with self._adding:
            downstream = self._known.get(name)
            if downstream is None:
                downstream = self._known[name] = _Downstream(name, Gate(self.room, clock.monotonic()))
        return downstream

    def _meet(self, downstream: _Downstream) -> None:
        """Ask about a downstream before the first message goes there: it may be out, or paused, as all others know."""
        with downstream.meeting:
            if downstream.met:
                return
            if self._store_is_out:
                # It is known to be: nobody waits for it again, for each name that is met meanwhile.
                self._lost(downstream)
                downstream.met = True
                return
            with downstream.changed:
                report = self._ask(downstream, clock.monotonic())
            self._exchange(downstream, report)
            downstream.met = True

    def _ask(self, downstream: _Downstream, now: int) -> Report:
        answers = downstream.answers
        times = len(answers)
        if downstream.free is not None:
            downstream.gate.answered(downstream.free, times)
        del answers[:times]
        return downstream.gate.ask(now)

    def _wait(self, downstream: _Downstream, since: int, hurried: Callable[[], bool]) -> Answer:
        gate = downstream.gate
        self._news.set()
        while True:
            now = clock.monotonic()
            answer = gate.wait_over(now)
            if answer is not None:
                return answer
            if hurried() or now - since >= _PATIENCE:
                return gate.give_up(now, clock.uniform())
            downstream.changed.wait(min(gate.wake_at(now) - now, _NAP, since + _PATIENCE - now) / 1000)

    def _exchange(self, downstream: _Downstream, report: Report) -> None:
        limits = self.limits

        def change(state: State, now: int) -> tuple[State, Lease]:
            return step(limits, state, report, now)

        try:
            lease = self.store.update(downstream.name, change)
        except Exception as error:
            if not downstream.out and not self._store_is_out:
                self.logger.warning(
                    "The store of CircuitBreaker does not answer (%s); all messages go freely until it does.",
                    error,
                    exc_info=not isinstance(error, StoreError),
                )
            downstream.out = True
            # A server that answers with an error is there: what is wrong is this one record.
            self._store_is_out = self._store_is_out or isinstance(error, StoreUnavailable)
            self._lost(downstream)
            return
        downstream.out = False
        if self._store_is_out:
            self._store_is_out = False
            self.logger.warning("The store of CircuitBreaker answers again.")
        with downstream.changed:
            downstream.gate.learn(lease, clock.monotonic(), clock.uniform())
            downstream.free = downstream.gate.free
            downstream.changed.notify_all()
        if lease.mode is not downstream.mode:
            first = downstream.mode is None
            downstream.mode = lease.mode
            telemetry.breaker_is(downstream.name, lease.mode.value)
            if not first or lease.mode is not Mode.CLOSED:
                self.logger.warning("Downstream %r %s.", downstream.name, _SAID[lease.mode])

    def _lost(self, downstream: _Downstream) -> None:
        with downstream.changed:
            downstream.gate.lost(clock.monotonic())
            downstream.free = downstream.gate.free
            downstream.changed.notify_all()

    def _run(self, news: threading.Event, known: dict[str, _Downstream]) -> None:
        while known is self._known:
            try:
                next_in = self.report()
            except Exception:
                # Whatever it is: without this thread a breaker that is open would stay so for ever.
                self.logger.exception("Reporting of the downstreams failed; it is tried again.")
                next_in = _NAP
            clock.wait(news, next_in)
            news.clear()

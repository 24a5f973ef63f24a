"""One process's side of a breaker: which message may go now, which waits, which is put off, and when to report.

While the breaker is closed the gate lets everything through, and counts.  It reports every few seconds, and as soon as
something fails.  While it is not, a message needs a token; the gate holds those of its last lease, and hands them out
evenly over the time until the next one, so that a batch that the delay queue delivers at once goes out at the rate all
the same.  A message for which there is none waits in its thread if there is room, and else is put off, to a place
behind those that were put off before: what comes back, comes back at the rate of the recovery.  From a queue whose
messages all go to the same downstream no more is taken than may wait (`Gate.hold`): the rest stays at the broker, in
its order, and next to nothing is put off.

Whoever has the gate does the rest: one thread at a time calls `ask`, gives the report to the store, and gives the
answer to `learn`; a store that is out is told by `lost`, and then everything is let through.

Like all of policy it must not know the time, chance or a store.  It is not thread-safe.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .breaker import Lease, Mode, Report

__all__ = ["Answer", "Gate", "Move", "waiting_room"]

#: The shortest time between two reports.
_SHORTEST = 50
#: So many failures are told at once.
_MANY = 4
#: The longest wait for a token that is looked forward to, in milliseconds.
_ROOM = 1_000
#: Milliseconds until a store that was out is asked again.
_STORE_OUT = 1_000
#: Milliseconds until it is asked again whether a queue is still held, while messages have their turns, and while none.
_HOLD, _HOLD_LONG = 10, 50
#: Milliseconds over which those that waited go when the breaker closes: all at once they might open it again.
_DISPERSAL = 500
#: A message of a queue that is held is put off for this share of the time that others are: there are few of them.
_SOONER = 0.2


def waiting_room(threads: int) -> int:
    """How many threads of a process may wait for one downstream: half of them, so that others get on.

    Parameters:
      threads(int): The worker threads of the process.

    Returns:
      int: How many of them may wait.
    """
    return max(1, threads // 2)


class Move(enum.Enum):
    """What becomes of a message at the gate."""

    #: It may run; its outcome is owed to `Gate.done`.
    ADMIT = "admit"
    #: Its thread waits for a token.
    WAIT = "wait"
    #: It is put off.
    PUT_OFF = "put_off"


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of a message.

    Parameters:
      move(Move): What.
      delay(int): Milliseconds by which it is put off.
      period(int): The period it was admitted in, to be named with its outcome.
    """

    move: Move
    delay: int = 0
    period: int = 0


class Gate:
    """The gate of one process for one downstream.

    Parameters:
      room(int): How many threads may wait for a token at a time.
      now(int): The time in milliseconds.
    """

    __slots__ = (
        *(
            "_away_until",
            "_bad",
            "_eager",
            "_wanted",
            "_gap",
            "_lease",
            "_next",
            "_ok",
            "_period",
            "_put_off",
            "_retry_after",
            "_tail",
        ),
        *("_tokens", "asking", "held", "look_at", "reported_at", "room", "waiting"),
    )

    def __init__(self, room: int, now: int) -> None:
        self.room = max(1, room)
        #: Messages whose threads wait.
        self.waiting = 0
        #: When the next report is due.
        self.look_at = now
        self.reported_at = now
        #: A report is under way.
        self.asking = False
        #: There is a queue that is held, rather than that its messages are put off.
        self.held = False
        self._lease = Lease(Mode.CLOSED, 0)
        # Counts up with each period, so that outcomes find theirs even after the store was out.
        self._period = 0
        self._ok = self._bad = self._put_off = 0
        self._retry_after: int | None = None
        self._tokens = 0
        self._gap = 0.0
        self._next = 0.0
        self._tail = 0.0
        self._eager = False
        self._wanted = 0
        self._away_until = now

    @property
    def mode(self) -> Mode:
        """What the breaker does, as far as this process knows."""
        return self._lease.mode

    @property
    def free(self) -> int | None:
        """The period in which messages are let through without asking; None while they need a token."""
        return self._period if self._lease.mode.admits_freely else None

    def arrive(self, now: int, u: float, *, again: bool = False) -> Answer:
        """A message is about to run.

        Parameters:
          now(int): The time.
          u(float): A random number from [0, 1).
          again(bool): It has been put off before: it goes before those that have not.

        Returns:
          Answer: What becomes of it.
        """
        if self._lease.mode.admits_freely:
            return Answer(Move.ADMIT, period=self._period)
        if not self.waiting and self._take(now):
            return Answer(Move.ADMIT, period=self._period)
        if self.waiting < self._room(again):
            self.waiting += 1
            if self.waiting == 1 and not self._tokens:
                self._hurry(now)
            return Answer(Move.WAIT)
        return self._put(now, u)

    def hold(self, taken: int) -> int:
        """Whether nothing more is to be taken from a queue whose messages all go to this downstream.

        Parameters:
          taken(int): How many were taken from it, and have not gone through yet.

        Returns:
          int: Milliseconds until it is to be asked again; 0 if the next one may be taken.
        """
        self.held = True
        lease = self._lease
        if lease.mode.admits_freely:
            return 0
        # One that is to probe is taken when it may soon, so that no thread waits as long as an outage lasts.
        early = lease.mode is Mode.OPEN and lease.soonest > lease.look
        if not early and max(taken, self.waiting) < self._room(again=False):
            return 0
        return _HOLD if lease.mode is Mode.RECOVERING else _HOLD_LONG

    def wait_over(self, now: int) -> Answer | None:
        """Whether the message that has waited longest may run now; None if it has to wait on."""
        if self._lease.mode.admits_freely:
            if now < self._next:
                return None
            self._next += self._gap
        elif not self._take(now):
            return None
        self.waiting -= 1
        return Answer(Move.ADMIT, period=self._period)

    def give_up(self, now: int, u: float) -> Answer:
        """A message does not wait any longer: it is put off."""
        self.waiting -= 1
        return self._put(now, u)

    def done(self, period: int, now: int, *, ok: bool, retry_after: int | None = None) -> None:
        """A message that was admitted has its outcome.

        Parameters:
          period(int): That of the answer it was admitted with.
          now(int): The time.
          ok(bool): The downstream answered, be it with a permanent error.
          retry_after(int | None): The Retry-After that came with a failure.
        """
        if retry_after is not None:
            self._retry_after = max(retry_after, self._retry_after or 0)
        if period == self._period:
            self._ok += ok
            self._bad += not ok
        elif retry_after is None:
            return
        if not ok or self._lease.mode is Mode.OPEN:
            self._told_soon(now)

    def answered(self, period: int, times: int) -> None:
        """So many messages that were let through without asking were answered.

        Parameters:
          period(int): What `free` was when they were.
          times(int): How many.
        """
        if period == self._period:
            self._ok += times

    def due(self, now: int) -> bool:
        """Whether a report is due."""
        return now >= self.look_at and not self.asking

    def wake_at(self, now: int) -> int:
        """When something may change for those that wait."""
        # Whoever waits for the answer of the store is told when it is there.
        look_at = now + _STORE_OUT if self.asking else self.look_at
        if self._tokens or self._lease.mode.admits_freely:
            look_at = min(look_at, int(self._next) + 1)
        return max(now + 1, look_at)

    def ask(self, now: int) -> Report:
        """Make the report that is due; `learn` or `lost` follows."""
        report = Report(
            self._lease.mode,
            self._lease.since,
            self._ok,
            self._bad,
            now - self.reported_at,
            self._retry_after,
            self.waiting,
            self._tokens,
            self._put_off,
            max(0, self._away_until - now),
        )
        self.asking = True
        self._wanted = self.waiting
        self.reported_at = now
        self._ok = self._bad = self._put_off = self._tokens = 0
        self._retry_after = None
        return report

    def learn(self, lease: Lease, now: int, u: float) -> None:
        """Take the answer of the store.

        Parameters:
          lease(Lease): The answer.
          now(int): The time.
          u(float): A random number from [0, 1), which keeps the processes from asking in step.
        """
        again = (lease.mode, lease.since) == (self._lease.mode, self._lease.since)
        if not again:
            self._period += 1
            self._ok = self._bad = 0
        self.asking = False
        self._lease = lease
        self._tail = float(now + max(lease.line, lease.soonest))
        self._tokens = lease.tokens
        # All that was wanted was granted: it is not the rate that limits, but how many may wait.
        self._eager = lease.tokens == self._wanted
        wait = round(lease.look * (0.9 + 0.2 * u))
        if lease.mode.admits_freely:
            self._gap = _DISPERSAL / max(1, self.waiting)
        else:
            self._gap = wait / max(1, lease.tokens)
        # As far behind the last one of the lease before as behind each other, and the first anywhere: leases make no
        # burst, neither of one process nor of many.
        self._next = min(max(self._next, float(now)), now + self._gap) if again else now + u * self._gap
        self.look_at = now + wait
        if self._bad:
            self._told_soon(now)  # what failed while the report was under way

    def lost(self, now: int) -> None:
        """The store is out: everything is let through until it is back."""
        self.asking = False
        self._lease = Lease(Mode.CLOSED, -1)
        self._period += 1
        self._tokens = 0
        self._gap, self._next = 0.0, float(now)
        self.look_at = now + _STORE_OUT

    def _told_soon(self, now: int) -> None:
        if self._bad >= _MANY and self._lease.mode is Mode.CLOSED:
            self.look_at = now  # what is refused at once fails a hundred times between two reports
        else:
            self._hurry(now)

    def _hurry(self, now: int) -> None:
        self.look_at = min(self.look_at, max(now, self.reported_at + _SHORTEST))

    def _room(self, again: bool) -> int:
        if self._lease.mode is Mode.RECOVERING:
            # No more than will have their turn in a second.
            room = min(self.room, max(1, round(_ROOM / self._lease.apart)))
            return room if again else max(1, room * 3 // 4)
        return 1 if self._lease.mode is Mode.OPEN else 0

    def _take(self, now: int) -> bool:
        if not self._tokens or now < self._next:
            return False
        self._tokens -= 1
        self._next += self._gap
        if not self._tokens and self._eager:
            self._hurry(now)
        return True

    def _put(self, now: int, u: float) -> Answer:
        lease = self._lease
        delay = round(lease.soonest + u * (lease.latest - lease.soonest) * (_SOONER if self.held else 1))
        if lease.apart:
            self._tail += lease.apart
            if self._tail <= now + lease.latest:
                delay = round(self._tail + (u - 0.5) * lease.apart) - now
            else:
                # The line is longer than anybody is to wait: a place anywhere in it, and another try.
                self._tail = float(now + lease.latest)
        self._put_off += 1
        self._away_until = max(self._away_until, now + delay)
        return Answer(Move.PUT_OFF, delay)

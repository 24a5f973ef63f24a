"""What to do about a verdict: the table of the library, as one pure and total function.

=========== ================================ ======================== ==================
verdict     retries left                     none left                counts
=========== ================================ ======================== ==================
RETRYABLE   RETRY after backoff, or as asked GIVE_UP: exhausted       yes
PERMANENT   GIVE_UP: permanent               GIVE_UP: permanent       no
FATAL       RETRY, then the process exits    GIVE_UP: exhausted, exit yes
DEFERRED    DEFER                            DEFER                    no, a cap of its own
INTERRUPTED REQUEUE at once                  REQUEUE at once          no, a cap of its own
=========== ================================ ======================== ==================

It must not know how a decision is carried out, nor the time; *u* is the caller's random number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .backoff import Backoff, Delay
from .duration import LONGEST_DELAY
from .verdict import Kind

if TYPE_CHECKING:
    from .verdict import Verdict

__all__ = ["Counts", "Decision", "Limits", "Step", "decide"]

#: The first and the longest wait of a deferral that did not ask for another.  A held key or an open breaker clears in
#: seconds or minutes, and a look costs little.
_DEFERRAL = (1_000, 60_000)


class Step(enum.Enum):
    """What becomes of the message."""

    #: Another attempt, after a delay.
    RETRY = "retry"
    #: The dead letters.
    GIVE_UP = "give_up"
    #: Later, as if this delivery had not been.
    DEFER = "defer"
    #: At once, on another process, as if this delivery had not been.
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to go on with a message.  None is unlimited.

    Parameters:
      max_retries(int | None): Retries after the first attempt, as in Dramatiq.
      retry_for(int | None): Milliseconds of `Counts.elapsed` after which no retry starts.
      max_deferrals(int | None): Deferrals in the message's life.  1000 of them, a minute and some each, are 19 hours:
        longer than a downstream's bad night, and shorter than the patience of whoever waits for the message.
      max_interruptions(int | None): Shutdowns in the message's life.  More than 5 in one job say that it is too long
        for the deploys, and going on would restart it for ever.
    """

    max_retries: int | None = 20
    retry_for: int | None = None
    max_deferrals: int | None = 1000
    max_interruptions: int | None = 5


@dataclass(frozen=True, slots=True)
class Counts:
    """What the message has been through before this delivery.  Negative numbers count as 0.

    Parameters:
      retries(int): Attempts that were counted.
      deferrals(int): Times it was put off.
      interruptions(int): Times a shutdown interrupted it.
      elapsed(int): Milliseconds since its first attempt failed; 0 before any has.
    """

    retries: int = 0
    deferrals: int = 0
    interruptions: int = 0
    elapsed: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about one delivery that did not succeed.

    Parameters:
      step(Step): What becomes of the message.
      reason(str | None): The reason code of the dead letter; None unless the step is GIVE_UP.
      delay(Delay | None): The wait before the next delivery; None where there is none to come.
      counted(bool): The delivery was an attempt: the message's retries go up by one.
      exit_process(bool): The process must be replaced once the message is settled.
      why(str): The reason in a sentence, for people.
    """

    step: Step
    reason: str | None
    delay: Delay | None
    counted: bool
    exit_process: bool
    why: str


def decide(
    verdict: Verdict,
    counts: Counts,
    limits: Limits,
    backoff: Backoff,
    u: float,
    *,
    throws: bool = False,
    retry_when: bool | None = None,
    exception: BaseException | None = None,
    message: Any = None,
) -> Decision:
    """Decide what becomes of a message whose delivery did not succeed.

    Parameters:
      verdict(Verdict): What the error means.
      counts(Counts): What the message has been through before.
      limits(Limits): How long to go on; a verdict with a smaller *max_retries* prevails.
      backoff(Backoff): The waits; a verdict with its own prevails.
      u(float): A random number from [0, 1), for the jitter.
      throws(bool): The actor's ``throws`` names the error: no retry, whatever the verdict.
      retry_when(bool | None): What the actor's ``retry_when`` answered.  False ends the retries; True does not lift
        *max_retries*; None where there is no such predicate.
      exception(BaseException): The error, for a schedule that is a function.
      message: The message, for a schedule that is a function.

    Returns:
      Decision: Equal arguments give equal decisions; none makes it raise.
    """
    fatal = verdict.kind is Kind.FATAL
    if throws:
        return _give_up("permanent", "the actor's throws names this error", exit_process=fatal)
    if verdict.kind is Kind.PERMANENT:
        return _give_up(verdict.reason or "permanent", f"trying again cannot help ({verdict.rule})")
    if verdict.kind is Kind.INTERRUPTED:
        return _requeue(max(0, counts.interruptions), limits.max_interruptions)
    backoff = backoff if verdict.backoff is None else verdict.backoff
    if verdict.kind is Kind.DEFERRED:
        return _defer(verdict, max(0, counts.deferrals), limits.max_deferrals, backoff, u)

    retries = max(0, counts.retries)
    max_retries, whose = limits.max_retries, "max_retries"
    if verdict.max_retries is not None and (max_retries is None or verdict.max_retries < max_retries):
        max_retries, whose = verdict.max_retries, f"max_retries of {verdict.rule}"
    if retry_when is False:
        return _give_up("exhausted", "retry_when declined", counted=True, exit_process=fatal)
    if _reached(retries, max_retries):
        return _give_up("exhausted", f"{retries} retries made, {whose} is {max_retries}", True, fatal)
    delay = _retry_delay(verdict, backoff, retries, u, exception, message)
    if limits.retry_for is not None and max(0, counts.elapsed) + delay.milliseconds > limits.retry_for:
        why = f"the next retry, in {delay.milliseconds} ms, would come after retry_for ({limits.retry_for} ms) is over"
        return _give_up("exhausted", why, counted=True, exit_process=fatal)
    of = "" if max_retries is None else f" of {max_retries}"
    why = f"retry {retries + 1}{of} in {delay.milliseconds} ms ({delay.strategy})"
    return Decision(Step.RETRY, None, delay, counted=True, exit_process=fatal, why=why)


def _retry_delay(
    verdict: Verdict, backoff: Backoff, retries: int, u: float, exception: BaseException | None, message: Any
) -> Delay:
    if verdict.delay is None:
        return backoff.delay(retries, u, exception=exception, message=message, floor=verdict.retry_after)
    # The error named its time, so there is no jitter: whoever computes a delay spreads it, or wants it exact.
    asked, floor = max(0, verdict.delay), max(0, verdict.retry_after or 0)
    wanted = max(asked, floor)
    return Delay(min(wanted, LONGEST_DELAY), "asked", capped=wanted > LONGEST_DELAY, floored=floor > asked)


def _defer(verdict: Verdict, deferrals: int, max_deferrals: int | None, backoff: Backoff, u: float) -> Decision:
    if _reached(deferrals, max_deferrals):
        return _give_up("deferred_too_often", f"put off {deferrals} times, max_deferrals is {max_deferrals}")
    floor = verdict.retry_after
    if verdict.exact and verdict.delay is not None:
        delay = Delay(min(max(0, verdict.delay), LONGEST_DELAY), "deferral", capped=False, floored=False)
        return _put_off(verdict, delay, deferrals)
    if verdict.delay is None:
        waits = Backoff(*_DEFERRAL, jitter=backoff.jitter)
    else:
        # What was asked for is also the floor, so that full jitter does not look again too early.
        waits = Backoff(0, jitter=backoff.jitter, schedule=[max(0, verdict.delay)])
        floor = max(verdict.delay, floor or 0)
    planned = waits.delay(deferrals, u, floor=floor)
    return _put_off(verdict, Delay(planned.milliseconds, "deferral", planned.capped, planned.floored), deferrals)


def _put_off(verdict: Verdict, delay: Delay, deferrals: int) -> Decision:
    return Decision(
        Step.DEFER,
        None,
        delay,
        counted=False,
        exit_process=False,
        why=f"put off by {delay.milliseconds} ms, deferral {deferrals + 1} ({verdict.rule})",
    )


def _requeue(interruptions: int, max_interruptions: int | None) -> Decision:
    if _reached(interruptions, max_interruptions):
        return _give_up(
            "interrupted_too_often", f"interrupted {interruptions} times, max_interruptions is {max_interruptions}"
        )
    at_once = Delay(0, "at once", capped=False, floored=False)
    return Decision(
        Step.REQUEUE,
        None,
        at_once,
        counted=False,
        exit_process=False,
        why="interrupted by a shutdown: requeued at once",
    )


def _give_up(reason: str, why: str, counted: bool = False, exit_process: bool = False) -> Decision:
    return Decision(Step.GIVE_UP, reason, None, counted, exit_process, why)


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit

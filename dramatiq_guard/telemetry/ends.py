"""How a worker process ends, and what messages kill it: the ``crash`` and ``shutdown`` spans and their metrics.

Every function takes plain values, never raises, and builds nothing where nothing is recorded.
"""

from __future__ import annotations

from opentelemetry.context import Context

from .. import clock
from . import names
from .signals import meters, quiet, tracer

__all__ = ["crashed", "crashes_uncounted", "ended", "job_stuck", "quarantined"]


@quiet
def crashed(*, reason: str, code: int) -> None:
    """The process ends for a fatal reason.

    Parameters:
      reason(str): Why, in a sentence.
      code(int): The exit code.
    """
    spans = tracer()
    if spans is not None:
        spans.start_span(names.SPAN_CRASH, attributes={names.WHY: reason, names.EXIT_CODE: code}).end()
    instruments = meters()
    if instruments is not None:
        instruments.crashes.add(1, {names.EXIT_CODE: code})


@quiet
def crashes_uncounted() -> None:
    """The store of crashes is out: messages run without being looked up."""
    instruments = meters()
    if instruments is not None:
        instruments.crashes_uncounted.add(1)


@quiet
def job_stuck(*, actor: str, queue: str) -> None:
    """A job runs on long after its time limit, and cannot be interrupted.

    Parameters:
      actor(str): The name of its actor.
      queue(str): The name of its queue.
    """
    instruments = meters()
    if instruments is not None:
        instruments.jobs_stuck.add(1, {names.ACTOR: actor, names.DESTINATION: queue})


@quiet
def quarantined(*, actor: str, queue: str) -> None:
    """A message that kills its workers was not run.

    Parameters:
      actor(str): The name of its actor.
      queue(str): The name of its queue.
    """
    instruments = meters()
    if instruments is not None:
        instruments.quarantined.add(1, {names.ACTOR: actor, names.DESTINATION: queue})


@quiet
def ended(
    *,
    reason: str,
    code: int,
    took_ms: int,
    in_flight: int,
    finished: int,
    interrupted: int,
    handed_back: int,
    abandoned: int,
) -> None:
    """The process has ended, up to its last flush.

    Parameters:
      reason(str): Why, in a sentence.
      code(int): The exit code.
      took_ms(int): Milliseconds from the signal on.
      in_flight(int): How many messages were running when it began.
      finished(int): How many of them finished.
      interrupted(int): How many were interrupted, and requeued.
      handed_back(int): How many that had not been begun went back to their queues.
      abandoned(int): How many were still running at the hard deadline, and were requeued.
    """
    spans = tracer()
    if spans is not None:
        now = clock.now()
        span = spans.start_span(
            names.SPAN_SHUTDOWN,
            # A root: what asked for the end belongs to no message.
            context=Context(),
            start_time=(now - took_ms) * 1_000_000,
            attributes={
                names.WHY: reason,
                names.EXIT_CODE: code,
                names.SHUTDOWN_IN_FLIGHT: in_flight,
                names.SHUTDOWN_FINISHED: finished,
                names.SHUTDOWN_INTERRUPTED: interrupted,
                names.SHUTDOWN_REQUEUED: handed_back,
                names.SHUTDOWN_ABANDONED: abandoned,
            },
        )
        span.end(end_time=now * 1_000_000)
    instruments = meters()
    if instruments is not None:
        instruments.shutdown_duration.record(took_ms / 1000, {names.EXIT_CODE: code})

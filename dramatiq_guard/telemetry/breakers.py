"""What the circuit breakers do: a short span for each message that met one that is not closed, and a gauge of states.

It must not know how a breaker judges; its mode comes in as a plain word.
"""

from __future__ import annotations

from . import names
from .signals import breakers, recording
from .steps import short_span

__all__ = ["breaker_is", "breaker_passed"]


@recording
def breaker_passed(downstream: str, mode: str, *, admitted: bool) -> None:
    """A message met a breaker that is not closed.

    Parameters:
      downstream(str): The downstream.
      mode(str): What its breaker does.
      admitted(bool): Whether the message was let through; else it was put off.
    """
    short_span(
        names.SPAN_BREAKER,
        lambda: {
            names.DOWNSTREAM: downstream,
            names.BREAKER: mode,
            names.OUTCOME: "admitted" if admitted else "deferred",
        },
    )


def breaker_is(downstream: str, mode: str) -> None:
    """A breaker has another mode, as far as this process knows; the gauge of its state reads it from here."""
    breakers[downstream] = mode

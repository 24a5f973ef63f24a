"""What the circuit breakers do: a short span for each message that met one that is not closed, and a gauge of states.

It must not know how a breaker judges; its mode comes in as a plain word.
"""

from __future__ import annotations

from typing import Final

from . import names
from .signals import breakers, recording
from .steps import short_span

__all__ = ["breaker_is", "breaker_passed"]

#: Downstreams in the gauge: where messages make the names there may be any number, and the SDK would throw away those
#: that come last.
_MOST: Final = 1_000
#: Characters of a name.
_LONGEST: Final = 200


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
            names.DOWNSTREAM: _exportable(downstream),
            names.BREAKER: mode,
            names.OUTCOME: "admitted" if admitted else "deferred",
        },
    )


def breaker_is(downstream: str, mode: str) -> None:
    """A breaker has another mode, as far as this process knows; the gauge of its state reads it from here."""
    downstream = _exportable(downstream)
    if downstream not in breakers and len(breakers) >= _MOST:
        # One that is well makes room.
        well = next((name for name, known in list(breakers.items()) if known == "closed"), None)
        if well is None:
            return
        breakers.pop(well, None)
    breakers[downstream] = mode


def _exportable(name: str) -> str:
    """A name that every exporter can write: a lone surrogate in one of them would cost a whole batch."""
    return name[:_LONGEST].encode("utf-8", "replace").decode()

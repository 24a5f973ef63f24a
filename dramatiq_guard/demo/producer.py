"""The producer: a process that sends the plan and keeps its own ledger of what it promised.

A promise is written down before its message is sent, and taken back when the broker refuses the message.

Run as ``python -m dramatiq_guard.demo.producer LEDGER``.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dramatiq

from .ledger import Ledger
from .plan import plan
from .settings import Settings
from .wiring import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan import Job

__all__ = ["produce"]


def produce(ledger: Ledger, jobs: Sequence[Job]) -> None:
    """Send every job that does not wait for another, in a mixed order, and promise the rest along with it.

    Parameters:
      ledger(Ledger): Gets each promise before its message is sent.
      jobs(Sequence[Job]): The plan.
    """
    following: dict[str, list[Job]] = {}
    for job in jobs:
        # The jobs of one message share the part of their name before the dot, and stand in order.
        following.setdefault(job.name.partition(".")[0], []).append(job)
    groups = list(following.values())
    random.Random(2).shuffle(groups)  # noqa: S311 - the same mixture every time
    for first, *later in groups:
        message = _message(first)
        for job in (first, *later):
            ledger.write(event="promised", job=asdict(job), message_id=message.message_id)
        try:
            dramatiq.get_broker().enqueue(message, delay=_delay(first))
        except Exception as error:  # noqa: BLE001 - whatever it is: this message was not sent
            for job in (first, *later):
                ledger.write(event="refused", name=job.name, error=repr(error))


def _message(job: Job) -> dramatiq.Message[Any]:
    from . import app

    if job.actor == "not_deployed_yet":
        return dramatiq.Message("default", job.actor, (job.name,), {}, {})
    if job.kind.endswith("pipeline"):
        row = job.name.removesuffix(".extract")
        extract, *rest = app.PIPELINE
        return dramatiq.pipeline([extract.message(f"{row}.extract"), *(stage.message() for stage in rest)]).messages[0]
    actor: dramatiq.Actor[Any, Any] = getattr(app, job.actor)
    return actor.message(job.name)


def _delay(job: Job) -> int | None:
    from . import app

    return 3 * app.MAX_AGE if job.reason == "expired" else None


if __name__ == "__main__":
    wire(Settings.from_environment())
    with Ledger(Path(sys.argv[1])) as _ledger:
        produce(_ledger, plan())

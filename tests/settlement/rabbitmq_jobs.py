"""The jobs of real worker processes on RabbitMQ: how they are sent, and what they wrote into their ledger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from dramatiq_guard import JitterBackoff

__all__ = ["Jobs", "send"]


class Jobs:
    """The ledger that the jobs of `rabbitmq_app` write to.

    Parameters:
      path(Path): The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def began(self) -> Counter[str]:
        """How often each job has been begun."""
        return self._of("began")

    @property
    def runs(self) -> Counter[str]:
        """How often each job has come to its end, good or bad."""
        return self._of("run")

    @property
    def done(self) -> Counter[str]:
        """How often each job has come to its good end."""
        return self._of("done")

    def _of(self, what: str) -> Counter[str]:
        lines = (line.split(" ", 1) for line in self.path.read_text().splitlines())
        return Counter(key for kind, key in lines if kind == what)


def send(url: str, *jobs: tuple[Any, ...], actor: str = "job", **options: Any) -> None:
    """Send jobs.

    Parameters:
      url(str): The virtual host.
      *jobs(tuple): The arguments of each.
      actor(str): The name of the actor.
      **options(Any): Options of the messages.
    """
    broker = RabbitmqBroker(url=url, confirm_delivery=True, middleware=[JitterBackoff()])
    for args in jobs:
        broker.enqueue(dramatiq.Message("default", actor, args, {}, dict(options)))
    broker.close()

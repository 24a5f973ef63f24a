"""What lies in the broker, read from its own keys: the demo's third witness, beside the two ledgers.

It must not change anything, and asks nobody: a message that a worker has forgotten is still seen here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .accounting import Letter
from .plan import job_of

if TYPE_CHECKING:
    import redis

__all__ = ["Contents", "look"]

_NAMESPACE: Final = "dramatiq"


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in the broker.

    Parameters:
      waiting(frozenset[str]): The jobs on a queue, where the next worker takes them.
      held(frozenset[str]): The jobs that a worker took and has not settled; delayed ones are among them.
      unsettled(int): How many messages there are in all, the stack's own included.
      buried(tuple[Letter, ...]): The dead letters that the broker itself keeps, which give no reasons.
    """

    waiting: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    unsettled: int = 0
    buried: tuple[Letter, ...] = ()


def look(client: redis.Redis) -> Contents:
    """Look into every queue.

    Parameters:
      client(redis.Redis): A client of the broker's server.

    Returns:
      Contents: What lies there now.
    """
    waiting: set[str] = set()
    held: set[str] = set()
    buried: list[Letter] = []
    unsettled = 0
    for key in client.scan_iter(f"{_NAMESPACE}:*.msgs"):
        queue = key.decode().removesuffix(".msgs")
        bodies: dict[Any, Any] = client.hgetall(key)
        if queue.endswith(".XQ"):
            buried += (_letter(json.loads(body)) for body in bodies.values())
            continue
        unsettled += len(bodies)
        listed = set(client.lrange(queue, 0, -1))
        for message_id, body in bodies.items():
            if (job := _job(json.loads(body))) is not None:
                (waiting if message_id in listed else held).add(job)
    return Contents(frozenset(waiting), frozenset(held - waiting), unsettled, tuple(buried))


def _job(message: dict[str, Any]) -> str | None:
    try:
        return job_of(message["actor_name"], message["args"])
    except (IndexError, KeyError, TypeError):
        return None  # not one of the demo's own


def _letter(message: dict[str, Any]) -> Letter:
    return Letter(_job(message) or "?", None, json.dumps(message["options"]))

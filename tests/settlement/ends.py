"""What a `dramatiq` process imports to be killed at a kill point: jobs that come to their end in every way.

Each point has a queue of its own, so that a process which is to die there meets its own job alone.  Everything a
message's end owes goes to the queue ``default``, which the dying do not consume.  ``ENDS_REDIS`` is the broker's URL
unless ``ENDS_RABBITMQ`` is, ``ENDS_LETTERS`` that of the stores, ``ENDS_LEDGER`` a file.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    GroupCallbacks,
    Pipelines,
    ShutdownNotifications,
    TimeLimit,
)
from dramatiq.rate_limits.backends import RedisBackend as RedisRateLimits
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend as RedisResults

from dramatiq_guard import Classify, DeadLetter, Defer, JitterBackoff, install
from dramatiq_guard.stores.connect import connect

from .kill_points import POINTS
from .redis_jobs import Ledger, Refused

HEARTBEAT = 3_000

_url = os.environ["ENDS_REDIS"]
ledger = Ledger(Path(os.environ["ENDS_LEDGER"]))
results = RedisResults(url=_url)
limits = RedisRateLimits(url=_url)
stores = connect(os.environ["ENDS_LETTERS"])
letters = stores.dead_letters
_middleware = [
    AgeLimit(),
    TimeLimit(interval=100),
    ShutdownNotifications(notify_shutdown=True),
    Callbacks(),
    Pipelines(),
    GroupCallbacks(limits),
    Results(backend=results),
    CurrentMessage(),
]
broker: Any
deliveries = None
if "ENDS_RABBITMQ" in os.environ:
    broker = RabbitmqBroker(url=os.environ["ENDS_RABBITMQ"], confirm_delivery=True, middleware=_middleware)
    deliveries = stores.deliveries
else:
    broker = RedisBroker(url=_url, heartbeat_timeout=HEARTBEAT, middleware=_middleware)
install(
    broker,
    Classify(builtin=False),
    JitterBackoff(min_backoff=100, max_backoff=500, log="summary", deliveries=deliveries),
    DeadLetter(letters, on_dead_letter="on_dead_letter"),
)
dramatiq.set_broker(broker)
for point in POINTS:
    broker.declare_queue(point)


def _attempt() -> int:
    message = CurrentMessage.get_current_message()
    return 1 + int((message.options if message is not None else {}).get("retries", 0))


@dramatiq.actor(max_retries=3)
def retried(key: str) -> None:
    """Fails once."""
    ledger.write(f"{key} attempt {_attempt()}")
    if _attempt() == 1:
        raise RuntimeError(key)


@dramatiq.actor(max_retries=0)
def deferred(key: str) -> None:
    """Is put off at its first delivery."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    times = message.options.get("dramatiq_guard", {}).get("deferrals", 0)
    ledger.write(f"{key} deferred {times}")
    if not times:
        raise Defer("not now", delay=100)


@dramatiq.actor(max_retries=0)
def interrupted(key: str) -> None:
    """Has its process told to stop, and waits for it, at its first delivery."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    times = message.options.get("dramatiq_guard", {}).get("interruptions", 0)
    ledger.write(f"{key} interrupted {times}")
    if os.environ.get("DRAMATIQ_GUARD_KILL_AT"):
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            threading.Event().wait(0.05)


@dramatiq.actor(max_retries=0, store_results=True)
def succeeds(key: str) -> str:
    """Succeeds, as a member of a group, with a callback and a stage that comes after it."""
    ledger.write(f"{key} attempt {_attempt()}")
    return key


@dramatiq.actor(max_retries=0, store_results=True)
def exhausted(key: str) -> None:
    """Fails, and may not be tried again."""
    ledger.write(f"{key} attempt {_attempt()}")
    raise Refused(key)


@dramatiq.actor
def told(kind: str, key: str, *_: Any) -> None:
    """The next stage of a pipeline, the callback of a group."""
    ledger.write(f"{key} {kind}")


@dramatiq.actor
def on_success(message: dict[str, Any], result: Any) -> None:
    ledger.write(f"{message['args'][0]} on_success")


@dramatiq.actor
def on_failure(message: dict[str, Any], error: Any) -> None:
    ledger.write(f"{message['args'][0]} on_failure")


@dramatiq.actor
def on_retry_exhausted(message: dict[str, Any], report: Any) -> None:
    ledger.write(f"{message['args'][0]} on_retry_exhausted")


@dramatiq.actor
def on_dead_letter(message: dict[str, Any], report: Any) -> None:
    ledger.write(f"{message['args'][0]} on_dead_letter")


def send(point: str) -> dramatiq.Message[Any]:
    """Send the job that passes a kill point, to that point's queue."""
    name = POINTS[point]
    message = broker.get_actor(name).message(point)
    options: dict[str, Any] = {}
    if name == "succeeds":
        uuid = f"group-of-{point}"
        # Where the group's member has been counted when its worker is killed, the group waits for another member: if
        # the first were counted twice, the group would be complete without it.
        limits.add(uuid, 2 if point == "after-group" else 1, 600_000)
        options = {
            "on_success": "on_success",
            "pipe_target": told.message("pipeline", point).copy(options={"pipe_ignore": True}).asdict(),
            "group_completion_uuid": uuid,
            "group_completion_callbacks": [told.message("group", point).asdict()],
        }
    elif name == "exhausted":
        options = {"on_failure": "on_failure", "on_retry_exhausted": "on_retry_exhausted"}
    sent: dramatiq.Message[Any] = broker.enqueue(message.copy(queue_name=point, options=options))
    return sent

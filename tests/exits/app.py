"""What a `dramatiq` process of these tests imports: jobs that end soon, late, or never, and delayed ones.

All is set by the environment, so that one module serves every test:

==================  ==================================================================================================
`EXITS_BROKER`      ``redis`` or ``rabbitmq``
`EXITS_URL`         where it is
`EXITS_NAME`        the queue, and on Redis the namespace, so that many can run beside each other
`EXITS_LETTERS`     the URL of a Redis for the letters
`EXITS_LEDGER`      the file that jobs write to; where `{file}.fast` exists as well, every job ends as soon as it begins
`EXITS_STACK`       ``guard``, or ``stock`` for Dramatiq by itself
`EXITS_ASYNC`       ``no`` for no event loop
`EXITS_SOFT`        the soft deadline in milliseconds
`EXITS_HARD`        the hard deadline in milliseconds
`EXITS_HEARTBEAT`   the heartbeat timeout on Redis in milliseconds
==================  ==================================================================================================
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, Shutdown, default_middleware

from dramatiq_guard import (
    Classify,
    CrashOnFatal,
    DeadLetter,
    GracefulShutdown,
    JitterBackoff,
    connect,
    current_delivery,
    install,
)

NAME = os.environ["EXITS_NAME"]
LEDGER = Path(os.environ["EXITS_LEDGER"])
FAST = LEDGER.with_name(f"{LEDGER.name}.fast")
LONG = 60.0

_middleware: list[Any] = [kind() for kind in default_middleware if kind.__name__ != "Prometheus"]
if os.environ.get("EXITS_ASYNC", "yes") == "yes":
    _middleware.append(AsyncIO())

broker: Any
if os.environ["EXITS_BROKER"] == "redis":
    broker = RedisBroker(
        url=os.environ["EXITS_URL"],
        namespace=NAME,
        heartbeat_timeout=int(os.environ.get("EXITS_HEARTBEAT", "60000")),
        middleware=_middleware,
    )
else:
    broker = RabbitmqBroker(url=os.environ["EXITS_URL"], confirm_delivery=True, middleware=_middleware)

soft, hard = int(os.environ.get("EXITS_SOFT", "1500")), int(os.environ.get("EXITS_HARD", "4000"))
if os.environ.get("EXITS_STACK", "guard") == "guard":
    stores = connect(os.environ["EXITS_LETTERS"], prefix=NAME)
    install(
        broker,
        Classify(),
        JitterBackoff(min_backoff=100, max_backoff=1_000),
        DeadLetter(stores.dead_letters),
        CrashOnFatal(stores.deliveries, heartbeat=1_000, held_after=hard),
        GracefulShutdown(soft_deadline=soft, hard_deadline=hard),
    )
dramatiq.set_broker(broker)


def note(what: str, key: str) -> None:
    """Add a line to the ledger in one write, which survives whatever ends the process."""
    file = os.open(LEDGER, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{what} {key} {os.getpid()}\n".encode())
    finally:
        os.close(file)


def in_steps(seconds: float) -> None:
    """Sleep so that an interrupt arrives soon."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)


def hold_the_interpreter() -> None:
    """Sleep in C without letting go of the interpreter's lock: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(int(LONG))


@dramatiq.actor(queue_name=NAME, min_backoff=100, max_backoff=1_000)
def job(key: str, kind: str) -> None:
    """Whatever a sync job can be at when the process is told to stop."""
    note("began", key)
    if not FAST.exists():
        if kind == "in C":
            time.sleep(LONG)
        elif kind == "GIL held":
            hold_the_interpreter()
        else:
            in_steps({"short": 0.3, "long": LONG}.get(kind) or float(kind.removesuffix(" s")))
    note("finished", key)


@dramatiq.actor(queue_name=NAME)
async def ajob(key: str, kind: str) -> None:
    """Whatever an async job can be at."""
    note("began", key)
    if not FAST.exists():
        if kind == "async blocking":
            time.sleep(LONG)
        await asyncio.sleep(0.3 if kind == "async short" else LONG)
    note("finished", key)


@dramatiq.actor(queue_name=NAME, notify_shutdown=True, max_retries=0)
def notified(key: str) -> None:
    """Asks to be told of a shutdown, and does not finish."""
    note("began", key)
    try:
        in_steps(0 if FAST.exists() else LONG)
    except Shutdown:
        note("notified", key)
        raise
    note("finished", key)


@dramatiq.actor(queue_name=NAME, max_retries=0, time_limit=120_000)
def leaves_early(key: str) -> None:
    """Asks by itself whether it is to stop, puts its half-done work aside, and is done."""
    note("began", key)
    delivery = current_delivery()
    left = delivery.time_left()
    note("in time" if left is not None and 0 < left <= 120_000 else "without a limit", key)
    while not delivery.shutting_down:
        time.sleep(0.02)
    left = delivery.time_left()
    note("in a hurry" if left is not None and left <= soft else "at leisure", key)
    note("finished", key)

"""What real worker processes run on RabbitMQ in the tests of this folder: jobs that write each run to a ledger.

RABBITMQ_URL names the server and STORE the Redis of letters and deliveries; JOBS is the ledger.  STOCK leaves the stack
out.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import AsyncIO, CurrentMessage

from dramatiq_guard import Classify, DeadLetter, GracefulShutdown, JitterBackoff, connect, install

BACKOFF: dict[str, Any] = {"min_backoff": 200, "max_backoff": 600}

broker = RabbitmqBroker(url=os.environ["RABBITMQ_URL"], confirm_delivery=True)
broker.add_middleware(AsyncIO())
broker.add_middleware(CurrentMessage())
if not os.environ.get("STOCK"):
    stores = connect(os.environ["STORE"])
    install(
        broker,
        Classify(builtin=False),
        JitterBackoff(log="summary", deliveries=stores.deliveries),
        DeadLetter(stores.dead_letters),
        GracefulShutdown(soft_deadline=4_000, hard_deadline=6_000),
    )
dramatiq.set_broker(broker)


class Refused(Exception):
    """What a job dies of that must not be tried again."""


def write(line: str) -> None:
    """Add a line to the ledger, in one write."""
    file = os.open(Path(os.environ["JOBS"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def run(key: str, fails: int, refused: bool) -> None:
    message = CurrentMessage.get_current_message()
    assert message is not None
    write(f"run {key}")
    if refused:
        raise Refused(key)
    if message.options.get("retries", 0) < fails:
        raise RuntimeError(key)
    write(f"done {key}")


@dramatiq.actor(max_retries=10, throws=Refused, **BACKOFF)
def job(key: str, fails: int = 0, refused: bool = False, ms: int = 0) -> None:
    """A job that waits, fails so many times, and is done; or is refused."""
    write(f"began {key}")
    if ms:
        threading.Event().wait(ms / 1000)
    run(key, fails, refused)


@dramatiq.actor(max_retries=10, throws=Refused, **BACKOFF)
async def ajob(key: str, fails: int = 0, refused: bool = False) -> None:
    """The same, without the wait, as a coroutine."""
    run(key, fails, refused)

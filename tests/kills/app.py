"""What a `dramatiq` process of these tests imports: one job for each way of guarding an effect.

All is set by the environment:

====================  ================================================================================================
`KILLS_BROKER`        ``redis`` or ``rabbitmq``
`KILLS_URL`           where it is
`KILLS_NAMESPACE`     the namespace on Redis, and the mark of its rows in the database
`KILLS_QUEUES`        the queues, separated by commas
`KILLS_STORE`         the URL of the store of keys
`KILLS_RECORDS`       the URL of a Redis for letters, deliveries and results
`KILLS_GATEWAY`       the port of the gateway
`KILLS_DIRECTORY`     where the ledger is; jobs that wait do so until there is a file ``open`` in it
`KILLS_STACK`         ``guard``, ``abrupt`` for the same without GracefulShutdown, or ``stock`` for Dramatiq by itself
`KILLS_LEASE`         the lease in milliseconds
`KILLS_HEARTBEAT`     the heartbeat timeout on Redis in milliseconds
`KILLS_MAX_CRASHES`   how many crashes a message may have been in
`KILLS_HURRY`         ``yes`` for jobs that never wait in this process
`KILLS_IDLE`          ``yes`` for jobs that do nothing but wait in a process of Dramatiq by itself
====================  ================================================================================================
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware, default_middleware
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from dramatiq_guard import (
    Classify,
    CrashOnFatal,
    DeadLetter,
    GracefulShutdown,
    IdempotencyGuard,
    JitterBackoff,
    Retryable,
    connect,
    current_delivery,
    install,
)
from dramatiq_guard.settle.killpoints import reach
from dramatiq_guard.stores.idempotency import TransactionalStore

from .gateway import charge

STACK = os.environ.get("KILLS_STACK", "guard")
DIRECTORY = Path(os.environ["KILLS_DIRECTORY"])
GATEWAY = int(os.environ["KILLS_GATEWAY"])
HURRY = os.environ.get("KILLS_HURRY") == "yes"
LONG = 90.0


class Points(Middleware):
    """The kill points around Dramatiq's own ack, and between the two halves of its promotion."""

    def before_ack(self, broker: Any, message: Any) -> None:
        reach("after-promote" if message.queue_name.endswith(".DQ") else "before-ack")

    def after_ack(self, broker: Any, message: Any) -> None:
        reach("after-ack")


_middleware: list[Any] = [kind() for kind in default_middleware if kind.__name__ != "Prometheus"]
_middleware.append(Results(backend=RedisBackend(url=os.environ["KILLS_RECORDS"])))
if STACK == "stock":
    _middleware.append(Points())
broker: Any
if os.environ["KILLS_BROKER"] == "redis":
    broker = RedisBroker(
        url=os.environ["KILLS_URL"],
        namespace=os.environ["KILLS_NAMESPACE"],
        heartbeat_timeout=int(os.environ["KILLS_HEARTBEAT"]),
        middleware=_middleware,
    )
else:
    broker = RabbitmqBroker(url=os.environ["KILLS_URL"], confirm_delivery=True, middleware=_middleware)

records, stores = connect(os.environ["KILLS_RECORDS"]), connect(os.environ["KILLS_STORE"])
if STACK == "stock":
    broker.actor_options |= {"idempotent", "on_crash"}
else:
    install(
        broker,
        Classify(),
        JitterBackoff(min_backoff=100, max_backoff=500, deliveries=records.deliveries),
        DeadLetter(records.dead_letters),
        CrashOnFatal(records.deliveries, heartbeat=1_000, max_crashes=int(os.environ.get("KILLS_MAX_CRASHES", "3"))),
        IdempotencyGuard(stores.idempotency, lease=int(os.environ["KILLS_LEASE"])),
        *([GracefulShutdown(soft_deadline=1_500, hard_deadline=4_000)] if STACK == "guard" else []),
    )
dramatiq.set_broker(broker)
for name in os.environ["KILLS_QUEUES"].split(","):
    broker.declare_queue(name)

_OPTIONS: dict[str, Any] = {"max_retries": 1, "min_backoff": 100, "max_backoff": 500, "store_results": True}


def note(what: str, job: str) -> None:
    """Add a line to the ledger in one write, which survives whatever ends the process."""
    file = os.open(DIRECTORY / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{what} {job} {os.getpid()}\n".encode())
    finally:
        os.close(file)


def begin(job: str) -> Any:
    """Note a run, and give its delivery; ``None`` where it is not guarded."""
    note("began", job)
    if STACK == "stock" or current_delivery().claim is None:
        return None
    delivery = current_delivery()
    note(f"{'taken-over' if delivery.is_takeover else 'claimed'}:{delivery.fence}", job)
    return delivery


def wait(job: str, how: str) -> None:
    """Wait until the test opens the way, interruptibly or in C, where nothing can interrupt; or a moment; or not."""
    if not how or HURRY or (DIRECTORY / "open").exists():
        return
    if how == "a moment":
        time.sleep(0.05)
        return
    note("waits", job)
    if how == "in C":
        time.sleep(LONG)
    try:
        until = time.monotonic() + LONG
        while not (DIRECTORY / "open").exists():
            assert time.monotonic() < until, "nobody opened the way"
            time.sleep(0.02)
    except BaseException as error:
        note(type(error).__name__, job)
        raise


def alone(job: str, fails: bool) -> None:
    """Fail, or never come to anything, before any effect, in a process of Dramatiq by itself that is told to."""
    if STACK == "stock" and fails:
        raise RuntimeError(job)
    if STACK == "stock" and os.environ.get("KILLS_IDLE"):
        wait(job, "in C")


@dramatiq.actor(**_OPTIONS)
def none(job: str, waits: str = "", fails: bool = False) -> str:
    """No guard: the control."""
    begin(job)
    alone(job, fails)
    made = charge(GATEWAY, job, None)
    reach("after-effect")
    return made


@dramatiq.actor(idempotent=True, **_OPTIONS)
def lease(job: str, waits: str = "") -> str:
    """Guarded, and the gateway is given no key."""
    begin(job)
    made = charge(GATEWAY, job, None)
    reach("after-effect")
    wait(job, waits)
    return made


@dramatiq.actor(idempotent=True, **_OPTIONS)
def key(job: str, waits: str = "", fails: bool = False) -> str:
    """Guarded, and the gateway is given the key."""
    delivery = begin(job)
    alone(job, fails)
    made = charge(GATEWAY, job, delivery.key_for("charge"))
    reach("after-effect")
    wait(job, waits)
    return made


@dramatiq.actor(idempotent=True, **_OPTIONS)
def step(job: str, waits: str = "") -> str:
    """Guarded, with a step that gives the gateway its key."""
    delivery = begin(job)
    made = delivery.step("charge", lambda key: charged(job, key))
    wait(job, waits)
    return str(made)


@dramatiq.actor(idempotent=True, **_OPTIONS)
def retried(job: str, waits: str = "") -> str:
    """The same as `key`, and fails once after its effect."""
    delivery = begin(job)
    made = charge(GATEWAY, job, delivery.key_for("charge"))
    if delivery.attempt == 1:
        raise Retryable("once more")
    return made


@dramatiq.actor(idempotent=True, on_crash="park", **_OPTIONS)
def park(job: str, waits: str = "") -> str:
    """The gateway takes no key, and twice is worse than perhaps not at all."""
    begin(job)
    made = charge(GATEWAY, job, None)
    reach("after-effect")
    return made


def effect(job: str) -> tuple[str, tuple[str, str]]:
    """The statement that has a job's effect in the database."""
    return "INSERT INTO effects (world, job) VALUES (%s, %s)", (os.environ["KILLS_NAMESPACE"], job)


def charged(job: str, key: str) -> str:
    """Charge, and come to the point between the effect and the record of it."""
    made = charge(GATEWAY, job, key)
    reach("after-effect")
    return made


if STACK == "stock" or isinstance(stores.idempotency, TransactionalStore):

    @dramatiq.actor(idempotent="atomic", **_OPTIONS)
    def atomic(job: str, waits: str = "") -> str:
        """A step at the gateway, and a row that is committed with the key."""
        delivery = begin(job)
        made = delivery.step("charge", lambda key: charged(job, key))
        with delivery.atomic(result=made) as connection:
            connection.execute(*effect(job))
            wait(job, waits)
        return str(made)

    @dramatiq.actor(idempotent="inbox", **_OPTIONS)
    def inbox(job: str, waits: str = "") -> str:
        """A row in the transaction of the whole run, and the gateway is given the key."""
        delivery = begin(job)
        delivery.connection.execute(*effect(job))
        made = charge(GATEWAY, job, delivery.key_for("charge"))
        reach("after-effect")
        wait(job, waits)
        return made

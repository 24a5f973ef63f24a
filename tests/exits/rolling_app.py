"""What the workers of a rolling deploy import: a job with an effect, which may fail once before it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker

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

LEDGER = Path(os.environ["ROLLING_LEDGER"])
broker = RedisBroker(url=os.environ["ROLLING_URL"])  # type: ignore[no-untyped-call]
stores = connect(os.environ["ROLLING_URL"])
install(
    broker,
    Classify(),
    JitterBackoff(min_backoff=200, max_backoff=500),
    DeadLetter(stores.dead_letters),
    CrashOnFatal(stores.deliveries),
    GracefulShutdown(soft_deadline=5_000, hard_deadline=8_000),
    IdempotencyGuard(stores.idempotency),
)
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=1, idempotent=bool(os.environ.get("ROLLING_GUARDED")))
def effect(number: int, takes: int) -> None:
    """Have one effect, which the ledger counts; every tenth fails before it, once."""
    delivery = current_delivery()
    if number % 10 == 0 and delivery.attempt == 1:
        raise Retryable("once more")
    time.sleep(takes / 1000)
    with LEDGER.open("a") as ledger:
        ledger.write(f"{number} {delivery.attempt}\n")

"""An app that workers with and without the stack run; which, the environment says.

Each run is a line in a file: name of the message, id of the worker's kind.
"""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, connect, install

broker = RedisBroker(url=os.environ["FLEET_REDIS"])  # type: ignore[no-untyped-call]
KIND = os.environ.get("FLEET_KIND", "producer")
if KIND == "stack":
    stores = connect(os.environ["FLEET_REDIS"])
    install(broker, Classify(builtin=False), JitterBackoff(), DeadLetter(stores.dead_letters))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=2, min_backoff=200, max_backoff=400)
def work(name: str, failures: int) -> None:
    """Fail so many times, then succeed."""
    with open(os.environ["FLEET_LEDGER"], "a") as ledger:
        ledger.write(f"{name} {KIND}\n")
    with open(os.environ["FLEET_LEDGER"]) as ledger:
        runs = sum(line.split()[0] == name for line in ledger)
    if runs <= failures:
        raise ConnectionError(f"{name}, run {runs}")

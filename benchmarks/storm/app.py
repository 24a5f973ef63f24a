"""The application that is caught in the storm: one actor that calls the downstream, under a chosen policy.

Run by the `dramatiq` command line.  ``STORM_POLICY`` says what is on the broker, and ``STORM_URL`` where its server
is.  It must not know what happens, nor what is measured.
"""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

from .client import call

URL = os.environ["STORM_URL"]
QUEUE = "storm"
#: Of their own, so that the other one is all for the downstream.
WARM_UP_QUEUE = "storm-warm-up"


def stock(broker: dramatiq.Broker) -> None:
    """Dramatiq, as it comes."""


def tuned(broker: dramatiq.Broker) -> None:
    """Dramatiq with the delays of one who wants it fast."""
    retries = next(each for each in broker.middleware if isinstance(each, Retries))
    retries.min_backoff, retries.max_backoff = 1_000, 10_000


def guard(broker: dramatiq.Broker, jitter: object = (0.10, 0.20), breaker: bool = False) -> None:
    """Classify, JitterBackoff and DeadLetter, with the same delays; and CircuitBreaker, or not."""
    from dramatiq_guard import CircuitBreaker, Classify, DeadLetter, JitterBackoff, connect, install

    stores = connect(URL)
    backoff = JitterBackoff(min_backoff=1_000, max_backoff=10_000, jitter=jitter, log="summary")  # type: ignore[arg-type]
    middlewares = [Classify(), backoff, DeadLetter(stores.dead_letters)]
    install(broker, *middlewares, *([CircuitBreaker(stores.breakers)] if breaker else []))


POLICIES = {
    "guard": lambda broker: guard(broker, breaker=True),
    "added": guard,
    "none": lambda broker: guard(broker, "none"),
    "equal": lambda broker: guard(broker, "equal"),
    "full": lambda broker: guard(broker, "full"),
    "stock": stock,
    "tuned": tuned,
}

broker = RedisBroker(url=URL)
POLICIES[os.environ["STORM_POLICY"]](broker)
dramatiq.set_broker(broker)

OPTIONS: dict[str, Any] = {"downstream": "payments"} if os.environ["STORM_POLICY"] == "guard" else {}


@dramatiq.actor(queue_name=QUEUE, **OPTIONS)
def work(job: int, shard: int, bad: int) -> None:
    """One job."""
    call(job, shard, bad)


@dramatiq.actor(queue_name=WARM_UP_QUEUE)
def warm(job: int) -> None:
    """A request before the storm."""
    call(job, 0, 0)

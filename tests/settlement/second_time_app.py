"""An app for the command line: a job that does each time what it was told to do that time, and counts its runs.

`BROKER_URL` says where the messages are, `LETTERS_URL`, a Redis, where the letters and the counts are.
"""

from __future__ import annotations

import os

import dramatiq
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, Permanent, connect, install

broker_url, letters_url = os.environ["BROKER_URL"], os.environ["LETTERS_URL"]
broker: dramatiq.Broker
if broker_url.startswith("redis"):
    broker = RedisBroker(url=broker_url, heartbeat_timeout=3_000)
else:
    broker = RabbitmqBroker(url=broker_url, confirm_delivery=True)
install(
    broker,
    Classify(),
    JitterBackoff(max_retries=0),
    DeadLetter(connect(letters_url).dead_letters),
)
dramatiq.set_broker(broker)
counts: redis.Redis = redis.Redis.from_url(letters_url)


@dramatiq.actor
def job(key: str, plan: list[str]) -> None:
    """Do what the plan says for this run: ``fail``, ``never`` (permanent), or ``succeed``."""
    run = counts.incr(f"runs:{key}")
    if plan[run - 1] == "fail":
        raise RuntimeError(key)
    if plan[run - 1] == "never":
        raise Permanent(key)

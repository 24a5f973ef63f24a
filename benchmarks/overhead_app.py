"""The application that `overhead` measures: one actor that succeeds, one that fails first, in a chosen set-up.

Run by the `dramatiq` command line.  ``OVERHEAD_SETUP`` says what is on the broker, ``OVERHEAD_URL`` where its server
is.  It must not know how anything is measured, but for the report it gives when it is asked.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

URL = os.environ["OVERHEAD_URL"]
QUEUE = os.environ["OVERHEAD_QUEUE"]


def plain(broker: dramatiq.Broker) -> None:
    """Stock Dramatiq, as it comes."""


def six_no_ops(broker: dramatiq.Broker) -> None:
    """Stock Dramatiq and six middlewares that override nothing: what merely being there costs."""
    for number in range(6):
        broker.add_middleware(type(f"NoOp{number}", (Middleware,), {})())


def stack(broker: dramatiq.Broker, log: str = "throttled") -> None:
    """Classify, JitterBackoff, DeadLetter and Tracing; no OpenTelemetry SDK."""
    from dramatiq_guard import Classify, DeadLetter, JitterBackoff, connect, install

    install(broker, Classify(), JitterBackoff(log=log), DeadLetter(connect(URL).dead_letters))  # type: ignore[arg-type]


def crash_on_fatal(broker: dramatiq.Broker) -> None:
    """The stack and CrashOnFatal, which keeps no crashes: its watchdog alone."""
    _crash_on_fatal(broker, counting=False)


def counting_crashes(broker: dramatiq.Broker) -> None:
    """The same with a mark written for each message."""
    _crash_on_fatal(broker, counting=True)


def _crash_on_fatal(broker: dramatiq.Broker, counting: bool) -> None:
    from dramatiq_guard import Classify, CrashOnFatal, DeadLetter, JitterBackoff, connect, install

    stores = connect(URL)
    guard = CrashOnFatal(stores.deliveries if counting else None)
    install(broker, Classify(), JitterBackoff(), DeadLetter(stores.dead_letters), guard)


def closed_breaker(broker: dramatiq.Broker) -> None:
    """The stack and CircuitBreaker, before a downstream that is well."""
    from dramatiq_guard import CircuitBreaker, Classify, DeadLetter, JitterBackoff, connect, install

    stores = connect(URL)
    breaker = CircuitBreaker(stores.breakers)
    install(broker, Classify(), JitterBackoff(), DeadLetter(stores.dead_letters), breaker)


def _guarded(broker: dramatiq.Broker, keys: str) -> None:
    from dramatiq_guard import Classify, DeadLetter, IdempotencyGuard, JitterBackoff, connect, install

    guard = IdempotencyGuard(connect(keys).idempotency)
    install(broker, Classify(), JitterBackoff(), DeadLetter(connect(URL).dead_letters), guard)


def keyed(broker: dramatiq.Broker) -> None:
    """The stack and IdempotencyGuard, whose keys are beside the queue."""
    _guarded(broker, URL)


def keyed_on_postgres(broker: dramatiq.Broker) -> None:
    """The same with keys on PostgreSQL, whose server the parent has set up."""
    _guarded(broker, os.environ["OVERHEAD_POSTGRES"])


def sampled_out(broker: dramatiq.Broker) -> None:
    """The stack with an SDK that samples what the sender sampled, which is nothing."""
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    _trace(ParentBased(TraceIdRatioBased(0.0)))
    stack(broker)


def recorded(broker: dramatiq.Broker) -> None:
    """The stack with an SDK that records every span, in batches that go nowhere."""
    _trace(None)
    stack(broker)


def recorded_and_counted(broker: dramatiq.Broker) -> None:
    """As `recorded`, and with metrics too."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
    recorded(broker)


def _trace(sampler: object) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=sampler)  # type: ignore[arg-type]
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


SETUPS = {
    "stock": plain,
    "no-ops": six_no_ops,
    "stack": stack,
    "crash-on-fatal": crash_on_fatal,
    "counting-crashes": counting_crashes,
    "closed-breaker": closed_breaker,
    "key": keyed,
    "message-id": keyed,
    "postgres-key": keyed_on_postgres,
    "sampled-out": sampled_out,
    "recorded": recorded,
    "recorded-and-counted": recorded_and_counted,
    "summary": lambda broker: stack(broker, "summary"),
    "throttled": lambda broker: stack(broker, "throttled"),
    "traceback": lambda broker: stack(broker, "traceback"),
}

#: What the actor that succeeds is declared with.
OPTIONS: dict[str, dict[str, Any]] = {
    "closed-breaker": {"downstream": "payments"},
    "key": {"idempotency_key": "order:{number}"},
    "message-id": {"idempotent": True},
    "postgres-key": {"idempotency_key": "order:{number}"},
}

SETUP = os.environ["OVERHEAD_SETUP"]
broker = RedisBroker(url=URL)
SETUPS[SETUP](broker)
dramatiq.set_broker(broker)

_runs = itertools.count()
_failed: set[int] = set()


@dramatiq.actor(queue_name=QUEUE, **OPTIONS.get(SETUP, {}))
def work(number: int) -> None:
    """Succeed, and do nothing else."""
    next(_runs)


@dramatiq.actor(queue_name=QUEUE, min_backoff=20, max_backoff=20, max_retries=3)
def flaky(number: int) -> None:
    """Fail at the first attempt, ten frames deep; succeed at the next."""
    next(_runs)
    if number not in _failed:
        _failed.add(number)
        place_order(number)


@dramatiq.actor(queue_name=QUEUE, priority=-1)
def report(path: str) -> None:
    """Say how much CPU time this process has used, and how often the actors ran."""
    said = {"cpu": time.process_time(), "runs": next(_runs)}
    Path(f"{path}.part").write_text(json.dumps(said))
    Path(f"{path}.part").rename(path)


# Functions of different names: Python shortens the traceback of a recursion.


def place_order(number: int) -> None:
    check_stock(number)


def check_stock(number: int) -> None:
    reserve(number)


def reserve(number: int) -> None:
    charge(number)


def charge(number: int) -> None:
    authorize(number)


def authorize(number: int) -> None:
    call_gateway(number)


def call_gateway(number: int) -> None:
    send_request(number)


def send_request(number: int) -> None:
    read_response(number)


def read_response(number: int) -> None:
    raise_for_status(number)


def raise_for_status(number: int) -> None:
    raise RuntimeError(f"order {number}: the gateway said 503")

"""The types of every public call, as mypy and editors see them; nothing here is run.

A line that ends in ``# type: ignore[…]`` must be an error: mypy complains of an ignore that nothing needs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

import dramatiq
from dramatiq.brokers.stub import StubBroker

import dramatiq_guard
from dramatiq_guard import (
    CircuitBreaker,
    Classify,
    CrashOnFatal,
    DeadLetter,
    Defer,
    Fatal,
    GracefulShutdown,
    GuardError,
    IdempotencyGuard,
    JitterBackoff,
    Permanent,
    Retryable,
    Tracing,
    classified,
    configure_telemetry,
    connect,
    current_delivery,
    enqueue_unique,
    explain,
    install,
)
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.delivery import Delivery
from dramatiq_guard.policy.explain import Explanation
from dramatiq_guard.reconcile import Done, NotDone, Unknown
from dramatiq_guard.stores.breakers import BreakerStore
from dramatiq_guard.stores.idempotency import IdempotencyStore
from dramatiq_guard.stores.protocols import DeadLetterStore, DeliveryStore, Stores

broker = StubBroker()

assert_type(dramatiq_guard.__version__, str)

# -- stores ----------------------------------------------------------------------------------------------------------

stores = connect("redis://localhost", prefix="app", schema="app")
assert_type(stores, Stores)
assert_type(stores.dead_letters, DeadLetterStore)
assert_type(stores.deliveries, DeliveryStore)
assert_type(stores.idempotency, IdempotencyStore)
assert_type(stores.breakers, BreakerStore)
connect("redis://localhost", namespace="app")  # type: ignore[call-arg]

# -- the stack -------------------------------------------------------------------------------------------------------


def on_dead_letter(letter: Letter) -> None:
    """What DeadLetter calls."""
    assert_type(letter.reason, str)
    assert_type(letter.message_id, str)


def redact(path: str, value: Any) -> Any:
    """What DeadLetter asks of each value."""
    return value


def retry_when(retries: int, error: BaseException) -> bool:
    """What JitterBackoff asks of each error."""
    return retries < 3


def schedule(retries: int, error: BaseException, message: Any) -> int:
    """A backoff of the user's own."""
    return 1_000 * retries


Classify()
Classify(
    permanent=[KeyError, "stripe.CardError", lambda error: "declined" in str(error)],
    retryable=[(OSError, {"max_retries": 3})],
    fatal=[MemoryError],
    defer_on=(dramatiq.RateLimitExceeded,),
    builtin=False,
)
Classify([KeyError])  # type: ignore[call-arg]
Classify(permanent=3)  # type: ignore[arg-type]

JitterBackoff()
JitterBackoff(
    max_retries=None,
    min_backoff=timedelta(seconds=1),
    max_backoff=300_000,
    retry_when=retry_when,
    jitter="full",
    backoff=[60_000, timedelta(minutes=5)],
    retry_for=timedelta(hours=1),
    max_deferrals=None,
    max_interruptions=3,
    log="summary",
)
JitterBackoff(jitter=(0.1, 0.2), backoff=schedule)
JitterBackoff(8)  # type: ignore[call-arg]
JitterBackoff(max_retries="8")  # type: ignore[arg-type]
JitterBackoff(min_backoff=1.5)  # type: ignore[arg-type]
JitterBackoff(jitter="wobbly")  # type: ignore[arg-type]
JitterBackoff(log="loud")  # type: ignore[arg-type]
JitterBackoff(retry_when=lambda retries: True)  # type: ignore[arg-type, misc]

DeadLetter(stores.dead_letters)
DeadLetter(
    stores.dead_letters,
    on_dead_letter=on_dead_letter,
    redact=redact,
    redact_keys=("password",),
    version="1.2.3",
    retention=timedelta(days=30),
    max_letters=1_000,
)
DeadLetter(stores.dead_letters, on_dead_letter="page_somebody")
DeadLetter()  # type: ignore[call-arg]
DeadLetter("redis://localhost")  # type: ignore[arg-type]
DeadLetter(stores.deliveries)  # type: ignore[arg-type]


def find_out(delivery: Delivery) -> Done | NotDone | Unknown:
    """What IdempotencyGuard asks of a run that died."""
    return Done(delivery.key) if delivery.is_takeover else NotDone()


IdempotencyGuard(stores.idempotency)
IdempotencyGuard(
    stores.idempotency,
    mode="lease",
    namespace="shop",
    lease=timedelta(seconds=15),
    retention=timedelta(days=8),
    store_wait=2_000,
    max_result=1_000,
    on_missing_key="message",
    on_busy="wait",
    on_crash=find_out,
    on_store_error="run",
    allow_eviction=True,
)
IdempotencyGuard()  # type: ignore[call-arg]
IdempotencyGuard(stores.deliveries)  # type: ignore[arg-type]
IdempotencyGuard(stores.idempotency, on_crash=3)  # type: ignore[arg-type]

CircuitBreaker(stores.breakers)
CircuitBreaker(stores.breakers, failure_ratio=0.3, min_failures=10, first_rate=5, waiting_threads=2)
CircuitBreaker(stores.deliveries)  # type: ignore[arg-type]
CircuitBreaker(stores.breakers, failure_ratio="half")  # type: ignore[arg-type]

Tracing(link_only=True, settle_spans=True, flush_timeout=2_000)
Tracing(True)  # type: ignore[call-arg]

assert_type(install(broker, Classify(), JitterBackoff(), DeadLetter(stores.dead_letters)), None)
install(broker, JitterBackoff(), allow_unconfirmed=True)
install(broker, JitterBackoff(), allow=True)  # type: ignore[call-arg]
install(JitterBackoff())  # type: ignore[arg-type]
broker.add_middleware(Classify())
broker.add_middleware(JitterBackoff(), before=dramatiq.middleware.Callbacks)
StubBroker(middleware=[Tracing(), JitterBackoff(), Classify()])


CrashOnFatal()
CrashOnFatal(stores.deliveries, max_crashes=2, window=timedelta(hours=72), max_memory=None)
CrashOnFatal(max_crashes="2")  # type: ignore[arg-type]
GracefulShutdown(soft_deadline=25_000, hard_deadline=timedelta(seconds=28))
GracefulShutdown(25_000)  # type: ignore[call-arg]
install(broker, JitterBackoff(), CrashOnFatal(stores.deliveries), GracefulShutdown())


# -- in an actor -----------------------------------------------------------------------------------------------------


@dramatiq.actor(broker=broker, max_retries=3, on_dead_letter="page_somebody", classify={"permanent": [KeyError]})
def charge(order_id: str, cents: int) -> str:
    """What a user writes."""
    delivery = current_delivery()
    assert_type(delivery, Delivery)
    assert_type(delivery.message_id, str)
    assert_type(delivery.attempt, int)
    assert_type(delivery.shutting_down, bool)
    assert_type(delivery.time_left(), int | None)
    if cents < 0:
        raise Permanent("nothing to charge")
    if cents == 0:
        raise Defer("not yet", delay=timedelta(minutes=1))
    if cents > 1_000_000:
        raise Retryable("ask again", delay=1_000)
    if not order_id:
        raise Fatal("the process lost its mind")
    return order_id


charge.send("a", 1)
charge.send("a", "1")  # type: ignore[arg-type]

Permanent("no", delay=1)  # type: ignore[call-arg]
Retryable("no", delay="soon")  # type: ignore[arg-type]
Retryable("no", 3)  # type: ignore[call-arg]

assert_type(charge.message("a", 1), dramatiq.Message[str])
assert_type(enqueue_unique(broker, charge.message("a", 1), key="a", ttl=60_000)[1], bool)
enqueue_unique(broker, charge.message("a", 1), "a", 60_000)  # type: ignore[call-arg]


@dramatiq.actor(broker=broker, idempotency_key="order:{order_id}", idempotent="atomic", fingerprint=["cents"])
def book(order_id: str, cents: int) -> None:
    """A guarded actor."""
    delivery = current_delivery()
    assert_type(delivery.key, str)
    assert_type(delivery.fence, int)
    assert_type(delivery.is_takeover, bool)
    assert_type(delivery.key_for("charge", generation=2), str)
    delivery.step("charge", lambda key: key, key_ttl=1_000, at_most_once=True, reconcile=lambda key: Unknown())
    with delivery.atomic(result={"order": order_id}) as connection:
        connection.execute("insert", (order_id, cents))
    with delivery.atomic("booked", step="book"):
        pass


# -- classified ------------------------------------------------------------------------------------------------------

with classified(KeyError, ValueError, as_=Permanent) as nothing:
    charge("a", 1)

classified("KeyError")  # type: ignore[arg-type]
classified(KeyError, as_="permanent")  # type: ignore[arg-type]


@classified(KeyError, as_=Defer)
def lookup(name: str) -> int:
    """A decorated function keeps its type."""
    return len(name)


@classified(KeyError)
async def lookup_later(name: str) -> int:
    """So does a coroutine function."""
    return len(name)


assert_type(lookup("a"), int)
lookup(3)  # type: ignore[arg-type]

# -- explain ---------------------------------------------------------------------------------------------------------

explanation = explain("httpx.HTTPStatusError", status=503)
assert_type(explanation, Explanation)
assert_type(explanation.rule, str)
assert_type(explanation.why, str)
explain(KeyError("k"))
explain(KeyError)
explain(OSError, errno="ECONNRESET")
explain("psycopg.Error", sqlstate="40001")
explain(3)  # type: ignore[arg-type]
explain("httpx.HTTPStatusError", 503)  # type: ignore[call-arg]

# -- telemetry -------------------------------------------------------------------------------------------------------

assert_type(configure_telemetry(), None)
configure_telemetry("http://localhost:4318", service_name="shop", headers={"x": "y"})
configure_telemetry(service="shop")  # type: ignore[call-arg]

# -- errors ----------------------------------------------------------------------------------------------------------


def caught(error: Exception) -> None:
    """What an error may be narrowed to."""
    if isinstance(error, GuardError):
        assert_type(str(error), str)
    if isinstance(error, Retryable | Defer):
        assert_type(error.delay, int | None)

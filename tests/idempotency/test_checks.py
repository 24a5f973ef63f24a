"""A guard that could not keep its promise as it is set up says so before the first message."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest

from dramatiq_guard import IdempotencyGuard, JitterBackoff, clock, install
from dramatiq_guard.checks import Problem, Setup, problems
from dramatiq_guard.errors import SetupError
from dramatiq_guard.idempotency.retention import longest_of, retention_of
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import Posture
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.idempotency.bench import FOR_EVER, Bench, Faulty
from tests.idempotency.conftest import MakeBench

HOUR, DAY = 3_600_000, 86_400_000


def found(bench: Bench) -> dict[str, Problem]:
    """The problems of a bench, by the names of their checks."""
    return {problem.check: problem for problem in problems(Setup(bench.broker))}


def charging(bench: Bench, **options: Any) -> Any:
    """A guarded actor."""

    @bench.actor(actor_name="charge", idempotency_key=["order_id"], **options)
    def charge(order_id: int) -> None:
        bench.note("run")

    return charge


def refused(bench: Bench, what: str) -> None:
    """A worker does not boot."""
    with pytest.raises(SetupError, match=what):
        bench.work()
    bench.rig.worker = None


# -- retention -------------------------------------------------------------------------------------------------------


def test_a_sound_guard_has_no_problems(in_memory: MakeBench) -> None:
    """With actors or without."""
    bench = in_memory()
    assert found(bench) == {}
    charging(bench)
    assert found(bench) == {}


def test_t81_a_retention_below_the_longest_sleep_is_refused(in_memory: MakeBench) -> None:
    """A copy that sleeps longer would find no record and run again; the error names the actor and both times."""
    bench = in_memory()
    charging(bench, retention=HOUR)

    problem = found(bench)["retention"]
    assert problem.fatal
    assert f"Actor 'charge' remembers its keys for {HOUR} ms" in problem.what
    refused(bench, "remembers its keys")


def test_t81_a_retention_that_fits_the_retries_is_taken(in_memory: MakeBench) -> None:
    """What counts is the longest single sleep, not the sum of all."""
    bench = in_memory()
    charging(bench, retention=HOUR, max_retries=3, max_backoff=60_000)

    assert found(bench) == {}


def test_t81_the_guards_own_retention_is_checked_for_each_actor(in_memory: MakeBench) -> None:
    """It may do for one and not for another."""
    bench = in_memory(retention=HOUR)
    charging(bench, max_retries=1)
    assert found(bench) == {}

    @bench.actor(idempotent=True, max_retries=20)
    def patient() -> None:
        """Sleeps for days."""

    assert "Actor 'patient'" in found(bench)["retention"].what


def test_t81_a_delay_beyond_the_retention_is_said(in_memory: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """When the message is sent, once for an actor: what is done meanwhile is forgotten when it wakes."""
    bench = in_memory(retention=HOUR)
    charge = charging(bench, max_retries=1)
    unguarded = bench.actor(actor_name="unguarded")(lambda: None)
    by_its_id = bench.actor(actor_name="by_its_id", idempotent=True, max_retries=1)(lambda: None)

    charge.send_with_options(args=(1,), delay=HOUR)
    unguarded.send_with_options(delay=DAY)
    by_its_id.send_with_options(delay=DAY)
    assert caplog.text == ""
    late = charge.send_with_options(args=(2,), delay=HOUR + 1)
    charge.send_with_options(args=(3,), delay=DAY)

    assert caplog.text.count("its key is remembered for 3600000 ms") == 1
    assert f"Message '{late.message_id}' of actor 'charge' is delayed by 3600001 ms" in caplog.text


def test_a_retention_that_nobody_chose_is_long_enough(in_memory: MakeBench) -> None:
    """A day at least, and longer than the longest sleep; Dramatiq's own Retries sleep for a week at most."""
    bench = in_memory()
    charging(bench, max_retries=1)
    patient = bench.actor(actor_name="patient", idempotent=True)(lambda: None)
    decider = bench.guards[1]
    plans = bench.guard.plans

    assert retention_of(plans["charge"], bench.broker.actors["charge"].options, decider) == DAY
    longest = longest_of(patient.options, decider)
    assert retention_of(plans["patient"], patient.options, decider) > longest >= 7 * DAY
    assert longest_of(patient.options, None) >= 7 * DAY


def test_a_retention_too_short_is_refused_where_no_backoff_says_otherwise() -> None:
    """Without JitterBackoff the sleeps are those of Dramatiq's Retries, and duplicates would be counted as failures."""
    from tests.stack.rig import build

    rig, _ = build("stub", "stock")
    install(rig.broker, IdempotencyGuard(MemoryIdempotency(), retention=6 * DAY))
    rig.actor(actor_name="work", idempotent=True)(lambda: None)

    checks = {problem.check for problem in problems(Setup(rig.broker))}
    assert {"retention", "puts_off"} <= checks
    rig.close()


# -- servers ---------------------------------------------------------------------------------------------------------


def test_t35_a_redis_that_evicts_is_refused(in_memory: MakeBench) -> None:
    """Unless it was accepted: an evicted key lets its work run again."""
    with PrivateValkey(extra=("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru")) as server:
        stores = connect(server.url)
        bench = in_memory(store=stores.idempotency)
        charging(bench)
        problem = found(bench)["eviction"]
        assert problem.fatal
        assert "maxmemory-policy volatile-lru" in problem.what
        refused(bench, "maxmemory-policy noeviction")

        accepting = in_memory(store=stores.idempotency, allow_eviction=True)
        charging(accepting)
        assert "eviction" not in found(accepting)
        stores.close()


def test_t35_a_redis_that_writes_nothing_to_disk_is_warned_of(
    in_memory: MakeBench, redis_url: str, own_valkey: PrivateValkey
) -> None:
    """After its restart all keys are unknown; with an append-only file there is nothing to say."""
    forgetful, durable = connect(redis_url), connect(own_valkey.url)
    bench, sound = in_memory(store=forgetful.idempotency), in_memory(store=durable.idempotency)
    charging(bench)
    charging(sound)

    assert not found(bench)["persistence"].fatal
    assert "appendonly yes" in found(bench)["persistence"].what
    assert found(sound) == {}
    forgetful.close()
    durable.close()


def test_t35_one_redis_for_both_is_warned_of(make: MakeBench, own_valkey: PrivateValkey) -> None:
    """A failover that un-acks a message un-marks it, too.  Another server, or another kind of broker, is fine."""
    bench = make()
    charging(bench)
    problem = found(bench).get("shared_server")
    if bench.guard.engine == "memory":
        assert problem is None
        return
    assert problem is not None
    assert not problem.fatal

    elsewhere = connect(own_valkey.url)
    apart = make(store=elsewhere.idempotency)
    charging(apart)
    assert "shared_server" not in found(apart)
    elsewhere.close()


def test_a_store_that_is_out_is_not_looked_at(in_memory: MakeBench) -> None:
    """It says nothing about itself; the worker boots, and messages wait."""
    store = Faulty()
    store.out["posture"] = store.out["ping"] = FOR_EVER
    bench = in_memory(store=store)
    charging(bench)

    assert set(found(bench)) == {"stores_answer"}
    assert not found(bench)["stores_answer"].fatal


def test_a_store_that_nobody_uses_is_not_looked_at(in_memory: MakeBench) -> None:
    """Without guarded actors it matters little what it forgets."""
    store = Faulty()
    bench = in_memory(store=store)

    assert found(bench) == {}
    assert store.asked("posture") == 0


# -- clocks ----------------------------------------------------------------------------------------------------------


class Ahead(clock.SystemClock):
    """A clock that is some milliseconds ahead of the world's."""

    def __init__(self, by: int) -> None:
        self.by = by

    def now(self) -> int:
        return super().now() + self.by


class Elsewhere(MemoryIdempotency):
    """A store with a clock of its own."""

    def posture(self) -> Posture:
        return Posture(engine="memory", server="x", now=clock.SystemClock().now())


@pytest.mark.parametrize(("offset", "wrong"), [(0, False), (25_000, False), (31_000, True), (-600_000, True)])
def test_t23_a_clock_that_is_off_stops_the_boot(in_memory: MakeBench, offset: int, wrong: bool) -> None:
    """By more than half of the broker's heartbeat_timeout: other workers would take this one for dead."""
    bench = in_memory(store=Elsewhere())
    bench.broker.heartbeat_timeout = 60_000
    charging(bench)

    with clock.use(Ahead(offset)):
        problem = found(bench).get("clock_offset")

    assert (problem is not None) == wrong
    assert problem is None or (problem.fatal and "Set the clock (NTP)" in problem.what)


def test_a_broker_without_heartbeats_does_not_mind(in_memory: MakeBench) -> None:
    """No decision of the guard's is made by a worker's clock."""
    bench = in_memory(store=Elsewhere())
    charging(bench)

    with clock.use(Ahead(600_000)):
        assert found(bench) == {}


# -- the stack -------------------------------------------------------------------------------------------------------


def test_two_guards_are_refused(in_memory: MakeBench) -> None:
    """By install, and by the boot where they were added one by one."""
    bench = in_memory()
    with pytest.raises(SetupError, match="IdempotencyGuard twice"):
        install(dramatiq.brokers.stub.StubBroker(), JitterBackoff(), bench.guard, IdempotencyGuard(MemoryIdempotency()))

    bench.broker.add_middleware(IdempotencyGuard(MemoryIdempotency()), after=IdempotencyGuard)
    assert found(bench)["each_once"].fatal
    refused(bench, "IdempotencyGuard is 2 times")

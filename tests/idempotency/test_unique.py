"""enqueue_unique: the same thing is not enqueued twice, as long as nothing is lost by that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dramatiq
import pytest

from dramatiq_guard import enqueue_unique
from dramatiq_guard.errors import SetupError, StoreUnavailable
from tests.idempotency.bench import FAST, FOR_EVER, Bench, Faulty
from tests.idempotency.conftest import MakeBench
from tests.support.waiting import wait_until

TTL = 600_000


def unique(bench: Bench, message: Any, key: Any = 17, **options: Any) -> tuple[Any, bool]:
    """Enqueue a message unless it is there."""
    return enqueue_unique(bench.broker, message, key=key, **{"ttl": TTL, **options})


def refreshing(bench: Bench, **options: Any) -> Any:
    """An actor that is not guarded: the names are kept all the same."""

    @bench.actor(actor_name="refresh", **options)
    def refresh(user_id: int) -> None:
        bench.note("run")

    return refresh


def test_what_is_enqueued_already_is_not_enqueued_again(on_each_store: MakeBench) -> None:
    """The answer has the id of the message that is there; other keys and other actors are other things."""
    bench = on_each_store()
    refresh = refreshing(bench)
    other = bench.actor(actor_name="other")(lambda user_id: None)

    first, created = unique(bench, refresh.message(17))
    again, created_again = unique(bench, refresh.message(17))
    assert (created, created_again) == (True, False)
    assert again.message_id == first.message_id
    assert unique(bench, refresh.message(18), 18)[1]
    assert unique(bench, refresh.message(17), "17")[1]
    assert unique(bench, other.message(17))[1]

    bench.work()
    bench.settle()
    assert bench.count("run") == 3


def test_it_may_be_enqueued_again_once_it_has_begun(make: MakeBench) -> None:
    """By default, so that a change that comes while it reads is not missed."""
    bench = make()

    @bench.actor
    def refresh(user_id: int) -> None:
        if bench.note("run") == 1:
            bench.note("created", unique(bench, refresh.message(17))[1])

    unique(bench, refresh.message(17))
    bench.work()
    bench.settle()

    assert bench.notes("created") == [True]
    assert bench.count("run") == 2


def test_it_may_be_enqueued_again_only_once_it_is_done(make: MakeBench) -> None:
    """until="done": its retries keep the name as well."""
    bench = make()

    @bench.actor(max_retries=2, **FAST)
    def refresh(user_id: int) -> None:
        run = bench.note("run")
        bench.note("created", unique(bench, refresh.message(17), until="done")[1])
        if run < 3:
            raise OSError

    unique(bench, refresh.message(17), until="done")
    bench.work()
    bench.settle()
    assert bench.notes("created") == [False, False, False]
    assert bench.count("run") == 3
    assert unique(bench, refresh.message(17), until="done")[1]
    bench.settle()


def test_a_message_that_died_gives_its_name_back(make: MakeBench) -> None:
    """It has ended."""
    bench = make()

    @bench.actor(max_retries=1, **FAST)
    def refresh(user_id: int) -> None:
        raise OSError

    unique(bench, refresh.message(17), until="done")
    bench.work()
    bench.settle()

    assert len(bench.letters()) == 1
    assert unique(bench, refresh.message(17), until="done")[1]
    bench.settle()


def test_a_retry_does_not_take_the_name_from_another(make: MakeBench) -> None:
    """until="start": the first attempt has let go of it; a later attempt leaves whoever has it by then alone."""
    bench = make()
    created: list[bool] = []

    @bench.actor(max_retries=1, **FAST)
    def refresh(user_id: int) -> None:
        if bench.note("run") == 1:
            # A delay keeps it enqueued while the first one is retried.
            created.append(unique(bench, refresh.message(17), delay=1_000)[1])
            raise OSError
        if bench.count("run") == 2:
            created.append(unique(bench, refresh.message(17))[1])

    unique(bench, refresh.message(17))
    bench.work()
    bench.settle()

    assert created == [True, False]
    assert bench.count("run") == 3


def test_a_name_that_was_left_behind_is_free_after_its_ttl(make: MakeBench) -> None:
    """It delays work by so much at most."""
    bench = make()
    refresh = refreshing(bench)
    name = 'default/refresh/key/["int",17]'
    bench.store.reserve(name, "lost", ttl=150)

    assert not unique(bench, refresh.message(17))[1]
    wait_until(lambda: unique(bench, refresh.message(17), ttl=timedelta(minutes=10))[1], describe="it to be free")
    bench.work()
    bench.settle()

    assert bench.count("run") == 1


def test_an_enqueue_that_fails_gives_the_name_back(in_memory: MakeBench) -> None:
    """Nothing was enqueued, so nothing is there."""

    class Refusing(dramatiq.Middleware):
        on = True

        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if self.on:
                raise dramatiq.middleware.MiddlewareError("no")

    refusing = Refusing()
    bench = in_memory(extra=[refusing])
    refresh = refreshing(bench)

    with pytest.raises(dramatiq.middleware.MiddlewareError):
        unique(bench, refresh.message(17))
    refusing.on = False

    assert unique(bench, refresh.message(17))[1]


def test_a_delayed_message_is_there(make: MakeBench) -> None:
    """It waits for its time, and its name with it."""
    bench = make()
    refresh = refreshing(bench)

    assert unique(bench, refresh.message(17), delay=200)[1]
    assert not unique(bench, refresh.message(17))[1]
    bench.work()
    bench.settle()

    assert bench.count("run") == 1
    assert unique(bench, refresh.message(17))[1]
    bench.settle()


def test_a_guarded_actor_may_be_enqueued_so(make: MakeBench) -> None:
    """The two have nothing to do with each other: the name saves work, the key guards it."""
    bench = make()

    @bench.actor(idempotent=True)
    def refresh(user_id: int) -> None:
        bench.note("run")

    message, _ = unique(bench, refresh.message(17))
    bench.work()
    bench.settle()
    bench.run(message)

    assert bench.count("run") == 1


def test_without_its_store_nothing_is_enqueued(in_memory: MakeBench) -> None:
    """The sender is told."""
    store = Faulty()
    bench = in_memory(store=store)
    refresh = refreshing(bench)
    store.out["reserve"] = FOR_EVER

    with pytest.raises(StoreUnavailable):
        unique(bench, refresh.message(17))

    assert bench.rig.watch.enqueued == 0


def test_a_name_that_cannot_be_let_go_of_at_the_start_stops_nothing(
    in_memory: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    """It is held until its ttl is over, and that is said."""
    store = Faulty()
    bench = in_memory(store=store)
    refresh = refreshing(bench)
    unique(bench, refresh.message(17))
    store.out["unreserve"] = FOR_EVER
    bench.work()
    bench.settle()

    assert bench.count("run") == 1
    assert "could not be let go of, and is held until its ttl is over" in caplog.text


def test_rubbish_in_the_carrier_is_passed_over(in_memory: MakeBench) -> None:
    """Nobody validates what travels."""
    bench = in_memory()
    refresh = refreshing(bench)

    for rubbish in (17, ["a"], [1, 2], None, "name"):
        bench.run(refresh.message_with_options(args=(1,), dramatiq_guard={"unique": rubbish}))

    assert bench.count("run") == 5
    assert bench.letters() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"until": "later"}, "until must be one of start, done, not 'later'"),
        ({"ttl": 0}, "ttl must be above 0 ms"),
        ({"ttl": "long"}, "ttl"),
        ({"key": 1.5}, "float"),
        ({"key": None}, "None"),
    ],
)
def test_a_wrong_argument_is_refused(in_memory: MakeBench, options: dict[str, Any], error: str) -> None:
    """Before anything is written."""
    bench = in_memory()
    refresh = refreshing(bench)

    with pytest.raises(SetupError, match=error):
        unique(bench, refresh.message(17), **options)

    assert bench.rig.watch.enqueued == 0


def test_without_a_guard_there_is_no_store(stub_broker: Any) -> None:
    """The error says what to add."""

    @dramatiq.actor(broker=stub_broker)
    def refresh(user_id: int) -> None:
        """Nothing."""

    with pytest.raises(SetupError, match=r"enqueue_unique needs IdempotencyGuard\(…\)"):
        enqueue_unique(stub_broker, refresh.message(1), key=1, ttl=TTL)

"""`assert_idempotent`, as the suite of a user would use it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import dramatiq
import pytest
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, Middleware, SkipMessage

from dramatiq_guard import (
    Defer,
    GuardError,
    IdempotencyGuard,
    JitterBackoff,
    Retryable,
    clock,
    connect,
    current_delivery,
    install,
)
from dramatiq_guard.delivery import Delivery, peek
from dramatiq_guard.reconcile import Done, NotDone, Unknown
from dramatiq_guard.settle.killpoints import reach
from dramatiq_guard.testing import assert_idempotent

from .shop import Gateway, broker_of_a_shop, complaint

pytestmark = pytest.mark.usefixtures("broker")

BETWEEN = "killed between the effect and its record"


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_an_effect_that_nobody_protects_is_found(gateway: Gateway) -> None:
    """A gateway that is given no key charges again when the worker dies before that is on record."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str, cents: int) -> None:
        gateway.charge(order, cents)

    def charges() -> int:
        return len(gateway.charges)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", 100, effect=charges)

    assert complaint(failure) == [
        f"{BETWEEN}: charges 1 → 2; pass current_delivery().key to the gateway, or wrap it in step()"
    ]


def test_the_report_lists_every_schedule(gateway: Gateway) -> None:
    """Those that went well, too: what was tried is to be seen."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    lines = [line.partition("  ")[0] for line in str(failure.value).split("\n\n")[1].splitlines()]
    assert lines == [
        "✓ delivered once",
        "✓ delivered 10 times",
        "✓ killed before the key was claimed",
        "✓ killed between the claim and the actor",
        f"✗ {BETWEEN}",
        "✓ killed after the key was completed",
        "✓ killed before the ack",
    ]


def test_a_key_that_is_passed_on_protects(gateway: Gateway) -> None:
    """The gateway knows the key, however often it is asked."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str, cents: int) -> str:
        return gateway.charge(order, cents, key=current_delivery().key)

    assert_idempotent(charge, "o-1", cents=100, effect=lambda: len(gateway.charges))


def test_a_step_whose_function_passes_its_key_on_protects(gateway: Gateway) -> None:
    """A step that is on record is not taken again; one that is not is asked for under the same key."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        delivery = current_delivery()
        first = delivery.step("first", lambda key: gateway.charge(order, 1, key=key))
        return first + delivery.step("second", lambda key: gateway.charge(order, 2, key=key))

    assert_idempotent(charge, "o-1", effect=lambda: gateway.charges)


def test_the_step_whose_effect_is_repeated_is_named(gateway: Gateway) -> None:
    """Of two steps the one that does not pass its key on is to blame, and it is said what to write."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def fulfil(order: str) -> None:
        delivery = current_delivery()
        delivery.step("charge", lambda key: gateway.charge(order, 1, key=key))
        delivery.step("ship", lambda key: gateway.charge(order, 2))

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(fulfil, "o-1", effect=lambda: {"charges": len(gateway.charges), "orders": 3})

    (line,) = complaint(failure)
    assert line == (
        "killed between the effect of step 'ship' and its record: charges 2 → 3; pass the key on: step('ship', lambda "
        "key: …(…, idempotency_key=key)); where nobody takes one, at_most_once=True"
    )


def test_an_effect_beside_the_steps_is_found(gateway: Gateway) -> None:
    """What lies between two steps is repeated from the point before the second one on."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def fulfil(order: str) -> None:
        current_delivery().step("charge", lambda key: gateway.charge(order, 1, key=key))
        gateway.charge(order, 2)
        current_delivery().step("ship", lambda key: gateway.charge(order, 3, key=key))

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(fulfil, "o-1", effect=lambda: len(gateway.charges))

    assert [line.partition(":")[0] for line in complaint(failure)] == [
        "killed before step 'ship'",
        "killed between the effect of step 'ship' and its record",
        "killed after step 'ship' was recorded",
        BETWEEN,
    ]


def test_an_actor_that_is_run_for_each_delivery_is_found(gateway: Gateway) -> None:
    """A message without a key, which runs unguarded by choice, is not idempotent."""

    @dramatiq.actor(idempotency_key=lambda order: None, on_missing_key="unguarded")
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", times=3, effect=lambda: len(gateway.charges))

    assert (
        "delivered 3 times: effect 1 → 3; the actor ran 3 times: see that its key is made of the message, and that it "
        "has one"
    ) in complaint(failure)


def test_an_effect_that_is_lost_is_found() -> None:
    """An actor that notes first what it is about to do does not do it after a crash in between."""
    begun: set[str] = set()
    sent: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def mail(order: str) -> None:
        if order in begun:
            return
        begun.add(order)
        current_delivery().step("mail", lambda key: sent.append(order))

    def forget() -> None:
        begun.clear()
        sent.clear()

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(mail, "o-1", effect=sent, reset=forget)

    (line,) = complaint(failure)
    assert line == (
        "killed before step 'mail': effect 1 → 0 (missing: 'o-1'); the actor must not take for done what it has only "
        "begun"
    )


def test_a_fake_that_remembers_is_told_to_be_reset() -> None:
    """A row that an earlier schedule has left is no effect of this one; it is said what to do."""
    rows: set[str] = set()

    @dramatiq.actor(idempotency_key="order:{order}")
    def book(order: str) -> None:
        rows.add(order)

    with pytest.raises(AssertionError, match="give reset= to make it forget"):
        assert_idempotent(book, "o-1", effect=rows)

    assert_idempotent(book, "o-1", effect=rows, reset=rows.clear)


def test_a_delivery_that_cannot_go_on_after_a_crash_is_found(gateway: Gateway) -> None:
    """An actor that stumbles over what it has left behind is none that may be run again."""
    taken: set[str] = set()

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        if order in taken:
            raise ValueError("taken")
        taken.add(order)
        gateway.charge(order, 1)

    def forget() -> None:
        taken.clear()
        gateway.forget()

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges), reset=forget)

    (line,) = complaint(failure)
    assert line == (
        f"{BETWEEN}: a delivery failed: ValueError('taken'); see that the actor can be run again after such a crash"
    )


def test_results_that_differ_are_found(gateway: Gateway) -> None:
    """Every delivery gives the first one's result."""

    @dramatiq.actor(idempotency_key=lambda order: None, on_missing_key="unguarded")
    def charge(order: str) -> int:
        gateway.charge(order, 1, key="one")
        calls.append(order)
        return len(calls)

    calls: list[str] = []

    def forget() -> None:
        gateway.forget()
        calls.clear()

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges), reset=forget)

    assert complaint(failure)[0] == (
        "delivered 10 times: delivery 2 returned 2, and the first one 1; return plain values that are recorded"
    )


def test_results_are_compared_as_others_get_them(gateway: Gateway) -> None:
    """A tuple is a list to whoever reads it from a backend; what cannot be kept is compared with nothing."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def tupled(order: str) -> tuple[str, str]:
        return order, gateway.charge(order, 1, key=current_delivery().key)

    @dramatiq.actor(idempotency_key="order:{order}")
    def opaque(order: str) -> object:
        gateway.charge(order, 1, key=current_delivery().key)
        return object()

    assert_idempotent(tupled, "o-1", effect=lambda: len(gateway.charges))
    assert_idempotent(opaque, "o-1", effect=lambda: len(gateway.charges))


# -- the options of the guard ------------------------------------------------------------------------------------------


def test_a_key_that_is_parked_has_no_second_effect() -> None:
    """With on_crash="park" nobody runs the work again; that a person has to look is no failure."""
    mails: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}", on_crash="park")
    def mail(order: str) -> None:
        mails.append(order)

    assert_idempotent(mail, "o-1", effect=mails)


def test_a_reconciliation_is_asked(gateway: Gateway) -> None:
    """on_crash= finds out what an earlier run has done, and the actor is not run again."""

    def look(delivery: Delivery) -> Done | NotDone:
        number = gateway.known.get(delivery.key)
        return NotDone() if number is None else Done(number)

    @dramatiq.actor(idempotency_key="order:{order}", on_crash=look)
    def charge(order: str) -> str:
        number = gateway.charge(order, 1)
        gateway.known[current_delivery().key] = number
        return number

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))


def test_a_reconciliation_that_is_wrong_is_found(gateway: Gateway) -> None:
    """One that says too readily that nothing was done repeats the effect; one that cannot tell parks."""

    def wrong(delivery: Delivery) -> NotDone:
        return NotDone()

    def careful(delivery: Delivery) -> Unknown:
        return Unknown()

    @dramatiq.actor(idempotency_key="order:{order}", on_crash=wrong)
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    @dramatiq.actor(idempotency_key="order:{order}", on_crash=careful)
    def mail(order: str) -> None:
        gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))
    assert [line.partition(":")[0] for line in complaint(failure)] == [BETWEEN]

    assert_idempotent(mail, "o-1", effect=lambda: len(gateway.charges))


def test_a_step_that_is_taken_at_most_once_is_parked() -> None:
    """Where nobody takes a key, a step that had begun is not taken again."""
    mails: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def mail(order: str) -> None:
        current_delivery().step("mail", lambda key: mails.append(order), at_most_once=True)

    assert_idempotent(mail, "o-1", effect=mails)


def test_a_parked_key_does_not_hide_what_was_repeated_before() -> None:
    """What lies before the step that parks is done by each run."""
    mails: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def mail(order: str) -> None:
        mails.append("begin")
        current_delivery().step("mail", lambda key: mails.append(order), at_most_once=True)
        mails.append("end")

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(mail, "o-1", effect=mails)

    lines = {line.partition(": ")[0]: line for line in complaint(failure)}
    assert set(lines) == {
        "killed before step 'mail'",
        "killed between the effect of step 'mail' and its record",
        "killed after step 'mail' was recorded",
        BETWEEN,
    }
    assert (
        "effect 3 → 3 (more: 'begin') (missing: 'end')"
        in lines["killed between the effect of step 'mail' and its record"]
    )


def test_a_failure_that_is_remembered_is_an_answer(gateway: Gateway) -> None:
    """The duplicates of a declined charge are declined without being tried."""

    @dramatiq.actor(idempotency_key="order:{order}", remember_failures=[LookupError], max_retries=0)
    def charge(order: str) -> None:
        gateway.charge(order, 1, key=current_delivery().key)
        raise LookupError("no such card")

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))


def test_a_failed_attempt_is_part_of_every_schedule(gateway: Gateway) -> None:
    """An actor that fails at first is retried as its stack says, without the wait, and killed in both attempts."""

    @dramatiq.actor(idempotency_key="order:{order}", min_backoff=3_600_000)
    def charge(order: str) -> None:
        delivery = current_delivery()
        if delivery.attempt == 1:
            raise Retryable("not yet")
        gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    lines = str(failure.value)
    assert [line.partition(":")[0] for line in complaint(failure)] == [BETWEEN]
    assert "✓ killed after the key was released" in lines
    assert "✓ killed at before-retry" in lines
    assert "✓ killed between the claim and the actor, time 2" in lines


def test_an_actor_that_puts_itself_off_is_waited_for(gateway: Gateway) -> None:
    """What is deferred comes again, when its time has come."""
    at: list[int] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        at.append(clock.now())
        if len(at) == 1:
            raise Defer("not now", delay=3_600_000)
        gateway.charge(order, 1, key=current_delivery().key)

    def forget() -> None:
        gateway.forget()
        at.clear()

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges), reset=forget)
    assert at[1] - at[0] >= 3_600_000


def test_the_key_of_a_message_may_be_given(gateway: Gateway) -> None:
    """What send_with_options would be given besides the arguments is given as options."""
    keys: list[str] = []

    @dramatiq.actor(idempotent=True)
    def charge(order: str) -> None:
        keys.append(current_delivery().key)
        gateway.charge(order, 1, key=current_delivery().key)

    assert_idempotent(
        charge, "o-1", effect=lambda: len(gateway.charges), options={"idempotency_key": "order-1"}, reset=gateway.forget
    )

    assert len(set(keys)) == 1
    assert "order-1" in keys[0]


def test_a_message_that_tells_others_of_its_success_leaves_its_mark(gateway: Gateway) -> None:
    """The mark by which its duplicates are skipped is a point at which the process may die, too."""

    @dramatiq.actor
    def charged(message: Any, result: Any) -> None:
        raise AssertionError("this is nobody's test")

    @dramatiq.actor(idempotency_key="order:{order}", on_success="charged")
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    assert "✓ killed at before-marker" in str(failure.value)


# -- what an effect is -------------------------------------------------------------------------------------------------


def test_the_calls_of_a_mock_are_an_effect() -> None:
    """A mock is counted by itself, and named."""
    send = Mock(name="send")

    @dramatiq.actor(idempotency_key="order:{order}")
    def mail(order: str) -> None:
        send(order)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(mail, "o-1", effect=send)

    assert complaint(failure)[0].startswith(f"{BETWEEN}: send 1 → 2;")


def test_an_effect_that_does_not_change_says_nothing(gateway: Gateway) -> None:
    """A test that looks at the wrong thing fails."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    @dramatiq.actor(idempotency_key="order:{order}")
    def skip(order: str) -> None:
        raise SkipMessage("not today")

    with pytest.raises(AssertionError, match="effect did not change when actor 'charge' was run"):
        assert_idempotent(charge, "o-1", effect=lambda: 0)
    with pytest.raises(AssertionError, match="reset= does not take it out of the actor's reach"):
        assert_idempotent(charge, "o-1", effect=[].copy, reset=gateway.forget)
    with pytest.raises(AssertionError, match="did not change"):
        assert_idempotent(skip, "o-1", effect=lambda: len(gateway.charges))


def test_a_reset_that_resets_nothing_is_refused(gateway: Gateway) -> None:
    """Else each schedule would be compared with the sum of all before it."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        gateway.charge(order, 1)

    with pytest.raises(GuardError, match=r"back to where it was: effect 0 before .* and effect 1 later on"):
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges), reset=lambda: None)


def test_with_a_reset_all_of_the_effect_is_compared(gateway: Gateway) -> None:
    """The keys are the same in each schedule, so what the third party has of them may be, too."""

    @dramatiq.actor(idempotent=True)
    def charge(order: str) -> None:
        gateway.charge(order, 1, key=current_delivery().key_for("charge"))

    assert_idempotent(charge, "o-1", effect=lambda: gateway.known, reset=gateway.forget)


def test_a_way_that_differs_from_the_first_run_is_found(gateway: Gateway) -> None:
    """A point that the actor does not come by again was not tested."""
    runs: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        runs.append(order)
        if len(runs) == 1:
            current_delivery().step("first", lambda key: None)
        gateway.charge(order, 1, key=current_delivery().key)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    assert complaint(failure)[0] == (
        "killed before step 'first': was not reached again: the actor took another way than in its first run; give "
        "reset=, so that each schedule begins alike"
    )


# -- actors of every kind ----------------------------------------------------------------------------------------------


def test_an_async_actor_is_killed_as_well() -> None:
    """Its steps are told apart though they are taken at once; what it was waiting for dies with it."""
    done: list[str] = []
    known: dict[str, str] = {}

    async def perform(name: str, key: str) -> str:
        await asyncio.sleep(0)
        if key not in known:
            done.append(name)
            known[key] = name
        return name

    @dramatiq.actor(idempotency_key="order:{order}")
    async def fulfil(order: str) -> list[str]:
        delivery = current_delivery()
        return await asyncio.gather(
            delivery.step("charge", lambda key: perform("charge", key)),
            delivery.step("ship", lambda key: perform("ship", key)),
        )

    assert_idempotent(fulfil, "o-1", effect=done)
    assert get_event_loop_thread() is None


def test_an_async_actor_whose_effect_is_repeated_is_found() -> None:
    """The step is named."""
    done: list[str] = []

    async def perform(order: str) -> None:
        done.append(order)

    @dramatiq.actor(idempotency_key="order:{order}")
    async def mail(order: str) -> None:
        await current_delivery().step("mail", lambda key: perform(order))

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(mail, "o-1", effect=done)

    assert [line.partition(":")[0] for line in complaint(failure)] == [
        "killed between the effect of step 'mail' and its record"
    ]


def test_an_event_loop_of_the_test_is_used() -> None:
    """A suite that runs one for its async actors keeps it."""
    loops: set[Any] = set()
    done: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    async def mail(order: str) -> None:
        loops.add(asyncio.get_running_loop())
        await current_delivery().step("mail", lambda key: done.append(order), at_most_once=True)

    asyncio_middleware = AsyncIO()
    asyncio_middleware.before_worker_boot(None, None)
    try:
        thread = get_event_loop_thread()
        assert_idempotent(mail, "o-1", effect=done)

        assert get_event_loop_thread() is thread
        assert loops == {thread.loop}
    finally:
        asyncio_middleware.after_worker_shutdown(None, None)


def test_an_actor_that_catches_everything_does_not_outlive_its_death(gateway: Gateway) -> None:
    """What it does after it was killed reaches neither the store nor a step, and it is told why that is bad."""
    steps: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        for name in ("one", "two"):
            with suppress(BaseException):
                current_delivery().step(name, lambda key: steps.append(name))
        return gateway.charge(order, 1)

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    lines = {line.partition(": ")[0]: line for line in complaint(failure)}
    assert set(lines) == {
        *(f"killed before step {name!r}" for name in ("one", "two")),
        *(f"killed between the effect of step {name!r} and its record" for name in ("one", "two")),
        *(f"killed after step {name!r} was recorded" for name in ("one", "two")),
        BETWEEN,
    }
    assert "since it catches BaseException" in lines["killed before step 'one'"]
    assert "since it catches BaseException" not in lines[BETWEEN]


def test_an_actor_that_makes_another_error_of_its_death_dies_all_the_same(gateway: Gateway) -> None:
    """What it raises in place of it is not a failure that is retried."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        try:
            return current_delivery().step("charge", lambda key: gateway.charge(order, 1, key=key))
        except BaseException as error:
            raise ValueError("wrapped") from error

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))


def test_steps_that_are_taken_in_threads_of_the_actor_are_named(gateway: Gateway) -> None:
    """A thread does not inherit the delivery, and its steps are known nevertheless."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        delivery = current_delivery()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                delivery.step("charge", lambda key: gateway.charge(order, 1))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    assert [line.partition(":")[0] for line in complaint(failure)] == [
        "killed between the effect of step 'charge' and its record"
    ]


def test_an_actor_of_a_stub_broker_is_tested_alike(gateway: Gateway) -> None:
    """Whatever the broker is, it is not used; nor is the store of its guard."""
    broker = StubBroker()
    keys = connect("memory://").idempotency
    install(broker, JitterBackoff(), IdempotencyGuard(keys))

    @dramatiq.actor(broker=broker, idempotency_key="order:{order}")
    def charge(order: str) -> str:
        return gateway.charge(order, 1, key=current_delivery().key)

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))

    assert keys.page().records == ()
    assert broker.queues["default"].empty()


def test_without_jitter_backoff_its_defaults_retry(gateway: Gateway) -> None:
    """A stack that has only the guard is tested with the retries that go best with it."""
    broker = StubBroker()
    install(broker, IdempotencyGuard(connect("memory://").idempotency))

    @dramatiq.actor(broker=broker, idempotency_key="order:{order}")
    def charge(order: str) -> str:
        if current_delivery().attempt < 3:
            raise Retryable
        return gateway.charge(order, 1, key=current_delivery().key)

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))


def test_the_middlewares_of_the_user_are_run(gateway: Gateway) -> None:
    """What the actor leans on is there, and is told of the end, of a death as well."""

    class Session(Middleware):
        """Opens something for each message."""

        def __init__(self) -> None:
            self.open = 0

        def before_process_message(self, broker: Any, message: Any) -> None:
            assert self.open == 0
            self.open += 1

        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
        ) -> None:
            self.open -= 1

        after_skip_message = after_process_message

    session = Session()
    broker_of_a_shop(CurrentMessage(), session)

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        assert session.open == 1
        message = CurrentMessage.get_current_message()
        assert message is not None
        assert message.args == (order,)
        return gateway.charge(order, 1, key=current_delivery().key)

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges))
    assert session.open == 0


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_an_actor_that_is_not_guarded_is_refused(broker: RedisBroker) -> None:
    """It is said how to guard it, and its stack."""

    @dramatiq.actor
    def careless() -> None: ...

    @dramatiq.actor(broker=StubBroker())
    def bare() -> None: ...

    with pytest.raises(GuardError, match="'careless' is not guarded: declare it with idempotency_key="):
        assert_idempotent(careless, effect=[])
    with pytest.raises(GuardError, match=r"'bare' is not guarded: its broker has no IdempotencyGuard. Add it"):
        assert_idempotent(bare, effect=[])


def test_what_is_no_actor_and_no_effect_is_refused() -> None:
    """So is a number of deliveries in which nothing can be repeated."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None: ...

    with pytest.raises(TypeError, match="takes an actor"):
        assert_idempotent(print, effect=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="effect must tell what the actor has done"):
        assert_idempotent(charge, "o-1", effect=7)
    for times in (1, True, 2.5):
        with pytest.raises(ValueError, match="times must be 2 at least"):
            assert_idempotent(charge, "o-1", effect=[], times=times)  # type: ignore[arg-type]


def test_a_failure_of_the_undisturbed_run_comes_through() -> None:
    """It is the actor's own, with a word on where it comes from."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as failure:
        assert_idempotent(charge, "o-1", effect=[])

    assert failure.value.__notes__ == [
        "assert_idempotent: so actor 'charge' ended when it was run once, undisturbed",
    ]


def test_what_ends_a_test_ends_it() -> None:
    """Neither Ctrl-C nor pytest.fail() in a fake is a failure of the actor that is retried."""
    runs: list[str] = []

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        runs.append(order)
        pytest.fail("not like this")

    with pytest.raises(pytest.fail.Exception, match="not like this"):
        assert_idempotent(charge, "o-1", effect=runs)

    assert runs == ["o-1"]


# -- what it leaves behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protected", [True, False])
def test_nothing_is_left_behind(broker: RedisBroker, gateway: Gateway, protected: bool) -> None:
    """No thread, no current delivery, no clock; the broker, its middlewares and the actor are as they were."""

    def work(order: str) -> None:
        gateway.charge(order, 1, key=current_delivery().key if protected else None)

    async def work_async(order: str) -> None:
        await asyncio.to_thread(work, order)

    actors = [
        dramatiq.actor(work, actor_name="sync", idempotency_key="order:{order}"),
        dramatiq.actor(work_async, actor_name="async", idempotency_key="order:{order}"),
    ]

    def state() -> Any:
        return (
            set(threading.enumerate()),
            peek(),
            {variable.name: value for variable, value in contextvars.copy_context().items()},
            [(middleware, dict(vars(middleware))) for middleware in broker.middleware],
            dict(vars(broker)),
            [(actor.fn, actor.broker, dict(actor.options)) for actor in actors],
            clock._clock,
        )

    before = state()
    for actor in actors:
        if protected:
            assert_idempotent(actor, "o-1", effect=lambda: len(gateway.charges))
        else:
            with pytest.raises(AssertionError):
                assert_idempotent(actor, "o-1", effect=lambda: len(gateway.charges))

    assert state() == before


def test_an_actor_may_still_be_called(gateway: Gateway) -> None:
    """Before and after, a direct call is a call of the function."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        return gateway.charge(order, 1, key=order)

    assert_idempotent(charge, "o-1", effect=lambda: len(gateway.charges), reset=gateway.forget)
    assert charge("o-2") == f"charge {len(gateway.charges)}"


def test_waiting_takes_no_time_and_others_keep_theirs(gateway: Gateway) -> None:
    """What the stack waits for in a run is skipped; threads of others have their own clock and their own points."""
    moments: list[int] = []
    begun, over = threading.Event(), threading.Event()

    def other() -> None:
        while not over.is_set():
            reach("before-claim")
            moments.append(clock.now())
            begun.set()
            clock.wait(over, 1)

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> str:
        begun.clear()
        assert begun.wait(10)
        before = clock.monotonic()
        assert not clock.wait(threading.Event(), 86_400_000)
        assert clock.monotonic() - before >= 86_400_000
        return gateway.charge(order, 1, key=current_delivery().key)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert_idempotent(charge, "o-1", times=2, effect=lambda: len(gateway.charges))
    finally:
        over.set()
        thread.join()

    assert max(moments) - min(moments) < 86_400_000


def test_a_death_is_told_to_the_middlewares_of_the_user_once(gateway: Gateway) -> None:
    """So that what they have opened for a message is closed when its process dies; none is retried for it."""
    ends: list[str] = []

    class Watching(Middleware):
        """Notes how messages end."""

        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
        ) -> None:
            ends.append(type(exception).__name__)

    broker_of_a_shop(Watching())

    @dramatiq.actor(idempotency_key="order:{order}")
    def charge(order: str) -> None:
        gateway.charge(order, 1, key=current_delivery().key)

    assert_idempotent(charge, "o-1", times=2, effect=lambda: len(gateway.charges))

    points = 5
    undisturbed, twice, killed_before_the_ack = 2, 2, 1
    assert ends.count("Killed") == points - killed_before_the_ack
    assert ends.count("NoneType") == undisturbed + twice + 2 * points + killed_before_the_ack

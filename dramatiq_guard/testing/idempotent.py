"""Whether an actor has one effect however often it is delivered, and wherever its process is killed.

The actor is run once, undisturbed: that is the effect which every other schedule must have, too.  Then its message is
delivered several times, and then, each time from the beginning, its process is killed at one of the points that the
first run came by, its lease runs out, and the message is delivered again.

This module must not know how a process is made to die.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from dramatiq import Actor, Message

from .. import clock
from ..errors import GuardError, OutcomeUnknown, ReplayedFailure
from ..idempotency.plan import SHORTEST_LEASE
from ..idempotency.values import decode, finished
from ..middleware.idempotency_guard import IdempotencyGuard
from ..stores.memory.idempotency import MemoryIdempotency
from .effects import Effect, amount, shortened
from .mortal import Course, Point, simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..idempotency.plan import Plan
    from ..stores.idempotency import IdempotencyStore

__all__ = ["assert_idempotent"]

_POINTS: Final = {
    "before-claim": "killed before the key was claimed",
    "after-claim": "killed between the claim and the actor",
    "before-step": "killed before step {step!r}",
    "in-step": "killed between the effect of step {step!r} and its record",
    "after-step": "killed after step {step!r} was recorded",
    "before-complete": "killed between the effect and its record",
    "after-complete": "killed after the key was completed",
    "before-release": "killed between a failure and the release of the key",
    "after-release": "killed after the key was released",
    "before-atomic": "killed before the transaction",
    "before-commit": "killed before the commit",
    "after-commit": "killed after the commit",
    "before-ack": "killed before the ack",
    "before-nack": "killed before the nack",
}

_LOST: Final = "the actor must not take for done what it has only begun"


def assert_idempotent(
    actor: Actor[..., Any],
    *args: Any,
    effect: Any,
    times: int = 10,
    reset: Callable[[], object] | None = None,
    store: IdempotencyStore | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Assert that an actor has one effect, however often its message is delivered and wherever its process is killed.

    It runs as the stack of its broker would run it, in this thread, on any broker and without a server: through the
    seam, with the options that it was declared with, and with keys that are kept in memory.  Each schedule has keys of
    its own.  Time is skipped.

    Parameters:
      actor(Actor): The guarded actor.
      *args: What it is sent with.
      effect(Callable | Collection | Mock): Tells what has happened so far, e.g. ``lambda: len(gateway.charges)`` or
        ``lambda: {"charges": len(gateway.charges), "mails": len(outbox)}``; or what keeps it, a list, a set, a dict or
        a mock.  What a schedule adds to it must be what one run adds.
      times(int): How often the message is delivered one after the other, undisturbed.
      reset(Callable | None): Called before each schedule, brings the effect back to where it was.  Then all of what
        `effect` tells is compared, and not just how much was added.
      store(IdempotencyStore | None): A store to keep the keys in, on PostgreSQL; needed by actors with
        ``idempotent="atomic"`` or ``"inbox"``, whose rows are committed with it.
      options(Mapping | None): Further options of the message, such as ``{"idempotency_key": "order-1"}``.
      **kwargs: What it is sent with.

    Raises:
      AssertionError: It is not idempotent: the table says when which effect was repeated or lost, and what helps.
      GuardError: It is not guarded, or cannot be tested like this.
      BaseException: What it failed with when it was run undisturbed.

    Example:
      >>> def test_a_customer_is_charged_once():
      ...     assert_idempotent(charge, "order-1", 100, effect=lambda: len(gateway.charges))
    """
    __tracebackhide__ = True
    trial = _Trial(actor, args, kwargs, options or {}, Effect(effect, whole=reset is not None), reset, store)
    if isinstance(times, bool) or not isinstance(times, int) or times < 2:
        raise ValueError(f"times must be 2 at least, since one delivery repeats nothing, not {times!r}")
    with simulated():
        rows = trial.rows(times)
    if any(row.complaint for row in rows):
        raise AssertionError(_report(actor, rows))


@dataclass(frozen=True, slots=True)
class _Row:
    """One schedule, and what came of it."""

    schedule: str
    outcome: str
    complaint: str = ""
    cure: str = ""


class _Trial:
    """All the schedules of one actor."""

    def __init__(
        self,
        actor: Actor[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        effect: Effect,
        reset: Callable[[], object] | None,
        store: IdempotencyStore | None,
    ) -> None:
        self.actor = actor
        self.plan = _plan_of(actor, store)
        self.make: Callable[[], Message[Any]] = lambda: actor.message_with_options(args=args, kwargs=kwargs, **options)
        self.effect = effect
        self.reset = reset
        self.store = store
        self.mark = clock.unique()[:8]
        self.message = self.make()
        self.schedules = 0
        self.begins_with: Any = None

    def rows(self, times: int) -> list[_Row]:
        """Run every schedule."""
        course, once = self.first()
        rows = [_Row("delivered once", self.effect.told(once))]
        rows.append(self.judged(f"delivered {times} times", once, *self.run(times)))
        rows += [self.judged(_words(point), once, *self.run(2, point), point=point) for point in course.reached]
        return rows

    def first(self) -> tuple[Course, Any]:
        """Run the actor undisturbed."""
        course, once = self.run(1)
        ended = course.ended[-1]
        if ended.error is not None and not isinstance(ended.error, self.plan.remember_failures):
            ended.error.add_note(
                f"assert_idempotent: so actor {self.actor.actor_name!r} ended when it was run once, undisturbed"
            )
            raise ended.error
        if ended.error is None and (once == self.begins_with if self.effect.whole else not amount(once)):
            raise AssertionError(
                f"{self.effect.name} did not change when actor {self.actor.actor_name!r} was run, so nothing can be "
                "said about it: let effect= tell what the actor does"
                + ("" if self.reset is None else ", and see that reset= does not take it out of the actor's reach")
            )
        _, again = self.run(1)
        self.effect.stable = bool(once == again)
        if not self.effect.same(once, again):
            raise AssertionError(
                f"a second run of actor {self.actor.actor_name!r}, under another key, did not do what the first one "
                f"did: {self.effect.differs(once, again)}. If what keeps the effect knows it from the first run, give "
                "reset= to make it forget"
            )
        return course, once

    def run(self, deliveries: int, kill_at: Point | None = None) -> tuple[Course, Any]:
        """Run one schedule, and look what it has done."""
        self.schedules += 1
        namespace, message = f"{self.plan.namespace}~{self.mark}", self.message
        if self.reset is not None:
            self.reset()
        else:
            # What the third party has not forgotten is known to it under other keys.
            namespace, message = f"{namespace}.{self.schedules}", self.make()
        store: Any = MemoryIdempotency() if self.store is None else self.store
        plan = replace(self.plan, namespace=namespace, engine=getattr(store, "engine", self.plan.engine))
        course = Course(self.actor, plan, store, self.store is not None, message, kill_at)
        before = self.effect.look()
        if self.schedules == 1:
            self.begins_with = before
        elif self.effect.whole and before != self.begins_with:
            raise GuardError(
                f"reset= did not bring {self.effect.name} back to where it was: "
                f"{self.effect.told(self.begins_with)} "
                f"before the first schedule, and {self.effect.told(before)} later on"
            )
        try:
            for _ in range(deliveries):
                course.deliver()
        finally:
            for key in course.keys:
                store.forget(key)
        return course, self.effect.of(before, self.effect.look())

    def judged(self, schedule: str, once: Any, course: Course, seen: Any, *, point: Point | None = None) -> _Row:
        """Say what came of a schedule."""
        if point is not None and not course.killed:
            return _Row(
                schedule,
                "not reached",
                "was not reached again: the actor took another way than in its first run",
                "give reset=, so that each schedule begins alike",
            )
        parked = any(isinstance(ended.error, OutcomeUnknown) for ended in course.ended)
        outcome = self.effect.told(seen) + (", parked for a person" if parked else "")
        if not self.effect.same(once, seen):
            less = amount(seen) < amount(once)
            if not (parked and less):
                cure = _LOST if less else self.cure_repeated(course, point)
                return _Row(schedule, outcome, self.effect.differs(once, seen), cure)
        return self.judged_by_ends(schedule, outcome, course)

    def judged_by_ends(self, schedule: str, outcome: str, course: Course) -> _Row:
        """The effect is what it should be; say whether each delivery ended as it should have."""
        ended = [each for each in course.ended if not each.killed]
        for each in ended:
            if each.dead and each.error is not None and not self.expects(each.error):
                died = f"a delivery failed: {shortened(repr(each.error))}"
                return _Row(schedule, outcome, died, "see that the actor can be run again after such a crash")
        results = [each.result for each in ended if each.returned]
        stored = [_as_stored(result, self.plan.max_result) for result in results]
        if None not in stored and any(each != stored[0] for each in stored):
            at = next(index for index, each in enumerate(stored) if each != stored[0])
            return _Row(
                schedule,
                outcome,
                f"delivery {at + 1} returned {shortened(repr(results[at]))}, and the first one "
                f"{shortened(repr(results[0]))}",
                "return plain values that are recorded",
            )
        return _Row(schedule, outcome)

    def expects(self, error: BaseException) -> bool:
        """Whether a delivery may end with an error: a person is asked, or it is an answer that is remembered."""
        return isinstance(error, (OutcomeUnknown, ReplayedFailure, *self.plan.remember_failures))

    def cure_repeated(self, course: Course, point: Point | None) -> str:
        """What to do about an effect that happened more than once, or another way."""
        if point is None:
            ran = sum(each.ran for each in course.ended)
            return f"the actor ran {ran} times: see that its key is made of the message, and that it has one"
        if point.name == "in-step":
            cure = (
                f"pass the key on: step({point.step!r}, lambda key: …(…, idempotency_key=key)); where nobody takes "
                "one, at_most_once=True"
            )
        elif self.plan.mode == "lease":
            cure = "pass current_delivery().key to the gateway, or wrap it in step()"
        else:
            cure = "write rows by the connection of the transaction; pass current_delivery().key to third parties"
        if course.swallowed:
            cure += (
                ". The actor also went on after it was killed, since it catches BaseException: that would keep it from "
                "being interrupted, too. Catch Exception"
            )
        return cure


def _plan_of(actor: Any, store: Any) -> Plan:
    """How an actor is guarded."""
    if not isinstance(actor, Actor):
        raise TypeError(f"assert_idempotent takes an actor and what it is sent with, not {actor!r}")
    name = actor.actor_name
    guard = next((m for m in actor.broker.middleware if isinstance(m, IdempotencyGuard)), None)
    if guard is None:
        raise GuardError(
            f"Actor {name!r} is not guarded: its broker has no IdempotencyGuard. Add it to the stack, "
            "install(broker, …, IdempotencyGuard(connect(…).idempotency)), and declare the actor with "
            "idempotency_key=… or idempotent=True."
        )
    plan = guard.plans.get(name)
    if plan is None:
        raise GuardError(
            f"Actor {name!r} is not guarded: declare it with idempotency_key=…, such as "
            "idempotency_key='order:{order_id}', or with idempotent=True."
        )
    if plan.mode != "lease" and store is None:
        raise GuardError(
            f"Actor {name!r} has idempotent={plan.mode!r}: its rows and its key are one commit, which no store in "
            "memory can show. Give a test database: assert_idempotent(…, store=connect('postgresql://…').idempotency)."
        )
    return plan if store is None else replace(plan, lease=SHORTEST_LEASE)  # it cannot be skipped, so it is short


def _as_stored(result: Any, max_result: int) -> Any:
    """A result as another delivery gets it, in a tuple; ``None`` if it is not kept."""
    finish, omitted = finished(result, max_result)
    if omitted is not None:
        return None
    return (None if finish.result is None else decode(finish.result),)


def _words(point: Point) -> str:
    words = _POINTS.get(point.name, f"killed at {point.name}").format(step=point.step)
    return words if point.time == 1 else f"{words}, time {point.time}"


def _report(actor: Actor[..., Any], rows: list[_Row]) -> str:
    """A table of all schedules, and what is to be done about those that failed."""
    failed = [row for row in rows if row.complaint]
    width = max(len(row.schedule) for row in rows)
    lines = [
        f"Actor {actor.actor_name!r} is not idempotent: {len(failed)} of {len(rows)} schedules differ from one run.",
        "",
        *(f"{'✗' if row.complaint else '✓'} {row.schedule:<{width}}  {row.outcome}" for row in rows),
        "",
        *(f"{row.schedule}: {row.complaint}; {row.cure}" for row in failed),
    ]
    return "\n".join(lines)

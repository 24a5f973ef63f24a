"""IdempotencyGuard: one effect, however many deliveries.

The life of a message in it:

1. Its key is made of its arguments (or its id), and claimed at the store just before the actor runs.
2. *Fresh*: the actor runs under a lease that is renewed for as long as it does. What it returns is recorded, and only
   then do Dramatiq's hooks see it.  If it fails, the key is given back before the retry is sent.
3. *Taken over*: an earlier run ended without a word.  The actor runs again, or the key waits for a person, or a
   reconciliation finds out, as ``on_crash`` says.
4. *Busy*: another delivery is at work.  This one is put off, uncounted.
5. *Done*: the recorded result is returned from the seam, so that results, pipelines, groups and callbacks go on as if
   the actor had run.
6. The store is out: the message is put off, uncounted, and no actor runs unguarded unless that was chosen.

What it cannot do: if a worker is killed between an effect outside the store and the record of it, the effect is
repeated, unless the third party was given `current_delivery().key`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dramatiq.logging import get_logger

from ..delivery import CARRIER
from ..errors import Permanent, SetupError
from ..idempotency.checks import problems_of
from ..idempotency.claimed import Claimed
from ..idempotency.claiming import claim, refuse
from ..idempotency.ending import begin_to_tell, complete, give_back
from ..idempotency.inbox import run_in_inbox
from ..idempotency.keyring import Keyring
from ..idempotency.plan import MODES, OPTIONS, check_on_crash, checked_choice, checked_lease, checked_size, plan_for
from ..idempotency.replaying import owe_marker, replay
from ..idempotency.retention import retention_of
from ..idempotency.unique import UNIQUE, let_go, owe_letting_go
from ..interrupts import call_interruptibly
from ..policy.duration import milliseconds
from ..reconcile import Done, NotDone, Unknown
from ..settle.killpoints import reach
from ..stores.idempotency import DONE, TransactionalStore
from ..wiring import stack_of
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from dramatiq import Actor, Broker, Message
    from dramatiq.worker import Worker

    from ..checks import Problem, Setup
    from ..delivery import Delivery
    from ..idempotency.plan import Plan
    from ..stores.idempotency import IdempotencyStore

__all__ = ["IdempotencyGuard"]


class IdempotencyGuard(GuardMiddleware):
    """Guards the actors that have an ``idempotency_key=`` or ``idempotent=True``.

    Actors have options of the same names as the arguments, and besides ``idempotency_key`` (a callable, a list of
    parameter names, or a template like ``"order:{order_id}"``), ``scope``, ``fingerprint`` (the parameters that a
    second use of a key must repeat; all by default) and ``remember_failures`` (errors that are final answers).

    Parameters:
      store(IdempotencyStore): Where keys are kept, e.g. ``connect("postgresql://…").idempotency``.
      mode(str): ``lease``, ``atomic`` or ``inbox``: what `idempotent=True` means.
      namespace(str): What tells the keys of one application or tenant from those of others in the same store.
      lease(int | timedelta): Milliseconds for which a key is held without a sign of life.
      retention(int | timedelta): Milliseconds for which a key is remembered after its last claim; by default as long as
        a copy of a message may sleep, and a day at least.
      store_wait(int | timedelta): Milliseconds for which a store that is out is asked again before the message waits
        elsewhere.
      max_result(int): How many bytes of a result are kept.
      on_missing_key(str): ``error``: the dead letter ``missing_key``; ``message``: guard it by its id; ``unguarded``.
      on_busy(str): ``requeue``: put off; ``wait``: keep the thread for up to ten seconds first; ``skip``: drop the
        duplicate, whose work is lost if the other run fails; ``fail``: a dead letter.  Messages guarded by their id are
        always put off.
      on_crash(str | Callable): What is done about a key whose run died: ``rerun``, ``park``, or a function of the
        delivery that returns `Done`, `NotDone` or `Unknown` of `dramatiq_guard.reconcile`.
      on_store_error(str): ``defer``: the message waits for the store; ``run``: it runs unguarded.
      allow_eviction(bool): Accept a Redis that drops keys when its memory is full.

    Raises:
      SetupError: When an argument is of the wrong type or out of range; names it.

    Example:
      >>> IdempotencyGuard(stores.idempotency, lease=15_000)
    """

    place: ClassVar[int] = 5

    def __init__(
        self,
        store: IdempotencyStore,
        *,
        mode: str = "lease",
        namespace: str = "default",
        lease: int | timedelta = 30_000,
        retention: int | timedelta | None = None,
        store_wait: int | timedelta = 2_000,
        max_result: int = 65_536,
        on_missing_key: str = "error",
        on_busy: str = "requeue",
        on_crash: str | Callable[[Delivery], Done | NotDone | Unknown] = "rerun",
        on_store_error: str = "defer",
        allow_eviction: bool = False,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        if not hasattr(store, "claim") or not hasattr(store, "complete"):
            raise SetupError(
                "IdempotencyGuard: store must keep idempotency keys, e.g. connect('redis://…').idempotency, not "
                f"{store!r}"
            )
        self.store = store
        self.transactional = isinstance(store, TransactionalStore)
        self.engine = getattr(store, "engine", type(store).__name__)
        try:
            if mode not in MODES:
                raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
            if mode != "lease" and not self.transactional:
                raise ValueError(f"mode={mode!r} needs a store on PostgreSQL: connect('postgresql://…').idempotency")
            if not isinstance(namespace, str) or not namespace:
                raise TypeError(f"namespace must be a name, not {namespace!r}")
            check_on_crash(on_crash)
            self.mode = mode
            self.namespace = namespace
            self.lease = checked_lease(lease)
            self.retention = None if retention is None else milliseconds(retention, "retention")
            self.store_wait = milliseconds(store_wait, "store_wait")
            self.max_result = checked_size(max_result)
            self.on_missing_key = checked_choice("on_missing_key", on_missing_key)
            self.on_busy = checked_choice("on_busy", on_busy)
            self.on_crash = on_crash
            self.on_store_error = checked_choice("on_store_error", on_store_error)
        except (TypeError, ValueError) as error:
            raise SetupError(f"IdempotencyGuard: {error}") from error
        self.allow_eviction = allow_eviction
        self.plans: dict[str, Plan] = {}
        self._overslept: set[str] = set()
        self.keyring = Keyring(store)

    @property
    def actor_options(self) -> set[str]:
        return set(OPTIONS)

    # -- set-up --------------------------------------------------------------------------------------------------------

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().before_declare_actor(broker, actor)
        # Here, where an error stops the declaration: after it Dramatiq swallows them.
        self._plan(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().after_declare_actor(broker, actor)
        if actor.actor_name not in self.plans:
            # It was declared before this middleware was added.
            self._plan(actor)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        self.keyring.boot()
        leases = [plan.lease for plan in self.plans.values() if plan.mode != "inbox"]
        if leases:
            self.keyring.leases.start(stack_of(broker).interrupts, min(leases))

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        # Not before: the actors that still run need their leases.
        self.keyring.leases.close()
        super().after_worker_shutdown(broker, worker)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Say once of an actor that a message of it sleeps for longer than its key is remembered."""
        if not delay or message.actor_name in self._overslept:
            return
        plan, actor = self.plans.get(message.actor_name), broker.actors.get(message.actor_name)
        by_its_id = plan is not None and plan.source is None and not message.options.get("idempotency_key")
        if plan is None or actor is None or by_its_id:
            return
        decider = next((each for each in broker.middleware if hasattr(each, "decide")), None)
        retention = retention_of(plan, actor.options, decider)
        if delay > retention:
            self._overslept.add(message.actor_name)
            self.logger.warning(
                "Message %r of actor %r is delayed by %d ms, and its key is remembered for %d ms: if the same work is "
                "done meanwhile, that is forgotten by then, and it is done again. Give the actor a retention above its "
                "longest delay (said once).",
                message.message_id,
                message.actor_name,
                delay,
                retention,
            )

    def problems(self, setup: Setup) -> Iterator[Problem]:
        """What is wrong with the set-up of this guard."""
        return problems_of(self, setup)

    def _plan(self, actor: Actor[Any, Any]) -> None:
        self.plans.pop(actor.actor_name, None)
        plan = plan_for(actor, self)
        if plan is not None:
            self.plans[actor.actor_name] = plan

    # -- the layer -----------------------------------------------------------------------------------------------------

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Claim, run or replay, complete or give back."""
        carrier = delivery.options.get(CARRIER)
        if carrier and UNIQUE in carrier:
            let_go(self.store, delivery)
        plan = self.plans.get(delivery.actor_name)
        made = None if plan is None else plan.key_of(delivery)
        if plan is None or made is None:
            return proceed()
        key, business = made
        if plan.mode == "inbox":
            answer = run_in_inbox(self.keyring, plan, delivery, key, business=business, proceed=proceed)
            if answer is None:
                return delivery.claim.result
            if answer.answer != DONE:
                refuse(plan, delivery, key, answer, business=business)
            delivery.claim = Claimed(key, plan, self.store, answer, None, 0)
            return replay(self.keyring, plan, delivery, answer, key, self.plans)
        delivery.claim = claimed = claim(self.keyring, plan, delivery, key, business=business)
        if claimed.claim.answer == DONE:
            return replay(self.keyring, plan, delivery, claimed.claim, key, self.plans)
        if claimed.store is None:
            return proceed()
        if plan.mode == "atomic":
            claimed.announce = partial(begin_to_tell, self.keyring, delivery)
        self.keyring.leases.hold(claimed)
        try:
            reach("after-claim")
            done = _reconciled(plan, delivery, claimed) if claimed.is_takeover else None
            result = proceed() if done is None else done.result
        except BaseException as error:
            give_back(self.keyring, delivery, claimed, error)
            raise
        return complete(self.keyring, delivery, claimed, result)

    def note(self, delivery: Delivery) -> None:
        """Owe what comes last at the end of a message: the mark for its duplicates, and the name it was unique by."""
        owe_marker(self.keyring, delivery)
        owe_letting_go(self.store, delivery)


def _reconciled(plan: Plan, delivery: Delivery, claimed: Claimed) -> Done | None:
    """What a reconciliation found out about a run that died; ``None`` if this one is to go on."""
    if not callable(plan.on_crash):
        return None
    found = call_interruptibly(delivery.interrupts, plan.on_crash, (delivery,), {})
    if isinstance(found, Unknown):
        claimed.park("an earlier run died, and its reconciliation cannot tell")
    if not isinstance(found, Done | NotDone):
        raise Permanent(f"on_crash of actor {plan.actor!r} must return Done(…), NotDone() or Unknown(), not {found!r}")
    return found if isinstance(found, Done) else None

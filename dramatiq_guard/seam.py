"""The one wrapper around a user's function, and the around layers that middlewares contribute.

Dramatiq has hooks before and after, none around.  What a worker calls is ``actor.fn`` (H16), so that is where the seam
sits: set once when the actor is declared, marked on the function, finding the layers through the current delivery and
never by closure, since one function may be declared on two brokers.

The life of a call:

1. No current delivery (a direct call, a test, an eager broker), or one whose function has been entered already (a
   nested or recursive call): just call.
2. Otherwise the layers run, outermost first; the innermost one arms the interrupts around the function alone.
3. What comes back is a result, or an error that the deciding middleware looks at: one that counts as an attempt goes
   on as it is, a deferral or an interruption leaves by the skip path, so that no failure callback fires and no result
   is overwritten.

This module must not know any middleware, store or broker.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq.middleware import SkipMessage

from .async_actors import spare_the_loop
from .delivery import Delivery, peek
from .errors import PutOff
from .interrupts import Run, call_interruptibly
from .policy.decision import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .interrupts import Interrupts
    from .policy.decision import Decision

__all__ = ["Around", "Decider", "Seam", "wrap"]

#: Marks a function that is a seam already.
_MARK = "__dramatiq_guard_seam__"


class Around(Protocol):
    """A layer around the user's function: calls `proceed` once or not at all, and returns what the actor returns."""

    def __call__(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any: ...


class Decider(Protocol):
    """Says what is to be done about an error; total, and the same answer for the same delivery."""

    def decide(self, delivery: Delivery, error: BaseException) -> Decision: ...


class Seam:
    """The layers of one broker's stack, put together when its worker boots.

    Parameters:
      layers(tuple[Around, ...]): Outermost first.
      decider(Decider | None): Who decides what an error leads to; without one, every error goes on as it is.
      interrupts(Interrupts): Who may interrupt the function.
      arm(Callable[[Delivery], Run]): Says what may interrupt this delivery.
      admit(Callable[[Delivery], bool]): Says whether this copy of the message may run at all.
    """

    def __init__(
        self,
        layers: tuple[Around, ...],
        decider: Decider | None,
        interrupts: Interrupts,
        arm: Callable[[Delivery], Run],
        admit: Callable[[Delivery], bool] = lambda _: True,
    ) -> None:
        self.layers = layers
        self.decider = decider
        self.interrupts = interrupts
        self.arm = arm
        self.admit = admit

    def run(self, delivery: Delivery, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's function for a delivery, inside every layer."""
        if not self.admit(delivery):
            delivery.skipped = True
            delivery.message.options["store_results"] = False
            raise SkipMessage("another copy of this message has taken its place")
        delivery.entered = True
        delivery.interrupts = run = self.arm(delivery)

        def proceed() -> Any:
            return call_interruptibly(run, function, args, kwargs)

        for layer in reversed(self.layers):
            proceed = functools.partial(layer, delivery, proceed)

        try:
            result = proceed()
        except BaseException as error:
            self._leave(delivery, error)
            raise
        delivery.result = result
        delivery.returned = True
        return result

    def _leave(self, delivery: Delivery, error: BaseException) -> None:
        """Raise `PutOff` in place of an error that counts as no attempt."""
        if isinstance(error, SkipMessage):
            delivery.skipped = True
            return
        if self.decider is None:
            return
        decision = self.decider.decide(delivery, error)
        if decision.step in (Step.DEFER, Step.REQUEUE):
            # Only in memory: Results would overwrite a stored result with None (H7).  The copy is made of the options
            # as they were decoded, so this never travels.
            delivery.message.options["store_results"] = False
            raise PutOff(decision.why) from error


def wrap(actor: Actor[Any, Any]) -> None:
    """Put the seam on an actor's function, once."""
    function = actor.fn
    if getattr(function, _MARK, False):
        return
    function = spare_the_loop(function)
    actor_name = actor.actor_name

    @functools.wraps(function)
    def seam(*args: Any, **kwargs: Any) -> Any:
        delivery = peek()
        if delivery is None or delivery.entered or delivery.consumer is None or delivery.actor_name != actor_name:
            return function(*args, **kwargs)
        return delivery.stack.seam.run(delivery, function, args, kwargs)

    setattr(seam, _MARK, True)
    actor.fn = seam

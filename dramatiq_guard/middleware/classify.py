"""Classify: what an error means, at the moment it is caught.

The life of a message in it:

1. The actor raises; the error passes the layer on its way out.
2. The actor's own rules (`classify=`) are asked, then the middleware's, then the built-in table, then the error's
   causes; the nearest class wins.
3. The verdict is written on the delivery.  What is done about it is for JitterBackoff to decide.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from dramatiq.logging import get_logger

from .. import clock, telemetry
from ..errors import SetupError
from ..policy.rules import Rules, compile_rules
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dramatiq import Actor, Broker

    from ..delivery import Delivery
    from ..policy.verdict import Verdict

__all__ = ["Classify"]


class Classify(GuardMiddleware):
    """Gives each error a verdict: retryable, permanent, fatal, not now.

    Every entry of a list is an exception class, a qualified class name in a string (nothing is imported for it), a
    predicate on the error, or a pair of one of these and its own limits, as in
    ``(RateLimited, {"max_retries": 3, "backoff": [60_000, 300_000]})``.

    Parameters:
      permanent(Iterable): Errors that trying again cannot help.
      retryable(Iterable): Errors that trying again may help.
      fatal(Iterable): Errors after which the process must be replaced.
      defer_on(Iterable): Errors that mean "not now", such as `dramatiq.RateLimitExceeded`; no attempt is counted.
      builtin(bool): Whether the built-in table is asked; see docs/classification.md for what is in it.

    Raises:
      SetupError: When an entry is none of these; names the entry.

    Example:
      >>> Classify(permanent=[CardDeclined], retryable=["stripe.RateLimitError"])
    """

    place: ClassVar[int] = 7

    def __init__(
        self,
        *,
        permanent: Iterable[Any] = (),
        retryable: Iterable[Any] = (),
        fatal: Iterable[Any] = (),
        defer_on: Iterable[Any] = (),
        builtin: bool = True,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        self.builtin = builtin
        try:
            self.own = compile_rules(
                origin="middleware", permanent=permanent, retryable=retryable, fatal=fatal, defer=defer_on
            )
        except (TypeError, ValueError) as error:
            raise SetupError(f"Classify: {error}") from error
        self.rules = Rules((self.own,), builtin=builtin)
        self._by_actor: dict[str, Rules] = {}

    @property
    def actor_options(self) -> set[str]:
        return {"classify"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().before_declare_actor(broker, actor)
        # Here, where an error stops the declaration: after it Dramatiq swallows them.
        self._compile(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().after_declare_actor(broker, actor)
        if actor.actor_name not in self._by_actor:
            # It was declared before this middleware was added.
            self._compile(actor)

    def _compile(self, actor: Actor[Any, Any]) -> None:
        self._by_actor.pop(actor.actor_name, None)
        own = actor.options.get("classify")
        if own is None:
            return
        if not isinstance(own, dict) or not own.keys() <= {"permanent", "retryable", "fatal", "defer_on"}:
            raise SetupError(
                f"Actor {actor.actor_name!r}: classify must be a dict of lists under permanent, retryable, fatal or "
                f"defer_on, not {own!r}"
            )
        try:
            rules = compile_rules(
                origin="actor",
                permanent=own.get("permanent", ()),
                retryable=own.get("retryable", ()),
                fatal=own.get("fatal", ()),
                defer=own.get("defer_on", ()),
            )
        except (TypeError, ValueError) as error:
            raise SetupError(f"Actor {actor.actor_name!r}: classify: {error}") from error
        self._by_actor[actor.actor_name] = Rules((rules, self.own), builtin=self.builtin)

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Let the error pass, and write its verdict on the delivery."""
        try:
            return proceed()
        except BaseException as error:
            self.verdict(delivery, error)
            raise

    def verdict(self, delivery: Delivery, error: BaseException) -> Verdict:
        """The verdict on an error, written on the delivery; the first one stays.

        Parameters:
          delivery(Delivery): The delivery that met the error.
          error(BaseException): The error, from the actor or from another middleware's hook.

        Returns:
          Verdict: What it means; never raises.
        """
        if delivery.verdict is not None:
            return delivery.verdict
        rules = self._by_actor.get(delivery.actor_name, self.rules)
        verdict = rules.classify(
            error,
            call_does_not_fit=type(error) is TypeError and _does_not_fit(delivery),
            now_ms=clock.now(),
        )
        delivery.verdict = verdict
        if verdict.rule.endswith("predicate-raised"):
            self.logger.error("Classifying %r of message %r: %s", type(error), delivery.message_id, verdict.why)
        telemetry.classified(
            verdict=verdict.kind.value, rule=verdict.rule, why=verdict.why, error_type=type(error).__qualname__
        )
        return verdict


def _does_not_fit(delivery: Delivery) -> bool:
    """Whether the message's arguments do not fit the actor's signature, so that no attempt can ever succeed."""
    message = delivery.message
    try:
        function = delivery.stack.broker.get_actor(message.actor_name).fn
        inspect.signature(function).bind(*message.args, **message.kwargs)
    except TypeError:
        return True
    except Exception:  # noqa: BLE001 - no signature to be had: then it is an error like any other
        return False
    return False

"""What else a message's end owes: callbacks, the next stage of a pipeline, the completion of a group, the result.

Dramatiq's own middlewares do this in hooks whose errors are swallowed, so that a hiccup of the broker or the result
backend loses it.  Their instances stay in the broker's list, since Dramatiq looks for them by class identity
(``type(m) is Results``) and users place others before and after them; only what their hooks do is replaced: they note
what is owed, and the settle barrier does it, each part once.

A delivery without a consumer (an eager broker) has no barrier: there the hooks do what they always did.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dramatiq import Message
from dramatiq.middleware import Callbacks, GroupCallbacks, Pipelines
from dramatiq.rate_limits import Barrier
from dramatiq.results import Results

from ..delivery import Due, delivery_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker
    from dramatiq.broker import MessageProxy

    from ..delivery import Delivery

__all__ = ["FollowUps"]

_TAKEN_OVER: Final = "_dramatiq_guard_taken_over"


class FollowUps:
    """Takes over the hooks of Dramatiq's own middlewares of one broker; subclasses of users keep their own way.

    Parameters:
      broker(Broker): The broker whose middlewares are looked through.
    """

    def __init__(self, broker: Broker) -> None:
        self._results: list[Results] = []
        for middleware in broker.middleware:
            kind = type(middleware)
            if kind is Results:
                self._results.append(middleware)  # type: ignore[arg-type]
            if middleware.__dict__.get(_TAKEN_OVER):
                continue
            if kind is Callbacks:
                self._take_over(middleware, after_process_message=_callback)
            elif kind is Pipelines:
                self._take_over(middleware, after_process_message=_next_stage)
            elif kind is GroupCallbacks:
                self._take_over(middleware, after_process_message=_group_member)
            elif kind is Results:
                self._take_over(
                    middleware, after_process_message=_result, after_skip_message=_skipped, after_nack=_nothing
                )

    def note(self, delivery: Delivery) -> None:
        """Owe the stored exception of a message that failed; Dramatiq stores it after the nack, when it may be late."""
        message = delivery.message
        if not message.failed:
            return
        # Failed by a middleware without an error, it went through the hooks of a success: that is not its result.
        delivery.dues[:] = [due for due in delivery.dues if due.done or due.name != "result"]
        for results in self._results:
            store, ttl = results._lookup_options(delivery.stack.broker, message)
            if store:
                error = delivery.error or message._exception or Exception("unknown")
                _owe(delivery, "result", partial(results.backend.store_exception, message, error, ttl))

    @staticmethod
    def _take_over(middleware: Any, **hooks: Callable[..., None]) -> None:
        for name, hook in hooks.items():
            original = getattr(middleware, name)

            def taken(
                broker: Broker,
                message: MessageProxy,
                *,
                _hook: Callable[..., None] = hook,
                _original: Callable[..., None] = original,
                **outcome: Any,
            ) -> None:
                delivery = delivery_of(message)
                if delivery.consumer is None:
                    _original(broker, message, **outcome)
                elif outcome.get("exception") is not None and delivery.returned:
                    # An interrupt tore a hook of a message that had succeeded, and the chain runs again as if it had
                    # failed (H4).  What its success owes is owed still.
                    _hook(middleware, broker, message, delivery, result=delivery.result)
                else:
                    _hook(middleware, broker, message, delivery, **outcome)

            setattr(middleware, name, taken)
        setattr(middleware, _TAKEN_OVER, True)


def _owe(delivery: Delivery, name: str, perform: Callable[[], Any], message: Message[Any] | None = None) -> None:
    """Owe something once, however often the hook runs."""
    if not any(due.name == name for due in delivery.dues):
        delivery.dues.append(Due(name, perform, message))


def _owe_message(delivery: Delivery, name: str, message: Message[Any], delay: int | None = None) -> None:
    consumer: Any = delivery.consumer
    _owe(delivery, name, partial(consumer.send, delivery, name, message, delay), message)


def _snapshot(message: MessageProxy) -> dict[str, Any]:
    """The message as a callback is told of it, as it is now."""
    return {**message._message.asdict(), "options": dict(message.options)}


def _callback(
    _: Callbacks,
    broker: Broker,
    message: MessageProxy,
    delivery: Delivery,
    *,
    result: Any = None,
    exception: BaseException | None = None,
) -> None:
    if exception is not None and delivery.replayed:
        return  # whoever was to be told of this failure has been
    name = "on_success" if exception is None else "on_failure"
    target = message.options.get(name) or broker.get_actor(message.actor_name).options.get(name)
    if not target:
        return
    told = result if exception is None else {"type": type(exception).__name__, "message": _text(exception)}
    actor = broker.get_actor(target)
    callback: Message[Any] = actor.message(_snapshot(message), told)
    _owe_message(delivery, name, callback)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001 - the user's __str__ may raise anything, and somebody waits to be told
        return f"[no text: its __str__ raised {type(failure).__name__}]"


def _next_stage(
    _: Pipelines,
    broker: Broker,
    message: MessageProxy,
    delivery: Delivery,
    *,
    result: Any = None,
    exception: BaseException | None = None,
) -> None:
    data = message.options.get("pipe_target")
    if exception is not None or message.failed or data is None:
        return
    stage: Message[Any] = Message(**data)
    ignore = stage.options.get("pipe_ignore") or broker.get_actor(message.actor_name).options.get("pipe_ignore")
    if not ignore:
        stage = stage.copy(args=(*stage.args, result))
    _owe_message(delivery, "pipeline", stage, stage.options.get("delay"))


def _group_member(
    group: GroupCallbacks,
    broker: Broker,  # noqa: ARG001 - the hook's signature
    message: MessageProxy,
    delivery: Delivery,
    *,
    result: Any = None,  # noqa: ARG001 - the hook's signature
    exception: BaseException | None = None,
) -> None:
    uuid = message.options.get("group_completion_uuid")
    callbacks = message.options.get("group_completion_callbacks")
    if exception is not None or not uuid or not callbacks:
        return
    arrival = _Arrival(group, delivery, uuid, callbacks)
    _owe(delivery, "group", arrival.perform)


class _Arrival:
    """A group member's arrival: counted once, and the callbacks sent once, however often it is tried."""

    def __init__(self, group: GroupCallbacks, delivery: Delivery, uuid: str, callbacks: list[Any]) -> None:
        self.barrier = Barrier(group.rate_limiter_backend, uuid, ttl=group.barrier_ttl)
        self.delivery = delivery
        self.consumer: Any = delivery.consumer
        self.completes: bool | None = None
        self.noted = False
        self.left = list(callbacks)

    def perform(self) -> None:
        if self.completes is None:
            # A worker that was killed before its ack may have counted this member already; once more, and the group
            # would be complete without another.
            noted = self.consumer.noted(self.delivery)
            self.noted = not noted.isdisjoint(("group-counted", "group-complete"))
            self.completes = "group-complete" in noted if self.noted else self.barrier.wait(block=False)
        if not self.noted:
            self.consumer.note(self.delivery, "group-complete" if self.completes else "group-counted")
            self.noted = True
        while self.completes and self.left:
            self.consumer.send(self.delivery, f"group-{len(self.left)}", Message(**self.left[0]))
            self.left.pop(0)


def _result(
    results: Results,
    broker: Broker,
    message: MessageProxy,
    delivery: Delivery,
    *,
    result: Any = None,
    exception: BaseException | None = None,
) -> None:
    store, ttl = results._lookup_options(broker, message)
    if store and exception is None:
        _owe(delivery, "result", lambda: results.backend.store_result(message, result, ttl))
    if not store and result is not None and message.options.get("pipe_target") is None:
        results.logger.warning(
            "Actor '%s' returned a value that is not None, but you haven't set its `store_results' option to `True' so "
            "the value has been discarded.",
            message.actor_name,
        )


def _skipped(results: Results, broker: Broker, message: MessageProxy, delivery: Delivery) -> None:
    store, ttl = results._lookup_options(broker, message)
    if store and not message.failed:
        _owe(delivery, "result", lambda: results.backend.store_result(message, None, ttl))


def _nothing(_: Results, broker: Broker, message: MessageProxy, delivery: Delivery) -> None:
    """Nothing: the exception was stored at the barrier, before the nack."""

"""Dramatiq's own TimeLimit and ShutdownNotifications, with the same options, interrupting the user's function only.

The stock ones are armed from before the first hook until after the last one, so that their asynchronous exceptions
land in other middlewares' hooks: the worker thread dies, or a message that succeeded is run again (H4).  The
substitutes stand in the same places of the middleware list and leave the arming to the seam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq.logging import get_logger
from dramatiq.middleware import ShutdownNotifications, TimeLimit

from . import host
from .interrupts import Interrupts, gevent_notifier

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker
    from dramatiq.worker import Worker

__all__ = ["SeamShutdownNotifications", "SeamTimeLimit", "substitute"]


class SeamTimeLimit(TimeLimit):
    """A TimeLimit that the seam arms around the user's function.

    Parameters:
      stock(TimeLimit): The one it stands in for.
    """

    def __init__(self, stock: TimeLimit) -> None:
        self.logger = stock.logger
        self.time_limit = stock.time_limit
        self.manager = stock.manager

    @property
    def interval(self) -> int:
        """How often, in milliseconds, deadlines are looked at."""
        return int(getattr(self.manager, "interval", 1.0) * 1000)

    def after_process_boot(self, broker: Broker) -> None:
        """Nothing: the seam's own watch starts when the worker boots."""

    def before_process_message(self, broker: Broker, message: Any) -> None:
        """Nothing: the seam arms the limit."""

    def after_process_message(self, broker: Broker, message: Any, *, result: Any = None, exception: Any = None) -> None:
        """Nothing: the seam has disarmed the limit."""

    def after_skip_message(self, broker: Broker, message: Any, *, result: Any = None, exception: Any = None) -> None:
        """Nothing: the seam has disarmed the limit."""


class SeamShutdownNotifications(ShutdownNotifications):
    """A ShutdownNotifications that the seam arms around the user's function.

    Parameters:
      stock(ShutdownNotifications): The one it stands in for.
    """

    def __init__(self, stock: ShutdownNotifications) -> None:
        self.logger = stock.logger
        self.notify_shutdown = stock.notify_shutdown
        self.manager = stock.manager
        self.interrupts: Interrupts | None = None
        #: Ends the taking of messages.
        self.shut_down: Callable[[], None] | None = None

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Interrupt the runs that asked for it, once nothing more is taken: what they give back must not come here."""
        if self.shut_down is not None:
            self.shut_down()
        self.logger.debug("Sending shutdown notification to worker threads...")
        if self.interrupts is not None:
            self.interrupts.shutdown()

    def before_process_message(self, broker: Broker, message: Any) -> None:
        """Nothing: the seam arms the notification."""

    def after_process_message(self, broker: Broker, message: Any, *, result: Any = None, exception: Any = None) -> None:
        """Nothing: the seam has disarmed the notification."""

    def after_skip_message(self, broker: Broker, message: Any, *, result: Any = None, exception: Any = None) -> None:
        """Nothing: the seam has disarmed the notification."""


def substitute(broker: Broker) -> tuple[Interrupts, SeamTimeLimit | None, SeamShutdownNotifications | None]:
    """Put the substitutes in the places of the stock middlewares; subclasses of users stay as they are.

    Returns:
      tuple: The interrupts of this worker, and the two substitutes where the broker has them.
    """
    time_limit: SeamTimeLimit | None = None
    notifications: SeamShutdownNotifications | None = None
    for index, middleware in enumerate(broker.middleware):
        if type(middleware) is TimeLimit:
            middleware = broker.middleware[index] = SeamTimeLimit(middleware)  # noqa: PLW2901
        elif type(middleware) is ShutdownNotifications:
            middleware = broker.middleware[index] = SeamShutdownNotifications(middleware)  # noqa: PLW2901
        elif isinstance(middleware, TimeLimit | ShutdownNotifications) and not isinstance(
            middleware, SeamTimeLimit | SeamShutdownNotifications
        ):
            get_logger("dramatiq_guard", "substitutes").warning(
                "%r is a subclass of Dramatiq's and keeps its own way: its interrupts may land in hooks.", middleware
            )
        if isinstance(middleware, SeamTimeLimit):
            time_limit = middleware
        elif isinstance(middleware, SeamShutdownNotifications):
            notifications = middleware
    gevent = host.is_gevent_active()
    interrupts = Interrupts(
        interval=time_limit.interval if time_limit is not None else 1000,
        gevent_timer=time_limit.manager if gevent and time_limit is not None else None,
        gevent_notifier=gevent_notifier() if gevent else None,
    )
    if notifications is not None:
        notifications.interrupts = interrupts
    return interrupts, time_limit, notifications

"""The one place where the demo's processes differ: the broker with the stack on it, or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries, default_middleware

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["HEARTBEAT_TIMEOUT", "wire"]

#: Milliseconds after which a silent worker counts as dead; short, so that the demo need not wait a minute for it.
HEARTBEAT_TIMEOUT: Final = 3_000

#: The same patience for both, and short, so that the demo is: the first retry comes after about 200 ms.
_PATIENCE: Final[dict[str, Any]] = {"max_retries": 5, "min_backoff": 200, "max_backoff": 1_000}


def wire(settings: Settings) -> RedisBroker:
    """Make the broker, put the stack on it where it is wanted, and make it the global one.

    Parameters:
      settings(Settings): Where everything is.

    Returns:
      RedisBroker: The broker.
    """
    stock = [kind() for kind in default_middleware if kind is not Retries]
    broker: RedisBroker = RedisBroker(
        url=settings.broker, heartbeat_timeout=HEARTBEAT_TIMEOUT, middleware=[*stock, Retries(**_PATIENCE)]
    )
    if not settings.stock:
        _add_stack(broker, settings)
    dramatiq.set_broker(broker)
    return broker


def _add_stack(broker: RedisBroker, settings: Settings) -> None:
    from dramatiq_guard import Classify, DeadLetter, JitterBackoff, configure_telemetry, connect, install

    if settings.collector:
        configure_telemetry(endpoint=settings.collector)
    install(
        broker,
        Classify(),
        JitterBackoff(**_PATIENCE),
        DeadLetter(connect(settings.broker).dead_letters),
    )

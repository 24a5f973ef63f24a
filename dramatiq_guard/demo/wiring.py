"""The one place where the demo's processes differ: the broker with the stack on it, or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dramatiq
from dramatiq.brokers.redis import RedisBroker

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["HEARTBEAT_TIMEOUT", "wire"]

#: Milliseconds after which a silent worker counts as dead; short, so that the demo need not wait a minute for it.
HEARTBEAT_TIMEOUT: Final = 3_000


def wire(settings: Settings) -> RedisBroker:
    """Make the broker, put the stack on it where it is wanted, and make it the global one.

    Parameters:
      settings(Settings): Where everything is.

    Returns:
      RedisBroker: The broker.
    """
    broker = RedisBroker(url=settings.broker, heartbeat_timeout=HEARTBEAT_TIMEOUT)
    if not settings.stock:
        _add_stack(broker, settings)
    dramatiq.set_broker(broker)
    return broker


def _add_stack(broker: RedisBroker, settings: Settings) -> None:
    raise NotImplementedError

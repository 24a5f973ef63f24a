"""Waiting, at boot, until the broker and the stores answer.

A worker whose broker is down boots all the same and says once a second that a consumer met an error; one whose store is
down takes messages up that it cannot guard.  Here it waits instead, says for what, and leaves as soon as it is told to
stop.  What answers, and is not set up, stops the boot.

This module must not know any middleware or concrete store.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger

from .. import clock, host
from ..boot_log import say
from ..checks import guards_of
from ..errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Broker

__all__ = ["wait_for_servers"]

#: How long, in milliseconds, between two tries, and between two lines of the log.
_EVERY: Final = 500
_SAY_EVERY: Final = 5_000

#: Where middlewares keep their stores.
_NAMES: Final = ("store", "deliveries")

#: Never set: waiting for it is sleeping on our clock.
_NEVER: Final = threading.Event()


def wait_for_servers(broker: Broker, given_up: Callable[[], bool]) -> bool:
    """Wait until the broker and every store of its middlewares have answered once.

    Parameters:
      broker(Broker): The broker.
      given_up(Callable[[], bool]): Whether nobody shall wait any more, since the process ends.

    Returns:
      bool: Whether they have; not if the process ends meanwhile.

    Raises:
      SetupError: A store answers, and is not set up.
    """
    logger = get_logger("dramatiq_guard", "boot_wait")
    said_at: int | None = None
    for what, ping in _servers(broker):
        while not given_up():
            try:
                ping()
            except SetupError:
                raise
            except Exception as error:  # noqa: BLE001 - a client's, whichever it is
                if said_at is None or clock.monotonic() - said_at >= _SAY_EVERY:
                    said_at = clock.monotonic()
                    text = f"This worker process waits for {what}, and takes nothing up meanwhile: {error}"
                    say(logger, logging.WARNING, text)
            else:
                break
            # A signal cuts no wait short: its handler runs, and the wait goes on.
            clock.wait(_NEVER, _EVERY)
    if given_up():
        return False
    if said_at is not None:
        logger.info("All servers answer; this worker process goes on.")
    return True


def _servers(broker: Broker) -> Iterator[tuple[str, Callable[[], object]]]:
    ping = _ping_of(broker)
    if ping is not None:
        yield "its broker", ping
    seen: list[object] = []
    for middleware in guards_of(broker):
        for name in _NAMES:
            store: Any = getattr(middleware, name, None)
            if store is not None and hasattr(store, "ping") and not any(store is each for each in seen):
                seen.append(store)
                yield f"the store of {type(middleware).__name__} ({store!r})", store.ping


def _ping_of(broker: Any) -> Callable[[], object] | None:
    kind = host.kind_of(broker)
    if kind == "redis":
        ping: Callable[[], object] = broker.client.ping
        return ping
    if kind == "rabbitmq":
        import pika

        return lambda: pika.BlockingConnection(parameters=broker.parameters).close()
    return None

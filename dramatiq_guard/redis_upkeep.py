"""The upkeep of a Redis broker by each worker process: its heartbeat, and the return of dead workers' messages.

Dramatiq writes the heartbeat with every command and looks for dead workers on one command in a thousand, so that a
silent consumer looks dead and a dead worker's messages come back after 97 seconds to 28 minutes.  Here a thread does
both, whatever the consumers do, until the worker has shut down.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from dramatiq.common import dq_name
from dramatiq.logging import get_logger

from . import clock, host

__all__ = ["RedisUpkeep"]

#: How often, in milliseconds; more often where the broker's heartbeat timeout is short.
_EVERY: Final = 5_000


class RedisUpkeep:
    """Keeps a worker process's heartbeat, and reclaims what dead ones held.

    Parameters:
      broker(Broker): A RedisBroker.
    """

    def __init__(self, broker: Any) -> None:
        self.logger = get_logger("dramatiq_guard", "redis_upkeep")
        self.broker = broker
        self.every = max(50, min(_EVERY, self.broker.heartbeat_timeout // 4))
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, after the fork."""
        self._thread = threading.Thread(target=self._run, name="dramatiq-guard-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; the worker has shut down."""
        self._closed.set()

    def _run(self) -> None:
        complained = False
        while not clock.wait(self._closed, self.every):
            try:
                for queue_name in self.broker.get_declared_queues():
                    host.redis_maintain(self.broker, queue_name)
                    host.redis_maintain(self.broker, dq_name(queue_name))
                complained = False
            except Exception as error:  # noqa: BLE001 - the next round tries again, whatever it was
                if not complained:
                    self.logger.warning("Redis does not take the heartbeat (%s); it goes on trying.", error)
                complained = True

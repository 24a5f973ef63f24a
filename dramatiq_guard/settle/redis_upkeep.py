"""The upkeep of a Redis broker by each worker process: its heartbeat, and the return of dead workers' messages.

Dramatiq writes the heartbeat with every command and looks for dead workers on one command in a thousand, so that a
silent consumer looks dead and a dead worker's messages come back after 97 seconds to 28 minutes.  Here a thread does
both, whatever the consumers do, until the worker has shut down.

After an outage everybody's heartbeat is old, and who looks first would take the jobs of the living for those of the
dead and have them run twice.  So nobody is looked for until this process has been in touch with Redis for a while.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from dramatiq.common import dq_name
from dramatiq.logging import get_logger

from .. import clock, host

__all__ = ["RedisUpkeep"]

#: How often, in milliseconds; more often where the broker's heartbeat timeout is short.
_EVERY: Final = 5_000

#: How long, in milliseconds, Redis must have been in reach before others are taken for dead; long enough for those who
#: live to have said so.  Never more than the heartbeat timeout.
_IN_TOUCH: Final = 10_000


class RedisUpkeep:
    """Keeps a worker process's heartbeat, and reclaims what dead ones held.

    Parameters:
      broker(Broker): A RedisBroker.
    """

    def __init__(self, broker: Any) -> None:
        self.logger = get_logger("dramatiq_guard", "redis_upkeep")
        self.broker = broker
        self.every = max(50, min(_EVERY, self.broker.heartbeat_timeout // 4))
        self.in_touch = min(_IN_TOUCH, self.broker.heartbeat_timeout)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, after the fork."""
        # Dramatiq's own look-out, on one command in a thousand, knows nothing of outages.
        self.broker.maintenance_chance = 0
        self._thread = threading.Thread(target=self._run, name="dramatiq-guard-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; the worker has shut down."""
        self._closed.set()

    def _run(self) -> None:
        complained = False
        since: int | None = None
        latest = 0
        while not clock.wait(self._closed, self.every):
            began = clock.monotonic()
            if since is not None and began - latest > 2 * self.every:
                since = None  # this process itself was frozen
            try:
                reclaiming = since is not None and began - since >= self.in_touch
                for queue_name in self.broker.get_declared_queues():
                    for name in (queue_name, dq_name(queue_name)):
                        host.redis_maintain(self.broker, name, reclaiming=reclaiming)
                latest = clock.monotonic()
                since = latest if since is None else since
                complained = False
            except Exception as error:  # noqa: BLE001 - the next round tries again, whatever it was
                since = None
                if not complained:
                    self.logger.warning("Redis does not take the heartbeat (%s); it goes on trying.", error)
                complained = True

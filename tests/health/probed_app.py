"""An application whose worker processes answer probes, for `dramatiq tests.health.probed_app`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from dramatiq_guard import Classify, install
from dramatiq_guard.probing import probe_files, probes
from dramatiq_guard.probing.health import Health

# Looks, and loses patience, ten times as often as it would.
probes.EVERY, probe_files.FRESH_FOR = 200, 1_000  # type: ignore[misc]


class Probed(Middleware):
    """What a shutdown middleware does with probes."""

    def before_worker_boot(self, broker, worker):
        port = os.environ.get("PROBE_PORT")
        self.probes = probes.Probes(
            Health(worker), directory=os.environ.get("PROBE_DIR"), port=int(port) if port else None
        )
        self.probes.start()

    def before_worker_shutdown(self, broker, worker):
        self.probes.drain()

    def after_worker_shutdown(self, broker, worker):
        self.probes.close()


broker = RedisBroker(url=os.environ["REDIS_URL"])
broker.add_middleware(Probed())
install(broker, Classify())
dramatiq.set_broker(broker)


@dramatiq.actor
def wait_for(path: str) -> None:
    """Run until a file is there."""
    Path(f"{path}.begun").touch()
    while not Path(path).exists():
        time.sleep(0.02)

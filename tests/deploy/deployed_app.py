"""An application for the deployment files: it ends as the next line of a file says, and leaves orphans behind.

Variables: ``ENDS``, a file of exit codes, one for each start (``0``: the master is told to stop; nothing more: it goes
on); ``ORPHANS``, how many processes an actor leaves to the container's first one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware

from dramatiq_guard import Classify, install


class Ending(Middleware):
    """Ends the process, or sends the message that makes orphans, when the worker has booted."""

    def after_worker_boot(self, broker, worker):
        if os.environ.get("ORPHANS"):
            make_orphans.send()
        if os.environ.get("ENDS"):
            threading.Timer(1, _end, [Path(os.environ["ENDS"])]).start()


def _end(ends: Path) -> None:
    code, _, rest = ends.read_text().partition("\n")
    ends.write_text(rest)
    if code == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    elif code:
        os._exit(int(code))


broker = StubBroker()
broker.add_middleware(Ending())
install(broker, Classify())
dramatiq.set_broker(broker)


@dramatiq.actor
def make_orphans() -> None:
    """Start processes whose parent ends before them."""
    for _ in range(int(os.environ["ORPHANS"])):
        subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"], check=True)
    print("orphans made", flush=True)

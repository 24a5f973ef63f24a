"""GracefulShutdown: take no new work, finish what runs, keep a hard deadline, and say by the exit code what happened.

The life of a shutdown in it:

1. TERM or HUP arrives, at the master, at one worker or at the whole process group, once or more within two seconds.
2. Nothing more is fetched; what was prefetched or delayed goes back to its queue at once.
3. Actors may finish until the soft deadline.  Then they are interrupted, and their messages requeued without being
   counted, whatever their ``max_retries``.
4. At the hard deadline the rest is requeued, and the process leaves.

All of it is done by `dramatiq_guard.exits.worker_exit`, which CrashOnFatal asks, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .. import host
from ..errors import SetupError
from ..policy.duration import milliseconds
from ..probing.health import Health
from ..probing.probes import Probes
from ..wiring import stack_of
from .base import GuardMiddleware

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from dramatiq import Broker
    from dramatiq.worker import Worker

__all__ = ["GracefulShutdown"]


class GracefulShutdown(GuardMiddleware):
    """Shuts a worker process down in time, and loses nothing by it.

    Parameters:
      soft_deadline(int | timedelta): Milliseconds from the signal on that actors may take to finish.
      hard_deadline(int | timedelta): Milliseconds from the signal on after which the process leaves.  Keep it below
        what the orchestrator grants (30 s in Kubernetes, 90 s in systemd).
      probe_dir(Path | str | None): A directory in which the worker processes of one master keep their answers to
        probes, for ``dramatiq-guard probe``; nobody else may use it.
      probe_port(int | None): The port of an HTTP endpoint for probes; ``None`` for none.
      probe_host(str): The address that it listens on.

    Systemd is told of readiness, the end, and liveness where it listens (``NOTIFY_SOCKET``).

    Raises:
      SetupError: When a deadline is no duration, or the hard one does not come after the soft one; or, when the worker
        boots, the directory or the port cannot be used.

    Example:
      >>> GracefulShutdown(soft_deadline=25_000, hard_deadline=28_000)
    """

    place: ClassVar[int] = 2

    def __init__(
        self,
        *,
        soft_deadline: int | timedelta = 25_000,
        hard_deadline: int | timedelta = 28_000,
        probe_dir: Path | str | None = None,
        probe_port: int | None = None,
        probe_host: str = "127.0.0.1",
    ) -> None:
        try:
            self.soft_deadline = milliseconds(soft_deadline, "soft_deadline")
            self.hard_deadline = milliseconds(hard_deadline, "hard_deadline")
        except (TypeError, ValueError) as error:
            raise SetupError(f"GracefulShutdown: {error}") from error
        if self.hard_deadline <= self.soft_deadline:
            raise SetupError(
                f"GracefulShutdown: hard_deadline ({self.hard_deadline} ms) must come after soft_deadline "
                f"({self.soft_deadline} ms), so that interrupted actors can be requeued."
            )
        if probe_port is not None and (
            isinstance(probe_port, bool) or not isinstance(probe_port, int) or not 0 < probe_port < 65_536
        ):
            raise SetupError(f"GracefulShutdown: probe_port must be a port from 1 to 65535, not {probe_port!r}")
        self.probe_dir = probe_dir
        self.probe_port = probe_port
        self.probe_host = probe_host

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        ending = stack_of(broker).exit
        ending.soft_deadline, ending.hard_deadline = self.soft_deadline, self.hard_deadline
        ending.install(worker)
        probes = Probes(Health(worker), directory=self.probe_dir, port=self.probe_port, host=self.probe_host)
        try:
            probes.start()
        except SetupError:
            host.stop_event_loop()
            raise
        ending.heralds.append(lambda reloading: probes.drain(reloading=reloading))
        ending.farewells.append(probes.close)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        stack_of(broker).exit.begin("the worker was stopped")
        super().before_worker_shutdown(broker, worker)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().after_worker_shutdown(broker, worker)
        stack_of(broker).exit.finish()

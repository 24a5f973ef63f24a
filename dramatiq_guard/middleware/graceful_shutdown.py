"""GracefulShutdown: take no new work, finish what runs, keep a hard deadline, and say by the exit code what happened.

The life of a shutdown in it:

1. TERM or HUP arrives, at the master, at one worker or at the whole process group, once or more within two seconds.
2. Nothing more is fetched; what was prefetched or delayed goes back to its queue at once.
3. Actors may finish until the soft deadline.  Then they are interrupted, and their messages requeued without being
   counted, whatever their ``max_retries``.
4. At the hard deadline the rest is requeued, and the process leaves.

All of it is done by `dramatiq_guard.worker_exit`, which CrashOnFatal asks, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..errors import SetupError
from ..policy.duration import milliseconds
from ..wiring import stack_of
from .base import GuardMiddleware

if TYPE_CHECKING:
    from datetime import timedelta

    from dramatiq import Broker
    from dramatiq.worker import Worker

__all__ = ["GracefulShutdown"]


class GracefulShutdown(GuardMiddleware):
    """Shuts a worker process down in time, and loses nothing by it.

    Parameters:
      soft_deadline(int | timedelta): Milliseconds from the signal on that actors may take to finish.
      hard_deadline(int | timedelta): Milliseconds from the signal on after which the process leaves.  Keep it below
        what the orchestrator grants (30 s in Kubernetes, 90 s in systemd).

    Raises:
      SetupError: When a deadline is no duration, or the hard one does not come after the soft one.

    Example:
      >>> GracefulShutdown(soft_deadline=25_000, hard_deadline=28_000)
    """

    place: ClassVar[int] = 2

    def __init__(self, *, soft_deadline: int | timedelta = 25_000, hard_deadline: int | timedelta = 28_000) -> None:
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

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        ending = stack_of(broker).exit
        ending.soft_deadline, ending.hard_deadline = self.soft_deadline, self.hard_deadline
        ending.install(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        stack_of(broker).exit.begin("the worker was stopped")
        super().before_worker_shutdown(broker, worker)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().after_worker_shutdown(broker, worker)
        stack_of(broker).exit.finish()

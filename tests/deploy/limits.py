"""How long a worker may take to leave, with GracefulShutdown as it is by default."""

from __future__ import annotations

import inspect

from dramatiq_guard.middleware.graceful_shutdown import GracefulShutdown

#: Milliseconds from the signal on.
HARD_DEADLINE: int = inspect.signature(GracefulShutdown).parameters["hard_deadline"].default
#: And what an interpreter that is held needs besides, until faulthandler ends it; and a machine that is slow.
LATEST = HARD_DEADLINE + 5_000

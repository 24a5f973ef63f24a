"""dramatiq-guard: composable Dramatiq middlewares that give every failure one planned path.

Only these names are public; what is not here may move.
"""

from __future__ import annotations

from .classified import classified
from .delivery import current_delivery
from .errors import Defer, Fatal, GuardError, Permanent, Retryable
from .idempotency.unique import enqueue_unique
from .middleware.circuit_breaker import CircuitBreaker
from .middleware.classify import Classify
from .middleware.crash_on_fatal import CrashOnFatal
from .middleware.dead_letter import DeadLetter
from .middleware.graceful_shutdown import GracefulShutdown
from .middleware.idempotency_guard import IdempotencyGuard
from .middleware.jitter_backoff import JitterBackoff
from .middleware.tracing import Tracing
from .policy.explain import explain
from .stack import install
from .stores.connect import connect
from .telemetry import configure_telemetry
from .version import __version__

__all__ = [
    "CircuitBreaker",
    "Classify",
    "CrashOnFatal",
    "DeadLetter",
    "Defer",
    "Fatal",
    "GracefulShutdown",
    "GuardError",
    "IdempotencyGuard",
    "JitterBackoff",
    "Permanent",
    "Retryable",
    "Tracing",
    "__version__",
    "classified",
    "configure_telemetry",
    "connect",
    "current_delivery",
    "enqueue_unique",
    "explain",
    "install",
]

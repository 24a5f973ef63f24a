"""What ``dramatiq`` is started with: the broker, then the application on it."""

from __future__ import annotations

import importlib

from .settings import Settings
from .wiring import wire

broker = wire(Settings.from_environment())

# After the broker: actors are declared on whichever broker is the global one at that moment.
importlib.import_module("dramatiq_guard.demo.app")

"""What a `dramatiq` process of the tests imports: the jobs, on the stack or without it, by the environment.

``JOBS_REDIS`` is the broker's URL, ``JOBS_LETTERS`` that of the letter store, ``JOBS_LEDGER`` a file; ``JOBS_STOCK=1``
leaves the stack out, and ``JOBS_HEARTBEAT`` is the broker's heartbeat timeout in milliseconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq

from dramatiq_guard.stores.connect import connect

from .redis_jobs import Jobs, Ledger, guarded, stock

_options = {"heartbeat_timeout": int(os.environ.get("JOBS_HEARTBEAT", "60000"))}
if os.environ.get("JOBS_STOCK"):
    broker = stock(os.environ["JOBS_REDIS"], **_options)
else:
    broker = guarded(os.environ["JOBS_REDIS"], connect(os.environ["JOBS_LETTERS"]).dead_letters, **_options)
dramatiq.set_broker(broker)
jobs = Jobs(broker, Ledger(Path(os.environ["JOBS_LEDGER"])))

"""The application that is caught in the storm, for Celery; ``STORM_POLICY`` says how it retries."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from ..client import Refused, call

#: As documented for those who want retries: exponential, with full jitter, three of them, ten minutes at most.
RETRIES: dict[str, dict[str, Any]] = {
    "celery": {"retry_backoff": True},
    "celery-tuned": {"retry_backoff": 1, "retry_backoff_max": 10, "max_retries": None},
}

app = Celery("storm", broker=os.environ["STORM_URL"])
app.conf.task_default_queue = "storm"
app.conf.task_ignore_result = True


@app.task(name="work", autoretry_for=(Refused,), **RETRIES[os.environ["STORM_POLICY"]])
def work(job: int, shard: int, bad: int) -> None:
    """One job."""
    call(job, shard, bad)


@app.task(name="warm")
def warm(job: int) -> None:
    """A request before the storm."""
    call(job, 0, 0)

"""The demo's application: what a user of Dramatiq would write, the same with the stack and without.

Every actor asks the downstream for one thing and lets whatever goes wrong be raised.  Nothing here knows the stack.
"""

from __future__ import annotations

import os
from typing import Any, Final

import dramatiq
import requests

from .settings import Settings

__all__ = ["MAX_AGE", "PIPELINE"]

#: Milliseconds after which a coupon is not worth sending.
MAX_AGE: Final = 100


_settings = Settings.from_environment()


def _ask(job: str) -> str:
    answer = requests.post(f"{_settings.downstream}/{job}", headers={"X-Worker-Pid": str(os.getpid())}, timeout=10)
    answer.raise_for_status()
    return job


@dramatiq.actor
def ship(job: str) -> None:
    """Succeeds at once."""
    _ask(job)


@dramatiq.actor
def charge(job: str) -> None:
    """Meets a downstream that is out for a moment."""
    _ask(job)


@dramatiq.actor
def sync_stock(job: str) -> None:
    """Meets a downstream that asks for a wait."""
    _ask(job)


@dramatiq.actor
def import_row(job: str) -> None:
    """Sends what the downstream will never accept."""
    _ask(job)


@dramatiq.actor(max_retries=2)
def render_report(job: str) -> None:
    """Meets a downstream that is broken for longer than two retries."""
    _ask(job)


@dramatiq.actor(max_age=MAX_AGE)
def send_coupon(job: str) -> None:
    """Must not run late."""
    _ask(job)


@dramatiq.actor
def extract(job: str) -> str:
    """The first stage of a pipeline."""
    return _ask(job).removesuffix(".extract")


@dramatiq.actor
def transform(row: str) -> str:
    """The second stage, which gets what the first returned."""
    _ask(f"{row}.transform")
    return row


@dramatiq.actor
def load(row: str) -> None:
    """The last stage."""
    _ask(f"{row}.load")


@dramatiq.actor(on_success="thank")
def take_order(job: str) -> None:
    """Has thanks sent when it is done."""
    _ask(job)


@dramatiq.actor(on_failure="apologise", max_retries=0)
def book_flight(job: str) -> None:
    """Has an apology sent when it fails."""
    _ask(job)


@dramatiq.actor
def thank(message: dict[str, Any], _result: Any) -> None:
    """The success callback."""
    _ask(f"{message['args'][0]}.thank")


@dramatiq.actor
def apologise(message: dict[str, Any], _error: dict[str, str]) -> None:
    """The failure callback."""
    _ask(f"{message['args'][0]}.apologise")


PIPELINE: Final[tuple[dramatiq.Actor[Any, Any], ...]] = (extract, transform, load)

"""``dramatiq-guard schedule``: when the retries of an actor's message take place."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table

from .output import as_json, console, duration
from .target import load_broker

if TYPE_CHECKING:
    from dramatiq import Broker

    from ..middleware.jitter_backoff import JitterBackoff
    from ..policy.backoff import Row
    from ..policy.decision import Limits

__all__ = ["schedule"]

#: How many rows stand for an unlimited number of retries.
_UNLIMITED: Final = 25


@click.command(short_help="Print the timetable of an actor's retries.")
@click.argument("target", metavar="MODULE:BROKER")
@click.argument("actor")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def schedule(target: str, actor: str, *, json_: bool) -> None:
    """Print when the retries of a message of ACTOR take place if it always fails.

    Each wait is printed with its bounds, and with how long after the first failure it ends.

    Example: dramatiq-guard schedule app.tasks:broker charge
    """
    broker = load_broker(target)
    limits, rows = _timetable(broker, actor)
    if json_:
        document: dict[str, Any] = {"actor": actor, "max_retries": limits.max_retries, "retry_for": limits.retry_for}
        as_json(document | {"retries": [asdict(row) for row in rows]})
        return
    table = Table(
        "retry", "after (between)", "since the first failure (between)", "strategy", title=f"Retries of {actor}"
    )
    for row in rows:
        table.add_row(
            str(row.retry),
            _between(row.low, row.high),
            _between(row.total_low, row.total_high),
            row.strategy,
        )
    out = console()
    out.print(table)
    out.print(_ending(limits, rows))


def _timetable(broker: Broker, name: str) -> tuple[Limits, tuple[Row, ...]]:
    from ..policy.backoff import timetable

    actor = broker.actors.get(name)
    if actor is None:
        known = ", ".join(sorted(broker.actors)) or "it has none"
        raise click.UsageError(f"The broker has no actor {name!r}. Its actors: {known}.")
    limits, backoff = _backoff_of(broker).plan(actor.options, {})
    rows = timetable(backoff, _UNLIMITED if limits.max_retries is None else limits.max_retries)
    if limits.retry_for is not None:
        rows = tuple(row for row in rows if row.total_low <= limits.retry_for)
    return limits, rows


def _backoff_of(broker: Broker) -> JitterBackoff:
    from ..middleware.jitter_backoff import JitterBackoff

    for middleware in broker.middleware:
        if isinstance(middleware, JitterBackoff):
            return middleware
    raise click.UsageError(
        "The broker has no JitterBackoff, so Dramatiq's own Retries decides: add it with "
        "dramatiq_guard.install(broker, JitterBackoff())."
    )


def _between(low: int, high: int) -> str:
    return duration(low) if low == high else f"{duration(low)} – {duration(high)}"


def _ending(limits: Limits, rows: tuple[Row, ...]) -> str:
    if not rows:
        return "No retries: a message that fails is given up at once."
    total = _between(rows[-1].total_low, rows[-1].total_high)
    if limits.max_retries is None and limits.retry_for is None:
        return f"The first {len(rows)} of an unlimited number of retries, over {total}."
    until = (
        ""
        if limits.retry_for is None
        else f"; none begins later than {duration(limits.retry_for)} after the first failure"
    )
    return (
        f"{len(rows)} retries over {total}, not counting the attempts themselves{until}; then the message is given up."
    )

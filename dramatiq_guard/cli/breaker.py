"""``dramatiq-guard breaker``: which downstreams are held back, and holding one back or letting it go by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ..policy.breaker import Mode, State, force
from ..stores.connect import connect
from .output import as_json, console

if TYPE_CHECKING:
    from ..stores.breakers import BreakerStore

__all__ = ["breaker"]

_STORE = click.option(
    "--store",
    "url",
    required=True,
    envvar="DRAMATIQ_GUARD_STORE",
    metavar="URL",
    help="Where the breakers are kept: redis://… or postgresql://….",
)


@click.group(short_help="See which downstreams are held back; pause one, or let it go.")
def breaker() -> None:
    """Look at the circuit breakers that all workers share, and overrule them."""


@breaker.command("list")
@_STORE
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def list_(url: str, json_: bool) -> None:
    """List the downstreams that workers reported of."""
    store = connect(url).breakers
    known = [(name, state) for name in store.names() if (state := store.read(name)) is not None]
    if json_:
        as_json([_as_dict(name, state) for name, state in known])
        return
    if not known:
        console().print("No breaker is known here: no worker with CircuitBreaker has reported yet.")
        return
    table = Table("downstream", "state", "since", "rate", "learned")
    for name, state in known:
        shown = _as_dict(name, state)
        table.add_row(
            name,
            shown["state"],
            shown["since"] or "",
            "" if shown["rate"] is None else f"{shown['rate']:.1f}/s",
            f"{shown['learned']:.1f}/s",
        )
    console().print(table)


@breaker.command("open")
@click.argument("name")
@_STORE
def open_(name: str, url: str) -> None:
    """Pause a downstream: its messages are put off until it is closed by hand."""
    _force(connect(url).breakers, name, Mode.FORCED_OPEN)
    console().print(
        f"{name} is paused. Its messages are put off and count as no attempt; dramatiq-guard breaker close lets them go."
    )


@breaker.command("close")
@click.argument("name")
@click.option("--at-once", is_flag=True, help="Let all messages go at once, in place of a paced recovery.")
@_STORE
def close(name: str, at_once: bool, url: str) -> None:
    """Let a downstream's messages go again, paced as after an outage; from then on the breaker judges by itself."""
    _force(connect(url).breakers, name, Mode.CLOSED if at_once else Mode.RECOVERING)
    console().print(f"{name} is let go{' at once' if at_once else ', at the pace of a recovery'}.")


def _force(store: BreakerStore, name: str, mode: Mode) -> None:
    known = store.names()
    if name not in known and mode is not Mode.FORCED_OPEN:
        raise click.ClickException(
            f"No breaker is called {name!r} here; there {'are' if len(known) != 1 else 'is'} "
            f"{', '.join(map(repr, known)) or 'none'}."
        )
    store.update(name, lambda state, now: (force(state, mode, now), None))


def _as_dict(name: str, state: State) -> dict[str, Any]:
    since = datetime.fromtimestamp(state.since / 1000, UTC).isoformat(timespec="seconds") if state.since else None
    return {
        "downstream": name,
        "state": state.mode.value,
        "since": since,
        "rate": round(state.rate, 2) if state.mode is Mode.RECOVERING else None,
        "learned": round(state.restart or state.learned.goodput, 2),
    }

"""``dramatiq-guard breaker``: which downstreams are held back, and holding one back or letting it go by hand."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from ..policy.breaker import Mode, State, force
from .output import as_json, console
from .selection import store_options
from .target import load_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..stores.breakers import BreakerStore

__all__ = ["breaker"]

#: So many names are listed where one is not known.
_NAMED = 20

_broker_option = click.option(
    "--broker", "target", metavar="MODULE:BROKER", help="Take the store of this broker's CircuitBreaker."
)


@click.group(short_help="See which downstreams are held back; pause one, or let it go.")
def breaker() -> None:
    """Look at the circuit breakers that all workers share, and overrule them."""


@breaker.command("list")
@store_options
@_broker_option
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def list_(*, url: str | None, prefix: str, schema: str, target: str | None, json_: bool) -> None:
    """List the downstreams that workers have reported of.

    Example: dramatiq-guard breaker list --store redis://localhost
    """
    with _open(url, prefix, schema, target) as store:
        known = [(name, state) for name in store.names() if (state := store.read(name)) is not None]
    if json_:
        as_json([_as_dict(name, state) for name, state in known])
        return
    if not known:
        click.echo("No downstream is known here: no worker with CircuitBreaker has reported yet.")
        return
    table = Table("downstream", "state", "since", "rate", "learned")
    for name, state in known:
        shown = _as_dict(name, state)
        rate = "" if shown["rate"] is None else f"{shown['rate']:.1f}/s"
        table.add_row(Text(_printable(name)), shown["state"], shown["since"] or "", rate, f"{shown['learned']:.1f}/s")
    console().print(table)


@breaker.command("open")
@click.argument("name")
@store_options
@_broker_option
def open_(name: str, *, url: str | None, prefix: str, schema: str, target: str | None) -> None:
    """Pause a downstream: its messages are put off, uncounted, until it is closed by hand."""
    if not name:
        raise click.UsageError("A downstream has a name: dramatiq-guard breaker list shows those that are known.")
    with _open(url, prefix, schema, target) as store:
        known = store.read(name) is not None
        _force(store, name, Mode.FORCED_OPEN)
    if not known:
        click.echo(f"No worker has reported of {_printable(name)} yet: is that its name?", err=True)
    click.echo(
        f"{_printable(name)} is paused, which all workers know within seconds. "
        f"Let its messages go again by: dramatiq-guard breaker close {shlex.quote(_printable(name))}"
    )


@breaker.command("close")
@click.argument("name")
@click.option("--at-once", is_flag=True, help="Let all messages go at once, in place of a paced recovery.")
@store_options
@_broker_option
def close(name: str, *, at_once: bool, url: str | None, prefix: str, schema: str, target: str | None) -> None:
    """Let a downstream's messages go again, paced as after an outage; then the breaker judges by itself."""
    with _open(url, prefix, schema, target) as store:
        state = store.read(name)
        if state is None:
            names = [repr(each) for each in store.names()]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise click.ClickException(
                f"No downstream {name!r} is known here; there are: {', '.join(names[:_NAMED]) or 'none'}{more}."
            )
        if state.mode is Mode.CLOSED:
            # A downstream that is well is not to be throttled by this.
            click.echo(f"{_printable(name)} is closed: its messages go already.")
            return
        _force(store, name, Mode.CLOSED if at_once else Mode.RECOVERING)
    click.echo(f"{_printable(name)} is let go{' at once' if at_once else ' at the pace of a recovery'}.")


@contextmanager
def _open(url: str | None, prefix: str, schema: str, target: str | None) -> Iterator[BreakerStore]:
    """Open the store that a verb is about: the one at the URL, else that of the broker's CircuitBreaker."""
    from ..middleware.circuit_breaker import CircuitBreaker
    from ..stores.connect import connect

    if url is not None:
        stores = connect(url, prefix=prefix, schema=schema)
        try:
            yield stores.breakers
        finally:
            stores.close()
        return
    if target is None:
        raise click.UsageError(
            "Say where the breakers are: --store redis://… or postgresql://…, DRAMATIQ_GUARD_STORE in the environment, "
            "or --broker module:broker."
        )
    middleware = next((each for each in load_broker(target).middleware if isinstance(each, CircuitBreaker)), None)
    if middleware is None:
        raise click.UsageError(f"The broker {target} has no CircuitBreaker, so it names no store: give --store URL.")
    yield middleware.store


def _force(store: BreakerStore, name: str, mode: Mode) -> None:
    # What an operator says goes for a Retry-After, too: who asked for it may be long back.
    store.update(name, lambda state, now: (replace(force(state, mode, now), floor=0), None))


def _printable(name: str) -> str:
    """A name that a message made may hold what moves a terminal's cursor."""
    return name if name.isprintable() else repr(name)[1:-1]


def _as_dict(name: str, state: State) -> dict[str, Any]:
    since = datetime.fromtimestamp(state.since / 1000, UTC).isoformat(timespec="seconds") if state.since else None
    return {
        "downstream": name,
        "state": state.mode.value,
        "since": since,
        "rate": round(state.rate, 2) if state.mode is Mode.RECOVERING else None,
        "learned": round(state.restart or state.learned.goodput, 2),
    }

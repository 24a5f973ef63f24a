"""``dramatiq-guard dead``: look at dead letters, replay them, lay them aside.

A face of `dead_letters.operations`, which does it all; here it is asked for, and told.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..dead_letters.operations import DeadLetters, ReplayStopped
from . import letters
from .output import as_json, console, who
from .selection import filter_options, open_store, state_option, store_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..dead_letters.operations import Moved, ReplayReport
    from ..stores.protocols import Filter
    from .selection import Selection

__all__ = ["dead"]

_broker_option = click.option("--broker", "target", metavar="MODULE:BROKER", help="The application's broker.")
_json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")
_all_option = click.option("--all", "everything", is_flag=True, help="Every letter that is dead.")
_dry_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
_why_option = click.option("--why", default="", help="The reason; it is kept with the letters.")
_by_option = click.option("--by", default=None, help="Who does it.  [default: the user's name]")


@click.group(short_help="List, show, replay and discard dead letters.")
def dead() -> None:
    """Look at dead letters, and act on them."""


@dead.command("list")
@store_options
@_broker_option
@state_option
@filter_options
@click.option("--groups", is_flag=True, help="Count them by bug instead.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--cursor", help="Go on where an earlier list ended.")
@_json_option
def list_(
    *,
    selection: Selection,
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    groups: bool,
    limit: int,
    cursor: str | None,
    json_: bool,
) -> None:
    """List dead letters, the latest death first.

    Example: dramatiq-guard dead list --store redis://localhost --reason permanent --newer-than 2h
    """
    with open_store(url, prefix, schema, target) as (store, _):
        operations = DeadLetters(store)
        if groups:
            found = operations.groups(selection.where)
            if json_:
                as_json({"groups": [asdict(group) for group in found]})
            else:
                console().print(letters.by_bug(found, {group.latest: store.get(group.latest) for group in found}))
            return
        try:
            page = operations.list(selection.where, limit=limit, cursor=cursor)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        if json_:
            as_json({"letters": [letter.as_dict() for letter in page.letters], "cursor": page.cursor})
            return
        if not page.letters:
            click.echo("No such letters.")
            return
        console().print(letters.listed(page.letters))
        if page.cursor is not None:
            click.echo(f"There are more: --cursor {page.cursor}")


@dead.command()
@click.argument("letter_id")
@store_options
@_broker_option
@_json_option
def show(letter_id: str, *, url: str | None, prefix: str, schema: str, target: str | None, json_: bool) -> None:
    """Show one letter: what was asked for, what it died of, every attempt, and what was done since."""
    with open_store(url, prefix, schema, target) as (store, _):
        letter = DeadLetters(store).show(letter_id)
    if json_:
        as_json(letter.as_dict())
    else:
        letters.show(letter, console())


@dead.command()
@click.argument("target", metavar="MODULE:BROKER")
@click.argument("ids", metavar="[LETTER_ID]...", nargs=-1)
@store_options
@filter_options
@_all_option
@_dry_option
@click.option("--force", is_flag=True, help="Replay those whose idempotency keys are forgotten, too.")
@_why_option
@_by_option
@_json_option
@click.pass_context
def replay(
    context: click.Context,
    *,
    selection: Selection,
    target: str,
    url: str | None,
    prefix: str,
    schema: str,
    everything: bool,
    dry_run: bool,
    force: bool,
    why: str,
    by: str | None,
    json_: bool,
) -> None:
    """Send dead messages again, in the order in which they were first sent.

    The letters are those of the store that the broker's DeadLetter writes to, unless --store says another. Exit code 1
    if any letter was refused: also one whose idempotency key's record has expired, since then nobody can tell whether
    its effect happened. --force replays it.

    Example: dramatiq-guard dead replay app.tasks:broker --reason permanent --dry-run
    """
    chosen = selection.chosen(everything=everything)
    with open_store(url, prefix, schema, target) as (store, broker):
        try:
            report = DeadLetters(store, broker).replay(chosen, by=who(by), why=why, dry_run=dry_run, force=force)
        except ReplayStopped as stopped:
            if json_:
                as_json(asdict(stopped.report) | {"stopped": str(stopped)})
            raise
    if json_:
        as_json(asdict(report))
    else:
        _tell_replay(report)
    context.exit(1 if report.refused else 0)


@dead.command()
@click.argument("ids", metavar="[LETTER_ID]...", nargs=-1)
@store_options
@_broker_option
@filter_options
@_all_option
@_dry_option
@_why_option
@_by_option
@_json_option
@click.pass_context
def discard(
    context: click.Context,
    *,
    selection: Selection,
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    everything: bool,
    dry_run: bool,
    why: str,
    by: str | None,
    json_: bool,
) -> None:
    """Lay dead letters aside; they are kept, and `dead restore` takes them back.

    With --broker, the copies that the broker itself keeps are removed. Exit code 1 if any of the named letters was not
    dead.
    """
    chosen = selection.chosen(everything=everything)
    with open_store(url, prefix, schema, target) as (store, broker):
        operations = DeadLetters(store, broker)
        if dry_run:
            _tell_count(_count(operations, chosen), "would be discarded", json_=json_)
            return
        moved = operations.discard(chosen, by=who(by), why=why)
    _tell_moved(context, moved, _asked_for(chosen, moved), "discarded", json_=json_)


@dead.command()
@click.argument("ids", metavar="LETTER_ID...", nargs=-1, required=True)
@store_options
@_broker_option
@_why_option
@_by_option
@_json_option
@click.pass_context
def restore(
    context: click.Context,
    *,
    ids: tuple[str, ...],
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    why: str,
    by: str | None,
    json_: bool,
) -> None:
    """Take discarded letters back, and replayed ones of which nothing was ever heard."""
    with open_store(url, prefix, schema, target) as (store, broker):
        moved = DeadLetters(store, broker).restore(ids, by=who(by), why=why)
    _tell_moved(context, moved, len(ids), "restored", json_=json_)


def _count(operations: DeadLetters, chosen: Filter | Sequence[str]) -> int:
    from ..stores.protocols import Filter

    if isinstance(chosen, Filter):
        return operations.store.count(chosen)
    return sum(letter is not None and letter.state == "dead" for letter in map(operations.store.get, chosen))


def _asked_for(chosen: Filter | Sequence[str], moved: Moved) -> int:
    """How many letters were meant: an id that leads to no letter counts too."""
    from ..stores.protocols import Filter

    return moved.selected if isinstance(chosen, Filter) else len(set(chosen))


def _tell_count(count: int, what: str, *, json_: bool) -> None:
    if json_:
        as_json({"selected": count, "dry_run": True})
    else:
        click.echo(f"{_letters(count)} {what}.")


def _tell_moved(context: click.Context, moved: Moved, asked: int, what: str, *, json_: bool) -> None:
    if json_:
        as_json(asdict(moved))
    else:
        click.echo(f"{_letters(len(moved.moved))} of {asked} {what}.")
    context.exit(0 if len(moved.moved) == asked else 1)


def _tell_replay(report: ReplayReport) -> None:
    what = "would be replayed" if report.dry_run else "replayed"
    click.echo(f"{_letters(len(report.replayed))} of {report.selected} {what}.")
    lines: dict[str, Any] = {f"  {count} × {actor}": None for actor, count in sorted(report.per_actor.items())}
    lines |= {f"  {letter_id}: {obstacle}": None for letter_id, obstacle in report.refused}
    for line in lines:
        click.echo(line)
    refused = {letter_id for letter_id, _ in report.refused}
    kept_back = sum(letter_id in refused for letter_id in report.forgotten)
    if kept_back:
        click.echo(
            f"{_letters(kept_back)} refused because nobody can tell any more whether the effect happened; to replay "
            "all the same, at the risk of doing the work twice, give --force."
        )
    if forced := len(report.forgotten) - kept_back:
        click.echo(f"{_letters(forced)} by force: nobody can tell whether the effect has happened before.")


def _letters(count: int) -> str:
    return "1 letter" if count == 1 else f"{count} letters"

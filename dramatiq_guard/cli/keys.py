"""``dramatiq-guard keys``: look at idempotency keys, and decide what only a person can.

A parked key is one of which nobody knows whether its effect happened.  Whoever has looked says so here: `resolve`.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from .. import clock
from ..errors import GuardError
from ..idempotency import resolving
from ..idempotency.values import encode
from ..stores.idempotency import ABSENT, BUSY, DONE, FREE, HELD, PARKED, Finish
from ..stores.protocols import Filter
from . import records
from .output import as_json, console, duration, moment, who
from .selection import store_options
from .target import load_broker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..stores.idempotency import IdempotencyStore, Record
    from ..stores.protocols import DeadLetterStore

__all__ = ["keys"]

#: Through how many dead letters at most the one of a key is looked for.
_LOOKED_THROUGH: Final = 2_000

_broker_option = click.option("--broker", "target", metavar="MODULE:BROKER", help="The application's broker.")
_json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")
_why_option = click.option("--why", default="", help="The reason, for the audit line.")
_by_option = click.option("--by", default=None, help="Who does it.  [default: the user's name]")
_yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where keys are kept, and where the letters of their messages.

    Parameters:
      keys(IdempotencyStore): The keys.
      letters(DeadLetterStore | None): The letters, if they are known.
      target(str | None): ``module:broker``, if it was given.
    """

    keys: IdempotencyStore
    letters: DeadLetterStore | None
    target: str | None


@click.group(short_help="List, show, resolve and forget idempotency keys.")
def keys() -> None:
    """Look at idempotency keys, and act on them."""


@keys.command("list")
@store_options
@_broker_option
@click.option(
    "--state",
    "states",
    type=click.Choice((PARKED, HELD, DONE, FREE)),
    multiple=True,
    help="Keys in this state; may be repeated.  [default: what somebody should look at: parked, and held by a run "
    "whose lease is over]",
)
@click.option("--key-prefix", default="", help="What the keys begin with, as in NAMESPACE/SCOPE/.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="About how many.")
@click.option("--cursor", help="Go on where an earlier list ended.")
@_json_option
def list_(
    *,
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    states: tuple[str, ...],
    key_prefix: str,
    limit: int,
    cursor: str | None,
    json_: bool,
) -> None:
    """List idempotency keys; without --state, those that wait for somebody.

    Example: dramatiq-guard keys list --store redis://localhost --key-prefix default/charge/
    """
    with _open(url, prefix, schema, target) as place:
        now = place.keys.posture().now
        found: list[Record] = []
        try:
            while True:
                page = place.keys.page(
                    prefix=key_prefix, states=states or (PARKED, HELD), limit=limit - len(found), cursor=cursor
                )
                found += (each for each in page.records if states or each.state != HELD or records.is_over(each, now))
                cursor = page.cursor
                if cursor is None or len(found) >= limit:
                    break
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    if json_:
        as_json({"keys": [records.as_dict(each, now) for each in found], "cursor": cursor})
        return
    if not found:
        click.echo("No such keys." if states else "No key waits for anybody.")
    else:
        console().print(records.listed(found, now))
    if cursor is not None:
        click.echo(f"There are more: --cursor {shlex.quote(cursor)}")


@keys.command()
@click.argument("key")
@store_options
@_broker_option
@_json_option
def show(key: str, *, url: str | None, prefix: str, schema: str, target: str | None, json_: bool) -> None:
    """Show one key: where it stands, its steps, its result, and the dead letters that wait for it."""
    with _open(url, prefix, schema, target) as place:
        record = _record_of(place, key)
        now = place.keys.posture().now
        dead = _letters_of(place, key)
    if json_:
        as_json(records.as_dict(record, now) | {"letters": dead})
        return
    records.show(record, now, console())
    if dead:
        click.echo(f"\nDead letters that wait for it: {', '.join(dead)}")
    if record.state == PARKED or records.is_over(record, now):
        click.echo(f"\nWhen you know: dramatiq-guard keys resolve {shlex.quote(key)} --done or --retry")


@keys.command()
@click.argument("key")
@click.option("--done", is_flag=True, help="The effect happened: the work is not run again.")
@click.option("--result", metavar="JSON", help="With --done: what duplicates and replays are given.  [default: null]")
@click.option("--retry", is_flag=True, help="It did not happen: the next delivery runs the work.")
@store_options
@_broker_option
@_yes_option
@_why_option
@_by_option
@_json_option
def resolve(
    key: str,
    *,
    done: bool,
    result: str | None,
    retry: bool,
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    yes: bool,
    why: str,
    by: str | None,
    json_: bool,
) -> None:
    """Decide about a key that is parked, or held by a run whose lease is over.

    Replay its dead letter afterwards: after --retry the work is run, after --done its result goes where it was to go.

    Example: dramatiq-guard keys resolve 'default/charge/key/["int",17]' --done --result '{"id": "ch_1"}'
    """
    if done == retry:
        raise click.UsageError("Say what you found: --done (the effect happened) or --retry (it did not).")
    if result is not None and not done:
        raise click.UsageError("--result is what the work ended with: it goes with --done.")
    finish = Finish(_result(result)) if done else None
    with _open(url, prefix, schema, target) as place:
        record = _record_of(place, key)
        now = place.keys.posture().now
        if record.state != PARKED and not records.is_over(record, now):
            raise _refusal(key, BUSY if record.state == HELD else record.state, record.lease_until - now)
        _confirm(
            f"Key {key} is {record.state}: {records.meaning(record, now)}. "
            + (
                "Its effect happened, and it is done?" if done else "Its effect did not happen, and it is to run again?"
            ),
            yes=yes,
        )
        was = resolving.resolve(place.keys, key, done=done, finish=finish)
        if was not in (PARKED, HELD):
            raise _refusal(key, was, None)
        now_is = DONE if done else FREE
        _audit(by, f"resolved key {key}: was {was}, is {now_is}", why)
        dead = _letters_of(place, key)
    replay = _replay_command(target, dead)
    if json_:
        as_json({"key": key, "was": was, "is": now_is, "letters": dead, "replay": replay})
        return
    click.echo(f"Key {key} was {was}, and is {now_is} now.")
    then = "so that its result goes where it was to go" if done else "so that the work is run"
    if was == HELD and not dead:
        click.echo("Its message is delivered again by the broker; if it is dead already:")
    else:
        click.echo(f"Replay its dead letter, {then}:")
    click.echo(f"  {replay}")


@keys.command()
@click.argument("key")
@store_options
@_broker_option
@_yes_option
@_why_option
@_by_option
@_json_option
def forget(
    key: str,
    *,
    url: str | None,
    prefix: str,
    schema: str,
    target: str | None,
    yes: bool,
    why: str,
    by: str | None,
    json_: bool,
) -> None:
    """Remove the record of a key, with its steps and its result: the work may run again, from its beginning."""
    with _open(url, prefix, schema, target) as place:
        record = _record_of(place, key)
        now = place.keys.posture().now
        at_work = record.state == HELD and not records.is_over(record, now)
        _confirm(
            f"Key {key} is {record.state}: {records.meaning(record, now)}. Once it is forgotten, the next delivery of "
            "its work runs it again from the beginning, whatever has happened"
            + (", beside the run that is at work now." if at_work else ".")
            + " Forget it?",
            yes=yes,
        )
        if not place.keys.forget(key):
            raise _refusal(key, ABSENT, None)
        _audit(by, f"forgot key {key}: was {record.state}", why)
    if json_:
        as_json({"key": key, "was": record.state, "is": ABSENT})
    else:
        click.echo(f"Key {key} was {record.state}, and is forgotten. The next delivery of its work runs it again.")


@contextmanager
def _open(url: str | None, prefix: str, schema: str, target: str | None) -> Iterator[_Place]:
    """Open the stores that a verb is about: those at the URL, else those of the broker's middlewares."""
    from ..middleware.dead_letter import DeadLetter
    from ..middleware.idempotency_guard import IdempotencyGuard
    from ..stores.connect import connect

    # The application's encoder is that of the results, so it is imported even where the URL names the store.
    broker = None if target is None else load_broker(target)
    if url is not None:
        stores = connect(url, prefix=prefix, schema=schema)
        try:
            yield _Place(stores.idempotency, stores.dead_letters, target)
        finally:
            stores.close()
        return
    if broker is None:
        raise click.UsageError(
            "Say where the keys are: --store redis://… or postgresql://…, DRAMATIQ_GUARD_STORE in the environment, or "
            "--broker module:broker."
        )
    guard = next((each for each in broker.middleware if isinstance(each, IdempotencyGuard)), None)
    if guard is None:
        raise click.UsageError(f"The broker {target} has no IdempotencyGuard, so it names no store: give --store URL.")
    letters = next((each.store for each in broker.middleware if isinstance(each, DeadLetter)), None)
    yield _Place(guard.store, letters, target)


def _record_of(place: _Place, key: str) -> Record:
    record = place.keys.get(key)
    if record is None:
        raise _refusal(key, ABSENT, None)
    return record


def _refusal(key: str, state: str, lease_left: int | None) -> GuardError:
    """Why there is nothing to decide about a key."""
    left = "" if lease_left is None else f" (in {duration(max(0, lease_left))} unless it renews it)"
    why = {
        BUSY: f"is busy: a run is at work; wait until it ends, or until its lease is over{left}",
        DONE: "is done already, and its result stands; if the work is to run again, run dramatiq-guard keys forget",
        FREE: "is free already: the next delivery runs it; replay its dead letter, if there is one",
        ABSENT: "is absent: it was never claimed, or its record has expired or was forgotten; dramatiq-guard keys list "
        "--state … shows what there is",
    }
    return GuardError(f"key {key} {why[state]}")


def _result(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--result is no JSON ({error}): a text is written '\"so\"'") from error
    return None if value is None else encode(value)


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise  # by Ctrl-C
        raise click.UsageError("There is nobody to ask: give --yes.") from None
    if not agreed:
        raise click.ClickException("Nothing was changed.")


def _audit(by: str | None, what: str, why: str) -> None:
    """One line for the record of who did what; where no logging is configured it goes to standard error."""
    logging.getLogger("dramatiq_guard.audit").warning(
        "%s %s %s%s", moment(clock.now()), who(by) or "somebody", what, why and f", because: {why}"
    )


def _letters_of(place: _Place, key: str) -> Sequence[str]:
    """The dead letters of a key's messages, as far as they can be found; the latest first."""
    if place.letters is None:
        return []
    found: list[str] = []
    cursor, looked = None, 0
    while looked < _LOOKED_THROUGH:
        page = place.letters.page(Filter(reason="outcome_unknown"), limit=200, cursor=cursor)
        found += (letter.letter_id for letter in page.letters if letter.key == key)
        looked += len(page.letters)
        cursor = page.cursor
        if cursor is None:
            break
    return found


def _replay_command(target: str | None, letters: Sequence[str]) -> str:
    which = shlex.join(letters) if letters else "--reason outcome_unknown"
    return f"dramatiq-guard dead replay {target or 'MODULE:BROKER'} {which}"

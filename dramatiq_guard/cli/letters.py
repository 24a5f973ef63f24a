"""Dead letters as people read them: a list, groups, one letter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .. import clock
from .output import duration, moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import Console

    from ..dead_letters.letter import ErrorRecord, Letter
    from ..stores.protocols import Group

__all__ = ["by_bug", "listed", "show"]


def listed(letters: Iterable[Letter]) -> Table:
    """One line for each letter."""
    now = clock.now()
    table = Table("letter", "died", "actor", "queue", "reason", "attempts", "the error", box=None, pad_edge=False)
    for letter in letters:
        table.add_row(
            Text(letter.letter_id, no_wrap=True),
            f"{duration(max(0, now - letter.died_at))} ago",
            Text(letter.actor),
            Text(letter.queue),
            letter.reason if letter.state == "dead" else f"{letter.reason} ({letter.state})",
            str(letter.attempts_total),
            Text(_first_line(letter.error)),
        )
    return table


def by_bug(groups: Iterable[Group], latest: Mapping[str, Letter | None]) -> Table:
    """One line for each bug.

    Parameters:
      groups(Iterable[Group]): The groups.
      latest(Mapping[str, Letter | None]): The letter that stands for each.
    """
    now = clock.now()
    table = Table("count", "last", "actors", "reasons", "the latest error", "fingerprint", box=None, pad_edge=False)
    for group in groups:
        letter = latest.get(group.latest)
        table.add_row(
            str(group.count),
            f"{duration(max(0, now - group.last_seen))} ago",
            Text(", ".join(group.actors)),
            ", ".join(group.reasons),
            Text(_first_line(letter.error if letter is not None else None)),
            Text(group.fingerprint, no_wrap=True),
        )
    return table


def show(letter: Letter, console: Console) -> None:
    """Print everything about a letter.

    Parameters:
      letter(Letter): The letter.
      console(Console): Where to.
    """
    facts = {
        "letter": letter.letter_id,
        "actor": letter.actor or "?",
        "queue": letter.queue,
        "state": letter.state,
        "reason": letter.reason,
        "first sent": moment(letter.message_timestamp),
        "died": f"{moment(letter.died_at)} on {letter.host}, process {letter.pid}",
        "attempts": str(letter.attempts_total),
        "fingerprint": letter.fingerprint,
        "trace": letter.trace_id,
        "code version": letter.code_version,
        "replay of": letter.replay_of or "",
        "key": letter.key,
        "remembered": _remembered(letter),
        "not replayable": letter.unreplayable or "",
        "redacted": ", ".join(letter.redacted),
    }
    for name, text in facts.items():
        if text:
            _line(console, f"{name + ':':16}{text}")
    if letter.raw is not None:
        _section(console, "What the broker held", letter.raw)
    else:
        _section(console, "Arguments", json.dumps({"args": letter.args, "kwargs": letter.kwargs}, indent=2))
    if letter.error is not None:
        _section(console, "The error", letter.error.traceback or f"{letter.error.type}: {letter.error.message}")
    if letter.history:
        _history(letter, console)
    if letter.standing.events:
        lines = [
            f"{moment(event.at)}  {event.what}" + (event.by and f" by {event.by}") + (event.why and f": {event.why}")
            for event in letter.standing.events
        ]
        _section(console, "What was done since", "\n".join(lines))


def _remembered(letter: Letter) -> str:
    """Until when the record of its key tells what became of the work."""
    if letter.remembered_until is None:
        return ""
    left = letter.remembered_until - clock.now()
    return f"until {moment(letter.remembered_until)}, " + (f"in {duration(left)}" if left > 0 else "which is over")


def _history(letter: Letter, console: Console) -> None:
    console.print("\nAttempts", style="bold")
    shown = len(letter.history)
    if shown < letter.attempts_total:
        _line(console, f"  ({shown} of {letter.attempts_total}: the first and the latest)")
    for attempt in letter.history:
        wait = "" if attempt.delay is None else f"; again after {duration(attempt.delay)}"
        _line(console, f"  {moment(attempt.at)}  {attempt.type}: {attempt.message}")
        _line(console, f"    at {attempt.place or '?'}; {attempt.verdict} by {attempt.rule or '?'}{wait}")


def _section(console: Console, title: str, body: str) -> None:
    console.print(f"\n{title}", style="bold")
    for line in body.rstrip().splitlines():
        _line(console, f"  {line}")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _first_line(error: ErrorRecord | None) -> str:
    if error is None:
        return ""
    lines = error.message.strip().splitlines()
    return f"{error.type}: {lines[0][:120]}" if lines else error.type

"""How the verbs write: tables, moments and durations for people, JSON for programs."""

from __future__ import annotations

import getpass
import json
import sys
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console

__all__ = ["as_json", "console", "duration", "moment", "who"]

_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"), (1, "ms"))


def console(*, stderr: bool = False) -> Console:
    """A console on whatever standard output is now; plain and unshortened where that is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 160)


def as_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def duration(milliseconds: int) -> str:
    """Write a duration as people read it: the two largest units, seconds with one decimal.

    Parameters:
      milliseconds(int): The duration.

    Returns:
      str: ``850 ms``, ``1.5 s``, ``3 min 20 s``, ``7 d``.
    """
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f}".removesuffix(".0") + " s"
    parts = []
    for size, unit in _UNITS[:4]:
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)


def moment(milliseconds: int) -> str:
    """Write a moment: ``2026-03-01 09:30:00 UTC``."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def who(by: str | None) -> str:
    """Who acts: whoever was named, else the user that runs the verb."""
    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a container's user may have no name

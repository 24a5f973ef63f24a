"""The records of idempotency keys as people read them: a list, one record; and as plain data.

What a store holds of results and steps was written by the application's encoder.  What cannot be read here is shown as
it is: looking at a record never fails.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from ..dead_letters.letter import as_json
from ..idempotency.claimed import DECIDED, STARTED, UNDONE, decided
from ..idempotency.values import decode
from ..stores.idempotency import DONE, FAILURE, FREE, HELD, OMITTED, PARKED, Record
from .output import duration, moment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

__all__ = ["as_dict", "is_over", "listed", "meaning", "show"]

_SHOWN: Final = 2_000
_BEGUN: Final = {"begun": True}
_UNDONE: Final = {"begun": True, "happened": False}


def is_over(record: Record, now: int) -> bool:
    """Whether a record is held by a run whose lease is over: it died, or was cut off."""
    return record.state == HELD and record.lease_until <= now


def meaning(record: Record, now: int) -> str:
    """What it means for the work that its record stands where it does."""
    if record.state == PARKED:
        return "nobody knows whether its effect happened; it is run by nobody until it is resolved"
    if record.state == FREE:
        return "it was given back undone; the next delivery runs it"
    if record.state == DONE:
        if record.flags & FAILURE:
            return "with a failure; duplicates are given it"
        return "duplicates are given the result"
    left = record.lease_until - now
    if left > 0:
        return f"a run is at work; its lease is over in {duration(left)} unless it renews it"
    return f"its run was last heard of when its lease ran out, {duration(-left)} ago; the next delivery sees to it"


def listed(records: Iterable[Record], now: int) -> Table:
    """One line for each record.

    Parameters:
      records(Iterable[Record]): The records.
      now(int): The store's clock.
    """
    table = Table("key", "state", "claims", "crashes", "first claimed", "forgotten", box=None, pad_edge=False)
    for record in records:
        table.add_row(
            Text(record.key, overflow="fold"),
            "held, lease over" if is_over(record, now) else record.state,
            str(record.attempts),
            str(record.crashes),
            f"{duration(max(0, now - record.first_claim_at))} ago",
            f"in {duration(max(0, record.expires_at - now))}",
        )
    return table


def show(record: Record, now: int, console: Console) -> None:
    """Print everything about a record.

    Parameters:
      record(Record): The record.
      now(int): The store's clock.
      console(Console): Where to.
    """
    resolved_at, _ = decided(record.steps)
    facts = {
        "key": record.key,
        "state": f"{record.state}: {meaning(record, now)}",
        "claimed": f"{_times(record.attempts)}, first {moment(record.first_claim_at)}",
        "crashes": str(record.crashes) if record.crashes else "",
        "owner": record.owner,
        "lease": f"until {moment(record.lease_until)}" if record.state == HELD else "",
        "resolved": f"{moment(resolved_at)}, to be run again" if resolved_at else "",
        "fence": str(record.fence),
        "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
        "forgotten": f"{moment(record.expires_at)}, in {duration(max(0, record.expires_at - now))}",
    }
    for name, text in facts.items():
        if text:
            _line(console, f"{name + ':':16}{text}")
    if steps := _steps(record):
        console.print("\nSteps", style="bold")
        for name, value in steps.items():
            _line(console, f"  {name}: {_text(value)}")
    if record.state == DONE:
        console.print("\nThe failure" if record.flags & FAILURE else "\nThe result", style="bold")
        left_out = "not kept: it was too large, or could not be encoded"
        _line(console, f"  {left_out if record.flags & OMITTED else _text(_value(record.result))}")


def as_dict(record: Record, now: int) -> dict[str, Any]:
    """A record as plain data; what cannot be decoded stands as ``{"undecodable": …}``.

    Parameters:
      record(Record): The record.
      now(int): The store's clock.
    """
    return {
        "key": record.key,
        "state": record.state,
        "lease_over": is_over(record, now),
        "fence": record.fence,
        "owner": record.owner,
        "lease_until": record.lease_until,
        "fingerprint": record.fingerprint.hex() if record.fingerprint else None,
        "attempts": record.attempts,
        "crashes": record.crashes,
        "first_claim_at": record.first_claim_at,
        "expires_at": record.expires_at,
        "resolved_at": decided(record.steps)[0] or None,
        "steps": _steps(record),
        "result": _value(record.result),
        "result_is": "failure" if record.flags & FAILURE else "omitted" if record.flags & OMITTED else "result",
    }


def _steps(record: Record) -> dict[str, Any]:
    told = {STARTED: _BEGUN, UNDONE: _UNDONE}
    return {name: told.get(data) or _value(data) for name, data in record.steps.items() if name != DECIDED}


def _value(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return as_json(decode(data))
    except Exception:  # noqa: BLE001 - bytes of another encoder, or of nobody's
        return {"undecodable": data[:_SHOWN].decode("utf-8", "backslashreplace")}


def _text(value: Any) -> str:
    if value in (_BEGUN, _UNDONE):
        return "has begun, and no more is known" if value == _BEGUN else "had begun, and did not happen"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + f" […, {len(text)} characters in all]"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

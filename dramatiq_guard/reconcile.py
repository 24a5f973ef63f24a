"""What a reconciliation may find out about work whose process died: it was done, it was not, or nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Done", "NotDone", "Unknown"]


@dataclass(frozen=True, slots=True)
class Done:
    """The effect has happened.

    Parameters:
      result(Any): What the actor would have returned.
    """

    result: Any = None


@dataclass(frozen=True, slots=True)
class NotDone:
    """The effect has not happened and cannot happen any more by itself: the work is to be run again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can tell: a person has to look."""

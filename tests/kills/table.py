"""The table of the matrix: what an outsider counted, by way of guarding and by where the worker was killed."""

from __future__ import annotations

from collections.abc import Mapping

from .batches import Outcome
from .cells import POINTS, Cell

__all__ = ["table_of"]


def table_of(outcomes: Mapping[Cell, Outcome]) -> str:
    """Charges at each point (and rows, where there are any), of all brokers: ``1`` or, where they differ, ``1, 2``."""
    modes = [mode for mode in POINTS if any(cell.mode == mode for cell in outcomes)]
    points = sorted({cell.point for cell in outcomes}, key=_place)
    rows = [["killed at", *(f"{mode}, {store}" for mode, store in _columns(outcomes, modes))]]
    rows.append(["---"] * len(rows[0]))
    for point in points:
        row = [point]
        for mode, store in _columns(outcomes, modes):
            found = [
                each for cell, each in outcomes.items() if (cell.mode, cell.store, cell.point) == (mode, store, point)
            ]
            row.append(", ".join(sorted({_counted(mode, each) for each in found})) or "·")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _columns(outcomes: Mapping[Cell, Outcome], modes: list[str]) -> list[tuple[str, str]]:
    return [
        (mode, store)
        for mode in modes
        for store in ("redis", "postgresql")
        if any((cell.mode, cell.store) == (mode, store) for cell in outcomes)
    ]


def _place(point: str) -> tuple[int, str]:
    return max(points.index(point) for points in POINTS.values() if point in points), point


def _counted(mode: str, outcome: Outcome) -> str:
    charges = f"**{outcome.charges}**" if outcome.charges != 1 else "1"
    return charges if mode not in ("atomic", "inbox") else f"{charges} / {outcome.rows} row"

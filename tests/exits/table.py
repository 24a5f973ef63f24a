"""The table of docs/shutdown.md: what became of each job, in how many cells of the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .cells import Outcome
from .matrix import FACTORS, Cell, expected

__all__ = ["PAGE", "table_in", "table_of", "with_table"]

PAGE: Final = Path(__file__).parents[2] / "docs" / "shutdown.md"

_BEGIN: Final = "<!-- written by nox -s exit_matrix -->"
_END: Final = "<!-- end -->"

_IS_AT: Final = {
    "short": "0.3 s in Python",
    "long": "60 s in Python",
    "in C": "`time.sleep(60)`: in C, the interpreter free",
    "GIL held": "60 s in C, holding the interpreter",
    "async short": "`await asyncio.sleep(0.3)`",
    "async long": "`await asyncio.sleep(60)`",
    "async blocking": "`time.sleep(60)` on the event loop",
}


def table_of(outcomes: Mapping[Cell, Outcome]) -> str:
    """The table in Markdown."""
    targets = [str(target) for target in FACTORS["target"]]
    head = ["job", "is at", "exit code", "its message", *targets, "longest, ms"]
    rows = [head, ["---", "---", "---:", "---", *("---:" for _ in targets), "---:"]]
    for job in map(str, FACTORS["job"]):
        cells = [cell for cell in outcomes if cell.job == job]
        due = expected(cells[0])
        took = max(outcomes[cell].took for cell in cells)
        rows.append(
            [
                job,
                _IS_AT[job],
                str(due.code),
                "finished" if due.finished else "back in its queue" if due.reached else "redelivered by the broker",
                *(_right(outcomes, [cell for cell in cells if cell.target == target]) for target in targets),
                str(took) if due.reached else "·",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str, table: str) -> str:
    """The page with this table in place of the one it has."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


def table_in(page: str) -> dict[str, dict[str, str]]:
    """The rows of a page's table by the job, each by the head of its columns."""
    lines = page.partition(_BEGIN)[2].partition(_END)[0].strip().splitlines()
    head, _, *rows = [[field.strip() for field in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def _right(outcomes: Mapping[Cell, Outcome], cells: list[Cell]) -> str:
    return f"{sum(not outcomes[cell].wrong for cell in cells)} of {len(cells)}"

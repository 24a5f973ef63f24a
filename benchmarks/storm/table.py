"""What came of the runs: as a table, as JSON and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .cases import TARGETS
from .results import medians

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case
    from .run import Storm

__all__ = ["document", "middle", "missed", "tables"]


def middle(storms: Sequence[Storm]) -> dict[str, float | None]:
    """The figures of the rounds of one case: the middle one of each; none where a round has none."""
    return medians([storm.row() for storm in storms])


def missed(case: Case, row: dict[str, float | None]) -> list[str]:
    """The targets that a case must keep to and does not."""
    if not case.bound:
        return []
    failed = []
    for name, target in TARGETS.items():
        value = row[name]
        if value is None or (value < target if name == "efficiency" else value > target):
            failed.append(f"{case.name}: {name} is {value}, and should be {target}")
    return failed


def tables(results: dict[Case, list[Storm]]) -> list[Table]:
    """The results as people read them, one table a scenario."""
    made: dict[str, Table] = {}
    for case, storms in results.items():
        scenario = case.scenario
        title = f"{scenario.name}, rejection cost {scenario.rejection_cost:g}"
        table = made.get(title) or made.setdefault(title, _table(title))
        row = middle(storms)
        processes = f"{scenario.processes} × {scenario.threads}"
        table.add_row(
            f"{case.policy.title}{'' if scenario.processes == 1 else f', {processes} threads'}",
            _number(row["attempts_per_job"], 2),
            _number(row["amplification"], 3),
            _number(row["outage_share"], 2),
            f"{_number(row['peak_1s'], 2)} / {_number(row['peak_100ms'], 1)}",
            _number(row["efficiency"], 2),
            _number(row["makespan"], 3, "not done"),
            f"{_number(row['undone'], 0)} / {_number(row['lost'], 0)}",
            _number(row["answers_per_bad_job"], 2),
            _number(row["headroom"], 0),
        )
    return list(made.values())


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    headings = ("attempts/job", "amplifi-\ncation", "outage\nshare", "peak\n1 s / 100 ms", "effi-\nciency", "makespan")
    for heading in ("policy", *headings, "undone\n/ lost", "answers/\nbad job", "head-\nroom"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    return table


def _number(value: float | None, digits: int, nothing: str = "–") -> str:
    return nothing if value is None else f"{value:.{digits}f}"


def document(results: dict[Case, list[Storm]]) -> list[dict[str, Any]]:
    """The results as they are written to a file; the names are those of the simulation's."""
    return [
        {
            "case": case.name,
            "scenario": asdict(case.scenario),
            "policy": case.policy.name,
            "title": case.policy.title,
            "figures": middle(storms),
            "rounds": [
                {
                    "figures": each.row(),
                    "modes": each.run.modes,
                    "requests_per_second": each.run.requests,
                }
                for each in storms
            ],
        }
        for case, storms in results.items()
    ]

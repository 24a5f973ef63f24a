"""What came of runs, as it lies in files: written, and read again, whoever made it, real workers or the simulation.

It must not know how a run is made, nor what is held against its figures.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dramatiq_guard.simulation.scenario import Phase, Scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Result", "Unreadable", "decoded", "medians", "read", "write"]

#: What every run has in a file, and of which kind.
_PARTS = {"case": str, "scenario": dict, "policy": str, "title": str, "figures": dict, "rounds": list}
_HOW = "write it with: python -m benchmarks.storm --json FILE, or python benchmarks/simulate.py --like FILE --json FILE"


class Unreadable(Exception):
    """A file has no results of storms in it, and why."""


@dataclass(frozen=True, slots=True)
class Result:
    """One case of a file.

    Parameters:
      case(str): Its name.
      scenario(Scenario): What happened; its seed is that of the first round.
      policy(str): The name of what the workers did about it.
      title(str): The same for people.
      figures(Mapping): The middle of the rounds, by figure; None where a round has none.
      rounds(tuple[Mapping, ...]): The figures of each round.
      simulated(bool): It is the simulation's.
    """

    case: str
    scenario: Scenario
    policy: str
    title: str
    figures: Mapping[str, float | None]
    rounds: tuple[Mapping[str, float | None], ...]
    simulated: bool = False

    @property
    def finished(self) -> int:
        """In how many rounds everything was done before the run's end."""
        return sum(each["makespan"] is not None for each in self.rounds)


def read(path: Path) -> dict[str, Result]:
    """The cases of a file, by name.

    Parameters:
      path(Path): The file.

    Returns:
      dict[str, Result]: In the order of the file.

    Raises:
      Unreadable: There is no such file, or something else is in it.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror}); {_HOW}") from None
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON ({error}); {_HOW}") from None
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list):
        raise Unreadable(f"{path} has no list of `runs` in it; {_HOW}")
    # A simulation says what it is like.
    results = [_result(path, number, run, simulated="like" in document) for number, run in enumerate(runs, 1)]
    return {result.case: result for result in results}


def write(path: Path, about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Write runs into a file, one a line, so that it can be looked through and compared.

    Parameters:
      path(Path): The file.
      about(Mapping): What is to be said of them all.
      runs(Sequence[Mapping]): The runs.
    """
    said = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in about.items()]
    lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in runs)
    path.write_text("{" + "".join(f"{each},\n" for each in said) + f'"runs": [\n{lines}\n]}}\n')


def decoded(given: Mapping[str, Any]) -> Scenario:
    """A scenario from what its JSON says; what an older file does not say is as it is by default.

    Parameters:
      given(Mapping): Its fields by name, the phases as mappings.

    Returns:
      Scenario: The scenario.

    Raises:
      ValueError: It has fields that there are not.
    """
    if unknown := sorted(given.keys() - {field.name for field in fields(Scenario)}):
        raise ValueError(f"unknown in a scenario: {', '.join(unknown)}")
    return Scenario(**{**given, "phases": tuple(Phase(**phase) for phase in given["phases"])})


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The middle one of each figure; None where a row has none."""
    return {
        name: None if any(row[name] is None for row in rows) else statistics.median(row[name] for row in rows)
        for name in rows[0]
    }


def _result(path: Path, number: int, run: Any, *, simulated: bool) -> Result:
    where = f"{path}, run {number}"
    for part, kind in _PARTS.items():
        if not isinstance(run, dict) or not isinstance(run.get(part), kind):
            raise Unreadable(f"{where}: there is no `{part}`, as the results of a storm have it; {_HOW}")
    if not run["rounds"]:
        raise Unreadable(f"{where}: {run['case']} has no rounds; {_HOW}")
    try:
        made = decoded(run["scenario"])
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{where}: the scenario of {run['case']} is none of this version ({error}); {_HOW}") from None
    rounds = [each.get("figures") if isinstance(each, dict) else None for each in run["rounds"]]
    for figures in (run["figures"], *rounds):
        if not isinstance(figures, dict) or not figures.keys() >= {"amplification", "makespan"}:
            raise Unreadable(f"{where}: {run['case']} lacks figures: amplification and makespan are needed; {_HOW}")
    return Result(run["case"], made, run["policy"], run["title"], run["figures"], tuple(rounds), simulated)

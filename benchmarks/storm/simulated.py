"""The cases of a run of real workers, simulated: the same scenarios and policies, to the same end, as many times.

It must not know whether what comes of it is near what came of the real ones: that is `benchmarks.agreement`'s.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dramatiq_guard.simulation import comparison
from dramatiq_guard.simulation.measure import Figures, measure
from dramatiq_guard.simulation.policies import POLICIES
from dramatiq_guard.simulation.world import simulate

from .cases import Case
from .results import medians

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .results import Result

__all__ = ["ROUNDS", "cases", "document", "middle", "run"]

#: So many seeds at least: single runs differ by a few hundredths, short ones by a tenth and more.
ROUNDS = 3
#: What `simulate` grants a run besides its patience, in milliseconds.
_GRACE = 20_000


def cases(results: Iterable[Result], rounds: int = ROUNDS) -> list[list[Case]]:
    """What is to be simulated: the rounds of each case whose policy the simulation knows.

    Parameters:
      results(Iterable[Result]): What came of the real workers.
      rounds(int): The least number of seeds.

    Returns:
      list[list[Case]]: For each such case as many seeds as it had rounds, and `rounds` at least.
    """
    return [
        [
            Case(replace(result.scenario, seed=result.scenario.seed + number), POLICIES[result.policy])
            for number in range(max(rounds, len(result.rounds)))
        ]
        for result in results
        if result.policy in POLICIES
    ]


def run(case: Case) -> comparison.Run:
    """Simulate one round of a case, and end it when the real one is ended, whatever is left then.

    Attempts of a policy that does not come through go on growing, so that they can only be compared at one moment.

    Parameters:
      case(Case): What to simulate.

    Returns:
      comparison.Run: What came of it.
    """
    scenario = case.scenario
    patience = (case.given_up_after - scenario.recovery - _GRACE) / scenario.ideal()[1]
    recording = simulate(scenario, case.policy, patience=patience)
    figures, requests = measure(scenario, recording), comparison.curves(recording)
    return comparison.Run(scenario, case.policy, figures, requests, tuple(recording.modes))


def middle(runs: Sequence[comparison.Run]) -> comparison.Run:
    """The first of the rounds, with the middle of all their figures, and with its processes where it has several."""
    figures: dict[str, Any] = medians([each.figures.row() for each in runs])
    first = runs[0]
    several = f", {first.scenario.processes} × {first.scenario.threads} threads"
    title = first.policy.title + ("" if first.scenario.processes == 1 else several)
    return replace(first, policy=replace(first.policy, title=title), figures=Figures(**figures))


def document(rounds: Sequence[Case], runs: Sequence[comparison.Run]) -> dict[str, Any]:
    """A case as it is written to a file, in the shape in which the real one is.

    Parameters:
      rounds(Sequence[Case]): What was simulated.
      runs(Sequence[comparison.Run]): What came of each.

    Returns:
      dict[str, Any]: The entry.
    """
    case = rounds[0]
    return {
        "case": case.name,
        "scenario": asdict(case.scenario),
        "policy": case.policy.name,
        "title": case.policy.title,
        "figures": medians([each.figures.row() for each in runs]),
        "rounds": [
            {"figures": each.figures.row(), "modes": each.modes, "requests_per_second": each.requests} for each in runs
        ],
    }

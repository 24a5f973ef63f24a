"""Whether the simulation says of a storm what real workers make of it, case by case, from the files of both.

    python -m benchmarks.storm --json REAL.json
    python benchmarks/simulate.py --like REAL.json --json SIMULATED.json
    python -m benchmarks.agreement REAL.json SIMULATED.json [--within 0.10]

A case agrees where simulated amplification and makespan are within ±10 % of the real ones.  A real run has a fixed end:
where not everything was done by then there is no makespan, and how many attempts there were by then says more of the
end than of the policy.  So a case that no round finished agrees where no simulated one did, and a case that some rounds
finished and some did not is left out of the verdict, unless it is the guard's, which must finish.

The exit code is 0 where all cases agree, 1 where one does not, and 2 where the files cannot be compared.
"""

from __future__ import annotations

import argparse
import enum
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.storm.results import Unreadable, read
from dramatiq_guard.simulation.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.storm.results import Result

__all__ = ["JUDGED", "Comparison", "Incomparable", "Verdict", "compare", "main"]

#: The figures that must agree.
JUDGED = ("amplification", "makespan")
#: Those that are shown beside them.
SHOWN = {"peak_1s": "peak 1 s", "efficiency": "efficiency"}
WITHIN = 0.10
#: What floating point makes of a ratio that is exactly at the limit.
_ROUNDING = 1e-9


class Incomparable(Exception):
    """Two files cannot be held against each other, and why."""


class Verdict(enum.Enum):
    """What is said of a case."""

    AGREES = "agrees"
    DIFFERS = "differs"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case, real and simulated.

    Parameters:
      real(Result): What came of real workers.
      simulated(Result | None): What the simulation says; None: nothing.
      within(float): By how much of the real figures the simulated ones may be off.
    """

    real: Result
    simulated: Result | None
    within: float

    def ratio(self, figure: str) -> float | None:
        """The simulated figure by the real one; None where one of them has none."""
        if self.simulated is None:
            return None
        real, simulated = self.real.figures.get(figure), self.simulated.figures.get(figure)
        return simulated / real if real and simulated is not None else None

    def off(self) -> list[str]:
        """The judged figures that differ by too much."""
        ratios = {name: self.ratio(name) for name in JUDGED}
        return [name for name, ratio in ratios.items() if ratio is None or abs(ratio - 1) > self.within + _ROUNDING]

    def verdict(self) -> tuple[Verdict, str]:
        """The verdict, and why."""
        if self.simulated is None:
            return Verdict.DIFFERS, "not simulated"
        finished = [(each.finished, len(each.rounds)) for each in (self.real, self.simulated)]
        if all(done == rounds for done, rounds in finished):
            off = self.off()
            return (Verdict.DIFFERS, f"in {' and '.join(off)}") if off else (Verdict.AGREES, "")
        if not any(done for done, _ in finished):
            return Verdict.AGREES, "neither finishes"
        (real, real_rounds), (simulated, simulated_rounds) = finished
        why = f"finished {real} of {real_rounds} real, {simulated} of {simulated_rounds} simulated rounds"
        some = any(0 < done < rounds for done, rounds in finished)
        return Verdict.LEFT_OUT if some and self.real.policy != "guard" else Verdict.DIFFERS, why


def compare(
    real: Mapping[str, Result], simulated: Mapping[str, Result], within: float = WITHIN
) -> tuple[list[Comparison], list[str]]:
    """Hold what came of real workers against what the simulation says.

    Parameters:
      real(Mapping[str, Result]): The cases of the real run.
      simulated(Mapping[str, Result]): Those of the simulated one.
      within(float): By how much they may differ.

    Returns:
      tuple[list[Comparison], list[str]]: The cases whose policy the simulation knows, and the names of the others.

    Raises:
      Incomparable: They are not a real and a simulated one, have no case in common, or one of the same name that is
        another scenario.
    """
    for results, wanted in ((real, False), (simulated, True)):
        if any(each.simulated is not wanted for each in results.values()):
            raise Incomparable("the first file must be of real workers, and the second one of the simulation")
    if not real.keys() & simulated.keys():
        both = [", ".join(each) or "none" for each in (real, simulated)]
        raise Incomparable(f"no case is in both files: real are {both[0]}; simulated are {both[1]}")
    comparisons = []
    for name, result in real.items():
        other = simulated.get(name)
        if other is None and result.policy not in POLICIES:
            continue
        if other is not None and replace(other.scenario, seed=0) != replace(result.scenario, seed=0):
            raise Incomparable(
                f"{name} is another scenario in each of the files; simulate it again: --like the real one"
            )
        comparisons.append(Comparison(result, other, within))
    return comparisons, [name for name in real if name not in {each.real.case for each in comparisons}]


def table(comparisons: Sequence[Comparison]) -> Table:
    """The cases as people read them: real, simulated, and the one by the other."""
    made = Table(title="simulated against real workers: real / simulated, and simulated ÷ real", title_justify="left")
    for heading in ("case", *JUDGED, *SHOWN.values(), "verdict"):
        numbers = heading not in ("case", "verdict")
        made.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers)
    for each in comparisons:
        verdict, why = each.verdict()
        cells = [_cell(each, figure) for figure in (*JUDGED, *SHOWN)]
        made.add_row(each.real.case, *cells, f"{verdict.value}: {why}" if why else verdict.value)
    return made


def _cell(comparison: Comparison, figure: str) -> str:
    results = (comparison.real, comparison.simulated)
    values = [_number(None if each is None else each.figures.get(figure)) for each in results]
    return f"{values[0]} / {values[1]}  {_number(comparison.ratio(figure)):>5}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files, and print what came of it.

    Returns:
      int: The status.
    """
    parser = argparse.ArgumentParser(
        prog="agreement", description="Whether the simulation says of a storm what real workers make of it."
    )
    parser.add_argument("real", type=Path, metavar="REAL.json", help="of: python -m benchmarks.storm --json")
    parser.add_argument(
        "simulated", type=Path, metavar="SIMULATED.json", help="of: benchmarks/simulate.py --like REAL.json --json"
    )
    parser.add_argument("--within", type=float, default=WITHIN, help="how much may they differ (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        comparisons, others = compare(read(options.real), read(options.simulated), options.within)
    except (Unreadable, Incomparable) as error:
        parser.error(str(error))
    Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(table(comparisons))
    if others:
        print(f"policies that the simulation does not know: {', '.join(others)}")
    verdicts = [each.verdict()[0] for each in comparisons]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"within ±{options.within:.0%}: {counts}; judged are {' and '.join(JUDGED)}")
    if Verdict.AGREES not in verdicts:
        print("no case agrees", file=sys.stderr)
        return 1
    return 1 if Verdict.DIFFERS in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())

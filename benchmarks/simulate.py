"""A downstream's outage, simulated: what each policy makes of it, with the very policy code that workers run.

    python benchmarks/simulate.py [--quick | --full | --like REAL.json [--seeds N]] [--json FILE] [--pictures DIRECTORY]

Without an option: every policy at C = 100/s with 1 000 workers and three costs of rejection, and ours at C = 1 000/s
with 10 000 workers in 100 processes, in every kind of trouble, and with a herd of 10 000 failures at once.  `--quick`
leaves out what takes long, `--full` runs ours with ten seeds.  The exit code is 1 where a target is missed.
`--like` simulates what real workers went through in ``python -m benchmarks.storm --json REAL.json`` instead, and holds
nothing against it: that is what ``python -m benchmarks.agreement REAL.json SIMULATED.json`` does.

What happens is in `dramatiq_guard.simulation`, which `dramatiq-guard simulate` shares.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks.storm import simulated
from benchmarks.storm.results import Unreadable, read, write
from dramatiq_guard.simulation import comparison
from dramatiq_guard.simulation.policies import POLICIES
from dramatiq_guard.simulation.scenario import TROUBLES, Phase, Scenario, herd, trouble

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COSTS = (0.0, 0.1, 0.3)
#: Policies that overload the downstream for good where rejections cost: their runs are long, and show one thing.
SMALL = Scenario(lasts=130_000)
#: The size that the targets are for.
LARGE = replace(SMALL, capacity=1_000.0, arrivals=750.0, processes=100)
#: What a run of ours must keep, at the large size.
TARGETS = {"amplification": 1.01, "peak_1s": 1.15, "steady": 1.10}
HERD_TARGET = 2.05

#: The name of a table, the scenario, and the policy.
Plan = tuple[str, Scenario, str]


def plans(*, quick: bool, seeds: int) -> Iterator[Plan]:
    """Everything that is run, table by table."""
    for cost in COSTS:
        for name in POLICIES:
            if not quick or name in ("guard", "stock", "tuned", "oracle"):
                yield f"outage of 25 s, rejection cost {cost:g}, C = 100/s", _of(SMALL, cost), name
    for cost in COSTS:
        for seed in range(1, 1 + (1 if quick else seeds)):
            title = f"outage of 25 s, rejection cost {cost:g}, C = 1 000/s, 10 000 workers"
            yield title, replace(_of(LARGE, cost), seed=seed), "guard"
    for cost in COSTS:
        yield f"herd of 10 000, rejection cost {cost:g}", herd(replace(LARGE, rejection_cost=cost), 10_000), "guard"
    size = SMALL if quick else LARGE
    for name in TROUBLES[1:]:
        yield f"{name}, rejection cost 0.3, C = {size.capacity:g}/s", trouble(_of(size, 0.3), name), "guard"


def _of(size: Scenario, cost: float) -> Scenario:
    return replace(size, rejection_cost=cost, phases=(Phase(20_000, 45_000),))


def missed(title: str, run: comparison.Run) -> list[str]:
    """The targets that a run misses."""
    figures: dict[str, Any] = run.figures.row()
    if run.policy.name != "guard":
        return []
    problems = [f"{title}: {figures['undone']} good jobs undone"] if figures["undone"] else []
    limits: dict[str, float] = {}
    if run.scenario.name == "herd":
        limits = {"amplification": HERD_TARGET}
    elif run.scenario.name == "outage" and run.scenario.capacity == LARGE.capacity:
        limits = TARGETS
    for name, limit in limits.items():
        if figures[name] is None or figures[name] > limit:
            problems.append(f"{title}, seed {run.scenario.seed}: {name} is {figures[name]}, more than {limit}")
    return problems


def _run(plan: Plan) -> comparison.Run:
    return comparison.run(plan[1], POLICIES[plan[2]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all; 0 where every target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under a minute")
    size.add_argument("--full", action="store_true", help="ten seeds of the large runs")
    size.add_argument("--like", type=Path, metavar="REAL.json", help="the cases of a run of benchmarks.storm")
    parser.add_argument("--seeds", type=int, default=simulated.ROUNDS, help="of each case, with --like (%(default)s)")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--pictures", type=Path, help="draw one picture a table into this directory")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be 1 at least")
    if options.like is not None:
        return _like(options, parser)
    planned = list(plans(quick=options.quick, seeds=10 if options.full else 3))
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    problems: list[str] = []
    documents: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        results = zip(planned, pool.map(_run, planned), strict=True)
        for title, group in groupby(results, key=lambda pair: pair[0][0]):
            runs = [run for _, run in group]
            console.print(comparison.table(runs, title))
            problems += [problem for run in runs for problem in missed(title, run)]
            documents += [{"table": title, **entry} for entry in comparison.document(runs)]
            if options.pictures is not None:
                _draw(runs, options.pictures, title)
    console.print(f"{len(planned)} runs in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        write(options.json, {"missed": problems}, documents)
    for problem in problems:
        console.print(f"MISSED {problem}")
    return 1 if problems else 0


def _like(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        results = read(options.like)
    except Unreadable as unreadable:
        parser.error(str(unreadable))
    cases = simulated.cases(results.values(), options.seeds)
    if not cases:
        policies = ", ".join(sorted({result.policy for result in results.values()})) or "none"
        parser.error(f"nothing in {options.like} can be simulated: its policies are {policies}")
    with ProcessPoolExecutor(options.jobs) as pool:
        each_of = pool.map if options.jobs > 1 else map
        runs = list(each_of(simulated.run, [case for rounds in cases for case in rounds]))
    grouped = [[runs.pop(0) for _ in rounds] for rounds in cases]
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    middle = [simulated.middle(rounds) for rounds in grouped]
    for title, group in groupby(middle, key=_scenario):
        alike = list(group)
        console.print(comparison.table(alike, title))
        if options.pictures is not None:
            _draw(alike, options.pictures, title)
    console.print(
        f"{len(cases)} of {len(results)} cases of {options.like}, each the middle of {max(map(len, cases))} seeds"
    )
    if options.json is not None:
        about = {"like": options.like.name, "rounds": max(map(len, cases))}
        documents = [simulated.document(rounds, each) for rounds, each in zip(cases, grouped, strict=True)]
        write(options.json, about, documents)
    return 0


def _scenario(run: comparison.Run) -> str:
    return f"{run.scenario.name}, rejection cost {run.scenario.rejection_cost:g}: as real workers went through it"


def _draw(runs: list[comparison.Run], directory: Path, title: str) -> None:
    from dramatiq_guard.simulation.picture import draw

    directory.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    draw(runs, directory / f"{name}.png", title)


if __name__ == "__main__":
    sys.exit(main())

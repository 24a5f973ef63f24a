"""Retry storms with real workers: ours, stock Dramatiq's, and others.

python -m benchmarks.storm [--quick | --full | --peers] [--json FILE] [--pictures DIRECTORY] [--rounds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dramatiq_guard.simulation.picture import draw

from .cases import full, outage, peers, quick
from .results import write
from .run import Storm, storm
from .table import document, middle, missed, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case


def _say(where: str, progress: str = "") -> None:
    if sys.stderr.isatty():
        print(f"\r{where + progress:78}\r", end="", file=sys.stderr, flush=True)


def _chosen(cases: list[Case], only: Sequence[str], parser: argparse.ArgumentParser) -> list[Case]:
    known = {case.name for case in cases}
    if unknown := [name for name in only if not any(each.startswith(name) for each in known)]:
        parser.error(f"unknown case {unknown[0]}; known are {', '.join(sorted(known))}")
    return [case for case in cases if not only or any(case.name.startswith(name) for name in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the tables, write the JSON and the pictures.

    Returns:
      int: The status: 1 where a target was asked for and missed.
    """
    parser = argparse.ArgumentParser(prog="storm", description="Retry storms with real workers.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="four cases in less than three minutes (default)")
    how.add_argument("--full", action="store_true", help="every case; about three quarters of an hour")
    how.add_argument("--peers", action="store_true", help="Celery and BullMQ, which must be installed, beside ours")
    how.add_argument("--tiny", action="store_true", help="seconds: shows that it works, says nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="draw requests over time, a file a scenario")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is run, one after the other (1)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="such as outage:0.3:guard:1")
    parser.add_argument("--assert", dest="held", action="store_true", help="fail where the guard misses a target")
    chosen = parser.parse_args(arguments)

    # What it has started ends with it, however it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    results: dict[Case, list[Storm]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="storm-") as directory:
        for number in range(1, chosen.rounds + 1):
            cases = full() if chosen.full else peers() if chosen.peers else quick()
            if chosen.tiny:
                cases = [replace(cases[0], scenario=outage(3, begins=2, after=2, threads=8))]
            for case in _chosen(cases, chosen.only, parser):
                where = f"round {number} of {chosen.rounds}: {case.name}: "
                seeded = replace(case, scenario=replace(case.scenario, seed=number))
                results[case].append(storm(seeded, Path(directory), partial(_say, where)))
    _say("")
    scenario = next(iter(results)).scenario
    lasts = (scenario.recovery - scenario.phases[0].begins) / 1000
    print(
        f"Retry storms: {scenario.capacity:g} requests/s, {scenario.arrivals:g} jobs/s, {lasts:g} s of trouble, "
        f"{scenario.threads} threads a process; "
        f"Python {platform.python_version()}, Dramatiq {version('dramatiq')}, "
        f"{chosen.rounds} round{'s' * (chosen.rounds > 1)} in {time.monotonic() - begun:.0f} s"
    )
    console = Console(width=150)
    for table in tables(results):
        console.print(table)
    print(
        "amplification: attempts ÷ jobs done; peak, efficiency, headroom: ÷ capacity; makespan: ÷ a perfect policy's; "
        "answers/bad job: how often a job that can never succeed was told so"
    )
    if chosen.json is not None:
        about = {"python": platform.python_version(), "dramatiq": version("dramatiq"), "rounds": chosen.rounds}
        write(chosen.json, about, document(results))
    if chosen.pictures is not None:
        _draw(results, chosen.pictures)
    failed = [line for case, storms in results.items() for line in missed(case, middle(storms))]
    for line in failed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if failed and chosen.held else 0


def _draw(results: dict[Case, list[Storm]], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    scenarios: dict[str, list[Storm]] = defaultdict(list)
    for case, storms in results.items():
        scenarios[case.name.rsplit(":", 2)[0]].append(storms[-1])
    for name, storms in scenarios.items():
        runs = [
            replace(
                each.run,
                policy=replace(
                    each.run.policy, title=f"{each.run.policy.title}, {each.case.scenario.processes} process(es)"
                ),
            )
            for each in storms
        ]
        scenario = storms[0].case.scenario
        title = f"{scenario.name}, rejection cost {scenario.rejection_cost:g}: real workers"
        draw(runs, directory / f"storm-{name.replace(':', '-')}.png", title)


if __name__ == "__main__":
    raise SystemExit(main())

"""Run schedules by their seeds: ``python -m tests.simulation 17`` or ``python -m tests.simulation --count 100000``.

With ``--guarded``, those of guarded actors.
"""

from __future__ import annotations

import argparse
import sys

from .guarded import guarded
from .schedules import schedule


def main() -> int:
    """Run what was asked for, and say which seeds break a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="the seeds to run")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed of --count")
    parser.add_argument("--guarded", action="store_true", help="schedules of guarded actors")
    arguments = parser.parse_args()
    failed = 0
    seeds = [*arguments.seeds, *range(arguments.first, arguments.first + arguments.count)]
    for seed in seeds:
        world = guarded(seed) if arguments.guarded else schedule(seed)
        complaints = world.complaints()
        if complaints:
            failed += 1
            print(f"seed {seed} ({world.kills} kills):", *complaints, sep="\n  ")
    print(f"{len(seeds) - failed} schedules kept every promise, {failed} did not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run all of the matrix, and write the table of docs/shutdown.md: `python -m tests.exits`."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.rabbitmq import PrivateRabbitMQ

from .cells import AT_ONCE, Outcome, Servers, run_cell
from .matrix import Cell, every_cell
from .table import PAGE, table_of, with_table


def main() -> int:
    """Run, say how it goes, write the table, and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--at-once", type=int, default=AT_ONCE, help="how many cells to run beside each other")
    arguments.add_argument("--only", default="", help="run the cells whose name holds this, and write no table")
    chosen = arguments.parse_args()
    cells = [cell for cell in every_cell() if chosen.only in str(cell)]
    outcomes: dict[Cell, Outcome] = {}
    began = time.monotonic()
    with PrivateValkey() as valkey, PrivateRabbitMQ() as rabbitmq, ThreadPoolExecutor(chosen.at_once) as pool:
        servers = Servers(valkey.url, rabbitmq.url)
        running = {pool.submit(run_cell, cell, servers): cell for cell in cells}
        for done in as_completed(running):
            cell = running[done]
            outcomes[cell] = done.result()
            if outcomes[cell].wrong:
                print(f"WRONG {cell}", "\n  ".join(outcomes[cell].wrong)[:5_000], sep="\n  ", flush=True)
            if not len(outcomes) % 50:
                print(f"{len(outcomes)} of {len(cells)} after {time.monotonic() - began:.0f} s", flush=True)
    wrong = [cell for cell in cells if outcomes[cell].wrong]
    if not chosen.only:
        PAGE.write_text(with_table(PAGE.read_text(), table_of({cell: outcomes[cell] for cell in cells})))
    print(f"{len(cells)} cells, {len(wrong)} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""``dramatiq-guard probe``: what an orchestrator runs to ask how the workers are.

It reads the files that they keep, and imports neither the application nor Click: it runs every few seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..probing.probe_files import STATES, ask

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Answer a probe.

    Parameters:
      arguments(Sequence[str]): What stands behind the verb.

    Returns:
      int: 0 if it holds for the workers, 1 if not, 2 when the call itself was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="dramatiq-guard probe",
        description="Ask how the worker processes are that keep their files in DIR. Exit code 0 if it holds for all of "
        "them (draining: for any), 1 with the reasons if not.",
    )
    parser.add_argument("state", choices=STATES)
    parser.add_argument("--dir", required=True, type=Path, help="the probe_dir= of the workers")
    try:
        asked = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    answer = ask(asked.dir, asked.state)
    sys.stdout.write(f"{answer.as_json()}\n")
    return 0 if answer.holds else 1

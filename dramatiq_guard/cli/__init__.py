"""The command line, ``dramatiq-guard``: one file a verb.

This file only sees to it that what the verbs need is installed.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line.

    Returns:
      int: 0 when all is well, 1 when something failed or was found wanting, 2 when the call itself was wrong.
    """
    if sys.argv[1:2] == ["probe"]:
        # Run every few seconds, and in images without the extra: it does without what the other verbs need.
        from .probe import main as probe

        return probe(sys.argv[2:])
    try:
        from .root import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in {"click", "rich"}:
            raise
        sys.stderr.write(f"dramatiq-guard needs {missing}: run pip install 'dramatiq-guard[cli]'\n")
        return 2
    return run()

"""The overhead benchmark runs against real workers and accounts for every run; what it measures is nobody's promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.redis


def overhead(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the project's directory, as people do."""
    return subprocess.run(
        [sys.executable, "benchmarks/overhead.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_quick_run_prints_its_table_and_writes_its_json(tmp_path: Path) -> None:
    """Each case has its row, in both, and its actors ran exactly as often as planned."""
    only = ("work:stack", "flaky:summary")
    run = overhead(
        "--quick", "--json", str(tmp_path / "out.json"), *(part for name in only for part in ("--only", name))
    )

    assert 0 == run.returncode, run.stderr
    for words in ("a message that succeeds", "stack, no SDK", "≤ 1.15", 'stack, log="summary"', "≤ 0.45"):
        assert words in run.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert 1 == written["rounds"]
    assert [("work", "stock"), ("work", "stack"), ("flaky", "stock"), ("flaky", "summary")] == [
        (case["scenario"], case["setup"]) for case in written["cases"]
    ]
    for case in written["cases"]:
        assert case["planned"] == case["runs"] == case["messages"] * (2 if case["scenario"] == "flaky" else 1)
        assert 1 == len(case["rounds_us"])


def test_a_case_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    """A typing error costs no minutes."""
    run = overhead("--only", "work:stak")

    assert 2 == run.returncode
    assert "unknown case work:stak; known are " in run.stderr
    assert "work:stack" in run.stderr

"""The benchmark of guarded messages runs and counts right; what it measures is nobody's promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


def idempotency(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the project's directory, as people do."""
    return subprocess.run(
        [sys.executable, "benchmarks/idempotency.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_smallest_run_prints_its_tables_and_writes_its_json(tmp_path: Path) -> None:
    """Whoever says two words, one and one says as many in both."""
    parts = [part for name in ("trips", "growth", "designs") for part in ("--only", name)]
    run = idempotency("--smallest", "--without-powertools", "--json", str(tmp_path / "out.json"), *parts)

    assert 0 == run.returncode, run.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert [("redis", 2, 1, 1), ("postgresql", 2, 1, 1)] == [
        (row["store"], row["fresh"], row["duplicate"], row["busy"]) for row in written["trips"]
    ]
    assert all(row["bytes_per_key"] > 0 for row in written["growth"])
    trips = {
        row["design"]: (row["fresh_trips"], row["duplicate_trips"], row["busy_trips"]) for row in written["designs"]
    }
    assert (2, 1, 1) == trips["IdempotencyGuard's store on Redis"]
    assert (2, 1, 1) == trips["IdempotencyGuard's store on PostgreSQL"]
    assert (3, 1, 1) == trips["GET, SET, SET"]
    for design in trips:
        assert design in run.stdout


def test_a_library_that_is_missing_ends_the_run() -> None:
    """A comparison that leaves somebody out says so."""
    run = idempotency("--smallest", "--only", "designs")

    assert 1 == run.returncode
    assert "aws-lambda-powertools is not installed: run nox -s bench_idempotency" in run.stderr

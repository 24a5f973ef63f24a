"""The storm benchmark runs real workers against its downstream and accounts for every job; its times are no promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.redis


def storm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the project's directory, as people do."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.storm", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_tiny_storm_accounts_for_every_job(tmp_path: Path) -> None:
    """Nothing is lost, bad jobs are attempted once and end as dead letters, and the outage is not stormed at."""
    run = storm("--tiny", "--json", str(tmp_path / "out.json"), "--pictures", str(tmp_path / "pictures"))

    assert 0 == run.returncode, run.stderr
    assert "outage, rejection cost 0.3" in run.stdout
    (written,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    figures = written["figures"]
    assert ("guard", 1) == (written["policy"], len(written["rounds"]))
    assert 0 == figures["lost"] == figures["dead_good"]
    assert 1.0 == figures["answers_per_bad_job"]
    assert figures["bad"] == figures["dead_bad"] > 0
    assert figures["amplification"] < 1.5
    assert figures["outage_share"] < 1
    assert 100 < figures["jobs"] <= sum(written["rounds"][0]["requests_per_second"])
    assert "open" in [mode for _, mode in written["rounds"][0]["modes"]]
    assert 1 == len(list((tmp_path / "pictures").glob("*.png")))


def test_a_case_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    """A typing error costs no minutes."""
    run = storm("--only", "outage:0.3:gard")

    assert 2 == run.returncode
    assert "unknown case outage:0.3:gard; known are " in run.stderr
    assert "outage:0.3:guard:1" in run.stderr

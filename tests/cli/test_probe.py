"""``dramatiq-guard probe``: the files of the workers, read in a process that imports as little as it can."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dramatiq_guard.probing.probe_files import STATES, ProbeFiles


def run(*arguments):
    """Run the verb as the console script does."""
    program = "import sys; from dramatiq_guard.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "probe", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("state", STATES)
def test_the_exit_code_is_the_answer(call, tmp_path, state):
    """0 if it holds, 1 with the reasons if not."""
    files = ProbeFiles(tmp_path, 41)
    files.write({state}, {})
    assert call("probe", state, "--dir", str(tmp_path)).code == 0

    files.write((), {state: ["so"]})
    outcome = call("probe", state, "--dir", str(tmp_path))
    assert outcome.code == 1
    assert outcome.document["ok"] is False


def test_it_runs_as_a_command_of_its_own(tmp_path):
    """As an orchestrator runs it."""
    ProbeFiles(tmp_path, 41).write({"startup"}, {"live": ["worker thread 'Thread-3' is dead"]})

    outcome = run("startup", "--dir", str(tmp_path))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    outcome = run("live", "--dir", str(tmp_path))
    assert outcome.returncode == 1
    assert json.loads(outcome.stdout)["reasons"] == ["process 41: worker thread 'Thread-3' is dead"]


@pytest.mark.parametrize("arguments", [(), ("live",), ("lively", "--dir", "/"), ("live", "/")])
def test_a_wrong_call_is_a_usage_error(arguments):
    """Exit code 2, and what would be right."""
    outcome = run(*arguments)
    assert outcome.returncode == 2
    assert "usage: dramatiq-guard probe" in outcome.stderr


def test_its_help_is_its_own(call):
    """Exit code 0."""
    outcome = run("--help")
    assert outcome.returncode == 0
    assert "{startup,live,ready,draining}" in outcome.stdout
    assert call("probe", "--help").code == 0


def test_it_needs_neither_the_cli_extra_nor_an_application(tmp_path):
    """Images for production do not have Click; and every few seconds a second more would be felt."""
    program = (
        "import sys; sys.modules['click'] = sys.modules['rich'] = None; sys.argv[1:] = ['probe', 'live', '--dir', '/'];"
        "from dramatiq_guard.cli import main; main();"
        "print(sorted({'redis', 'pika', 'psycopg', 'opentelemetry.sdk'} & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == "[]"

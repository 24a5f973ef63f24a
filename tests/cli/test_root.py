"""The command line as a whole: its verbs, its exit codes, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dramatiq_guard import __version__
from dramatiq_guard.cli.output import duration


def run(*arguments, **options):
    """Run the command line in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_lists_the_verbs(call):
    """Somebody who knows nothing finds every verb."""
    outcome = call("--help")

    assert outcome.code == 0
    for verb in ("demo", "explain", "schedule", "dead", "schema"):
        assert f"\n  {verb} " in outcome.out


def test_an_unknown_verb_is_a_usage_error(call):
    """Exit code 2 is for calls that are wrong in themselves."""
    outcome = call("frobnicate")

    assert outcome.code == 2
    assert "No such command 'frobnicate'" in outcome.err


def test_python_m_runs_the_same_command_line():
    """Where the script is not on PATH, the module is."""
    outcome = run("-m", "dramatiq_guard", "--version")

    assert (outcome.returncode, outcome.stdout) == (0, f"dramatiq-guard, version {__version__}\n")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_missing_extra_is_named_with_its_cure(missing):
    """Without the cli extra there is one line, and no traceback."""
    program = f"import sys; sys.modules[{missing!r}] = None; from dramatiq_guard.cli import main; sys.exit(main())"
    outcome = run("-c", program)

    assert outcome.returncode == 2
    assert outcome.stderr == f"dramatiq-guard needs {missing}: run pip install 'dramatiq-guard[cli]'\n"


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 ms"),
        (850, "850 ms"),
        (1_500, "1.5 s"),
        (15_000, "15 s"),
        (60_000, "1 min"),
        (200_000, "3 min 20 s"),
        (7_200_000, "2 h"),
        (7_205_000, "2 h"),
        (7 * 86_400_000, "7 d"),
        (90_061_000, "1 d 1 h"),
    ],
)
def test_durations_are_written_in_their_two_largest_units(milliseconds, text):
    """Nobody reads 604800000 ms as a week."""
    assert duration(milliseconds) == text


@pytest.mark.parametrize("missing", ["redis", "requests", "opentelemetry.sdk"])
def test_what_the_demo_lacks_is_named_before_it_starts(missing):
    """The demo extra is asked for by name, with no process started."""
    program = f"import sys; sys.modules[{missing!r}] = None; from dramatiq_guard.cli import main; sys.exit(main())"
    outcome = run("-c", program, "demo")

    assert outcome.returncode == 2
    assert "pip install 'dramatiq-guard[demo]'" in outcome.stderr
    assert "Traceback" not in outcome.stderr

"""How the command line begins and ends: what is missing, what was stopped, and the verb of the demo around its run."""

from __future__ import annotations

import builtins
import signal
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from dramatiq_guard import cli
from dramatiq_guard.cli import demo as demo_verb
from dramatiq_guard.cli import root
from dramatiq_guard.demo import drawing
from dramatiq_guard.demo import run as course
from dramatiq_guard.demo.processes import ProcessEnded


def test_a_probe_needs_nothing_that_the_other_verbs_need(monkeypatch, tmp_path, capsys):
    """It is run every few seconds, in images without the extra."""
    monkeypatch.setattr(sys, "argv", ["dramatiq-guard", "probe", "live", "--dir", str(tmp_path)])
    real = builtins.__import__

    def without(name, *rest):
        assert name not in ("click", "rich"), f"{name} was imported"
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main() == 1
    assert '"ok": false' in capsys.readouterr().out


@pytest.mark.parametrize("module", ["click", "rich.console"])
def test_what_is_missing_is_said_with_its_cure(monkeypatch, capsys, module):
    """2: the call itself was wrong."""
    monkeypatch.setattr(sys, "argv", ["dramatiq-guard", "explain", "ValueError"])
    monkeypatch.delitem(sys.modules, "dramatiq_guard.cli.root")
    monkeypatch.setitem(sys.modules, module, None)
    for name in [each for each in sys.modules if each.startswith("dramatiq_guard.cli.")]:
        monkeypatch.delitem(sys.modules, name)

    assert cli.main() == 2
    assert f"needs {module.partition('.')[0]}: run pip install 'dramatiq-guard[cli]'" in capsys.readouterr().err


def test_another_module_that_is_missing_is_an_error_of_ours(monkeypatch):
    """No advice would help."""
    monkeypatch.setattr(sys, "argv", ["dramatiq-guard", "explain", "ValueError"])
    monkeypatch.setitem(sys.modules, "dramatiq_guard.cli.root", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def test_a_verb_runs_to_its_end(monkeypatch, capsys):
    """Through the entry point."""
    monkeypatch.setattr(sys, "argv", ["dramatiq-guard", "explain", "builtins.TimeoutError"])
    assert cli.main() == 0
    assert "retryable" in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        (click.ClickException("it failed"), 1, "Error: it failed"),
        (click.UsageError("wrong call"), 2, "wrong call"),
        (click.Abort(), 130, "Stopped."),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
)
def test_an_error_is_a_line_and_a_code(monkeypatch, capsys, ending, code, says):
    """No traceback."""

    def main(**options):
        raise ending

    monkeypatch.setattr(root.cli, "main", main)
    assert root.run() == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("given", "code"), [(1, 1), (0, 0), (None, 0)])
def test_a_verb_may_give_a_code(monkeypatch, given, code):
    """Nothing is 0."""
    monkeypatch.setattr(root.cli, "main", lambda **_: given)
    assert root.run() == code


@pytest.fixture
def demo(monkeypatch):
    """The demo's verb around a run that the test makes up; what the run was told."""
    demo = SimpleNamespace(told=[], ending=None, report=SimpleNamespace(accounted=True, as_dict=lambda: {"ok": 1}))

    def run(progress, **options):
        demo.told.append(options)
        demo.handler = signal.getsignal(signal.SIGTERM)
        if demo.ending is not None:
            raise demo.ending
        return demo.report

    monkeypatch.setattr(course, "run", run)
    monkeypatch.setattr(drawing, "draw", lambda report, console: console.print("drawn"))
    demo.call = lambda *arguments: CliRunner().invoke(root.cli, ["demo", *arguments])
    return demo


def test_the_demo_succeeds_only_if_every_message_is_accounted_for(demo):
    """Its picture for people, its document for machines."""
    assert "drawn" in demo.call().stdout
    demo.report.accounted = False
    outcome = demo.call("--json", "--stock", "--no-mischief")

    assert outcome.exit_code == 1
    assert '"ok": 1' in outcome.stdout
    assert (demo.told[0]["stock"], demo.told[1]["stock"]) == (False, True)
    assert demo.told[0]["mischief"].kill_worker
    assert not demo.told[1]["mischief"].restart_broker


def test_a_polite_kill_ends_what_the_demo_started(demo):
    """As Ctrl-C does; afterwards the signal is whose it was."""
    before = signal.getsignal(signal.SIGTERM)
    demo.call()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt):
        demo.handler(signal.SIGTERM, None)


def test_a_process_that_ended_ends_the_demo_with_a_line(demo):
    """And 1."""
    demo.ending = ProcessEnded("the producer ended with 3")
    outcome = demo.call()
    assert (outcome.exit_code, "the producer ended with 3" in outcome.stderr) == (1, True)


def test_what_the_demo_needs_is_missed_before_it_starts(demo, monkeypatch):
    """And not in its processes' logs."""
    monkeypatch.setattr(demo_verb, "_NEEDED", ("no_such_module",))
    outcome = demo.call()
    assert outcome.exit_code == 2
    assert "The demo needs no_such_module: run pip install 'dramatiq-guard[demo]'" in outcome.stderr
    assert demo.told == []

"""One directory for all worker processes of a master: who writes what, and what it means to who asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dramatiq_guard import clock
from dramatiq_guard.probing.probe_files import FRESH_FOR, STATES, ProbeFiles, ask

ALL = {"startup", "live", "ready"}


@pytest.fixture
def other():
    """The number of another process that lives during the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.stdin.close()
        process.wait(10)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_there_while_it_is_true(tmp_path):
    """So that a shell can tell, too."""
    files = ProbeFiles(tmp_path / "probes", 41)
    files.write(ALL, {})
    assert names(files.directory) == ["live.41", "process.41", "ready.41", "startup.41"]

    files.write({"startup", "live", "draining"}, {"ready": ["it is draining"]})
    assert names(files.directory) == ["draining.41", "live.41", "process.41", "startup.41"]

    files.remove()
    assert names(files.directory) == []


@pytest.mark.parametrize("state", ["startup", "live", "ready"])
def test_it_holds_if_it_holds_for_every_process(tmp_path, state):
    """One that is not shows, with its reason."""
    one, two = ProbeFiles(tmp_path, 41), ProbeFiles(tmp_path, 42)
    one.write(ALL, {})
    two.write(ALL, {})
    assert ask(tmp_path, state).holds

    two.write(ALL - {state}, {state: ["its cat is on the keyboard"]})
    answer = ask(tmp_path, state)
    assert (answer.holds, answer.reasons) == (False, ("process 42: its cat is on the keyboard",))


def test_draining_holds_if_it_holds_for_any(tmp_path):
    """The others are about to follow."""
    one, two = ProbeFiles(tmp_path, 41), ProbeFiles(tmp_path, 42)
    one.write(ALL, {})
    two.write(ALL, {})
    assert not ask(tmp_path, "draining").holds
    assert ask(tmp_path, "draining").reasons

    two.write({"startup", "live", "draining"}, {})
    assert ask(tmp_path, "draining").holds


def test_a_process_that_has_only_begun_is_not_overlooked(tmp_path):
    """Nothing holds of it yet, but it is there."""
    ProbeFiles(tmp_path, 41).write(ALL, {})
    ProbeFiles(tmp_path, 42).write((), {})

    assert ask(tmp_path, "startup").reasons == ("process 42: not startup",)


@pytest.mark.parametrize("state", STATES)
def test_where_nobody_is_nothing_holds(tmp_path, state):
    """Neither in an empty directory, nor in none, nor in what is no directory."""
    (tmp_path / "file").write_text("")
    for directory in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        answer = ask(directory, state)
        assert not answer.holds
        assert str(directory) in answer.reasons[0]


@pytest.mark.parametrize("state", STATES)
def test_what_is_old_does_not_hold(tmp_path, turned, state):
    """A process that is frozen, or holds its GIL, does not touch its files."""
    ProbeFiles(tmp_path, 41).write(STATES, {})
    turned.added = FRESH_FOR - 1_000
    assert ask(tmp_path, state).holds

    turned.added = FRESH_FOR + 1_000
    answer = ask(tmp_path, state)
    assert not answer.holds
    if state != "draining":
        assert answer.reasons == (
            "process 41: it has not been heard of for more than 10000 ms: it was killed, or hangs",
        )


def test_what_is_from_the_future_does_not_hold(tmp_path, turned):
    """The system's clock was set back by an hour: it holds again when the process has touched its files."""
    files = ProbeFiles(tmp_path, 41)
    turned.added = 3_600_000
    files.write(ALL, {})
    turned.added = 0
    assert not ask(tmp_path, "live").holds

    files.write(ALL, {})
    assert ask(tmp_path, "live").holds


def test_a_dead_process_is_swept_away(tmp_path, turned):
    """It was killed and could not say goodbye; not before its files are old, since its death is news for a while."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ProbeFiles(tmp_path, process.pid).write(ALL, {})
    mine = ProbeFiles(tmp_path)
    mine.sweep()
    assert f"process.{process.pid}" in names(tmp_path)

    turned.added = FRESH_FOR + 1_000
    mine.write(ALL, {})
    mine.sweep()
    assert ask(tmp_path, "live").holds
    assert names(tmp_path) == sorted(f"{name}.{os.getpid()}" for name in ("process", *ALL))


def test_a_process_that_hangs_is_not_swept_away(tmp_path, turned, other):
    """However long it hangs: it is there, and not live."""
    ProbeFiles(tmp_path, other.pid).write(ALL, {})
    turned.added = 3_600_000
    mine = ProbeFiles(tmp_path)
    mine.write(ALL, {})
    mine.sweep()

    assert not ask(tmp_path, "live").holds


def test_a_number_that_was_given_to_another_process_is_no_life(tmp_path, turned, other):
    """A container that is started again gives the same numbers."""
    ProbeFiles(tmp_path, other.pid).write(ALL, {})
    process = tmp_path / f"process.{other.pid}"
    process.write_text(json.dumps(json.loads(process.read_text()) | {"born": "1"}))
    turned.added = FRESH_FOR + 1_000
    mine = ProbeFiles(tmp_path)
    mine.write(ALL, {})
    mine.sweep()

    assert ask(tmp_path, "live").holds


def test_files_that_make_no_sense_stop_nobody(tmp_path, turned):
    """What is in the directory may be anything."""
    for name, content in {
        "process.x": "",
        "process.": "",
        "process.41": "no JSON",
        "process.42": "[]",
        "process.43": '{"reasons": []}',
    }.items():
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, ns=(clock.now() * 10**6,) * 2)

    assert ask(tmp_path, "live").reasons == ("process 41: not live", "process 42: not live", "process 43: not live")
    turned.added = 3_600_000
    ProbeFiles(tmp_path).sweep()
    assert names(tmp_path) == ["process.", "process.x"]


def test_a_directory_that_vanished_is_made_again(tmp_path):
    """Somebody cleaned up."""
    files = ProbeFiles(tmp_path / "probes", 41)
    files.write(ALL, {})
    files.remove()
    files.directory.rmdir()
    files.write(ALL, {})

    assert ask(files.directory, "ready").holds

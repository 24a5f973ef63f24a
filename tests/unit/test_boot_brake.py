"""A process that keeps dying soon after its boot waits before it tries again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from dramatiq_guard.exits.boot_brake import BootBrake


@pytest.fixture
def brake(tmp_path, virtual):
    """Makes the brake of one boot, on one file."""
    return lambda boot="this": BootBrake(tmp_path / "boots.json", boot)


def crash(brake, times, soon=True, clock=None):
    """Boots that end in a crash."""
    for n in range(times):
        one = brake(f"boot {n}")
        one.booted()
        if not soon:
            clock.time += 10_001
        one.crashed()


@pytest.mark.parametrize(
    ("crashes", "delay"), [(0, 0), (2, 0), (3, 5_000), (4, 10_000), (6, 40_000), (7, 60_000), (90, 60_000)]
)
def test_each_further_boot_waits_twice_as_long(brake, crashes, delay):
    """The first three are free, and a minute is the most."""
    crash(brake, crashes)
    assert brake().delay() == delay


def test_a_crash_after_a_while_is_none_of_the_boots(brake, virtual):
    """Nor is one that came before the process went to work."""
    crash(brake, 5, soon=False, clock=virtual)
    brake("another").crashed()

    assert brake().delay() == 0


def test_crashes_are_forgotten_after_five_minutes(brake, virtual):
    """Somebody has mended it."""
    crash(brake, 5)
    virtual.time += 300_000
    assert brake().delay() == 0


def test_the_processes_of_one_master_count_as_one_boot(brake):
    """They crash together; and this boot's own siblings do not count at all."""
    for _ in range(8):
        crash(brake, 2)
    for _ in range(8):
        sibling = brake("this")
        sibling.booted()
        sibling.crashed()

    assert brake("this").delay() == 0
    assert brake("the next").delay() == 5_000


def test_the_wait_is_said_and_ends(brake, virtual, caplog):
    """With the number of boots, in small steps, so that it can be given up."""
    crash(brake, 3)
    brake().wait(lambda: False)

    assert sum(virtual.waits) == 5_000
    assert max(virtual.waits) <= 100
    assert "The last 3 boots of this command ended in a crash" in caplog.text


def test_nobody_waits_once_the_process_ends(brake, virtual):
    """TERM while it waits."""
    crash(brake, 7)
    brake().wait(lambda: len(virtual.waits) == 3)
    assert len(virtual.waits) == 3


def test_without_crashes_nobody_waits(brake, virtual, caplog):
    """Nor says anything."""
    brake().wait(lambda: False)
    assert (virtual.waits, caplog.text) == ([], "")


@pytest.mark.parametrize("content", ["", "{", "{}", "7", '[1, [2], ["x", "y"], [9e99, "z"], [1, 2]]', "\xff"])
def test_a_file_that_makes_no_sense_stops_no_boot(tmp_path, content):
    """And is written anew."""
    path = tmp_path / "boots.json"
    path.write_bytes(content.encode("latin-1"))
    brake = BootBrake(path, "this")
    assert brake.delay() == 0

    brake.booted()
    brake.crashed()
    ((_, boot),) = json.loads(path.read_text())
    assert boot == "this"


def test_a_file_that_cannot_be_written_is_said(tmp_path, caplog):
    """The crash goes on."""
    brake = BootBrake(tmp_path / "missing" / "boots.json", "this")
    brake.booted()
    brake.crashed()
    assert "could not be noted" in caplog.text


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary directory of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_each_command_line_has_a_file_of_its_own(temporary, monkeypatch):
    """In a directory that nobody else can read."""
    one = BootBrake()
    monkeypatch.setattr("sys.argv", ["dramatiq", "another"])
    two = BootBrake()

    assert one.path is not None
    assert one.path != two.path
    assert one.path.parent.stat().st_mode & 0o777 == 0o700
    assert one.boot.startswith(f"{os.getppid()}:")


@pytest.mark.parametrize("taken", ["a file", "somebody else's", "a link"])
def test_where_the_place_is_somebody_elses_there_is_no_brake(temporary, taken, monkeypatch):
    """What they write would hold us up, or what we write would overwrite theirs."""
    folder = Path(temporary) / f"dramatiq-guard-{os.getuid()}"
    if taken == "a file":
        folder.write_text("")
    elif taken == "a link":
        (temporary / "elsewhere").mkdir()
        folder.symlink_to(temporary / "elsewhere")
    else:
        folder.mkdir()
        mine = os.getuid()
        answers = iter([mine])
        monkeypatch.setattr(os, "getuid", lambda: next(answers, mine + 1))
    brake = BootBrake()
    brake.booted()
    brake.crashed()

    assert brake.path is None
    assert brake.delay() == 0

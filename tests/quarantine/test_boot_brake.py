"""A command whose boots keep ending in a crash waits before it tries again, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dramatiq_guard.exits.boot_brake import BootBrake
from tests.support.waiting import wait_until

from .conftest import VirtualClock
from .fleet import fleet


def never() -> bool:
    return False


def crash(path: Path, boot: str, virtual: VirtualClock, after: int = 500) -> None:
    """A boot that ends in a crash."""
    brake = BootBrake(path, boot)
    brake.wait(never)
    brake.booted()
    virtual.time += after
    brake.crashed()


def test_the_first_crashes_are_free(virtual: VirtualClock, tmp_path: Path) -> None:
    """Anybody may have bad luck twice; the fourth boot waits, and each one after it twice as long, up to a minute."""
    path = tmp_path / "boots.json"
    delays = []
    for boot in range(9):
        delays.append(BootBrake(path, f"boot {boot}").delay())
        crash(path, f"boot {boot}", virtual)

    assert [0, 0, 0, 5_000, 10_000, 20_000, 40_000, 60_000, 60_000] == delays


def test_it_waits_and_says_so(virtual: VirtualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How many boots crashed, and for how long it waits."""
    for boot in range(3):
        crash(tmp_path / "boots.json", f"boot {boot}", virtual)
    began = virtual.time

    BootBrake(tmp_path / "boots.json", "next").wait(never)

    assert 5_000 == virtual.time - began
    assert "The last 3 boots" in caplog.text
    assert "waits for 5000 ms" in caplog.text


def test_who_is_told_to_stop_does_not_wait_on(virtual: VirtualClock, tmp_path: Path) -> None:
    """A signal ends the wait."""
    for boot in range(8):
        crash(tmp_path / "boots.json", f"boot {boot}", virtual)
    began = virtual.time

    BootBrake(tmp_path / "boots.json", "next").wait(lambda: virtual.time - began > 1_000)

    assert virtual.time - began < 2_000


def test_all_processes_of_one_master_are_one_boot(virtual: VirtualClock, tmp_path: Path) -> None:
    """Eight of them that crash together are no loop; and those that crash first do not brake the others."""
    path = tmp_path / "boots.json"
    for _ in range(8):
        crash(path, "one master", virtual)
        assert 0 == BootBrake(path, "one master").delay()
    for boot in range(2):
        crash(path, f"boot {boot}", virtual)
        crash(path, "this master", virtual)

    assert 5_000 == BootBrake(path, "this master").delay()
    assert 10_000 == BootBrake(path, "another").delay()


def test_a_crash_long_after_the_boot_is_no_loop(virtual: VirtualClock, tmp_path: Path) -> None:
    """Nor one before the boot is over, nor one that is long ago."""
    path = tmp_path / "boots.json"
    for boot in range(5):
        crash(path, f"late {boot}", virtual, after=10_001)
        BootBrake(path, f"early {boot}").crashed()
    assert 0 == BootBrake(path, "next").delay()

    for boot in range(5):
        crash(path, f"boot {boot}", virtual)
    assert BootBrake(path, "next").delay() > 0
    virtual.time += 300_001
    assert 0 == BootBrake(path, "next").delay()


@pytest.mark.parametrize("rubbish", ["", "{}", "[1, 2]", '[["a", 1]]', "[[1]]", "\0"])
def test_rubbish_in_the_file_is_no_crash(virtual: VirtualClock, tmp_path: Path, rubbish: str) -> None:
    """And the next crash replaces it."""
    path = tmp_path / "boots.json"
    path.write_text(rubbish)
    assert 0 == BootBrake(path, "next").delay()

    for boot in range(3):
        crash(path, f"boot {boot}", virtual)
    assert 5_000 == BootBrake(path, "next").delay()


def test_a_place_that_is_somebody_elses_is_not_used(
    virtual: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory is everybody's: a link that lies where the file should be is left alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    brake = BootBrake()
    assert brake.path is not None
    assert brake.path.parent.stat().st_mode & 0o777 == 0o700
    brake.path.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    brake.path.parent.symlink_to(tmp_path / "elsewhere")

    brake = BootBrake()
    brake.wait(never)
    brake.booted()
    brake.crashed()

    assert brake.path is None
    assert [] == os.listdir(tmp_path / "elsewhere")


def test_a_real_command_is_braked(valkey) -> None:
    """Three boots meet a fatal error at once; the fourth says that it waits, and takes nothing up."""
    with fleet("redis", valkey.url, valkey.url, threads=1) as workers:
        for at in range(20):
            workers.send("faulty", f"fault{at}", "Fatal")
        workers.supervise()
        wait_until(lambda: "The last 3 boots" in workers.log, 60, workers.story)

        assert [70, 70, 70] == workers.codes
        assert 3 == len(set(workers.pids("began")))

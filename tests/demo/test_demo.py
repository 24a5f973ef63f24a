"""The demo as its user sees it: one process, its exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from dramatiq_guard.demo.plan import plan
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(150)

PLANNED = {kind: [job for job in plan() if job.kind == kind] for kind in {job.kind for job in plan()}}


@dataclass
class Demo:
    """A running demo, marked so that whatever it started can be found."""

    process: subprocess.Popen
    mark: str
    directory: Path

    def finish(self) -> tuple[int, str]:
        """Wait for its end; gives its exit code and what it printed."""
        out, err = self.process.communicate(timeout=120)
        assert "Traceback" not in err
        return self.process.returncode, out

    @property
    def offspring(self) -> list[int]:
        """The processes that carry its mark, without itself."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if pid != self.process.pid]


@pytest.fixture
def start(tmp_path):
    """Starts a demo with its temporary files in a directory of its own."""
    started = []

    def start(*arguments: str) -> Demo:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "dramatiq_guard", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path), "DEMO_MARK": mark},
        )
        started.append(process)
        return Demo(process, mark, tmp_path)

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def test_plain_dramatiq_leaves_deaths_unexplained(start):
    """On stock Dramatiq every message ends somewhere, but no death has a reason; the exit code is 1."""
    demo = start("--stock", "--no-mischief", "--json")
    code, out = demo.finish()
    document = json.loads(out)

    assert (code, document["mode"], document["accounted"]) == (1, "stock", False)
    dead = sum(job.ends == "dead" for job in plan())
    assert document["faults"]["no_reason"] == document["fates"]["dead"] == dead
    assert document["kinds"]["fine"] == {
        "messages": len(PLANNED["fine"]),
        "fates": {"done": len(PLANNED["fine"])},
        "faults": {},
        "requests": len(PLANNED["fine"]),
        "planned": len(PLANNED["fine"]),
    }
    assert document["kinds"]["permanent"]["requests"] == 6 * len(PLANNED["permanent"])
    assert document["replay"] is None
    assert document["trace"] == []
    assert demo.offspring == []
    assert list(demo.directory.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(start, sent):
    """Ctrl-C in the middle ends every process that was started and removes every file."""
    demo = start("--stock")
    # Valkey, downstream, two masters with a worker each, at least.
    wait_until(lambda: len(demo.offspring) >= 6, timeout=30)
    demo.process.send_signal(sent)
    code, _ = demo.finish()

    assert code == 130
    assert demo.offspring == []
    assert list(demo.directory.iterdir()) == []


def test_with_the_stack_every_message_is_accounted_for(start):
    """Served or dead with its reason, after as many requests as planned; replayed after the fix; exit code 0."""
    demo = start("--no-mischief", "--json")
    code, out = demo.finish()
    document = json.loads(out)

    assert document["misses"] == []
    assert document["faults"] == {}
    assert (code, document["accounted"]) == (0, True)
    for kind, jobs in PLANNED.items():
        found = document["kinds"][kind]
        assert found["fates"].get("dead", 0) == sum(job.ends == "dead" for job in jobs)
        assert found["requests"] == found["planned"]
    assert {reason for group in document["groups"] for reason in group["reason"].split(", ")} == {
        job.reason for job in plan() if job.reason
    }
    assert sum(group["count"] for group in document["groups"]) == sum(job.ends == "dead" for job in plan())
    cured = [job for job in plan() if job.reason in {"permanent", "exhausted"}]
    assert document["replay"]["asked"] == document["replay"]["sent"] == len(cured)
    assert document["replay"]["fates"] == {
        "done": len(plan()) - document["replay"]["left"],
        "dead": document["replay"]["left"],
        "waiting": 0,
        "stranded": 0,
        "lost": 0,
        "not due": 0,
    }
    assert demo.offspring == []
    assert list(demo.directory.iterdir()) == []


def test_one_message_is_shown_as_one_trace(start):
    """The trace of a message that failed twice shows its sending, each attempt, and each decision."""
    demo = start("--no-mischief")
    code, out = demo.finish()

    assert code == 0
    lines = [line.strip() for line in out.partition("One message, one trace:")[2].splitlines()]
    trace = lines[1 : lines.index("", 1)]
    assert trace[0].startswith("send default")
    assert [line for line in trace if "process default" in line][-1].endswith("→ succeeded")
    assert sum("→ retried" in line for line in trace) == 2
    assert sum("dramatiq_guard.backoff" in line for line in trace) == 2
    assert "Every one of 376 messages is accounted for" in out


def test_with_the_stack_nothing_is_lost_when_the_broker_restarts_and_a_worker_is_killed(start):
    """What the demo does by default: the same account, with a broker that goes away and a worker that dies."""
    demo = start("--json")
    code, out = demo.finish()
    document = json.loads(out)

    assert document["misses"] == []
    assert document["replay"]["misses"] == []
    assert (code, document["accounted"]) == (0, True)
    assert ["killed" in event for event in document["events"]] == [True, False]
    assert "the broker was stopped" in document["events"][1]
    assert demo.offspring == []


def test_plain_dramatiq_loses_what_a_restart_and_a_kill_touch(start):
    """The same on stock Dramatiq: messages are lost, or stranded with a worker that is dead or has forgotten them."""
    demo = start("--stock", "--json")
    code, out = demo.finish()
    document = json.loads(out)

    assert (code, document["accounted"]) == (1, False)
    assert len(document["events"]) == 2
    assert document["fates"]["lost"] + document["fates"]["stranded"] > 0
    named = [miss["job"] for miss in document["misses"] if miss["fate"] in {"lost", "stranded"}]
    assert len(named) == document["fates"]["lost"] + document["fates"]["stranded"]
    assert demo.offspring == []

"""The image's entrypoint, as the first process of a process namespace of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tests.support.workers import Workers

DOCKER = Path(__file__).parents[2] / "deploy" / "docker"
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
if os.getuid() != 0:
    NAMESPACE[1:1] = ["--user", "--map-root-user"]


def _allowed() -> bool:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(
    not _allowed() and os.environ.get("CI") != "true", reason="this machine allows no process namespaces: run as root"
)


class Container(Workers):
    """The workers behind the entrypoint, which is process 1."""

    def __init__(self, **options):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        options["env"] = {"PATH": path, **options.get("env", {})}
        super().__init__("tests.deploy.deployed_app", **options)
        arguments = self.command[self.command.index("tests.deploy.deployed_app") :]
        self.command = [*NAMESPACE, "sh", str(DOCKER / "entrypoint.sh"), *arguments]

    @property
    def first(self):
        """The number, outside, of what is process 1 inside."""
        return _children(self.pid)[0]


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_to_the_first_process_reaches_the_workers(sig):
    """`docker stop` ends them as it ends a master on a plain machine: they stop, with 0."""
    with Container(processes=2) as container:
        os.kill(container.first, sig)
        assert container.wait() == 0
        assert container.log.count("Worker has been shut down.") == 2


def test_orphans_are_taken_in(tmp_path):
    """An actor starts processes and forgets them: none of them stays a zombie."""
    with Container(env={"ORPHANS": "20"}) as container:
        container.wait_log("orphans made")
        first = container.first
        wait_until(lambda: len(_children(first)) == 1, describe=lambda: _children(first))
        (master,) = _children(first)
        assert not _is_zombie(master)
        assert container.process.poll() is None


@pytest.mark.parametrize("code", [70, 75])
def test_the_exit_code_of_the_workers_is_the_containers(tmp_path, code):
    """An orchestrator tells by it what happened."""
    (tmp_path / "ends").write_text(f"{code}\n")
    with Container(env={"ENDS": str(tmp_path / "ends")}) as container:
        assert container.wait() == code


def test_the_image_runs_the_entrypoint_as_it_is():
    """In the exec form, not as root, with the signal that dramatiq knows."""
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line and not line.startswith("#")}

    assert words["ENTRYPOINT"] == '["/bin/sh", "/usr/local/bin/entrypoint.sh"]'
    assert words["CMD"].startswith("[")
    assert words["STOPSIGNAL"] == "SIGTERM"
    assert words["USER"] not in {"root", "0"}
    assert 'CMD ["dramatiq-guard", "probe", "live"' in words["HEALTHCHECK"]
    assert "dumb-init" in words["RUN"] or any("dumb-init" in line for line in lines if line.startswith("RUN"))

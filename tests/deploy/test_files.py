"""The files that no test can run: they are what their programs read, and grant the time that workers need to leave."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dramatiq_guard.cli.probe import main as probe
from dramatiq_guard.probing.probe_files import STATES, ProbeFiles
from tests.deploy.limits import HARD_DEADLINE, LATEST

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "worker.service"


def seconds(text):
    """Read 40, 40s or 1m30s as milliseconds."""
    units = {"": 1_000, "s": 1_000, "m": 60_000, "h": 3_600_000}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([smh]?)", str(text)))


# -- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pod():
    """The pod of the Deployment."""
    document = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("apps/v1", "Deployment")
    assert (
        document["spec"]["selector"]["matchLabels"].items()
        <= document["spec"]["template"]["metadata"]["labels"].items()
    )
    return document["spec"]["template"]["spec"]


def test_kubernetes_grants_more_than_a_worker_needs_to_leave(pod):
    """terminationGracePeriodSeconds > preStop + hard deadline; what preStop takes is taken from the same time."""
    (container,) = pod["containers"]
    pre_stop = container.get("lifecycle", {}).get("preStop", {})
    if "exec" in pre_stop:
        took = sum(seconds(word) for word in pre_stop["exec"]["command"] if word.isdecimal())
    else:
        took = pre_stop.get("sleep", {}).get("seconds", 0) * 1_000

    assert pod["terminationGracePeriodSeconds"] * 1_000 > took + HARD_DEADLINE
    assert pod["terminationGracePeriodSeconds"] * 1_000 >= took + LATEST


@pytest.mark.parametrize(
    ("kind", "state"), [("startupProbe", "startup"), ("livenessProbe", "live"), ("readinessProbe", "ready")]
)
def test_kubernetes_asks_what_the_workers_answer(pod, tmp_path, kind, state):
    """Each probe's command, with the directory that the workers are given."""
    (container,) = pod["containers"]
    name, verb, *arguments = container[kind]["exec"]["command"]
    assert (name, verb) == ("dramatiq-guard", "probe")
    (directory,) = [each["value"] for each in container["env"] if each["name"] == "PROBE_DIR"]
    assert directory in {mount["mountPath"] for mount in container["volumeMounts"]}

    ProbeFiles(tmp_path, 41).write({state}, {})
    assert probe([str(tmp_path) if word == directory else word for word in arguments]) == 0
    assert directory in arguments


def test_kubernetes_does_not_restart_for_one_slow_answer(pod):
    """A worker may be busy; and a probe's own process takes its time on a busy machine."""
    (container,) = pod["containers"]
    live = container["livenessProbe"]
    assert live["failureThreshold"] >= 3
    assert live["timeoutSeconds"] >= 5
    assert container["readinessProbe"]["exec"]["command"][2] == "ready"


# -- Compose ---------------------------------------------------------------------------------------------------------


def test_compose_grants_the_time_and_restarts_crashes_only(capsys, tmp_path):
    """And asks for its health what the workers answer."""
    worker = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["worker"]

    assert seconds(worker["stop_grace_period"]) >= LATEST
    assert worker["restart"] == "on-failure"
    assert worker["healthcheck"]["test"][:4] == ["CMD", "dramatiq-guard", "probe", "live"]
    assert worker["healthcheck"]["test"][-1] == worker["environment"]["PROBE_DIR"]
    assert (DEPLOY / worker["build"]["context"] / "Dockerfile").exists()
    assert any(mount.startswith(worker["environment"]["PROBE_DIR"]) for mount in worker["tmpfs"])


# -- systemd ---------------------------------------------------------------------------------------------------------


class Unit(configparser.RawConfigParser):
    """A unit file; keys keep their case."""

    def optionxform(self, optionstr):
        return optionstr


@pytest.fixture
def service():
    """The [Service] section."""
    parser = Unit(delimiters=("=",), strict=False)
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_understands_the_unit(tmp_path):
    """Without a warning; only the path of the program is another one here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    dramatiq = Path(sys.executable).with_name("dramatiq")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/srv/app/venv/bin/dramatiq", str(dramatiq)))
    outcome = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")


def test_systemd_grants_the_time_and_restarts_crashes_only(service):
    """It listens to the workers, which are not its main process."""
    assert seconds(service["TimeoutStopSec"]) >= LATEST
    assert service["Restart"] == "on-failure"
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "all")
    assert service["KillMode"] in {"mixed", "control-group"}
    assert seconds(service["WatchdogSec"]) >= 30_000


def test_every_probe_has_a_name_that_is_used(pod):
    """Nothing is asked that nobody answers."""
    (container,) = pod["containers"]
    asked = {container[kind]["exec"]["command"][2] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked <= set(STATES)

"""What can be run here, by name: `tests`, `demo`, `lint`, `bench`; for longer, `bench_storm`, `bench_peers` and others.

Run as a script it needs nothing but Python with venv: `python3 noxfile.py tests` makes a virtual environment of its
own with nox in it (`.nox/_nox`), and goes on as `nox -s tests`.  Where nox or uv is at hand, `nox -s tests` and
`uvx nox -s tests` are the same.  What stands behind the name goes to the program that is run:
`python3 noxfile.py demo --stock`, `python3 noxfile.py tests -k backoff`.

It must not know anything of the library: settings of the tools are in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)


def python_with_nox() -> Path:
    """Make the environment that nox runs in, unless it is there, and give its interpreter."""
    if sys.version_info < OLDEST_PYTHON:
        wanted, found = ".".join(map(str, OLDEST_PYTHON)), sys.version.split()[0]
        sys.exit(f"noxfile.py: Python {wanted} or newer is needed, and {sys.executable} is {found}")
    environment = HERE / ".nox" / "_nox"
    python = environment / "bin" / "python"
    ready = environment / f"ready-{sys.version_info.major}.{sys.version_info.minor}"
    if ready.exists() and python.exists():
        return python
    print(f"noxfile.py: making {environment.relative_to(HERE)} with nox in it (once)", file=sys.stderr)
    try:
        venv.create(environment, clear=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit("noxfile.py: no virtual environment could be made; on Debian run: apt-get install python3-venv")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "nox>=2025.2"]
    if status := subprocess.run(install, check=False).returncode:
        sys.exit(f"noxfile.py: pip could not install nox (status {status}); its message is above")
    ready.touch()
    return python


def nox_arguments(arguments: list[str]) -> list[str]:
    """Read `tests -k backoff` as `--session tests -- -k backoff`; what begins with an option is nox's own."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    session, *rest = arguments
    return ["--session", session, "--", *(rest[1:] if rest[:1] == ["--"] else rest)]


if __name__ == "__main__":
    executable = str(python_with_nox())
    os.chdir(HERE)
    sys.stderr.flush()
    os.execv(executable, [executable, "-m", "nox", "--noxfile", str(HERE / "noxfile.py"), *nox_arguments(sys.argv[1:])])

import nox  # noqa: E402 - there is none yet where this file is run as a script

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.default_venv_backend = "virtualenv"

PROJECT = nox.project.load_toml(HERE / "pyproject.toml")
CHECKED = ("dramatiq_guard", "tests", "benchmarks", "noxfile.py")


def _install(session: nox.Session, extra: str, *groups: str) -> None:
    session.install("--quiet", "-e", f".[{extra}]", *nox.project.dependency_groups(PROJECT, *groups))


def _lint(session: nox.Session) -> None:
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    session.run("mypy")


def _storm(session: nox.Session, *how: str, pictures: bool = False) -> None:
    """Real workers in a storm, the simulation of the same, and whether it says what they made of it."""
    results = Path(session.create_tmp()).resolve()
    real, simulated = str(results / "real.json"), str(results / "simulated.json")
    drawn = [["--pictures", str(results / name)] if pictures else [] for name in ("real", "simulated")]
    session.run("python", "-m", "benchmarks.storm", *how, "--json", real, *drawn[0])
    session.run("python", "benchmarks/simulate.py", "--like", real, "--seeds", "9", "--json", simulated, *drawn[1])
    session.run("python", "-m", "benchmarks.agreement", real, simulated)
    if pictures:
        session.log(f"pictures and what was measured are in {results}")


@nox.session
def tests(session: nox.Session) -> None:
    """All checks and all tests, with coverage; with arguments for pytest, those tests alone."""
    _install(session, "all", "test", "libraries", "lint")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    _lint(session)
    # Most tests wait for a server or a process: three at a time keep two cores busy.
    session.run("pytest", "-n", "3", "--dist", "loadfile", "--cov", "--cov-report=")
    session.run("coverage", "report", "--include=dramatiq_guard/policy/*", "--fail-under=100")
    session.run("coverage", "report", "--fail-under=95")


@nox.session
def lint(session: nox.Session) -> None:
    """The checks of the `tests` session without the tests."""
    _install(session, "all", "test", "libraries", "lint")
    _lint(session)


@nox.session
def demo(session: nox.Session) -> None:
    """A broker, workers, a flaky downstream, and what became of every message."""
    _install(session, "demo")
    session.run("dramatiq-guard", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """What the stack costs for each message against stock Dramatiq, what a guarded one costs, what a storm does."""
    _install(session, "all", "test")
    session.run("python", "benchmarks/overhead.py", *session.posargs)
    if not session.posargs:
        session.run("python", "benchmarks/idempotency.py", "--quick", "--without-powertools")
        session.run("python", "benchmarks/simulate.py", "--quick")
        _storm(session, "--quick")


@nox.session
def bench_storm(session: nox.Session) -> None:
    """Every storm three times, simulated like it, and whether both agree; two hours, pictures in .nox."""
    _install(session, "all", "test")
    _storm(session, *(session.posargs or ["--full", "--rounds", "3"]), pictures=True)


@nox.session
def bench_idempotency(session: nox.Session) -> None:
    """What a guarded message costs, against naive designs and aws-lambda-powertools: about fifteen minutes."""
    _install(session, "all", "test")
    session.install("--quiet", "aws-lambda-powertools[redis]>=3", "boto3")  # which it imports, whatever the layer
    session.run("python", "benchmarks/idempotency.py", *(session.posargs or ["--full"]))


@nox.session
def bench_peers(session: nox.Session) -> None:
    """The same storm for Celery and BullMQ, which are installed for it; needs node and npm."""
    if missing := [name for name in ("node", "npm") if not shutil.which(name)]:
        session.error(
            f"bench_peers runs BullMQ, and there is no {' and no '.join(missing)}: install Node.js 20 or newer"
        )
    _install(session, "all")
    session.install("--quiet", "celery[redis]>=5.4")
    modules = Path(session.create_tmp()) / "node"
    modules.mkdir(exist_ok=True)
    packages = ("bullmq@^6", "ioredis@^6")
    session.run(
        "npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(modules), *packages, external=True
    )
    environment = {"STORM_NODE_MODULES": str(modules.resolve() / "node_modules")}
    session.run("python", "-m", "benchmarks.storm", "--peers", *session.posargs, env=environment)


@nox.session
def simulate_faults(session: nox.Session) -> None:
    """A hundred thousand seeded schedules of faults, on models of broker and store."""
    _install(session, "all", "test")
    for world in ([], ["--guarded"]) if not session.posargs else ([],):
        session.run("python", "-m", "tests.simulation", *world, *(session.posargs or ["--count", "100000"]))


@nox.session
def settlement_matrix(session: nox.Session) -> None:
    """Every fault at every moment, on real brokers: about half an hour."""
    _install(session, "all", "test")
    session.run("pytest", "-m", "matrix", "tests/settlement", *session.posargs)


@nox.session
def idempotency_matrix(session: nox.Session) -> None:
    """Workers killed at every point between claim and ack, with each way of guarding; prints what was charged."""
    _install(session, "all", "test")
    session.run("pytest", "-m", "matrix", "tests/kills", *session.posargs)


@nox.session
def exit_matrix(session: nox.Session) -> None:
    """Every way of telling real workers to stop, at every kind of job; writes the table of docs/shutdown.md."""
    _install(session, "all", "test")
    session.run("python", "-m", "tests.exits", *session.posargs)


@nox.session
def quarantine(session: nox.Session) -> None:
    """Poison of every kind on every broker, ten times each: about an hour."""
    _install(session, "all", "test")
    session.run("pytest", "-m", "matrix", "tests/quarantine", *session.posargs)


@nox.session
def rolling_deploy(session: nox.Session) -> None:
    """Twenty restarts of two masters while five thousand messages with effects run."""
    _install(session, "all", "test")
    session.run("python", "-m", "tests.exits.rolling", *session.posargs)

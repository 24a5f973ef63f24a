"""A private RabbitMQ, from Debian's `rabbitmq-server`, that touches nothing of the system's own.

Node name, AMQP port, distribution port, port mapper (epmd), data, logs and Erlang cookie are all its own, and the
server's scripts are called beneath Debian's wrapper, which would switch to the user `rabbitmq`.  It is asked to do
things in Erlang by `erl_call`, because `rabbitmqctl` takes seconds to start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import pika
import pika.exceptions

from dramatiq_guard.testing.private_server import PrivateServer, ServerDidNotStart, free_port
from tests.support.waiting import wait_until

__all__ = ["HOW_TO_INSTALL", "ForeignRabbitMQ", "PrivateRabbitMQ", "rabbitmq_is_installed"]

HOW_TO_INSTALL = (
    "RabbitMQ is not installed: run `apt-get install rabbitmq-server` (Debian, Ubuntu), or name one that the tests "
    "may use in DRAMATIQ_GUARD_TEST_RABBITMQ_URL"
)

_SCRIPTS = [*map(Path, ("/usr/lib/rabbitmq/bin", "/usr/local/lib/rabbitmq/bin", "/opt/rabbitmq/sbin"))]


def _server_script() -> Path | None:
    for place in _SCRIPTS:
        if (place / "rabbitmq-server").exists():
            return place / "rabbitmq-server"
    return None


def rabbitmq_is_installed() -> bool:
    """Whether there is a RabbitMQ that a private one can be started from."""
    return _server_script() is not None and shutil.which("erl") is not None


class ForeignRabbitMQ:
    """A RabbitMQ that somebody else runs: it has a URL, and cannot be stopped.

    Parameters:
      url(str): Its URL; the tests use queues with names of their own in it.
    """

    def __init__(self, url: str) -> None:
        self.url = url


class PrivateRabbitMQ(PrivateServer):
    """A RabbitMQ of one's own on 127.0.0.1, with the user `guest`.  It takes 15 to 30 seconds to boot.

    Parameters:
      port(int): The AMQP port; a free one by default.
      ready_within(float): The number of seconds to wait for the first answer.
    """

    name: ClassVar[str] = "rabbitmq"

    def __init__(self, *, port: int | None = None, ready_within: float = 120.0) -> None:
        super().__init__(port=port, ready_within=ready_within)
        self.epmd_port, self.dist_port, self.ctl_port = free_port(), free_port(), free_port()
        self.node = f"guard{self.port}@localhost"
        self.cookie = secrets.token_hex(16)

    @property
    def url(self) -> str:
        """The URL of its default virtual host."""
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        """Give the URL of one of its virtual hosts."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost.replace('/', '%2F')}"

    # -- what it can be asked to do ----------------------------------------------------------------------------------

    def add_vhost(self, name: str) -> str:
        """Create an empty virtual host and give its URL."""
        self.erlang(
            f'ok = rabbit_vhost:add(<<"{name}">>, <<"tests">>),'
            'ok = rabbit_auth_backend_internal:set_permissions('
            f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )  # fmt: skip
        return self.url_of(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with its queues; whoever is connected to it is disconnected."""
        self.erlang(f'rabbit_vhost:delete(<<"{name}">>, <<"tests">>).')

    def close_all_connections(self) -> None:
        """Close every client's connection from the server's side, as an operator would."""
        self.erlang('rabbit_networking:close_connections(rabbit_networking:connections(), "closed by a test").')

    @contextlib.contextmanager
    def memory_alarm(self) -> Iterator[None]:
        """Have the server think that it is out of memory: inside the block publishers are blocked."""
        self._watermark("0.0")
        try:
            wait_until(lambda: "memory" in self.alarms(), describe=lambda: f"the memory alarm in {self.alarms()}")
            yield
        finally:
            self._watermark("0.4")
            wait_until(lambda: "memory" not in self.alarms(), describe=lambda: f"no memory alarm in {self.alarms()}")

    def alarms(self) -> str:
        """Give the alarms that are up, as Erlang prints them."""
        return self.erlang("rabbit_alarm:get_alarms().")

    def erlang(self, code: str) -> str:
        """Evaluate Erlang in the server and give its value as Erlang prints it.

        Raises:
          AssertionError: If the server could not be reached or the code failed.
        """
        call = Path(os.path.realpath(shutil.which("erl") or "erl")).parent / "erl_call"
        # The node answers late while the machine is busy: erl_call waits for a handshake of its own for seconds only.
        for _ in range(5):
            done = subprocess.run(
                [str(call), "-sname", self.node, "-c", self.cookie, "-e"],
                input=code + "\n",
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            if "failed to connect" not in done.stdout + done.stderr:
                break
        answer = done.stdout + done.stderr
        assert done.returncode == 0, f"erl_call {self.node}: status {done.returncode}: {answer}"
        assert answer.startswith("{ok,"), f"{code} answered {answer}"
        return answer.removeprefix("{ok, ").removesuffix("}")

    def ctl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run `rabbitmqctl` against the server, which takes seconds, and give what it printed."""
        script = _server_script()
        assert script is not None, HOW_TO_INSTALL
        command = [str(Path(os.path.realpath(script)).parent / "rabbitmqctl"), "-n", self.node, "-q", *arguments]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    # -- how it is started and ended -------------------------------------------------------------------------------

    def start(self) -> Self:
        if not rabbitmq_is_installed():
            raise ServerDidNotStart(HOW_TO_INSTALL)
        cookie = self.directory / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(self.cookie)
            cookie.chmod(0o400)
            (self.directory / "enabled_plugins").write_text("[].\n")
            (self.directory / "rabbitmq.conf").write_text(
                f"listeners.tcp.1 = 127.0.0.1:{self.port}\nloopback_users = none\nlog.console = true\n"
                "vm_memory_high_watermark.relative = 0.4\ndisk_free_limit.absolute = 1MB\n"
            )
        return super().start()

    def close(self) -> None:
        super().close()
        if os.getpid() == self._owner and (epmd := shutil.which("epmd")):
            subprocess.run([epmd, "-port", str(self.epmd_port), "-kill"], capture_output=True, timeout=10, check=False)

    def stop(self, sig: int = signal.SIGTERM, *, timeout: float = 60.0) -> None:
        super().stop(sig, timeout=timeout)

    def command(self) -> list[str]:
        return [str(_server_script())]

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
        return {
            **kept,
            "HOME": str(self.directory),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "no-rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.directory / "config"),
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_CTL_DIST_PORT_MIN": str(self.ctl_port),
            "RABBITMQ_CTL_DIST_PORT_MAX": str(self.ctl_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # Has the script exec the Erlang VM instead of waiting for it, so that our process is the server.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def answers(self) -> bool:
        try:
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except (pika.exceptions.AMQPError, ConnectionError):
            return False
        return True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _watermark(self, fraction: str) -> None:
        self.erlang(f"vm_memory_monitor:set_vm_memory_high_watermark({fraction}).")

"""One process's way to a Redis or Valkey server: lazy, with short timeouts, and no retries of its own.

A client that silently repeats a command turns a timeout of five seconds into fifty; here the settle barrier is the one
who repeats.  This module must not know what the scripts do.
"""

from __future__ import annotations

import re
from hashlib import sha1
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

from ...errors import SetupError, StoreError, StoreUnavailable
from ..urls import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...settle.redis_scripts import KeptConnections

__all__ = ["RedisConnection", "Script"]

CONNECT_TIMEOUT: Final = 2.0
COMMAND_TIMEOUT: Final = 5.0

#: Replies of a server that is there but cannot serve now.  Inside a script they come as text.
_PASSING = re.compile(
    r"\b(READONLY|OOM|LOADING|MISCONF|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|BUSY|NOREPLICAS|UNKILLABLE|NOAUTH|WRONGPASS)\b"
)
_PASSING_TYPES: Final = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "ReadOnlyError",
        "OutOfMemoryError",
        "ClusterDownError",
        "MasterDownError",
        "TryAgainError",
        "SlotNotCoveredError",
        "OSError",
    }
)

#: redis-py's or valkey-py's error of a server that does not know a script.
_FORGOTTEN: Final = "NoScriptError"
#: Tells a client that decodes replies to leave this one.
_AS_IT_IS: Final[dict[str, Any]] = {"NEVER_DECODE": True}


class Script:
    """A Lua script of ours, with what it shares with others put in front.

    Parameters:
      name(str): The file in the folder ``lua``, without its suffix.
      shared(str): The file that is put in front.
    """

    __slots__ = ("name", "sha", "spoken", "text")

    def __init__(self, name: str, *, shared: str = "common") -> None:
        folder = files(__package__) / "lua"
        self.name = name
        self.text = "\n".join((folder / f"{each}.lua").read_text("utf-8") for each in (shared, name))
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        #: How running it begins; in bytes, which clients need not look at twice.
        self.spoken: Final = (b"EVALSHA", self.sha.encode(), b"1")


class RedisConnection:
    """Runs scripts on a server.

    Connections are made on first use, by each process for itself, and one per thread that is busy at once.

    Parameters:
      target(str | Redis): A URL, or a client of redis-py or valkey-py (Sentinel and cluster clients too), whose
        timeouts and retries are then its owner's.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._client: Any = None if isinstance(target, str) else target
        #: Of a client of our own; what a given one does around a command (its repeats, its metrics) is its owner's.
        self._kept: KeptConnections | None = None
        self._lock = Lock()
        self.name = masked(target) if isinstance(target, str) else f"the given {type(target).__name__}"

    def __repr__(self) -> str:
        return f"<RedisConnection to {self.name}>"

    def run(self, script: Script, key: str, *arguments: str | int) -> Any:
        """Run a script, in one round trip once the server knows it.

        Parameters:
          script(Script): The script.
          key(str): Its one key.
          *arguments(str | int): Its arguments.

        Returns:
          Any: Its reply, all text decoded.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          StoreError: The server answered with any other error.
        """

        def perform(client: Any) -> Any:
            try:
                return client.evalsha(script.sha, 1, key, *arguments)
            except Exception as error:
                if type(error).__name__ != _FORGOTTEN:
                    raise
                return client.eval(script.text, 1, key, *arguments)

        return self.call(f"running {script.name}", perform)

    def run_raw(self, script: Script, key: str | bytes, *arguments: str | int | bytes) -> Any:
        """Run a script whose reply may be anything but text, also on a client that decodes what it gets.

        Parameters:
          script(Script): The script.
          key(str | bytes): Its one key.
          *arguments(str | int | bytes): Its arguments.

        Returns:
          Any: Its reply, nothing of it decoded.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          StoreError: The server answered with any other error.
        """

        def perform(client: Any) -> Any:
            try:
                return client.execute_command("EVALSHA", script.sha, 1, key, *arguments, **_AS_IT_IS)
            except Exception as error:
                if type(error).__name__ != _FORGOTTEN:
                    raise
                return client.execute_command("EVAL", script.text, 1, key, *arguments, **_AS_IT_IS)

        return self._attempt(f"running {script.name}", perform)

    def run_unlooked(self, script: Script, key: str | bytes, *arguments: str | int | bytes) -> Any:
        """As `run_raw`, for what is said for every message, on a connection that is not looked at first.

        A connection that the server has closed in the last second is noticed by the failure: for scripts that are run
        again then, and answer as before.

        Parameters:
          script(Script): The script.
          key(str | bytes): Its one key.
          *arguments(str | int | bytes): Its arguments.

        Returns:
          Any: Its reply, nothing of it decoded.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          StoreError: The server answered with any other error.
        """
        if self._client is None:
            self._connected()
        kept = self._kept
        if kept is None:
            return self.run_raw(script, key, *arguments)
        try:
            return kept.ask(*script.spoken, key, *arguments, as_it_is=True)
        except Exception as error:
            if type(error).__name__ != _FORGOTTEN:
                if not _is_of_client(error):
                    raise
                raise self._translated(error, f"running {script.name}") from error
        return self.run_raw(script, key, *arguments)

    def run_each(self, script: Script, calls: Sequence[tuple[str | int | bytes, ...]]) -> list[Any]:
        """Run a script on many keys, all in one round trip (on a cluster, one for each server that has some).

        Each is an atomic step of its own.

        Parameters:
          script(Script): The script.
          calls(Sequence[tuple]): For each time its one key, and its arguments.

        Returns:
          list[Any]: Its replies, nothing of them decoded.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          StoreError: The server answered any of them with any other error.
        """

        def perform(client: Any) -> list[Any]:
            replies = _pipelined(client, [("EVALSHA", script.sha, 1, *call) for call in calls])
            forgotten = [at for at, reply in enumerate(replies) if type(reply).__name__ == _FORGOTTEN]
            again = _pipelined(client, [("EVAL", script.text, 1, *calls[at]) for at in forgotten])
            for at, reply in zip(forgotten, again, strict=True):
                replies[at] = reply
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

        return cast("list[Any]", self._attempt(f"running {script.name}", perform))

    def call(self, what: str, perform: Callable[[Any], Any]) -> Any:
        """Do something with the client itself.

        Parameters:
          what(str): What, for the error.
          perform(Callable): Gets the client.

        Returns:
          Any: What it returned, all text decoded.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          StoreError: The server answered with any other error.
        """
        return _decoded(self._attempt(what, perform))

    def close(self) -> None:
        """Give back the connections, unless they are somebody else's."""
        with self._lock:
            if isinstance(self._target, str) and self._client is not None:
                if self._kept is not None:
                    self._kept.clear()
                self._client.close()
                self._client = self._kept = None

    def _attempt(self, what: str, perform: Callable[[Any], Any]) -> Any:
        client = self._connected()
        try:
            return perform(client)
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise self._translated(error, what) from error

    def _connected(self) -> Any:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._kept, self._client = _client_of(self._target)
        return self._client

    def _translated(self, error: Exception, what: str) -> StoreError:
        names = {each.__name__ for each in type(error).__mro__}
        text = str(error).strip() or type(error).__name__
        if names & {"AuthenticationError", "AuthorizationError"} or re.search(r"NOAUTH|WRONGPASS", text):
            return StoreUnavailable(
                f"{self.name} refused the credentials while {what}: {text}; check user and password"
            )
        if names & _PASSING_TYPES or _PASSING.search(text):
            return StoreUnavailable(
                f"{self.name} is not available while {what}: {text}; is the server up and writable?"
            )
        return StoreError(f"{self.name} answered with an error while {what}: {text}")


def _is_of_client(error: Exception) -> bool:
    """Whether an error comes from redis-py, valkey-py or a socket; anything else is a mistake of ours."""
    libraries = {each.__module__.partition(".")[0] for each in type(error).__mro__}
    return isinstance(error, OSError) or bool(libraries & {"redis", "valkey"})


def _client_of(url: str) -> tuple[KeptConnections, Any]:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from ...settle.redis_scripts import KeptConnections
    except ImportError as error:
        raise SetupError(
            f"{masked(url)} needs redis-py, which is not installed; run pip install 'dramatiq-guard[redis]'"
        ) from error
    try:
        client = redis.Redis.from_url(
            re.sub("^valkey", "redis", url),
            socket_connect_timeout=CONNECT_TIMEOUT,
            socket_timeout=COMMAND_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
        )
        return KeptConnections(client.connection_pool), client
    except (ValueError, TypeError) as error:
        raise SetupError(f"not a usable Redis URL: {masked(url)}: {error}") from error


def _pipelined(client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
    """What each command was answered with, or the error."""
    if not commands:
        return []
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command, **_AS_IT_IS)
        return list(pipeline.execute(raise_on_error=False))


def _decoded(reply: Any) -> Any:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, list):
        return [_decoded(each) for each in reply]
    return reply

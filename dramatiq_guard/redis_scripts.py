"""Running a script on a connection of the broker's own pool.

What redis-py's commands do around sending and reading (metrics, repeats, choices that do not arise here) takes as long
as the rest, and it is done three times for a message that is retried once.  So its methods of connections are called,
which its own commands stand on.  It must not know any script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["register"]


class _Script:
    """A script, called with its keys and its arguments.

    Parameters:
      client(Redis): The client that it is run by.
      script(Script): It as redis-py knows it.
    """

    __slots__ = ("pool", "script", "sha")

    def __init__(self, client: Any, script: Any) -> None:
        self.pool = client.connection_pool
        self.script = script
        self.sha = script.sha

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        connection = self.pool.get_connection()
        try:
            connection.send_command(b"EVALSHA", self.sha, len(keys), *keys, *args)
            return connection.read_response()
        except NoScriptError:
            pass
        finally:
            self.pool.release(connection)
        # A server that was restarted, or another one after a failover.
        return self.script(keys=keys, args=args)


def register(client: Any, source: str) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Make a script that can be called.

    Parameters:
      client(Redis): The broker's client.
      source(str): The script.

    Returns:
      Callable: Takes keys and arguments; raises what redis-py raises.
    """
    script: Any = client.register_script(source)
    if hasattr(script, "sha") and hasattr(client.connection_pool, "get_connection"):
        return _Script(client, script)
    return lambda keys, args: script(keys=keys, args=args)

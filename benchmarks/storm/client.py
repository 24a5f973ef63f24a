"""How an application calls the downstream: a line over a connection that each thread keeps."""

from __future__ import annotations

import os
import socket
import threading
from email.message import Message as Headers
from urllib.error import HTTPError

__all__ = ["Refused", "call"]

#: What a call that was not answered by 200 raises: an error of the standard library, as applications see them.
Refused = HTTPError

_mine = threading.local()


def call(job: int, shard: int, bad: int) -> None:
    """Ask the downstream that ``STORM_PORT`` names.

    Raises:
      HTTPError: It does not answer with 200.
    """
    connection = getattr(_mine, "connection", None)
    if connection is None:
        address = ("127.0.0.1", int(os.environ["STORM_PORT"]))
        connection = _mine.connection = socket.create_connection(address, timeout=30).makefile("rwb", 0)
    connection.write(b"%d %d %d\n" % (job, shard, bad))
    status = int(connection.readline())
    if status != 200:
        raise HTTPError("http://downstream/", status, "no", Headers(), None)

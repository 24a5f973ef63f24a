"""A TCP proxy that stands between a client and a server and fails on purpose.

It knows bytes and turns, not protocols: a *turn* is one request that was followed by an answer, whatever their sizes,
which is what a network round trip costs.  Faults hold for open and new connections alike until `heal()`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from dramatiq_guard.testing.private_server import free_port

__all__ = ["Conversation", "FaultyProxy"]

#: The most of one request that is kept to be searched for `matching`.
_REQUEST_KEPT = 1 << 20


@dataclass(slots=True)
class Conversation:
    """One connection through the proxy, open or over, and what went over it."""

    turns: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    open: bool = True


@dataclass(slots=True)
class _LostReply:
    remaining: int
    matching: bytes
    lost: threading.Event = field(default_factory=threading.Event)


class FaultyProxy:
    """A proxy on a free port of 127.0.0.1; a context manager.

    Parameters:
      target(str | tuple[str, int]): The server behind it: a URL with host and port, or the pair.

    Example:
      >>> with FaultyProxy(valkey.url) as proxy:
      ...     broker = RedisBroker(url=proxy.url)
      ...     lost = proxy.lose_reply(matching=b"enqueue")
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self._url = target if isinstance(target, str) else None
        if isinstance(target, str):
            parts = urlsplit(target)
            assert parts.hostname, f"the target needs a host and a port: {target!r}"
            assert parts.port, f"the target needs a host and a port: {target!r}"
            target = (parts.hostname, parts.port)
        self.target = target
        self.port = free_port()
        #: Every connection since the start or the last `forget()`, in the order they came.
        self.conversations: list[Conversation] = []
        self._lock = threading.Lock()
        self._ends: list[tuple[Conversation, socket.socket]] = []
        self._listener: socket.socket | None = None
        self._latency = 0.0
        self._dark: str | None = None
        self._cut_after: int | None = None
        self._losses: list[_LostReply] = []
        self._closed = False

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The target's URL with the proxy's address in it."""
        assert self._url is not None, "the proxy was given a host and a port, not a URL: use .port"
        return self.through(self._url)

    def through(self, url: str) -> str:
        """Put the proxy's address into a URL of the target (another database, another user)."""
        parts = urlsplit(url)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    @property
    def turns(self) -> int:
        """The round trips over all connections since the start or the last `forget()`."""
        return sum(conversation.turns for conversation in self.conversations)

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        return sum(conversation.open for conversation in self.conversations)

    def forget(self) -> None:
        """Begin counting anew; open connections stay, with their counts at nought."""
        for conversation in self.conversations:
            conversation.turns = conversation.bytes_up = conversation.bytes_down = 0
        self.conversations = [conversation for conversation in self.conversations if conversation.open]

    # -- faults ------------------------------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Hold every answer back for so long."""
        self._latency = seconds

    def blackhole(self, *, replies_only: bool = False) -> None:
        """Swallow the traffic: connections open and stay open, and nothing comes.

        With `replies_only` the requests still reach the server and are carried out.  What was held back arrives
        after `heal()`, if the connection still stands.
        """
        self._dark = "replies" if replies_only else "all"

    def refuse(self) -> None:
        """Cut every connection and refuse new ones (ECONNREFUSED)."""
        self._stop_listening()
        self.cut()

    def cut_after(self, count: int) -> None:
        """Cut each connection once it has carried so many bytes of answers from now on, in the middle of one."""
        for conversation in self.conversations:
            conversation.bytes_down = 0
        self._cut_after = count

    def lose_reply(self, nth: int = 1, *, matching: bytes = b"") -> threading.Event:
        """Let a request through, drop its answer and cut the connection: the client cannot know what happened.

        Parameters:
          nth(int): Which answer from now on, over all connections.
          matching(bytes): Count only answers to requests that hold these bytes.

        Returns:
          Event: Set once the answer has been lost.
        """
        loss = _LostReply(nth, matching)
        with self._lock:
            self._losses.append(loss)
        return loss.lost

    def cut(self) -> None:
        """Cut every connection now; new ones are accepted."""
        with self._lock:
            for conversation, end in self._ends:
                conversation.open = False
                _reset(end)

    def heal(self) -> None:
        """End every fault.  Connections that were cut stay cut."""
        self._latency, self._dark, self._cut_after = 0.0, None, None
        with self._lock:
            self._losses.clear()
        if self._listener is None and not self._closed:
            self._listen()

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        self._listen()
        return self

    def close(self) -> None:
        self._closed = True
        self._dark = None
        self.refuse()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True).start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            conversation = Conversation()
            self.conversations.append(conversation)
            with self._lock:
                self._ends.append((conversation, client))
            if self._listener is not listener:  # refuse() came between accept() and now
                self.cut()
            threading.Thread(target=self._converse, args=(client, conversation), name="proxy", daemon=True).start()

    def _converse(self, client: socket.socket, conversation: Conversation) -> None:
        ends = [client]
        try:
            while self._dark == "all":
                if _over(conversation, client):
                    return
                time.sleep(0.01)
            server = socket.create_connection(self.target, timeout=5.0)
            server.settimeout(None)
            ends.append(server)
            with self._lock:
                self._ends.append((conversation, server))
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._relay(client, server, conversation)
        except OSError:
            pass  # either side went away: so does the other
        finally:
            conversation.open = False
            with self._lock:
                self._ends = [(other, end) for other, end in self._ends if other is not conversation]
            for end in ends:
                end.close()

    def _relay(self, client: socket.socket, server: socket.socket, conversation: Conversation) -> None:
        request = bytearray()
        asked = False
        while conversation.open:
            if self._dark == "all":
                if _over(conversation, client, server):
                    return
                time.sleep(0.01)
                continue
            watched = [client] if self._dark == "replies" else [client, server]
            readable, _, _ = select.select(watched, [], [], 0.02 if self._dark else None)
            if self._dark == "all" or (self._dark and server in readable):
                continue  # the light went out while we waited: what is readable now stays unread
            if server in readable:
                answer = server.recv(65536)
                if not answer:
                    return
                if asked:
                    asked = False
                    conversation.turns += 1
                    if self._loses_answer_to(request):
                        return
                    request.clear()
                if self._latency:
                    time.sleep(self._latency)
                limit = self._cut_after
                if limit is not None:
                    answer = answer[: max(0, limit - conversation.bytes_down)]
                conversation.bytes_down += len(answer)  # before it is sent: whoever has it may look at the count
                last = limit is not None and conversation.bytes_down >= limit
                client.sendall(answer)
                if last:
                    return
            if client in readable:
                part = client.recv(65536)
                if not part:
                    return
                asked = True
                if len(request) < _REQUEST_KEPT:
                    request += part
                conversation.bytes_up += len(part)
                server.sendall(part)

    def _loses_answer_to(self, request: bytearray) -> bool:
        with self._lock:
            for loss in self._losses:
                if loss.matching in request:
                    loss.remaining -= 1
                    if loss.remaining <= 0:
                        self._losses.remove(loss)
                        loss.lost.set()
                        return True
        return False


def _reset(end: socket.socket) -> None:
    """End a connection from any thread: the shutdown wakes whoever waits on it, and its close will be a reset."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)


def _over(conversation: Conversation, *ends: socket.socket) -> bool:
    """Whether a connection was cut or left by either side, without reading from it."""
    if not conversation.open:
        return True
    for end in ends:
        with contextlib.suppress(BlockingIOError):
            if end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                return True
    return False

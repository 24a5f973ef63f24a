"""A Redis that exists in memory only, as far as Dramatiq and the stack use one, and that fails when it is told to.

`ModelRedis` is the server; each process has a `ModelClient` of it, on which the real `RedisBroker` runs.  Commands are
atomic, as scripts are.  Before each one the faults are asked: it may not arrive, or its reply may be lost.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import redis

from dramatiq_guard import host


class ModelRedis:
    """The server: what `dispatch.lua` and the stack's own script keep."""

    def __init__(self) -> None:
        self.heartbeats: dict[str, int] = {}
        self.queues: dict[str, list[str]] = defaultdict(list)
        self.bodies: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.acks: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.dead: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.parts: dict[str, set[str]] = defaultdict(set)

    @property
    def drained(self) -> bool:
        """Whether nothing is queued, delayed or held."""
        return not any(self.bodies.values())

    def dispatch(self, args: list[Any]) -> Any:
        """What Dramatiq's dispatch script does, with maintenance where it is asked for."""
        command, now, queue, worker, timeout, _, maintain, _, *rest = args
        self.heartbeats[worker] = int(now)
        if int(maintain):
            for other, seen in list(self.heartbeats.items()):
                if seen <= int(now) - int(timeout):
                    for each in sorted(self.acks.pop((other, queue), ())):
                        if each in self.bodies[queue]:
                            self.queues[queue].append(each)
        held = self.acks[(worker, queue)]
        if command == "enqueue":
            self.bodies[queue][rest[0]] = rest[1]
            self.queues[queue].append(rest[0])
        elif command == "fetch":
            ids = [self.queues[queue].pop(0) for _ in range(min(int(rest[0]), len(self.queues[queue])))]
            held.update(ids)
            return [self.bodies[queue].get(each) for each in ids]
        elif command == "requeue":
            for each in rest:
                if each in held:
                    held.discard(each)
                    if each in self.bodies[queue]:
                        self.queues[queue].append(each)
        elif command == "ack":
            self.ack(worker, queue, rest[0])
        elif command == "nack" and rest[0] in held:
            held.discard(rest[0])
            self.dead[queue.removesuffix(".DQ")][rest[0]] = self.bodies[queue].pop(rest[0])
        return None

    def ack(self, worker: str, queue: str, old: str) -> int:
        """What the ack of either script does."""
        if old not in self.acks[(worker, queue)]:
            return 0
        self.acks[(worker, queue)].discard(old)
        self.bodies[queue].pop(old, None)
        return 1

    def move(self, worker: str, queue: str, old: str, to: str, new: str, body: bytes) -> int:
        """What the stack's own script does."""
        if old not in self.acks[(worker, queue)]:
            return 0
        self.acks[(worker, queue)].discard(old)
        self.bodies[queue].pop(old, None)
        self.bodies[to][new] = body
        self.queues[to].append(new)
        return 1

    def send_part(self, owner: tuple[str, str], old: str, part: str, to: str, new: str, body: bytes) -> int:
        """What the stack's other script does."""
        if old not in self.acks[owner] or part in self.parts[old]:
            return 0
        self.parts[old].add(part)
        self.bodies[to][new] = body
        self.queues[to].append(new)
        return 1

    def actors_waiting(self) -> list[str]:
        """The names of the actors whose messages are still there, for error texts."""
        return [json.loads(body)["actor_name"] for bodies in self.bodies.values() for body in bodies.values()]


class ModelPool:
    """The connection pool that a client seems to have."""

    def __init__(self) -> None:
        self.connection_kwargs: dict[str, Any] = {}

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Nothing to disconnect."""


class ModelClient:
    """One process's client of the model.

    Parameters:
      server(ModelRedis): The server.
      faulty(Callable): Called with a command's name and the command; runs it, or fails in its stead.
    """

    def __init__(self, server: ModelRedis, faulty: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.server = server
        self.faulty = faulty
        self.connection_pool = ModelPool()

    def set_retry(self, retry: Any) -> None:
        """It never retries."""

    def register_script(self, source: bytes | str) -> Callable[..., Any]:
        """The scripts that are ever registered."""
        text = source.decode() if isinstance(source, bytes) else source
        if text == host._ACK:
            return self._ack
        if text == host._MOVE:
            return self._move
        if text == host._SEND_PART:
            return self._send_part
        if "unpack_with_size" in text:
            return lambda: 8_000
        return self._dispatch

    def sismember(self, key: str, member: str) -> bool:
        """Whether an ack set holds an id."""
        return bool(self.faulty("sismember", lambda: member in self.server.acks[self._owner(key)]))

    def smembers(self, key: str) -> Iterable[bytes]:
        """The ids in an ack set."""
        found = self.faulty("smembers", lambda: {each.encode() for each in self.server.acks[self._owner(key)]})
        return set(found)

    def _dispatch(self, args: list[Any], keys: list[str]) -> Any:
        return self.faulty(args[0], lambda: self.server.dispatch(args))

    def _ack(self, keys: list[str], args: list[Any]) -> Any:
        worker, queue = self._owner(keys[0])
        return self.faulty("ack", lambda: self.server.ack(worker, queue, args[0]))

    def _move(self, keys: list[str], args: list[Any]) -> Any:
        worker, queue = self._owner(keys[0])
        to = keys[3].partition(":")[2]
        return self.faulty("move", lambda: self.server.move(worker, queue, args[0], to, args[1], args[2]))

    def _send_part(self, keys: list[str], args: list[Any]) -> Any:
        worker, queue = self._owner(keys[0])
        to = keys[3].partition(":")[2]
        return self.faulty(
            "send_part", lambda: self.server.send_part((worker, queue), args[0], args[1], to, args[2], args[3])
        )

    def delete(self, key: str) -> None:
        """Forget the parts of a message's end."""
        self.faulty("delete", lambda: self.server.parts.pop(key.partition(":__guard__.")[2], None))

    @staticmethod
    def _owner(key: str) -> tuple[str, str]:
        worker, _, queue = key.partition(":__acks__.")[2].partition(".")
        return worker, queue


#: What a client may meet instead of a reply; all of them are one kind to the stack.
ERRORS: tuple[type[redis.RedisError], ...] = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)

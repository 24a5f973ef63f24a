"""Idempotency keys on Redis or Valkey: one string a key, which expires by itself, and one script a call.

Results and the values of steps are bytes, which no client may decode.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ..cells import clean
from ..idempotency import DONE, FREE, HELD, PARKED, Claim, Ended, Finish, Keys, Posture, Record
from .connection import RedisConnection, Script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["RedisIdempotency"]

CLAIM: Final = Script("key_claim", shared="key")
COMPLETE: Final = Script("key_complete", shared="key")
LEAVE: Final = Script("key_leave", shared="key")
READ: Final = Script("key_read", shared="key")
RENEW: Final = Script("key_renew", shared="key")
RESOLVE: Final = Script("key_resolve", shared="key")
STEP: Final = Script("key_step", shared="key")
RESERVE: Final = Script("reserve", shared="nothing")
UNRESERVE: Final = Script("unreserve", shared="nothing")

#: States as the records have them.
_STATES: Final = {b"h": HELD, b"f": FREE, b"d": DONE, b"p": PARKED}

#: How often a page looks on where it found too few keys, and at about how many each time.
_LOOKS: Final = 20
_LOOK_AT_LEAST: Final = 10
_LOOK_AT: Final = 1_000

#: Errors of a server that does not let everybody look how it is set up.
_FORBIDDEN: Final = ("NoPermissionError", "ResponseError")


class RedisIdempotency:
    """An `IdempotencyStore` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    engine = "redis"

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        self._base = f"{prefix}:key:"
        self._marks = f"{prefix}:mark:"
        self._names = f"{prefix}:name:"

    def __repr__(self) -> str:
        return f"<RedisIdempotency at {self._connection.name}, {self._base[:-1]}>"

    def claim(
        self,
        key: str,
        *,
        owner: str,
        lease: int,
        retention: int,
        fingerprint: bytes | None = None,
        strict: bool = True,
        park: bool = False,
    ) -> Claim:
        asked = f"{lease} {retention} {strict:d} {park:d} {clean(owner)}".encode()
        reply = self._run_unlooked(CLAIM, key, asked, _given(fingerprint))
        text, result, steps = (reply, None, ()) if isinstance(reply, bytes) else reply
        answer, *numbers = text.decode().split()
        fence, lease_left, attempts, crashes, first_claim_at, now, same, flags = map(int, numbers)
        return Claim(
            answer=answer,
            fence=fence,
            lease_left=lease_left,
            attempts=attempts,
            crashes=crashes,
            first_claim_at=first_claim_at,
            now=now,
            steps=_steps(steps) if steps else {},
            result=result,
            flags=flags,
            same=bool(same),
        )

    def renew(self, claims: Sequence[tuple[str, int]], *, lease: int) -> tuple[bool, ...]:
        calls = [(self._base + key, fence, lease) for key, fence in claims]
        return tuple(map(bool, self._connection.run_each(RENEW, calls)))

    def step(self, key: str, fence: int, name: str, value: bytes) -> bool:
        return bool(self._run(STEP, key, fence, _text(name), value))

    def complete(self, key: str, fence: int, finish: Finish, *, retention: int) -> Ended:
        asked = f"{fence} {finish.flags} {retention}".encode()
        reply = self._run_unlooked(COMPLETE, key, asked, _given(finish.result))
        if reply == 1:
            return Ended(DONE, True)
        state, flags, result = reply
        return Ended(_STATES[state], False, result, flags)

    def release(self, key: str, fence: int) -> bool:
        return bool(self._run(LEAVE, key, fence, "f"))

    def park(self, key: str, fence: int) -> bool:
        return bool(self._run(LEAVE, key, fence, "p"))

    def resolve(self, key: str, *, done: bool, finish: Finish | None = None) -> str:
        finish = finish or Finish()
        state: bytes = self._run(RESOLVE, key, "d" if done else "f", finish.flags, _given(finish.result))
        return _STATES.get(state) or state.decode()

    def forget(self, key: str) -> bool:
        return bool(self._connection.call("forgetting a key", lambda client: client.delete(self._base + key)))

    def get(self, key: str) -> Record | None:
        return _record(key, self._run(READ, key))

    def page(self, *, prefix: str = "", states: Sequence[str] = (), limit: int = 50, cursor: str | None = None) -> Keys:
        if limit < 1:
            raise ValueError(f"a page holds at least one key, not {limit}")
        node, position = _position(cursor)
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._base + prefix) + "*"

        def look(client: Any) -> list[Any]:
            return _scan(client, pattern, limit, node, position)

        keys, following = self._connection.call("reading keys", look)
        found = self._connection.run_each(READ, [(key,) for key in keys])
        records = [_record(key[len(self._base) :], fields) for key, fields in zip(keys, found, strict=True)]
        return Keys(
            tuple(each for each in records if each is not None and (not states or each.state in states)), following
        )

    def mark(self, name: str, *, retention: int) -> None:
        self._connection.call("noting a name", lambda client: client.set(self._marks + name, 1, px=retention))

    def marked(self, name: str) -> bool:
        return bool(self._connection.call("looking for a name", lambda client: client.exists(self._marks + name)))

    def reserve(self, name: str, holder: str, *, ttl: int) -> str:
        has: bytes = self._connection.run_raw(RESERVE, self._names + name, _text(holder), ttl)
        return has.decode()

    def unreserve(self, name: str, holder: str) -> bool:
        return bool(self._connection.run_raw(UNRESERVE, self._names + name, _text(holder)))

    def purge(self, *, limit: int = 1_000) -> int:  # the server does it
        return 0

    def posture(self) -> Posture:
        posture: Posture = self._connection.call("looking how it is set up", _posture)
        return posture

    def ping(self) -> None:
        self._connection.call("saying hello", lambda client: client.ping())

    def close(self) -> None:
        self._connection.close()

    def _run(self, script: Script, key: str, *arguments: str | int | bytes) -> Any:
        return self._connection.run_raw(script, (self._base + key).encode(), *arguments)

    def _run_unlooked(self, script: Script, key: str, *arguments: str | int | bytes) -> Any:
        """As `_run`, for the two calls of every message: both answer as before when they are asked again."""
        return self._connection.run_unlooked(script, (self._base + key).encode(), *arguments)


def _text(name: str) -> bytes:
    """A name, past whatever encoding the client has."""
    return clean(name).encode()


def _given(value: bytes | None) -> bytes:
    """Tell what is missing from what is empty."""
    return b"" if value is None else b"=" + value


def _steps(flat: Sequence[bytes]) -> dict[str, bytes]:
    return dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))


def _record(key: str, fields: list[Any] | None) -> Record | None:
    if fields is None:
        return None
    state, fence, attempts, crashes, first, fingerprint, flags, result, steps, lease_until, owner, expires_at = fields
    return Record(
        key=key,
        state=_STATES[state],
        fence=fence,
        owner=owner.decode(),
        lease_until=lease_until,
        fingerprint=fingerprint,
        attempts=attempts,
        crashes=crashes,
        first_claim_at=first,
        expires_at=expires_at,
        steps=_steps(steps),
        result=result,
        flags=flags,
    )


def _nodes(client: Any) -> dict[str, Any]:
    """Clients of the servers that hold the keys, by name; one without a name where there is no cluster."""
    if not hasattr(client, "get_primaries"):
        return {"": client}
    nodes = sorted(client.get_primaries(), key=lambda node: node.name)
    return {node.name: client.get_redis_connection(node) for node in nodes}


def _position(cursor: str | None) -> tuple[str, int]:
    """Which server, and where in it."""
    node, _, position = (cursor or "0").rpartition(" ")
    if not position.isdecimal():
        raise ValueError(f"not a cursor of a page of keys: {cursor!r}; give back what the former page returned")
    return node, int(position)


def _scan(client: Any, pattern: str, limit: int, node: str, position: int) -> list[Any]:
    """The next keys, about as many as were asked for, and where to go on."""
    nodes = _nodes(client)
    left = [name for name in nodes if name >= node]
    # A server that has left the cluster since took its place in the order with it.
    if not left or left[0] != node:
        position = 0
    keys: dict[Any, None] = {}
    count = limit
    for _ in range(_LOOKS):
        if not left:
            return [list(keys), None]
        position, found = nodes[left[0]].scan(position, match=pattern, count=count)
        keys.update(dict.fromkeys(found))
        count = min(_LOOK_AT, count * 2) if not found else max(limit - len(keys), _LOOK_AT_LEAST)
        if not position:
            left.pop(0)
        if len(keys) >= limit:
            break
    return [list(keys), f"{left[0]} {position}".strip() if left else None]


def _posture(client: Any) -> Posture:
    infos, now = [], 0
    for node in _nodes(client).values():
        seconds, micros = node.time()
        now = now or seconds * 1_000 + micros // 1_000
        try:
            infos.append(node.info())
        except Exception as error:
            if type(error).__name__ not in _FORBIDDEN:
                raise
            infos.append({})
    policies = [policy for policy in _all(infos, "maxmemory_policy") if policy != "noeviction"]
    durable = [bool(enabled) for enabled in _all(infos, "aof_enabled")]
    return Posture(
        engine=RedisIdempotency.engine,
        server=str(infos[0].get("run_id", "")),
        now=now,
        evicts=policies[0] if policies else None,
        durable=all(durable) if len(durable) == len(infos) else None,
    )


def _all(infos: Iterable[dict[str, Any]], name: str) -> list[Any]:
    return [info[name] for info in infos if name in info]

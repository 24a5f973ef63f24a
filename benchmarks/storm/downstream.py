"""The downstream: a server in a process of its own, which does so much per second, has its trouble, and keeps a book.

It speaks lines over TCP, since it must not cost the workers the CPU that they are to storm it with:

    begin MILLISECONDS      the scenario begins at this reading of the monotonic clock; until then all are served
    JOB SHARD BAD           a request; answered by 200, by 503 where it is turned away, by 400 where BAD is 1
    served                  how many different jobs have had an answer other than 503

How long an answer takes, and who is turned away, is the model that the simulation uses.  It must not know who asks.

Run as ``python -m benchmarks.storm.downstream SCENARIO BOOK``, the first being JSON; prints its port, and serves until
its standard input ends.  Then it writes the book: for each request when it came, for which job, what was answered, and
when.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dramatiq_guard.simulation.downstream import Downstream

from .results import decoded

if TYPE_CHECKING:
    from dramatiq_guard.simulation.scenario import Scenario

__all__ = ["clock"]


def clock() -> float:
    """Milliseconds, the same in all processes of the machine."""
    return time.monotonic() * 1000


class _Server:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.began: float | None = None
        self.shards: list[Downstream] = []
        self.served: set[int] = set()
        self.book: list[tuple[float, int, int, float]] = []

    def begin(self, at: float) -> None:
        scenario = self.scenario
        self.began = at
        self.shards = [
            Downstream(
                scenario.capacity / scenario.shards,
                scenario.rejection_cost,
                scenario.latency,
                scenario.phases if shard < scenario.bad_shards else (),
            )
            for shard in range(scenario.shards)
        ]

    def answer(self, job: int, shard: int, bad: int) -> tuple[int, float]:
        """The status, and in how many milliseconds it is to be sent."""
        if self.began is None:
            return 200, self.scenario.latency
        now = max(0.0, clock() - self.began)
        served, takes = self.shards[shard].answer(now)
        status = 503 if not served else 400 if bad else 200
        self.book.append((round(now, 1), job, status, round(now + takes, 1)))
        if served:
            self.served.add(job)
        return status, takes


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match line.split():
                case [b"begin", at]:
                    self._server.begin(float(at))
                    self._send(b"ok\n")
                case [b"served"]:
                    self._send(b"%d\n" % len(self._server.served))
                case [job, shard, bad]:
                    status, takes = self._server.answer(int(job), int(shard), int(bad))
                    asyncio.get_running_loop().call_later(takes / 1000, self._send, b"%d\n" % status)
                case _:
                    self._transport.close()

    def _send(self, line: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(line)


async def _serve(server: _Server) -> None:
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=512)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    listening.close()


if __name__ == "__main__":
    serving = _Server(decoded(json.loads(sys.argv[1])))
    asyncio.run(_serve(serving))
    Path(sys.argv[2]).write_text(json.dumps(serving.book))

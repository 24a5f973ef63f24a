"""Poison among innocents: what is sent, and what must have become of it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from tests.support.waiting import wait_until

from .fleet import fleet

__all__ = ["FULL", "SOME", "Scenario", "Servers", "run"]

#: Crashes at which a message is not run any more.
LIMIT = 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of poison on one kind of broker.

    Parameters:
      broker(str): ``redis``, ``rabbitmq`` or ``quorum``.
      death(str): How it kills its process; see `app`.
      seconds(float): For how long it runs before.
      poisons(int): How many there are at once.
      processes(int): How many worker processes.
      store(str): Where crashes are counted: ``redis`` or ``postgres``.
    """

    broker: str
    death: str
    seconds: float = 0.1
    poisons: int = 1
    processes: int = 1
    store: str = "redis"

    def __str__(self) -> str:
        many = f"{self.poisons} at once, " if self.poisons > 1 else ""
        fleet = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{self.broker}, {many}{self.death} after {self.seconds:g} s{fleet}, counted on {self.store}"


SOME = (
    Scenario("redis", "kill"),
    Scenario("redis", "kill", poisons=2, processes=2),
    Scenario("rabbitmq", "kill", processes=2),
    Scenario("quorum", "kill", store="postgres"),
    Scenario("rabbitmq", "kill", seconds=1.5),
    Scenario("rabbitmq", "segfault", poisons=2),
    Scenario("rabbitmq", "out of memory", store="postgres"),
)

FULL = tuple(
    Scenario(broker, death, seconds, poisons, processes, store)
    for broker in ("redis", "rabbitmq", "quorum")
    for death, seconds, poisons in (
        ("kill", 0.1, 1),
        ("kill", 0.1, 2),
        ("kill", 5, 1),
        ("segfault", 0.1, 1),
        ("out of memory", 0.1, 1),
    )
    for processes, store in ((1, "redis"), (2, "postgres"))
)


@dataclass(frozen=True, slots=True)
class Servers:
    """Where everything is."""

    redis: str
    rabbitmq: str
    postgres: str

    def of(self, kind: str) -> str:
        """The URL of a kind of server."""
        return self.rabbitmq if kind == "quorum" else str(getattr(self, kind))


@dataclass(slots=True)
class Outcome:
    """What became of a scenario."""

    wrong: list[str] = field(default_factory=list)
    story: str = ""

    def expect(self, sound: bool, what: str) -> None:
        """Note what is not as it must be."""
        if not sound:
            self.wrong.append(what)


def run(scenario: Scenario, servers: Servers, timeout: float = 120) -> Outcome:
    """Send poison and eight innocents, let a supervisor restart what dies, and look at the end."""
    outcome = Outcome()
    with fleet(
        scenario.broker, servers.of(scenario.broker), servers.of(scenario.store), processes=scenario.processes
    ) as workers:
        poisons = [f"poison{at}" for at in range(scenario.poisons)]
        innocents = [f"innocent{at}" for at in range(8)]
        sent = {workers.send("poison", key, scenario.death, scenario.seconds).message_id: key for key in poisons}
        for key in innocents:
            workers.send("innocent", key, 0.3)
        workers.supervise()

        def done() -> bool:
            return (
                len(workers.letters()) >= len(poisons)
                and set(innocents) <= set(workers.keys("finished"))
                and not workers.left()
            )

        try:
            wait_until(done, timeout, interval=0.1)
        except AssertionError:
            outcome.wrong.append(f"it has not come to an end within {timeout} s")
        outcome.story = workers.story()

        letters: dict[str, Any] = {letter.message_id: letter for letter in workers.letters()}
        outcome.expect(set(letters) == set(sent), f"the letters are of {letters}, and the poison is {sent}")
        began, finished = workers.keys("began"), workers.keys("finished")
        for key in innocents:
            outcome.expect(finished[key] >= 1, f"{key} has not finished")
            # Each poison may take it along once, before anybody knows.
            outcome.expect(began[key] - finished[key] <= scenario.poisons, f"{key} was taken along too often")
        pids = set(workers.pids("began"))
        for message_id, letter in letters.items():
            key = sent.get(message_id, "")
            outcome.expect(letter.reason == "poison", f"{key} died as {letter.reason}")
            # A run that the end of its process interrupts proves nothing.
            interrupted = outcome.story.count("Shutdown: raising an exception")
            outcome.expect(began[key] <= LIMIT + interrupted, f"{key} was run {began[key]} times")
            crashes = [attempt for attempt in letter.history if attempt.rule == "crash"]
            outcome.expect(len(crashes) == LIMIT, f"the letter of {key} tells of {len(crashes)} crashes")
            outcome.expect(
                all(crash.host == socket.gethostname() and crash.pid in pids and crash.at > 0 for crash in crashes),
                f"the letter of {key} tells of {crashes}",
            )
    return outcome

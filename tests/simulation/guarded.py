"""The world of guarded actors: its processes are killed and frozen, and its store of keys goes away, too.

Beside the broker there is a database, in which the keys and the rows of the actors lie, and a gateway that charges once
for each key that it is given.  Several messages are sent for the same work.  Whatever happens, it is done once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from typing import Any
from unittest import mock

import dramatiq

from dramatiq_guard import IdempotencyGuard, Retryable, clock, current_delivery
from dramatiq_guard.errors import FencedOut, StoreUnavailable
from dramatiq_guard.stores.idempotency import BUSY, DONE, FREE, FRESH, HELD, TAKEOVER, Claim, Finish, Record
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency

from .world import QUEUE, Faults, Process, World, nothing

LEASE = 6_000

#: How the work of a key is protected.
KINDS = ("lease", "step", "atomic", "inbox")

MIXES = (
    Faults(lost_request=0.05, lost_reply=0.05, outages=2),
    Faults(lost_request=0.02, lost_reply=0.02, outages=1, kill=0.03),
    Faults(lost_request=0.0, lost_reply=0.0, outages=0, kill=0.06),
    Faults(lost_request=0.15, lost_reply=0.15, outages=3, kill=0.01),
)


class Database:
    """Keys and rows, as one process sees them: all or nothing, unless the answer to a commit is lost.

    Parameters:
      world(GuardedWorld): Whose keys and rows they are.
      process(Process): Who asks.
    """

    engine = "memory"

    def __init__(self, world: GuardedWorld, process: Process) -> None:
        self.world = world
        self.process = process

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.world.keys, name)
        return lambda *args, **kwargs: self.world.reach_keys(self.process, lambda: method(*args, **kwargs))

    @contextmanager
    def atomic(self, key: str, fence: int, finish: Finish, *, step: str | None = None) -> Iterator[list[str]]:
        self.world.reach_keys(self.process, lambda: None)
        rows: list[str] = []
        yield rows

        change = (key, fence, finish, step)
        self.world.reach_keys(self.process, lambda: self.world.commit(rows, change))

    @contextmanager
    def inbox(
        self, key: str, *, owner: str, retention: int, fingerprint: bytes | None = None, strict: bool = True
    ) -> Iterator[Inbox]:
        inbox = Inbox(self, key, owner, retention, fingerprint, strict)
        try:
            self.world.reach_keys(self.process, inbox.open)
            yield inbox
        finally:
            inbox.close()


class Inbox:
    """A transaction with a lock on its key; the server rolls it back when its process dies."""

    def __init__(
        self, database: Database, key: str, owner: str, retention: int, fingerprint: bytes | None, strict: bool
    ) -> None:
        self.world, self.process = database.world, database.process
        self.key = key
        self.asked: dict[str, Any] = {
            "owner": owner,
            "retention": retention,
            "fingerprint": fingerprint,
            "strict": strict,
        }
        self.connection: list[str] = []
        self.claim = Claim(answer=BUSY)
        self.holds = False

    def open(self) -> None:
        """Take the lock, and look."""
        record: Record | None = self.world.keys.get(self.key)
        if self.key in self.world.locked:
            return
        self.world.locked.add(self.key)
        self.holds = True
        state = None if record is None else record.state
        answer = {None: FRESH, FREE: FRESH, DONE: DONE}.get(state, TAKEOVER)
        self.claim = Claim(
            answer=answer,
            fence=1 if record is None else record.fence + 1,
            result=None if record is None else record.result,
            flags=0 if record is None else record.flags,
        )

    def commit(self, finish: Finish) -> None:
        """Keep the key and the rows."""

        def both() -> None:
            assert self.holds, "committed without the lock"
            self.world.keys.complete(self.key, self.claim.fence, finish, retention=86_400_000)
            self.world.rows.update(self.connection)

        self.world.reach_keys(self.process, both)

    def close(self) -> None:
        """Let go of the lock."""
        if self.holds:
            self.world.locked.discard(self.key)


class GuardedWorld(World):
    """One schedule of guarded work.

    Parameters:
      seed(int): What it is made from.
      faults(Faults): How much goes wrong.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__(seed, faults, messages=12)
        self.keys = MemoryIdempotency()
        self.keys_out: list[tuple[int, int]] = []
        self.locked: set[str] = set()
        self.rows: Counter[str] = Counter()
        self.charges: dict[str, set[str]] = defaultdict(set)
        self.runs: Counter[str] = Counter()
        self.freezes = 0
        self.work_of: dict[str, str] = {}
        self.given: dict[str, set[str]] = defaultdict(set)

    def commit(self, rows: list[str], change: tuple[str, int, Finish, str | None]) -> None:
        """Keep rows, and complete their key or record a step of it, if it is still held."""
        key, fence, finish, step = change
        record = self.keys.get(key)
        if record is None or record.state != HELD or record.fence != fence:
            raise FencedOut(key)
        if step is None:
            self.keys.complete(key, fence, finish, retention=86_400_000)
        else:
            self.keys.step(key, fence, step, finish.result or b"")
        self.rows.update(rows)

    def reach_keys(self, process: Process, command: Any) -> Any:
        """Run a command of a process on the database, or let it fail."""
        self._meet(process, self.keys_out, lambda: StoreUnavailable("out"))
        value = command()
        if not self.calm and self.random.random() < self.faults.lost_reply:
            raise StoreUnavailable("the reply was lost")
        return value

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with super().in_place(), ExitStack() as stack:
            for name in ("leases.Leases.start", "retention.longest_of"):
                value = nothing if name.endswith("start") else (lambda *_: 3_600_000)
                stack.enter_context(mock.patch(f"dramatiq_guard.idempotency.{name}", value))
            # Interrupts need threads; a run that is deaf to them is the worse case anyway.
            stack.enter_context(mock.patch("dramatiq_guard.interrupts.Interrupts.interrupt", nothing))
            yield

    def guards(self, process: Process) -> list[Any]:
        process.guard = IdempotencyGuard(Database(self, process), lease=LEASE, store_wait=300)  # type: ignore[attr-defined,arg-type]
        return [process.guard]  # type: ignore[attr-defined]

    def kept_up(self, process: Process) -> None:
        with suppress(StoreUnavailable):
            process.guard.keyring.leases.renew()  # type: ignore[attr-defined]

    def declare(self, process: Process) -> None:
        for kind in KINDS:
            dramatiq.actor(
                self.actor(kind, process),
                actor_name=kind,
                broker=process.broker,
                idempotency_key=lambda name, *_: name,
                idempotent="lease" if kind == "step" else kind,
                fingerprint=False,
            )

    def actor(self, kind: str, process: Process) -> Any:
        """What the actors do: one effect, with some misfortune before or after it."""

        def work(name: str, fails: int, freeze: str) -> str:
            delivery = current_delivery()
            self.runs[name] += 1
            if freeze == "before" and self.runs[name] == 1:
                self.freeze(process)
            if delivery.attempt <= fails:
                raise Retryable("once more")
            if kind == "lease":
                self.charges[name].add(delivery.key)
            elif kind == "step":
                delivery.step("charge", lambda key: self.charges[name].add(key))
            elif kind == "atomic":
                with delivery.atomic(result=name) as rows:
                    rows.append(name)
            else:
                delivery.connection.append(name)
            if freeze == "after" and self.runs[name] == 1:
                self.freeze(process)
            return name

        return work

    def freeze(self, process: Process) -> None:
        """The process stands still for longer than its lease, and then goes on as if nothing had been."""
        self.freezes += 1
        process.frozen = True
        try:
            for _ in range(4):
                clock.wait(Event(), LEASE // 2)
        finally:
            process.frozen = False

    def send_all(self) -> None:
        producer = Process(self, works=False)
        calm, self.calm = self.calm, True
        outages, self.broker_out = self.broker_out, []
        start = self.clock.time
        for _ in range(self.faults.outages):
            begin = start + self.random.randrange(20_000)
            self.keys_out.append((begin, begin + self.random.randrange(500, 9_000)))
        for at in range(self.messages):
            kind = KINDS[at % len(KINDS)]
            name = f"{kind}-{at}"
            arguments = (
                name,
                self.random.choice((0, 0, 1, 2)),
                self.random.choice(("never", "never", "never", "before", "after")),
            )
            for _ in range(self.random.choice((1, 1, 2, 3))):
                message = dramatiq.Message(QUEUE, kind, arguments, {}, {})
                self.work_of[message.message_id] = name
                producer.broker.enqueue(message, delay=self.random.choice((None, None, 700)))
        self.calm, self.broker_out = calm, outages

    def complaints(self) -> list[str]:
        found = []
        if not self.server.drained:
            found.append(f"never worked off: {self.server.actors_waiting()}")
        found += [
            f"{letter.actor}: died as {letter.reason}: {letter.error and letter.error.message}"
            for letter in self.letters.page(limit=1_000).letters
        ]
        for name in sorted(set(self.work_of.values())):
            kind = name.partition("-")[0]
            if kind in ("atomic", "inbox"):
                if self.rows[name] != 1:
                    found.append(f"{name}: {self.rows[name]} rows")
            elif len(self.charges[name]) != 1:
                found.append(f"{name}: charged under {len(self.charges[name])} keys")
        states = Counter(record.state for record in self.keys.page(limit=1_000).records)
        if states.keys() - {DONE}:
            found.append(f"keys that are not done: {dict(states)}")
        return found


def guarded(seed: int) -> GuardedWorld:
    """Run the schedule of a seed."""
    world = GuardedWorld(seed, MIXES[seed % len(MIXES)])
    world.run()
    return world


def broken(first: int, count: int) -> list[tuple[int, list[str]]]:
    """The seeds from *first* on whose schedules break a promise, and which."""
    return [(seed, complaints) for seed in range(first, first + count) if (complaints := guarded(seed).complaints())]

"""A seeded world in which everything that can fail does, and in which time is a number.

Two worker processes work on one model broker and one model store.  The very code of the stack runs, on the real
`RedisBroker`, `ConsumerThread` and `WorkerThread`; only the server, the store, the threads and the clock are models.
One seed makes one schedule: which command fails before it arrives, which reply is lost, when broker and store are out,
at which line a process is killed.  A seed that fails is repeated by ``python -m tests.simulation SEED``.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from threading import Event, get_ident
from typing import Any
from unittest import mock

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import BrokerConnectionError
from dramatiq.worker import ConsumerThread, Worker, WorkerThread

from dramatiq_guard import (
    Classify,
    DeadLetter,
    Defer,
    JitterBackoff,
    Permanent,
    Retryable,
    clock,
    current_delivery,
    host,
    install,
)
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.settle import killpoints
from dramatiq_guard.settle.redis_upkeep import RedisUpkeep
from dramatiq_guard.settle.withdrawals import Withdrawals
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.wiring import stack_of

from .redis_model import ERRORS, ModelClient, ModelRedis

#: Longer than any outage: a process that is merely cut off must not be taken for dead.
HEARTBEAT_TIMEOUT = 30_000
QUEUE = "default"


class Killed(BaseException):
    """The process is dead: nothing that it still does reaches anybody."""


@dataclass
class Faults:
    """How much goes wrong.

    Parameters:
      lost_request: Share of commands that never arrive.
      lost_reply: Share of commands whose reply is lost.
      kill: Share of kill points at which the process dies.
      outages: How often broker and store are each out for some seconds.
    """

    lost_request: float = 0.05
    lost_reply: float = 0.05
    kill: float = 0.0
    outages: int = 2


class VirtualClock:
    """Time that passes when the world says so."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.time = 1_700_000_000_000
        self.thread = get_ident()

    def now(self) -> int:
        return self.time

    def monotonic(self) -> int:
        return self.time

    def uniform(self) -> float:
        return self.world.random.random()

    def wait(self, event: Event, milliseconds: int) -> bool:
        """Whoever waits lets the others work meanwhile."""
        if get_ident() != self.thread:
            # A thread that a test before this one left behind; it is no part of the world.
            return event.wait(milliseconds / 1000)
        self.world.pass_time(milliseconds)
        return event.is_set()


@dataclass
class Sent:
    """A message of the plan, and what shall become of it."""

    kind: str
    attempts: int
    letter: str | None = None
    travelled: bool = False
    runs: list[int] = field(default_factory=list)
    done: int = 0


class World:
    """One schedule.

    Parameters:
      seed(int): What it is made from.
      faults(Faults): How much goes wrong.
      messages(int): How many messages are sent.
    """

    def __init__(self, seed: int, faults: Faults, messages: int = 14) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.clock = VirtualClock(self)
        self.server = ModelRedis()
        self.letters = MemoryDeadLetters()
        self.sent: dict[str, Sent] = {}
        self.kills = 0
        self.broker_out: list[tuple[int, int]] = []
        self.store_out: list[tuple[int, int]] = []
        self.calm = False
        self.depth = 0
        self.processes: list[Process] = []
        self.messages = messages
        self.running: Process | None = None
        self.stages: Counter[str] = Counter()

    # -- the course of it -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Send everything, let everything go wrong, then let it calm down and be worked off."""
        with self.in_place():
            start = self.clock.time
            for _ in range(self.faults.outages):
                for outages in (self.broker_out, self.store_out):
                    begin = start + self.random.randrange(20_000)
                    outages.append((begin, begin + self.random.randrange(500, 9_000)))
            self.processes = [Process(self), Process(self)]
            self.send_all()
            for _ in range(150):
                self.turn()
            self.calm = True
            for _ in range(6_000):
                if self.server.drained:
                    break
                self.turn()

    def turn(self) -> None:
        """One step of a process, and some time."""
        at = self.random.randrange(len(self.processes))
        if self.processes[at].dead:
            self.processes[at] = Process(self)
        self.processes[at].step()
        self.pass_time(self.random.randrange(10, 400))

    def pass_time(self, milliseconds: int) -> None:
        """Let time pass; if somebody waits, the other process works meanwhile."""
        self.clock.time += max(1, milliseconds)
        waiting, self.depth = self.running, self.depth + 1
        try:
            for process in [each for each in self.processes if not (each.dead or each.frozen)]:
                # Whoever waits on one thread keeps its heartbeat on another.
                process.keep_up()
                if self.depth == 1 and waiting is not None and process is not waiting:
                    process.step()
        finally:
            self.depth -= 1
            self.running = waiting
        if waiting is not None and waiting.dead:
            raise Killed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the models where the code looks for the real things."""
        with ExitStack() as stack:
            stack.enter_context(clock.use(self.clock))
            stack.enter_context(killpoints.reaching(self.reached))
            for name in ("dramatiq.brokers.redis.current_millis", "dramatiq.worker.current_millis"):
                stack.enter_context(mock.patch(name, self.clock.now))
            # Ids decide orders, and so must come from the seed, too.
            for name in ("dramatiq.brokers.redis.uuid4", "dramatiq.message.uuid.uuid4"):
                stack.enter_context(mock.patch(name, self.uuid))
            stack.enter_context(mock.patch("dramatiq_guard.clock.unique", self.unique))
            for name in ("dramatiq.brokers.redis.time.sleep", "dramatiq_guard.interrupts.Interrupts.start"):
                stack.enter_context(mock.patch(name, nothing))
            stack.enter_context(mock.patch.object(RedisUpkeep, "start", nothing))
            stack.enter_context(mock.patch.object(Withdrawals, "start", nothing))
            logging.disable(logging.CRITICAL)
            try:
                yield
            finally:
                logging.disable(logging.NOTSET)

    def uuid(self) -> uuid.UUID:
        """An id that follows from the seed."""
        return uuid.UUID(int=self.random.getrandbits(128))

    def unique(self) -> str:
        """As `uuid`, in 32 digits."""
        return self.uuid().hex

    # -- what other worlds have more ------------------------------------------------------------------------------

    def guards(self, process: Process) -> list[Any]:
        """Further middlewares of a process."""
        return []

    def declare(self, process: Process) -> None:
        """Declare the actors of a process."""
        dramatiq.actor(self.work, actor_name="work", broker=process.broker)
        dramatiq.actor(self.stage, actor_name="stage", broker=process.broker)

    def stage(self, of: str) -> None:
        """The next stage of a pipeline."""
        self.stages[of] += 1

    def kept_up(self, process: Process) -> None:
        """What further threads of a process do in passing."""

    # -- the faults -----------------------------------------------------------------------------------------------

    def reached(self, point: str) -> None:
        """A process may die at any point that has a name."""
        process = self.running
        if process is None or self.calm:
            return
        if self.random.random() < self.faults.kill:
            self.kills += 1
            process.dead = True
            raise Killed(point)

    def reach_broker(self, process: Process, command: Callable[[], Any]) -> Any:
        """Run a command of a process on the broker, or let it fail."""
        self._meet(process, self.broker_out, lambda: self.random.choice(ERRORS)("out"))
        value = command()
        if not self.calm and self.random.random() < self.faults.lost_reply:
            raise self.random.choice(ERRORS[:2])("the reply was lost")
        return value

    def reach_store(self, process: Process, command: Callable[[], Any]) -> Any:
        """Run a command of a process on the store, or let it fail."""
        self._meet(process, self.store_out, lambda: StoreUnavailable("out"))
        value = command()
        if not self.calm and self.random.random() < self.faults.lost_reply:
            raise StoreUnavailable("the reply was lost")
        return value

    def _meet(self, process: Process, outages: list[tuple[int, int]], error: Callable[[], Exception]) -> None:
        if process.dead:
            raise Killed
        now = self.clock.time
        out = any(begin <= now < end for begin, end in outages)
        if out or (not self.calm and self.random.random() < self.faults.lost_request):
            raise error()

    # -- the plan -------------------------------------------------------------------------------------------------

    def send_all(self) -> None:
        """Put messages of every kind on the broker, behind the back of the faults."""
        producer = Process(self, works=False)
        kinds = ("fine", "flaky", "permanent", "exhausted", "deferred", "unknown", "pipeline", "hard", "wavering")
        for at in range(self.messages):
            kind = kinds[at] if at < len(kinds) else self.random.choice(kinds)
            times = self.random.randrange(1, 4)
            delay = self.random.choice((None, None, 700))
            plan = {
                "fine": Sent("fine", 1),
                "flaky": Sent("flaky", times + 1),
                "hard": Sent("hard", 4),
                "permanent": Sent("permanent", 1, "permanent"),
                "exhausted": Sent("exhausted", 3, "exhausted"),
                "deferred": Sent("deferred", 1),
                "unknown": Sent("unknown", 0, "unknown_actor"),
                "pipeline": Sent("pipeline", 1),
                "wavering": Sent("wavering", 1),
            }[kind]
            message = dramatiq.Message(
                queue_name=QUEUE,
                actor_name="nobody" if kind == "unknown" else "work",
                args=(kind, 3 if kind == "hard" else times),
                kwargs={},
                options={"max_retries": 2} if kind == "exhausted" else {},
            )
            if kind == "pipeline":
                stage = dramatiq.Message(QUEUE, "stage", (message.message_id,), {}, {"pipe_ignore": True})
                message = message.copy(options={"pipe_target": stage.asdict()})
            self.sent[message.message_id] = plan
            calm, self.calm = self.calm, True
            outages, self.broker_out = self.broker_out, []
            producer.broker.enqueue(message, delay=delay)
            self.calm, self.broker_out = calm, outages

    def work(self, kind: str, times: int) -> None:
        """What the actor does: what its message says, by the attempt that it is in."""
        delivery = current_delivery()
        plan = self.sent[delivery.message_id]
        if kind == "deferred":
            plan.runs.append(delivery.attempt)
            if len(plan.runs) <= times:
                raise Defer("not now", delay=300)
            plan.done += 1
            return
        plan.runs.append(delivery.attempt)
        if kind == "permanent" or (kind == "wavering" and len(plan.runs) == 1):
            raise Permanent("never")
        if kind == "exhausted" or (kind in ("flaky", "hard") and delivery.attempt <= times):
            raise Retryable("once more")
        plan.done += 1

    # -- the judgement --------------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Everything that is not as it was promised."""
        found = []
        if not self.server.drained:
            found.append(f"never worked off: {self.server.actors_waiting()}")
        letters: dict[str, list[str]] = defaultdict(list)
        for letter in self.letters.page(limit=1_000).letters:
            letters[letter.message_id].append(letter.reason)
        for message_id, plan in self.sent.items():
            has = letters.get(message_id, [])
            wanted = [] if plan.letter is None else [plan.letter]
            if plan.kind == "wavering" and (not plan.done or plan.travelled):
                # It dies at its first run, and succeeds if a kill brings it back after that.  Only a letter that was on
                # its way to a store that is out cannot be withdrawn then.
                plan.letter, wanted = "permanent", has if plan.done else ["permanent"]
            if has != wanted:
                found.append(f"{plan.kind}: letters {has}, wanted {wanted}")
            if plan.letter is None and not plan.done:
                found.append(f"{plan.kind}: lost, after attempts {plan.runs}")
            if plan.kind == "deferred":
                continue
            planned = list(range(1, plan.attempts + 1))
            if sorted(set(plan.runs)) != planned:
                found.append(f"{plan.kind}: attempts {plan.runs}, planned {planned}")
            elif len(plan.runs) > len(planned) + self.kills:
                found.append(f"{plan.kind}: {len(plan.runs)} runs of {len(planned)} planned, {self.kills} kills")
            if plan.kind == "pipeline" and not 1 <= self.stages[message_id] <= 1 + self.kills:
                found.append(f"pipeline: its next stage ran {self.stages[message_id]} times, {self.kills} kills")
        return found


class FaultyLetters:
    """A process's view of the store of letters."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process

    def put(self, letter: Letter) -> bool:
        try:
            return bool(self.world.reach_store(self.process, lambda: self.world.letters.put(letter)))
        except StoreUnavailable:
            self.world.sent[letter.message_id].travelled = True
            raise

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.world.letters, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.world.reach_store(self.process, lambda: method(*args, **kwargs))

        return call


class Process:
    """A worker process whose threads are steps."""

    def __init__(self, world: World, *, works: bool = True) -> None:
        self.world = world
        self.dead = False
        client = ModelClient(world.server, lambda _, command: world.reach_broker(self, command))
        self.broker = RedisBroker(client=client, maintenance_chance=0, heartbeat_timeout=HEARTBEAT_TIMEOUT)  # type: ignore[no-untyped-call]
        dead_letter = DeadLetter(FaultyLetters(world, self))  # type: ignore[arg-type]
        self.withdrawals = dead_letter.withdrawals
        #: Its threads do nothing, not even live, while it is frozen.
        self.frozen = False
        install(
            self.broker,
            Classify(),
            JitterBackoff(min_backoff=200, max_backoff=1_000, max_retries=3),
            dead_letter,
            *world.guards(self),
        )
        world.declare(self)
        if works:
            self._boot()

    def _boot(self) -> None:
        self.held: list[tuple[Any, Any]] = []
        self.worker = Worker(self.broker, worker_threads=2)
        calm, self.world.calm = self.world.calm, True
        outages, self.world.broker_out = self.world.broker_out, []
        store_outages, self.world.store_out = self.world.store_out, []
        self.broker.emit_before("worker_boot", self.worker)
        self.withdrawals.round()
        self.world.calm, self.world.broker_out, self.world.store_out = calm, outages, store_outages
        self.settler = stack_of(self.broker).settler
        self.settler._later = lambda *held: self.held.append(held)  # type: ignore[method-assign]
        for queue in (QUEUE, f"{QUEUE}.DQ"):
            thread = ModelThread(
                broker=self.broker,
                queue_name=queue,
                prefetch=4 if queue == QUEUE else 100,
                work_queue=self.worker.work_queue,
                worker_timeout=1,
            )
            thread.running = True
            self.worker.consumers[queue] = thread
            self.broker.emit_after("consumer_thread_boot", thread)
        self.thread = WorkerThread(
            broker=self.broker, consumers=self.worker.consumers, work_queue=self.worker.work_queue, worker_timeout=1
        )

    def step(self) -> None:
        """Do one thing that one of its threads would do."""
        outer, self.world.running = self.world.running, self
        try:
            self.keep_up()
            step = self.world.random.choice(
                (*[self._consume] * 3, *[self._work] * 3, *[self._settle] * 2, self.withdrawals.round)
            )
            # As on a thread of its own: who waits meanwhile must not find another's delivery for its own.
            copy_context().run(step)
        except Killed:
            pass
        finally:
            self.world.running = outer

    def keep_up(self) -> None:
        """What the upkeep thread does."""
        if self.frozen:
            return
        self.world.kept_up(self)
        for queue in (QUEUE, f"{QUEUE}.DQ"):
            try:
                host.redis_maintain(self.broker, queue)
            except Killed:
                raise
            except Exception:
                return

    def _consume(self) -> None:
        """What a consumer thread does in one round of its loop."""
        thread = self.world.random.choice(list(self.worker.consumers.values()))
        with as_consumer(thread):
            try:
                if thread.consumer is None:
                    thread.consumer = self.broker.consume(
                        queue_name=thread.queue_name, prefetch=thread.prefetch, timeout=1
                    )
                message = next(thread.consumer)
                if message is not None:
                    thread.handle_message(message)
                thread.handle_delayed_messages()
            except BrokerConnectionError:
                thread.delay_queue = PriorityQueue()
                thread.close()
                thread.consumer = None

    def _work(self) -> None:
        """What a worker thread does with one message."""
        try:
            item = self.worker.work_queue.get_nowait()
        except Empty:
            return
        self.thread.process_message(item.message)

    def _settle(self) -> None:
        """What the settler thread does in one round."""
        held, self.held = self.held, []
        self.held.extend(each for each in held if not self.settler._try(*each))


def nothing(*_: Any) -> None:
    """What takes a thread or a sleep in the real world takes nothing here."""


class ModelThread(ConsumerThread):
    """A consumer thread that is never started."""

    def itself(self) -> ConsumerThread:
        """The thread, when the code asks on which it runs."""
        return self


@contextmanager
def as_consumer(thread: ModelThread) -> Iterator[None]:
    """Let the code believe that it runs on this consumer thread."""
    with mock.patch("dramatiq_guard.settle.consumer_thread.threading.current_thread", thread.itself):
        yield

"""A run: jobs, a broker with its delay queue, worker processes with their gates, and the downstream, in simpy.

What is exact is done at once: the delay queue delivers in batches, so all that is due in one is one event; the
downstream's queue is computed, not walked through.  An exchange with the breaker's store takes no time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import simpy

from ..policy.breaker import Limits
from ..policy.gate import Answer, Gate, Move, waiting_room
from .downstream import Downstream
from .policies import Oracle, Policy, Shared, Sharing, Unpaced
from .scenario import STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .scenario import Scenario

__all__ = ["Job", "Recording", "simulate"]

#: The bins in which requests are counted, in milliseconds.
BIN = STEP
#: How long a message waits in its thread for a token.
_PATIENCE = 2_000


class Job:
    """One job."""

    __slots__ = ("arrived", "attempts", "done", "permanent", "put_off", "retries", "shard", "since")

    def __init__(self, arrived: float, shard: int, *, permanent: bool) -> None:
        self.arrived = arrived
        self.shard = shard
        self.permanent = permanent
        self.attempts = self.retries = self.put_off = 0
        self.done = -1.0
        self.since = 0.0


@dataclass(slots=True)
class Recording:
    """What happened in a run; counts by bin of `BIN` milliseconds.

    Parameters:
      requests(list[int]): Requests that reached the downstream.
      served(list[int]): Those it served.
      backlog(list[int]): Jobs that had arrived and were not done, at the end of the bin.
      jobs(list[Job]): All jobs.
      reports(int): Exchanges with the breaker's store.
      closed_reports(int): Those of them while it was closed.
      modes(list[tuple[int, str]]): When the breaker changed, and to what; of a breaker that all share.
      ended(float): When the run ended.
      undone(int): Good jobs that were not done by then.
    """

    requests: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    backlog: list[int] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    reports: int = 0
    modes: list[tuple[int, str]] = field(default_factory=list)
    ended: float = 0.0
    undone: int = 0


class _Process:
    """A worker process: its idle threads, and its gate."""

    __slots__ = ("free", "gate", "store", "waiting", "wakes")

    def __init__(self, threads: int, store: Shared | None) -> None:
        self.free = threads
        self.store = store
        self.gate = Gate(waiting_room(threads), 0)
        self.waiting: deque[Job] = deque()
        self.wakes = -1


class _World:
    def __init__(self, scenario: Scenario, policy: Policy, limits: Limits) -> None:
        self.scenario, self.policy = scenario, policy
        self.random = random.Random(scenario.seed)  # noqa: S311 - a run is to be repeatable
        self.env = simpy.Environment()
        part = scenario.capacity / scenario.shards
        self.downstreams = [
            Downstream(
                part,
                scenario.rejection_cost,
                scenario.latency,
                scenario.phases if shard < scenario.bad_shards else (),
            )
            for shard in range(scenario.shards)
        ]
        self.stores = self._stores(limits)
        self.processes = [
            _Process(scenario.threads, self.stores[index % len(self.stores)] if self.stores else None)
            for index in range(scenario.processes)
        ]
        self.turn = 0
        self.queue: deque[Job] = deque()
        self.delayed: dict[int, list[Job]] = {}
        self.recording = Recording()
        self.pending = 0
        self.arriving = True
        self.taking = False
        self.finished = self.env.event()

    def _stores(self, limits: Limits) -> list[Shared]:
        sharing = self.policy.sharing
        if sharing is Sharing.NONE:
            return []
        if sharing is Sharing.PROCESS:
            return [Shared(limits) for _ in range(self.scenario.processes)]
        if sharing is Sharing.ORACLE:
            return [Oracle(limits, self.scenario)]
        store = Unpaced(limits) if sharing is Sharing.UNPACED else Shared(limits)
        store.watch = lambda now, mode: self.recording.modes.append((now, mode.value))
        return [store]

    def run(self, horizon: float) -> Recording:
        self.env.process(self._bins())
        self.env.process(self._arrivals())
        self.env.run(until=self.env.any_of([self.finished, self.env.timeout(horizon)]))
        recording = self.recording
        recording.ended = self.env.now
        recording.reports = sum(store.reports for store in self.stores)
        recording.undone = sum(job.done < 0 and not job.permanent for job in recording.jobs)
        return recording

    def _after(self, delay: float, call: Callable[[Any], None], value: Any) -> None:
        event = self.env.timeout(delay, value)
        assert event.callbacks is not None  # noqa: S101 - it has not been processed yet
        event.callbacks.append(call)

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        scenario, dice = self.scenario, self.random
        for _ in range(scenario.herd):
            self._arrive()
        gap = 1000 / scenario.arrivals if scenario.arrivals else 0.0
        while gap and self.env.now < scenario.lasts:
            yield self.env.timeout(dice.expovariate(1) * gap)
            self._arrive()
        self.arriving = False
        yield self.env.timeout(0)

    def _arrive(self) -> None:
        dice = self.random
        job = Job(self.env.now, dice.randrange(self.scenario.shards), permanent=dice.random() < self.scenario.permanent)
        self.recording.jobs.append(job)
        self.pending += 1
        self._ready(job)

    def _bins(self) -> Generator[simpy.Event, None, None]:
        recording = self.recording
        while True:
            recording.requests.append(0)
            recording.served.append(0)
            yield self.env.timeout(BIN)
            recording.backlog.append(self.pending)

    def _ready(self, job: Job) -> None:
        """A job is due: some process with an idle thread takes it, or it waits in the queue."""
        processes = self.processes
        for _ in range(len(processes)):
            self.turn = (self.turn + 1) % len(processes)
            if self._takes(processes[self.turn]):
                self._begin(processes[self.turn], job)
                return
        self.queue.append(job)
        if len(self.queue) == 1:
            # Those that hold it look from now on whether they still do.
            for process in processes if self.stores else ():
                self._wake(process, int(self.env.now))

    def _begin(self, process: _Process, job: Job) -> None:
        process.free -= 1
        if process.store is None:
            self._request(process, job, 0)
            return
        now = int(self.env.now)
        self._exchange(process, now)
        answer = process.gate.arrive(now, self.random.random(), again=job.put_off > 0)
        if answer.move is Move.WAIT:
            job.since = now
            process.waiting.append(job)
            self._exchange(process, now)
            self._wake(process, now)
        else:
            self._follow(process, job, answer)

    def _follow(self, process: _Process, job: Job, answer: Answer) -> None:
        if answer.move is Move.ADMIT:
            self._request(process, job, answer.period)
            return
        job.put_off += 1
        self._delay(job, answer.delay)
        self._free(process)

    def _free(self, process: _Process) -> None:
        process.free += 1
        if self.taking:
            return  # further up the stack this is done anyway
        self._take(process)

    def _takes(self, process: _Process) -> bool:
        """Whether a process takes another job: it has a thread for it, and its gate does not hold the queue."""
        if not process.free:
            return False
        held = process.store is not None and self.scenario.own_queue
        return not (held and process.gate.hold(len(process.waiting)))

    def _take(self, process: _Process) -> None:
        self.taking = True
        while self.queue and self._takes(process):
            self._begin(process, self.queue.popleft())
        self.taking = False

    def _exchange(self, process: _Process, now: int) -> None:
        gate, store = process.gate, process.store
        if store is not None and gate.due(now):
            gate.learn(store.exchange(gate.ask(now), now), now, self.random.random())

    def _wake(self, process: _Process, now: int) -> None:
        """Look again when something may have changed for those that wait, or are held."""
        at = process.gate.wake_at(now)
        if process.waiting:
            at = min(at, int(process.waiting[0].since) + _PATIENCE)
        elif not self.queue or process.gate.free is not None:
            return
        if process.wakes <= now or at < process.wakes:
            process.wakes = max(at, now + 1)
            self._after(process.wakes - self.env.now, self._woken, process)

    def _woken(self, event: Any) -> None:
        # What floating point makes of a whole number may lie a little below it.
        process, now = event.value, int(self.env.now + 1e-6)
        if process.wakes != now:
            return  # another look was asked for meanwhile
        process.wakes = -1
        self._exchange(process, now)
        self._release(process, now)
        if not self.taking:
            self._take(process)
        self._wake(process, now)

    def _release(self, process: _Process, now: int) -> None:
        gate, waiting = process.gate, process.waiting
        while waiting:
            answer = gate.wait_over(now)
            if answer is None:
                break
            self._follow(process, waiting.popleft(), answer)
        while waiting and now - waiting[0].since >= _PATIENCE:
            self._follow(process, waiting.popleft(), gate.give_up(now, self.random.random()))

    def _request(self, process: _Process, job: Job, period: int) -> None:
        job.attempts += 1
        served, takes = self.downstreams[job.shard].answer(self.env.now)
        self.recording.requests[-1] += 1
        if served:
            self.recording.served[-1] += 1
        self._after(takes, self._outcome, (process, job, period, served))

    def _outcome(self, event: Any) -> None:
        process, job, period, served = event.value
        if process.store is not None:
            now = int(self.env.now)
            process.gate.done(period, now, ok=served)
            self._exchange(process, now)
            self._release(process, now)
            self._wake(process, now)
        if served:
            job.done = self.env.now
            self.pending -= 1
            if not self.pending and not self.arriving:
                self.finished.succeed()
        else:
            self._delay(job, self.policy.delay(job.retries, self.random.random()))
            job.retries += 1
        self._free(process)

    def _delay(self, job: Job, delay: int) -> None:
        """Into the delay queue, which delivers all that is due at the next of its turns."""
        turn = -int(-(self.env.now + delay) // self.scenario.delivery_step)
        batch = self.delayed.get(turn)
        if batch is None:
            self.delayed[turn] = [job]
            at = turn * self.scenario.delivery_step
            self._after(max(0.0, at - self.env.now), self._deliver, turn)
        else:
            batch.append(job)

    def _deliver(self, event: Any) -> None:
        for job in self.delayed.pop(event.value):
            self._ready(job)


def simulate(scenario: Scenario, policy: Policy, limits: Limits | None = None, *, patience: float = 4.0) -> Recording:
    """Run a scenario under a policy.

    Parameters:
      scenario(Scenario): What happens.
      policy(Policy): What the workers do about it.
      limits(Limits): How its breaker judges.
      patience(float): The run is given up after so many times the time that a perfect policy would take.

    Returns:
      Recording: What happened.
    """
    _, makespan = scenario.ideal()
    return _World(scenario, policy, limits or Limits()).run(scenario.recovery + patience * makespan + 20_000)

"""The course of the demo: start everything, send, wait, judge, fix, replay, judge again, end everything.

It knows the order of things and nothing else: the judgement is `accounting`'s, the drawing `drawing`'s.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import StoreUnavailable
from ..stores.connect import connect
from ..testing.valkey import PrivateValkey
from . import accounting
from .collector import Collector
from .ledger import read_ledger
from .letters import Graveyard, StackGraveyard, StockGraveyard
from .plan import after_the_fix
from .processes import DownstreamProcess, Fleet, ProcessEnded, end, start_producer
from .progress import Progress, Standing
from .queues import Contents, look
from .report import Replayed, Report
from .settings import Settings
from .tracing import Span, tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import Popen

__all__ = ["Mischief", "run"]

#: Seconds to wait for the spans of the trace that is shown.
_LAST_SPANS = 10.0

#: Seconds without any movement after which messages that are still unsettled count as stuck; longer than it may take
#: until a dead worker's messages are given to another one (the heartbeat timeout and 10 s more).
_PATIENCE: Final = 15.0
#: Seconds between two looks.
_INTERVAL: Final = 0.2
#: The reasons that the fix of the downstream cures.
_CURED: Final = ("permanent", "exhausted")


@dataclass(frozen=True, slots=True)
class Mischief:
    """What is done to the broker and the workers while messages are on their way.

    Parameters:
      restart_broker(bool): Stop the broker while retries are being scheduled, and start it again.
      kill_worker(bool): Kill a worker process (SIGKILL) in the middle of its work.
      outage(float): For how many seconds the broker stays away.
    """

    restart_broker: bool = False
    kill_worker: bool = False
    outage: float = 3.0


def run(progress: Progress, *, stock: bool = False, mischief: Mischief = Mischief()) -> Report:
    """Run the demo from nothing to its report; whatever it started has ended when this returns or raises.

    Parameters:
      progress(Progress): Gets told what happens.
      stock(bool): Leave the stack out.
      mischief(Mischief): What else goes wrong.

    Returns:
      Report: What was found.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as started:
        directory = Path(tempfile.mkdtemp(prefix="dramatiq-guard-demo-"))
        started.callback(shutil.rmtree, directory, ignore_errors=True)
        stage = _Stage(started, directory, progress, stock=stock, mischief=mischief)
        progress.say("sending, with a downstream that is down for some, busy for others and strict with the rest")
        stage.wait()
        accounts = stage.judge(frozenset())
        groups = stage.graveyard.groups()
        replayed = stage.replay()
        return Report(
            stock=stock,
            accounts=tuple(accounts),
            groups=tuple(groups),
            replayed=replayed,
            trace=stage.trace(),
            events=tuple(stage.events),
            seconds=time.monotonic() - began,
        )


class _Stage:
    """Everything that was started, and what can be seen of it."""

    def __init__(
        self, started: contextlib.ExitStack, directory: Path, progress: Progress, *, stock: bool, mischief: Mischief
    ) -> None:
        self.progress = progress
        self._mischief = self._planned_mischief(mischief)
        self.events: list[str] = []
        self.killed: set[int] = set()
        self.producer_ledger = directory / "producer.jsonl"
        self.downstream_ledger = directory / "downstream.jsonl"
        self.valkey = PrivateValkey(aof=True)
        started.callback(self.valkey.close)
        self.valkey.start()
        downstream = DownstreamProcess(self.downstream_ledger)
        started.callback(downstream.close)
        collector = None if stock else Collector()
        if collector is not None:
            started.callback(collector.close)
        self.settings = Settings(
            broker=self.valkey.url,
            downstream=downstream.url(),
            stock="yes" if stock else "",
            collector=collector.url if collector is not None else "",
        )
        self._collector = collector
        self.client = redis.Redis.from_url(self.valkey.url, retry=Retry(NoBackoff(), 0))
        started.callback(self.client.close)
        self.graveyard = self._find_graveyard(started)
        progress.say(f"a Valkey on port {self.valkey.port} and a downstream at {self.settings.downstream} are up")
        self.fleet = Fleet(self.settings, directory / "workers.log")
        started.callback(self.fleet.close)
        log = directory / "producer.log"
        self.producer: Popen[bytes] = start_producer(self.settings, self.producer_ledger, log)
        started.callback(end, self.producer)
        self._producer_log = log

    def _find_graveyard(self, started: contextlib.ExitStack) -> Graveyard:
        if self.settings.stock:
            return StockGraveyard(self.client)
        from .wiring import wire

        stores = connect(self.settings.broker)
        started.callback(stores.close)
        return StackGraveyard(stores.dead_letters, wire(self.settings))

    # -- looking -------------------------------------------------------------------------------------------------

    def standing(self, contents: Contents) -> Standing:
        """Sum up where things stand."""
        seen = accounting.requests(read_ledger(self.downstream_ledger))
        served = len({request.job for request in seen if request.status == 200})
        return Standing(
            promised=len(accounting.promises(read_ledger(self.producer_ledger))),
            served=served,
            refused=sum(request.status != 200 for request in seen),
            dead=len(self.graveyard.letters()),
            unsettled=contents.unsettled,
        )

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until nothing is left in the broker, or nothing has moved for too long."""
        last = None
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            self.fleet.mend()
            sent = self._sent()
            try:
                contents = look(self.client)
                standing = self.standing(contents)
            except (redis.RedisError, StoreUnavailable):
                time.sleep(_INTERVAL)  # the broker is away
                continue
            self.progress.show(standing)
            if sent and contents.unsettled == 0:
                return
            if standing != last:
                last, deadline = standing, time.monotonic() + _PATIENCE
            if sent and self._mischief and standing.refused >= self._mischief[0][0]:
                self._mischief.pop(0)[1]()
            time.sleep(_INTERVAL)

    def _sent(self) -> bool:
        status = self.producer.poll()
        if status:
            tail = "\n".join(self._producer_log.read_text(errors="replace").splitlines()[-15:])
            raise ProcessEnded(f"the demo's producer ended with status {status}:\n{tail}")
        return status == 0

    # -- mischief ------------------------------------------------------------------------------------------------

    def _planned_mischief(self, mischief: Mischief) -> list[tuple[int, Callable[[], None]]]:
        """What is done, each after so many refusals: while retries are being scheduled."""
        planned: list[tuple[int, Callable[[], None]]] = []
        if mischief.kill_worker:
            planned.append((40, self._kill_worker))
        if mischief.restart_broker:
            planned.append((120, lambda: self._restart_broker(mischief.outage)))
        return planned

    def _kill_worker(self) -> None:
        for request in reversed(accounting.requests(read_ledger(self.downstream_ledger))):
            if self.fleet.kill(request.pid):
                self.killed.add(request.pid)
                self._note(f"worker process {request.pid} was killed (SIGKILL) in the middle of its work")
                return

    def _restart_broker(self, outage: float) -> None:
        self.valkey.stop()
        time.sleep(outage)
        self.valkey.start()
        self._note(f"the broker was stopped for {outage:g} s while retries were being scheduled, and started again")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.progress.say(event)

    # -- judging -------------------------------------------------------------------------------------------------

    def judge(self, replayed: frozenset[str]) -> list[accounting.Account]:
        """Compare the ledgers with what lies in the dead letters and in the broker."""
        jobs = [after_the_fix(job, replayed) for job in accounting.promises(read_ledger(self.producer_ledger))]
        contents = look(self.client)
        return accounting.account(
            jobs,
            accounting.requests(read_ledger(self.downstream_ledger)),
            self.graveyard.letters(),
            waiting=contents.waiting,
            held=contents.held,
            killed=frozenset(self.killed),
        )

    def replay(self) -> Replayed | None:
        """Have the downstream fixed, replay what that cures, and wait for it."""
        fix = urllib.request.Request(f"{self.settings.downstream}/fix", method="POST")  # noqa: S310 - our own URL
        urllib.request.urlopen(fix, timeout=10).close()  # noqa: S310 - as above
        letters = self.graveyard.letters()
        cured = frozenset(letter.job for letter in letters if letter.reason in _CURED)
        counts = self.graveyard.replay(_CURED)
        if counts is None:
            return None
        self.progress.say(f"the downstream was fixed; {counts[1]} dead letters are replayed")
        self.wait()
        return Replayed(counts[0], counts[1], len(letters) - counts[0], tuple(self.judge(cured)))

    def trace(self) -> tuple[str, ...]:
        """Draw the trace of one message that was retried before it was served."""
        if self._collector is None:
            return ()
        # The workers export in batches: the last attempt's span may still be on its way.
        deadline = time.monotonic() + _LAST_SPANS
        while not _told_to_the_end(spans := self._collector.spans) and time.monotonic() < deadline:
            time.sleep(0.2)
        return tuple(tree([span for span in spans if span.trace_id == _telling_trace(spans)]))


def _telling_trace(spans: list[Span]) -> str:
    """The trace of a message of the actor `charge` with the most spans: it failed twice, and then was served."""
    sizes = Counter(span.trace_id for span in spans)
    told = {span.trace_id for span in spans if span.attributes.get("dramatiq.actor.name") == "charge"}
    ended = _ended(spans)
    return max(sorted(told), key=lambda trace_id: (trace_id in ended, sizes[trace_id]), default="")


def _ended(spans: list[Span]) -> set[str]:
    return {span.trace_id for span in spans if span.attributes.get("dramatiq_guard.outcome") == "succeeded"}


def _told_to_the_end(spans: list[Span]) -> bool:
    """Whether there is a message that was retried twice, and all of whose spans are here."""
    retried = Counter(span.trace_id for span in spans if span.attributes.get("dramatiq_guard.outcome") == "retried")
    return any(retried[trace_id] >= 2 for trace_id in _ended(spans))

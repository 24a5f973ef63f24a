"""The judgement: from two ledgers and the dead letters to what became of every message.

Pure, and the same for the stack and for plain Dramatiq.  It must not know who did the work, only what was promised,
what the downstream saw, what lies in the dead letters and what still waits.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .plan import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Account", "Fate", "Fault", "Letter", "Request", "Row", "account", "promises", "requests", "rows"]


class Fate(enum.Enum):
    """Where a message was found; the first three and the last are where it may be."""

    #: The downstream served it.
    DONE = "done"
    #: It lies in the dead letters.
    DEAD = "dead"
    #: It lies in its queue, where a worker will take it.
    WAITING = "waiting"
    #: A worker holds it, or held it when it died, and nobody works on it.
    STRANDED = "stranded"
    #: It is nowhere.
    LOST = "lost"
    #: What it waits for has not happened (a later stage of a pipeline, a callback).
    NOT_DUE = "not due"


class Fault(enum.Enum):
    """What is wrong with how a message ended."""

    LOST = "lost: not served, not in a queue, not in the dead letters"
    STRANDED = "stranded: taken by a worker, and not worked on for as long as the demo waited"
    STILL_WAITING = "still waiting when the patience ended"
    DOUBLED = "served more than once"
    NOT_DONE = "given up, although the downstream would have served it"
    WRONG_REASON = "in the dead letters for another reason"
    NO_REASON = "in the dead letters, and nothing says why"
    NO_FINAL_ERROR = "the error that ended it was not kept"
    NEEDLESS = "asked again, although the answer was final or asked for a wait"
    TOO_FEW = "tried less often than planned"


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the downstream's ledger.

    Parameters:
      job(str): What was asked for.
      status(int): How it was answered.
      incident(str): What the answer called itself, so that an error can be told from the one before it.
      pid(int): The worker process that asked.
      at(int): When, in milliseconds.
    """

    job: str
    status: int
    incident: str
    pid: int = 0
    at: int = 0


@dataclass(frozen=True, slots=True)
class Letter:
    """What is known of one message in the dead letters, whoever keeps them.

    Parameters:
      job(str): The job it is about.
      reason(str | None): Why it died; ``None`` where nothing says so.
      evidence(str): Everything that it says about the error.
    """

    job: str
    reason: str | None
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one job.

    Parameters:
      job(Job): The promise.
      fate(Fate): Where it was found.
      requests(int): How many requests the downstream saw.
      served(int): How many of them it served.
      faults(frozenset[Fault]): What is wrong with that; empty for a promise that was kept.
    """

    job: Job
    fate: Fate
    requests: int = 0
    served: int = 0
    faults: frozenset[Fault] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """The accounts of one kind, summed up."""

    kind: str
    messages: int = 0
    fates: Mapping[Fate, int] = field(default_factory=dict)
    faults: Mapping[Fault, int] = field(default_factory=dict)
    planned: int = 0
    requests: int = 0


def promises(producer: Iterable[Mapping[str, Any]]) -> list[Job]:
    """Read what was promised out of the producer's ledger.

    A message whose sending failed was never promised; one whose sending was never reported either way was.

    Parameters:
      producer(Iterable[Mapping[str, Any]]): The entries.

    Returns:
      list[Job]: The promises, in the order in which they were made.
    """
    jobs: dict[str, Job] = {}
    for entry in producer:
        match entry["event"]:
            case "promised":
                jobs[entry["job"]["name"]] = Job(**entry["job"])
            case "refused":
                jobs.pop(entry["name"], None)
    return list(jobs.values())


def requests(downstream: Iterable[Mapping[str, Any]]) -> list[Request]:
    """Read the requests out of the downstream's ledger."""
    fields = Request.__dataclass_fields__
    return [Request(**{name: entry[name] for name in fields}) for entry in downstream if entry["event"] == "request"]


def account(
    jobs: Sequence[Job],
    seen: Iterable[Request],
    letters: Iterable[Letter],
    *,
    waiting: frozenset[str] = frozenset(),
    held: frozenset[str] = frozenset(),
    killed: frozenset[int] = frozenset(),
) -> list[Account]:
    """Say what became of every job.

    Parameters:
      jobs(Sequence[Job]): What was promised; a job stands after the one that it waits for.
      seen(Iterable[Request]): What the downstream saw.
      letters(Iterable[Letter]): What lies in the dead letters.
      waiting(frozenset[str]): The jobs that lie in a queue.
      held(frozenset[str]): The jobs that a worker took from its queue and did not settle.
      killed(frozenset[int]): The worker processes that were killed on purpose.  Each may have died between its work
        and its ack: that explains one request more, and one service more, for each message that it worked on.

    Returns:
      list[Account]: One for each job, in the same order.
    """
    asked: dict[str, list[Request]] = {}
    for request in seen:
        asked.setdefault(request.job, []).append(request)
    dead: dict[str, Letter] = {letter.job: letter for letter in letters}
    fates: dict[str, Fate] = {}
    accounts = []
    for job in jobs:
        mine = asked.get(job.name, [])
        letter = dead.get(job.name)
        due = job.after is None or fates.get(job.after) is Fate(job.on)
        fate = fates[job.name] = _fate(job.name, mine, letter, waiting=waiting, held=held, due=due)
        served = sum(request.status == 200 for request in mine)
        faults = frozenset(_faults(job, fate, mine, letter, killed=killed))
        accounts.append(Account(job, fate, len(mine), served, faults))
    return accounts


def _fate(
    name: str,
    mine: list[Request],
    letter: Letter | None,
    *,
    waiting: frozenset[str],
    held: frozenset[str],
    due: bool,
) -> Fate:
    if letter is not None:
        return Fate.DEAD
    if any(request.status == 200 for request in mine):
        return Fate.DONE
    if name in waiting:
        return Fate.WAITING
    if name in held:
        return Fate.STRANDED
    return Fate.LOST if due or mine else Fate.NOT_DUE


def _faults(
    job: Job, fate: Fate, mine: list[Request], letter: Letter | None, *, killed: frozenset[int]
) -> Iterable[Fault]:
    match fate:
        case Fate.LOST:
            yield Fault.LOST
        case Fate.STRANDED:
            yield Fault.STRANDED
        case Fate.WAITING:
            yield Fault.STILL_WAITING
        case Fate.DEAD if letter is not None:
            if job.ends == "done":
                yield Fault.NOT_DONE
            if letter.reason is None:
                yield Fault.NO_REASON
            elif job.ends == "dead" and letter.reason != job.reason:
                yield Fault.WRONG_REASON
            if mine and not any(request.incident in letter.evidence for request in _final(mine, killed)):
                yield Fault.NO_FINAL_ERROR
        case _:
            pass
    served = [request for request in mine if request.status == 200]
    if len(served) > 1 + _kills(served, killed) or (served and letter is not None):
        yield Fault.DOUBLED
    if len(mine) > job.requests + _kills(mine, killed):
        yield Fault.NEEDLESS
    if fate is Fate.DEAD and len(mine) < job.requests:
        yield Fault.TOO_FEW


def _final(mine: list[Request], killed: frozenset[int]) -> list[Request]:
    """The answers that may have ended it: the last one, or one whose worker wrote the letter and was killed then."""
    since = len(mine) - 1 - _kills(mine, killed)
    return [mine[-1], *(request for request in mine[max(0, since) : -1] if request.pid in killed)]


def _kills(mine: list[Request], killed: frozenset[int]) -> int:
    """How many killed workers were at it: each may have died between its work and its ack, which explains one more."""
    return len({request.pid for request in mine} & killed)


def rows(accounts: Iterable[Account]) -> list[Row]:
    """Sum accounts up by kind, in the order in which the kinds first appear."""
    by_kind: dict[str, list[Account]] = {}
    for entry in accounts:
        by_kind.setdefault(entry.job.kind, []).append(entry)
    return [
        Row(
            kind,
            len(entries),
            Counter(entry.fate for entry in entries),
            {fault: count for fault in Fault if (count := sum(fault in entry.faults for entry in entries))},
            sum(entry.job.requests for entry in entries if entry.fate is not Fate.NOT_DUE),
            sum(entry.requests for entry in entries),
        )
        for kind, entries in by_kind.items()
    ]

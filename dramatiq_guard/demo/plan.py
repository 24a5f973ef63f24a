"""What the demo sends, how the downstream treats it, and what must become of it.

A job is one promise: a message the producer sends, or one that a pipeline or a callback sends later.  Its name begins
with its kind (``transient-007``), so that the downstream knows how to treat a request without being told anything else.
Pure: nothing is sent or counted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ALWAYS", "KINDS", "Job", "Kind", "Manner", "after_the_fix", "job_of", "kind_of", "manner_of", "plan"]

End = Literal["done", "dead"]

#: A refusal that does not stop until the downstream is told to behave.
ALWAYS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Manner:
    """How the downstream answers one job before "the fix".

    Parameters:
      status(int): The status of a refusal.
      refusals(int): How many requests are refused before the first is served.
      retry_after(int): Seconds in the Retry-After of a refusal; earlier requests are refused without being counted.
    """

    status: int = 200
    refusals: int = 0
    retry_after: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of message in the demo.

    Parameters:
      name(str): What the tables call it, and how its jobs' names begin.
      count(int): How many the producer sends.
      says(str): What it is about, for people.
    """

    name: str
    count: int
    says: str


@dataclass(frozen=True, slots=True)
class Job:
    """One promise: what must become of one message.

    Parameters:
      name(str): Its name, unique in the run and known to the downstream.
      kind(str): The kind it belongs to.
      actor(str): The actor that does it.
      ends(str): ``done`` when the downstream must serve it, ``dead`` when it must lie in the dead letters.
      reason(str | None): The reason code that its letter must bear.
      requests(int): How many requests the downstream must see.
      after(str | None): The job it waits for, when a pipeline or a callback sends it.
      on(str): How that job must end for this one to become due.
    """

    name: str
    kind: str
    actor: str
    ends: End = "done"
    reason: str | None = None
    requests: int = 1
    after: str | None = None
    on: End = "done"


KINDS: Final = (
    Kind("fine", 160, "served at once"),
    Kind("transient", 60, "503 once or twice, then served"),
    Kind("rate_limited", 20, "429 with Retry-After, then served"),
    Kind("permanent", 24, "422: will never be accepted"),
    Kind("exhausted", 16, "500 for ever, max_retries=2"),
    Kind("unknown_actor", 8, "an actor that no worker knows"),
    Kind("expired", 8, "older than its max_age"),
    Kind("pipeline", 12, "extract | transform | load, transform fails once"),
    Kind("broken_pipeline", 4, "the same, transform gets 422"),
    Kind("on_success", 12, "thanks are sent when it is done"),
    Kind("on_failure", 6, "an apology is sent when it fails"),
)

_STAGES: Final = ("extract", "transform", "load")


def kind_of(job: str) -> str:
    """Read the kind out of a job's name: ``broken_pipeline-003.load`` is of kind ``broken_pipeline``."""
    return job.partition("-")[0]


def _number(job: str) -> int:
    return int(job.partition("-")[2].partition(".")[0])


def _step(job: str) -> str:
    return job.partition(".")[2]


def manner_of(job: str) -> Manner:
    """Say how the downstream answers a job, which is all that it knows about it.

    Parameters:
      job(str): The name of the job.

    Returns:
      Manner: Which requests it refuses, and how.
    """
    match kind_of(job), _step(job):
        case "transient", _:
            return Manner(503, 1 + _number(job) % 2)
        case "rate_limited", _:
            return Manner(429, 1, retry_after=2)
        case ("permanent", _) | ("broken_pipeline", "transform"):
            return Manner(422, ALWAYS)
        case ("exhausted", _) | ("on_failure", ""):
            return Manner(500, ALWAYS)
        case "pipeline", "transform":
            return Manner(502, 1)
        case _:
            return Manner()


def plan(kinds: tuple[Kind, ...] = KINDS) -> tuple[Job, ...]:
    """List every promise of the demo, in the order in which the kinds are shown.

    Parameters:
      kinds(tuple[Kind, ...]): What to send, and how many of each.

    Returns:
      tuple[Job, ...]: The jobs.
    """
    return tuple(job for kind in kinds for number in range(kind.count) for job in _jobs(kind.name, number))


def _jobs(kind: str, number: int) -> Iterator[Job]:
    name = f"{kind}-{number:03d}"
    requests = manner_of(name).refusals + 1
    match kind:
        case "fine":
            yield Job(name, kind, "ship")
        case "transient":
            yield Job(name, kind, "charge", requests=requests)
        case "rate_limited":
            yield Job(name, kind, "sync_stock", requests=requests)
        case "permanent":
            yield Job(name, kind, "import_row", ends="dead", reason="permanent", requests=1)
        case "exhausted":
            yield Job(name, kind, "render_report", ends="dead", reason="exhausted", requests=3)
        case "unknown_actor":
            yield Job(name, kind, "not_deployed_yet", ends="dead", reason="unknown_actor", requests=0)
        case "expired":
            yield Job(name, kind, "send_coupon", ends="dead", reason="expired", requests=0)
        case "pipeline" | "broken_pipeline":
            before = None
            for stage in _STAGES:
                step = f"{name}.{stage}"
                refusals = manner_of(step).refusals
                if refusals == ALWAYS:
                    yield Job(step, kind, stage, ends="dead", reason="permanent", requests=1, after=before)
                else:
                    yield Job(step, kind, stage, requests=refusals + 1, after=before)
                before = step
        case "on_success":
            yield Job(name, kind, "take_order")
            yield Job(f"{name}.thank", kind, "thank", after=name, on="done")
        case "on_failure":
            yield Job(name, kind, "book_flight", ends="dead", reason="exhausted", requests=1)
            yield Job(f"{name}.apologise", kind, "apologise", after=name, on="dead")
        case _:
            raise ValueError(f"the demo knows no kind {kind!r}: use one of {', '.join(known.name for known in KINDS)}")


def after_the_fix(job: Job, replayed: frozenset[str]) -> Job:
    """Say what must become of a job once the downstream behaves and some dead letters were replayed.

    Parameters:
      job(Job): The promise as it was.
      replayed(frozenset[str]): The names of the jobs whose letters were replayed.

    Returns:
      Job: The promise as it is now: a replayed job is done with one more request.
    """
    if job.name in replayed:
        return replace(job, ends="done", reason=None, requests=job.requests + 1)
    return job


def job_of(actor: str, args: Sequence[Any]) -> str:
    """Read out of a message which job it is about.

    Parameters:
      actor(str): The name of the message's actor.
      args(Sequence[Any]): The message's positional arguments.

    Returns:
      str: The name of the job.
    """
    match actor:
        case "transform" | "load":
            return f"{args[0]}.{actor}"
        case "thank" | "apologise":
            return f"{args[0]['args'][0]}.{actor}"
        case _:
            return str(args[0])

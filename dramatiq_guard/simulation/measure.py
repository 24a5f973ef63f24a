"""The figures of a run: counts, and ratios to the downstream's capacity and to a perfect policy's time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .world import BIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scenario import Scenario
    from .world import Recording

__all__ = ["Figures", "measure"]

#: Milliseconds below which the time for the backlog says nothing about what is done in it.
_SHORTEST_WINDOW = 1_000


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of a run.

    Parameters:
      attempts_per_job(float): Attempts by jobs.
      amplification(float): Attempts by jobs done.
      outage_share(float): Attempts during the trouble, by jobs that arrived in it; None where none did.
      peak_1s(float): The largest arrival rate at the downstream in any second after the recovery, by its capacity.
      peak_100ms(float): The same in any tenth of a second.
      efficiency(float): What was done in the time that a perfect policy takes to work off the backlog, by what that
        would have done; None where there is hardly any backlog.
      steady(float | None): How long it took until the backlog was gone, by a perfect policy's time; None is never.
      makespan(float | None): The same until everything was done.
      undone(int): Good jobs that were not done when the run ended.
      permanent_attempts(float): Attempts per job that can never succeed.
      wait_p99(float): Seconds from arrival to end of the slowest hundredth of jobs done.
      wait_max(float): The same of the slowest job done.
      put_offs(float): How often a job was put off, on average.
      reports(int): Exchanges with the breaker's store.
      jobs(int): Jobs that arrived.
    """

    attempts_per_job: float
    amplification: float | None
    outage_share: float | None
    peak_1s: float
    peak_100ms: float
    efficiency: float | None
    steady: float | None
    makespan: float | None
    undone: int
    permanent_attempts: float | None
    wait_p99: float
    wait_max: float
    put_offs: float
    reports: int
    jobs: int

    def row(self) -> dict[str, Any]:
        """The figures as they are written to a file."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def measure(scenario: Scenario, recording: Recording) -> Figures:
    """Compute the figures.

    Parameters:
      scenario(Scenario): What happened.
      recording(Recording): What came of it.

    Returns:
      Figures: The figures.
    """
    jobs = recording.jobs
    attempts = sum(job.attempts for job in jobs)
    done = sum(job.done >= 0 for job in jobs)
    begins = scenario.phases[0].begins if scenario.phases else 0
    recovery = scenario.recovery
    after = -(-recovery // BIN)
    victims = sum(begins <= job.arrived < recovery for job in jobs)
    came = Counter(int(job.arrived // BIN) for job in jobs)
    ideal_steady, ideal_makespan = scenario.ideal(lambda time: came[int(time // BIN)])
    hopeless = [job.attempts for job in jobs if job.permanent]
    waits = sorted(job.done - job.arrived for job in jobs if job.done >= 0)
    return Figures(
        attempts_per_job=attempts / len(jobs),
        amplification=attempts / done if done else None,
        outage_share=sum(recording.requests[begins // BIN : after]) / victims if victims else None,
        peak_1s=_peak(recording.requests[after:], 10) / scenario.capacity,
        peak_100ms=_peak(recording.requests[after:], 1) * 10 / scenario.capacity,
        efficiency=_efficiency(scenario, recording, ideal_steady),
        steady=_steady(scenario, recording, ideal_steady),
        makespan=None if recording.undone else (recording.ended - recovery) / ideal_makespan,
        undone=recording.undone,
        permanent_attempts=sum(hopeless) / len(hopeless) if hopeless else None,
        wait_p99=waits[int(len(waits) * 0.99)] / 1000 if waits else 0.0,
        wait_max=waits[-1] / 1000 if waits else 0.0,
        put_offs=sum(job.put_off for job in jobs) / len(jobs),
        reports=recording.reports,
        jobs=len(jobs),
    )


def _peak(counts: Sequence[int], width: int) -> float:
    """The largest sum of so many bins in a row."""
    return max((sum(counts[at : at + width]) for at in range(max(1, len(counts) - width + 1))), default=0)


def _steady(scenario: Scenario, recording: Recording, ideal: float) -> float | None:
    for index, backlog in enumerate(recording.backlog):
        at = (index + 1) * BIN
        if at >= scenario.recovery and backlog <= scenario.normal:
            return (at - scenario.recovery) / max(ideal, BIN)
    return None


def _efficiency(scenario: Scenario, recording: Recording, ideal: float) -> float | None:
    if not _SHORTEST_WINDOW <= ideal < float("inf"):
        return None
    first, last = scenario.recovery // BIN, int((scenario.recovery + ideal) // BIN)
    return sum(recording.served[first:last]) / (scenario.capacity * ideal / 1000)

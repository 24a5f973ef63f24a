"""What is run: scenarios, and what the workers do about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dramatiq_guard.simulation.policies import POLICIES, Policy
from dramatiq_guard.simulation.scenario import TROUBLES, Phase, Scenario, trouble

__all__ = ["PEERS", "SEVERAL", "TARGETS", "Case", "full", "outage", "peers", "quick"]

#: The policies that are run; the titles are those of the simulation.
SEVERAL = ("guard", "added", "stock", "tuned", "none", "equal", "full")

#: What is run in the same table for comparison, where it is installed.
PEERS = (
    Policy("celery", "Celery, retry_backoff=True"),
    Policy("celery-tuned", "Celery, 1 s … 10 s, full jitter"),
    Policy("bullmq", "BullMQ, exponential from 1 s, 20 attempts"),
    Policy("bullmq-jitter", "BullMQ, the same with jitter 0.5"),
)

#: What the guard must keep to in an outage, by figure: the most, or for efficiency the least.
TARGETS = {
    "amplification": 1.05,
    "peak_1s": 1.25,
    "efficiency": 0.95,
    "makespan": 1.06,
    "undone": 0,
    "lost": 0,
    "answers_per_bad_job": 1.0,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Parameters:
      scenario(Scenario): What happens.
      policy(Policy): What the workers do about it.
    """

    scenario: Scenario
    policy: Policy

    @property
    def name(self) -> str:
        """What `--only` asks for."""
        scenario = self.scenario
        kind = scenario.name.replace(" ", "-")
        return f"{kind}:{scenario.rejection_cost:g}:{self.policy.name}:{scenario.processes}"

    @property
    def bound(self) -> bool:
        """Whether it must keep to the targets."""
        lasts = self.scenario.recovery - self.scenario.phases[0].begins
        # In a shorter one the few failures before it opens, and the moment in which it finds the rate, weigh too much.
        return self.policy.name == "guard" and self.scenario.name == "outage" and lasts >= 20_000

    @property
    def given_up_after(self) -> float:
        """Milliseconds after which the run ends, whatever is left."""
        return self.scenario.recovery + max(1.8 * self.scenario.ideal()[1], 10_000)


def outage(
    seconds: float,
    *,
    capacity: float = 30.0,
    rejection_cost: float = 0.3,
    begins: float = 10.0,
    after: float = 25.0,
    processes: int = 1,
    threads: int = 24,
) -> Scenario:
    """The outage that all comparisons begin with.

    Parameters:
      seconds(float): How long it lasts.
      capacity(float): Requests per second; three quarters of it arrive.
      rejection_cost(float): The work of turning a request away, as a share of that of serving it.
      begins(float): The second in which it begins.
      after(float): Seconds for which jobs arrive when it is over.
      processes(int): Worker processes.
      threads(int): Threads of each.

    Returns:
      Scenario: What happens.
    """
    begin = round(begins * 1000)
    end = begin + round(seconds * 1000)
    return Scenario(
        name="outage",
        capacity=capacity,
        arrivals=0.75 * capacity,
        lasts=end + round(after * 1000),
        phases=(Phase(begin, end),),
        rejection_cost=rejection_cost,
        processes=processes,
        threads=threads,
    )


def quick(seed: int = 1) -> list[Case]:
    """A few cases in three minutes."""
    base = replace(outage(8, begins=4, after=12), seed=seed)
    return [
        Case(base, POLICIES["guard"]),
        Case(replace(base, processes=2), POLICIES["guard"]),
        Case(base, POLICIES["stock"]),
        Case(base, POLICIES["tuned"]),
    ]


def peers(seed: int = 1) -> list[Case]:
    """Other libraries in the same storm, and ours beside them."""
    base = replace(outage(20), seed=seed)
    return [Case(base, POLICIES["guard"]), *(Case(base, policy) for policy in PEERS)]


def full(seed: int = 1) -> list[Case]:
    """Every case; about three quarters of an hour."""
    cases = []
    for cost in (0.3, 0.0):
        base = replace(outage(20, rejection_cost=cost), seed=seed)
        cases += [Case(base, POLICIES["guard"]), Case(replace(base, processes=2), POLICIES["guard"])]
        cases += [Case(base, POLICIES[name]) for name in SEVERAL[1:]]
    base = replace(outage(20), seed=seed)
    for name in TROUBLES[1:]:
        other = trouble(base, name)
        # What a policy makes of the trouble shows in the time after it; the simulation waits for it to pass entirely.
        other = replace(other, lasts=other.recovery + 25_000)
        cases += [
            Case(other, POLICIES["guard"]),
            Case(replace(other, processes=2), POLICIES["guard"]),
            Case(other, POLICIES["tuned"]),
        ]
    return cases

"""Several policies in one scenario: run them, and write what came of it as a table, as JSON and as lines of text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .measure import Figures, measure
from .world import BIN, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .policies import Policy
    from .scenario import Scenario
    from .world import Recording

__all__ = ["Run", "curves", "document", "run", "sketch", "table"]

_LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one scenario.

    Parameters:
      scenario(Scenario): What happened.
      policy(Policy): What the workers did about it.
      figures(Figures): What came of it.
      requests(tuple[float, ...]): Requests per second at the downstream, second by second.
      modes(tuple[tuple[int, str], ...]): When the breaker changed, and to what.
    """

    scenario: Scenario
    policy: Policy
    figures: Figures
    requests: tuple[float, ...]
    modes: tuple[tuple[int, str], ...]


def run(scenario: Scenario, policy: Policy) -> Run:
    """Run a scenario under a policy.

    Parameters:
      scenario(Scenario): What happens.
      policy(Policy): What the workers do about it.

    Returns:
      Run: What came of it.
    """
    recording = simulate(scenario, policy)
    return Run(scenario, policy, measure(scenario, recording), curves(recording), tuple(recording.modes))


def curves(recording: Recording) -> tuple[float, ...]:
    """The requests at the downstream, second by second."""
    width = 1000 // BIN
    counts = recording.requests
    return tuple(float(sum(counts[at : at + width])) for at in range(0, len(counts), width))


def document(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The runs as they are written to a file."""
    return [
        {
            "scenario": asdict(each.scenario),
            "policy": each.policy.name,
            "title": each.policy.title,
            "figures": each.figures.row(),
            "modes": each.modes,
            "requests_per_second": each.requests,
        }
        for each in runs
    ]


def table(runs: Sequence[Run], title: str) -> Table:
    """The runs as people read them; ratios are to the downstream's capacity, and to a perfect policy's time."""
    made = Table(title=title, title_justify="left")
    for heading in ("policy", "attempts/job", "amplification", "peak 1 s / 100 ms", "efficiency", "steady"):
        made.add_column(heading, justify="left" if heading == "policy" else "right")
    for heading in ("all done", "undone", "per bad job", "wait p99 / max"):
        made.add_column(heading, justify="right")
    for each in runs:
        figures = each.figures
        made.add_row(
            each.policy.title,
            f"{figures.attempts_per_job:.3f}",
            _number(figures.amplification, 3),
            f"{figures.peak_1s:.2f} / {figures.peak_100ms:.2f}",
            _number(figures.efficiency, 2),
            _number(figures.steady, 2, "never"),
            _number(figures.makespan, 2, "never"),
            str(figures.undone),
            _number(figures.permanent_attempts, 2),
            f"{figures.wait_p99:.0f} s / {figures.wait_max:.0f} s",
        )
    return made


def _number(value: float | None, digits: int, nothing: str = "–") -> str:
    return nothing if value is None else f"{value:.{digits}f}"


def sketch(runs: Sequence[Run], width: int = 100) -> list[str]:
    """The requests at the downstream over time, as lines of text on one scale.

    Parameters:
      runs(Sequence[Run]): What to draw.
      width(int): Characters that a line has for its curve.

    Returns:
      list[str]: Three lines a policy: its name, the curve, and the time below it.
    """
    lines = []
    seconds = max((len(each.requests) for each in runs), default=0)
    for each in runs:
        step = max(1, -(-seconds // width))
        bins = [each.requests[at : at + step] for at in range(0, len(each.requests), step)]
        # Twice the capacity fills a line; what is above is marked.
        full = 2 * each.scenario.capacity
        heights = [max(part) / full for part in bins]
        curve = "".join("▲" if height > 1 else _LEVELS[round(height * (len(_LEVELS) - 1))] for height in heights)
        phases = [
            "×" if each.scenario.capacity_at(at * step * 1000) < each.scenario.capacity else "·"
            for at in range(len(bins))
        ]
        lines += [each.policy.title, f"  {curve}", f"  {''.join(phases)}"]
    if lines:
        lines.append(f"  █ twice the capacity   ▲ more   × trouble   one character is {step} s")
    return lines

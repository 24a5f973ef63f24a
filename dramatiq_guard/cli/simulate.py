"""``dramatiq-guard simulate``: try a policy on one's own numbers, before deploying it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .output import as_json, console

if TYPE_CHECKING:
    from ..simulation.comparison import Run
    from ..simulation.scenario import Scenario

__all__ = ["simulate"]

_POLICIES = ("guard", "stock", "tuned", "none", "added", "equal", "full", "unpaced", "apart", "oracle")
_TROUBLES = ("outage", "brown-out", "flapping", "half capacity", "one bad shard of four")
_BEFORE = 20_000


@click.command(short_help="Try a retry policy on your own numbers.")
@click.option("--capacity", type=click.FloatRange(1), required=True, help="Requests per second the downstream serves.")
@click.option("--arrivals", type=click.FloatRange(0.1), required=True, help="Jobs per second.")
@click.option("--outage", type=click.FloatRange(1), default=30, show_default=True, help="Seconds that it lasts.")
@click.option("--trouble", type=click.Choice(_TROUBLES), default="outage", show_default=True, help="What befalls it.")
@click.option(
    "--rejection-cost",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Work of turning a request away, as a share of serving it.",
)
@click.option("--latency", type=click.IntRange(1), default=20, show_default=True, help="Milliseconds of a request.")
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True, help="Worker processes.")
@click.option("--threads", type=click.IntRange(1), default=8, show_default=True, help="Threads of each.")
@click.option("--shared-queue", is_flag=True, help="Its messages share a queue with others, which cannot be held.")
@click.option("--permanent", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="Share of bad jobs.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random numbers.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(_POLICIES),
    default=("guard", "stock", "tuned"),
    show_default=True,
    help="What the workers do; may be repeated.",
)
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw it into a file (matplotlib).")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def simulate(
    capacity: float,
    arrivals: float,
    outage: float,
    trouble: str,
    rejection_cost: float,
    latency: int,
    processes: int,
    threads: int,
    shared_queue: bool,
    permanent: float,
    seed: int,
    policies: tuple[str, ...],
    picture: Path | None,
    *,
    json_: bool,
) -> None:
    """Simulate an outage of a downstream, and what a policy makes of it.

    The policies are the ones that workers use; brokers, threads and clocks are simulated.  "Steady" is how long it
    took until the backlog was gone, as a multiple of what a perfect policy needs.

    Example: dramatiq-guard simulate --capacity 100 --outage 60 --arrivals 80 --policy guard --policy full
    """
    if arrivals >= capacity:
        raise click.UsageError(
            f"{arrivals:g} jobs arrive per second and {capacity:g} can be served: no policy works a backlog off. "
            "Give --arrivals below --capacity."
        )
    try:
        from ..simulation import comparison, scenario
        from ..simulation import policies as known
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"The simulation needs {error.name}: run pip install 'dramatiq-guard[simulate]'"
        ) from error
    begins = _BEFORE
    base = scenario.Scenario(
        capacity=capacity,
        arrivals=arrivals,
        phases=(scenario.Phase(begins, begins + round(outage * 1000)),),
        lasts=0,
        rejection_cost=rejection_cost,
        latency=latency,
        processes=processes,
        threads=threads,
        own_queue=not shared_queue,
        permanent=permanent,
        seed=seed,
    )
    planned = scenario.trouble(base, trouble)
    runs = [comparison.run(planned, known.POLICIES[name]) for name in policies]
    if json_:
        as_json(comparison.document(runs))
    else:
        out = console()
        out.print(comparison.table(runs, _title(planned)))
        for line in comparison.sketch(runs):
            out.print(line, markup=False, soft_wrap=True)
    if picture is not None:
        _draw(runs, picture, _title(planned))


def _title(planned: Scenario) -> str:
    lasts = (planned.recovery - planned.phases[0].begins) / 1000
    return (
        f"{planned.name} of {lasts:g} s: {planned.arrivals:g} jobs/s for {planned.capacity:g} requests/s, "
        f"rejection cost {planned.rejection_cost:g}, {planned.processes} × {planned.threads} threads"
    )


def _draw(runs: list[Run], picture: Path, title: str) -> None:
    try:
        from ..simulation.picture import draw

        draw(runs, picture, title)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"A picture needs {error.name}: run pip install 'dramatiq-guard[simulate]', or leave --picture out"
        ) from error

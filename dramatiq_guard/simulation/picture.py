"""The picture of a comparison: requests at the downstream over time, one frame a policy, all on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .comparison import Run

__all__ = ["draw"]

#: What the scale ends at, in multiples of the capacity; what is higher is cut, and its height written.
_HIGHEST = 4.0


def draw(runs: Sequence[Run], file: Path, title: str) -> None:
    """Draw the runs; needs matplotlib.

    Parameters:
      runs(Sequence[Run]): What to draw.
      file(Path): Where to; its suffix says in which format.
      title(str): What is above it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(runs) > 1 else 1
    lines = -(-len(runs) // columns)
    figure = Figure(figsize=(6.5 * columns, 0.6 + 1.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    frames = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    longest = max(each.scenario.recovery * 2.5 / 1000 + 60 for each in runs)
    for frame in frames.flat[len(runs) :]:
        frame.set_axis_off()
    for frame, each in zip(frames.flat, runs, strict=False):
        scale = each.scenario.capacity
        heights = [count / scale for count in each.requests]
        frame.fill_between(range(len(heights)), heights, step="post", color="#4477aa", linewidth=0)
        frame.axhline(1.0, color="#228833", linewidth=0.8)
        for phase in each.scenario.phases:
            frame.axvspan(phase.begins / 1000, phase.ends / 1000, color="#ee6677", alpha=0.15, linewidth=0)
        peak = max(heights, default=0.0)
        above = f", up to {peak:.0f} ×" if peak > _HIGHEST else ""
        figures = each.figures
        times = "never" if figures.steady is None else f"{figures.steady:.2f} × ideal"
        attempts = f"{figures.attempts_per_job:.2f} attempts a job"
        frame.set_title(f"{each.policy.title}: {attempts}, steady {times}{above}", fontsize=7)
        frame.tick_params(labelsize=7)
        frame.set_ylim(0, _HIGHEST)
        frame.set_xlim(0, longest)
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("requests at the downstream ÷ its capacity", fontsize=8)
    figure.savefig(file, dpi=110)

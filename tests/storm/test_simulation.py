"""The simulation: what it takes for granted, and what it shows of the policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dramatiq_guard.simulation import comparison
from dramatiq_guard.simulation.downstream import Downstream
from dramatiq_guard.simulation.policies import POLICIES
from dramatiq_guard.simulation.scenario import TROUBLES, Phase, Scenario, herd, trouble

SMALL = trouble(Scenario(phases=(Phase(5_000, 15_000),), lasts=0, rejection_cost=0.3), "outage")


def run(scenario: Scenario, policy: str) -> comparison.Run:
    return comparison.run(scenario, POLICIES[policy])


def test_a_downstream_serves_its_capacity_and_no_more() -> None:
    """What arrives at twice the capacity is served at once the capacity, where rejections cost nothing."""
    downstream = Downstream(100, 0.0, 20, ())
    served = sum(downstream.answer(now * 5.0)[0] for now in range(2_000))
    assert served == pytest.approx(1_010, abs=15)


def test_rejections_cost_goodput() -> None:
    """With a cost ρ, an offered load a leaves (1 - ρa) / (1 - ρ) of the capacity."""
    downstream = Downstream(100, 0.3, 20, ())
    served = sum(downstream.answer(now * 5.0)[0] for now in range(2_000))
    assert served == pytest.approx(1_000 * (1 - 0.6) / 0.7, rel=0.05)


def test_an_outage_serves_nobody_and_is_over_when_it_ends() -> None:
    """Phases are what they say."""
    downstream = Downstream(100, 0.0, 20, (Phase(1_000, 2_000), Phase(2_000, 3_000, capacity=1.0, latency=10.0)))
    assert [downstream.answer(now)[0] for now in (0.0, 999.0, 1_000.0, 1_999.0, 2_000.0)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert downstream.answer(2_500.0)[1] == pytest.approx(210)
    assert downstream.answer(3_500.0)[1] == pytest.approx(30)


def test_the_ideal_is_the_victims_by_the_spare_capacity() -> None:
    """10 s of 75 jobs a second take 30 s at a spare capacity of 25."""
    steady, done = replace(SMALL, lasts=60_000).ideal()
    assert steady == pytest.approx(30_000 - 1_500, rel=0.03)
    assert done == pytest.approx(45_000, rel=0.03)


def test_the_guard_comes_through_an_outage_in_which_others_collapse() -> None:
    """The same jobs, the same downstream: one policy overloads it for ever, one hardly tries in vain."""
    guard, tuned = run(SMALL, "guard").figures, run(SMALL, "full").figures
    assert guard.undone == 0
    assert guard.amplification is not None
    assert guard.amplification < 1.05
    assert guard.peak_1s < 1.3
    assert guard.steady is not None
    assert guard.steady < 1.4
    assert tuned.undone > 100


def test_the_oracle_is_the_limit() -> None:
    """Nothing is done sooner than the perfect policy says."""
    figures = run(SMALL, "oracle").figures
    assert figures.steady == pytest.approx(1, abs=0.06)
    assert figures.amplification == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("own_queue", [True, False])
@pytest.mark.parametrize("name", TROUBLES)
def test_no_trouble_starves_anybody(name: str, own_queue: bool) -> None:
    """Every good job is done in the end, and a bad one does not take more attempts than a good one."""
    figures = run(replace(trouble(SMALL, name), own_queue=own_queue), "guard").figures
    assert figures.undone == 0
    assert figures.amplification is not None
    assert figures.amplification < 1.5


def test_a_herd_is_let_in_at_a_pace() -> None:
    """A thousand failures at once cost one attempt each, and little more."""
    figures = run(herd(SMALL, 1_000), "guard").figures
    assert figures.amplification is not None
    assert 2.0 <= figures.amplification <= 2.1
    assert figures.undone == 0


@pytest.mark.parametrize("name", ["stock", "tuned", "none", "added", "equal", "unpaced", "apart"])
def test_every_policy_can_be_run_and_written(name: str) -> None:
    """A table, a document and a sketch come of each."""
    brief = replace(SMALL, lasts=20_000, rejection_cost=0.0)
    made = run(brief, name)
    entry = comparison.document([made])[0]
    assert entry["policy"] == name
    assert entry["figures"]["jobs"] > 1_000
    assert len(comparison.sketch([made])) == 4
    assert comparison.table([made], "title").row_count == 1


def test_equal_seeds_give_equal_runs() -> None:
    """A figure can be had again."""
    assert run(SMALL, "guard").figures == run(SMALL, "guard").figures


def test_an_unknown_trouble_is_refused() -> None:
    """And those that exist are named."""
    with pytest.raises(ValueError, match="brown-out"):
        trouble(SMALL, "plague")


def test_a_picture_is_drawn(tmp_path) -> None:
    """One frame a policy."""
    from dramatiq_guard.simulation.picture import draw

    draw([run(SMALL, name) for name in ("guard", "oracle", "apart")], tmp_path / "storm.png", "storm")
    assert (tmp_path / "storm.png").read_bytes().startswith(b"\x89PNG")

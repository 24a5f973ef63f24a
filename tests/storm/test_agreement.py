"""Real and simulated storms are held against each other, and what cannot be compared is said."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import agreement, simulate
from benchmarks.storm import simulated
from benchmarks.storm.cases import Case, outage
from benchmarks.storm.results import Unreadable, decoded, medians, read
from dramatiq_guard.simulation.policies import POLICIES
from dramatiq_guard.simulation.scenario import Phase, Scenario, trouble

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TINY = outage(2, begins=1, after=2, threads=8)
#: Amplification and makespan of a round; None is one that did not finish.
Round = tuple[float, float | None]


def entry(policy: str, rounds: Sequence[Round], scenario: Scenario = TINY) -> dict[str, Any]:
    """A case as it lies in a file."""
    figures = [
        {"amplification": attempts, "makespan": makespan, "peak_1s": 1.1, "efficiency": 0.9}
        for attempts, makespan in rounds
    ]
    return {
        "case": f"outage:0.3:{policy}:{scenario.processes}",
        "scenario": asdict(scenario),
        "policy": policy,
        "title": policy,
        "figures": medians(figures),
        "rounds": [{"figures": each} for each in figures],
    }


def written(path: Path, *entries: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({**more, "runs": entries}))
    return path


def compared(path: Path, real: dict[str, Any], other: dict[str, Any], *options: str) -> int:
    """The status of the command."""
    files = [written(path / "real.json", real), written(path / "simulated.json", other, like="real.json")]
    return agreement.main([*map(str, files), *options])


@pytest.mark.parametrize(
    ("real", "simulation", "status"),
    [
        ((1.0, 1.0), (1.1, 0.9), 0),
        ((1.0, 1.0), (1.11, 1.0), 1),
        ((1.0, 1.0), (0.89, 1.0), 1),
        ((1.0, 1.0), (1.0, 1.11), 1),
        ((1.0, 1.0), (1.0, 0.89), 1),
    ],
)
@pytest.mark.parametrize("policy", ["guard", "stock"])
def test_a_finished_case_agrees_within_a_tenth(
    policy: str, real: Round, simulation: Round, status: int, tmp_path: Path
) -> None:
    """Amplification and makespan are judged, each in both directions, and whosever the case is."""
    assert status == compared(tmp_path, entry(policy, [real]), entry(policy, [simulation] * 3))


def test_how_much_may_differ_is_asked_for(tmp_path: Path) -> None:
    """A narrower limit is missed where the ordinary one is kept."""
    files = entry("guard", [(1.0, 1.0)]), entry("guard", [(1.05, 1.0)] * 3)
    assert (0, 1) == (compared(tmp_path, *files), compared(tmp_path, *files, "--within", "0.04"))


DONE, UNDONE = (1.0, 1.0), (40.0, None)


@pytest.mark.parametrize(
    ("policy", "real", "simulation", "status", "said"),
    [
        # Attempts by the end are no figure of the policy: 40 against 60 is no difference.
        ("tuned", [UNDONE], [(60.0, None)] * 3, 0, "agrees: neither finishes"),
        ("guard", [UNDONE], [(60.0, None)] * 3, 0, "agrees: neither finishes"),
        ("tuned", [UNDONE], [DONE] * 3, 1, "differs: finished 0 of 1 real, 3 of 3 simulated rounds"),
        ("tuned", [DONE], [UNDONE] * 3, 1, "differs: finished 1 of 1 real, 0 of 3 simulated rounds"),
        ("tuned", [DONE, UNDONE], [DONE] * 3, 1, "left out: finished 1 of 2 real, 3 of 3 simulated rounds"),
        ("tuned", [UNDONE], [DONE, UNDONE, DONE], 1, "left out: finished 0 of 1 real, 2 of 3 simulated rounds"),
        ("guard", [DONE], [DONE, UNDONE, DONE], 1, "differs: finished 1 of 1 real, 2 of 3 simulated rounds"),
    ],
)
def test_what_did_not_finish_is_compared_by_that_alone(
    policy: str,
    real: list[Round],
    simulation: list[Round],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run's fixed end is not its makespan; where no case is left to judge, that is no agreement, either."""
    assert status == compared(tmp_path, entry(policy, real), entry(policy, simulation))
    assert said in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_what_is_left_out_does_not_spoil_what_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is that of the other cases, and policies that the simulation does not know are named."""
    peer = entry("celery", [(4.0, 9.0)])
    real = written(tmp_path / "real.json", entry("guard", [DONE]), entry("tuned", [DONE, UNDONE]), peer)
    entries = entry("guard", [DONE] * 3), entry("tuned", [DONE] * 3)
    other = written(tmp_path / "simulated.json", *entries, like="real.json")
    assert 0 == agreement.main([str(real), str(other)])
    printed = capsys.readouterr().out
    assert "1 agrees, 0 differs, 1 left out" in printed
    assert "does not know: outage:0.3:celery:1" in printed


def test_a_case_that_was_not_simulated_does_not_agree(tmp_path: Path) -> None:
    """Half of a comparison is none."""
    two = entry("guard", [DONE], replace(TINY, processes=2))
    real = written(tmp_path / "real.json", entry("guard", [DONE]), two)
    other = written(tmp_path / "simulated.json", entry("guard", [DONE] * 3), like="real.json")
    assert 1 == agreement.main([str(real), str(other)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is not JSON"),
        ("[]", "has no list of `runs`"),
        ('{"runs": [3]}', "run 1: there is no `case`"),
        (json.dumps({"runs": [entry("guard", [DONE]) | {"rounds": []}]}), "has no rounds"),
        (json.dumps({"runs": [entry("guard", [DONE]) | {"rounds": [{}]}]}), "lacks figures"),
        (json.dumps({"runs": [entry("guard", [DONE]) | {"scenario": {"speed": 3}}]}), "unknown in a scenario: speed"),
        (json.dumps({"runs": [entry("guard", [DONE]) | {"scenario": {}}]}), "is none of this version"),
        (json.dumps({"runs": [entry("stock", [DONE])]}), "no case is in both files"),
        (json.dumps({"runs": [entry("guard", [DONE], replace(TINY, capacity=9.0))]}), "is another scenario"),
        (json.dumps({"like": "", "runs": [entry("guard", [DONE])]}), "the first file must be of real workers"),
    ],
)
def test_what_cannot_be_compared_is_said(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong file is an error of its own, not a difference."""
    real = tmp_path / "real.json"
    if text is not None:
        real.write_text(text)
    other = written(tmp_path / "simulated.json", entry("guard", [DONE] * 3), like="real.json")
    with pytest.raises(SystemExit) as ended:
        agreement.main([str(real), str(other)])
    assert 2 == ended.value.code
    assert said in capsys.readouterr().err


def test_a_scenario_comes_back_from_its_json() -> None:
    """Nothing is lost on the way, phases least of all; what an older file does not say is the default."""
    there = trouble(replace(TINY, phases=(Phase(1_000, 9_000, 0.25, 3.0),), seed=7), "half capacity")
    given = json.loads(json.dumps(asdict(there)))
    assert there == decoded(given)
    del given["delivery_step"]
    assert there == decoded(given)


def test_the_simulation_of_a_real_run_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--like` writes has the cases of the real run that it knows, with as many seeds, and can be compared."""
    real = tmp_path / "real.json"
    written(real, entry("guard", [DONE] * 4), entry("stock", [UNDONE]), entry("bullmq", [DONE]))
    out = tmp_path / "simulated.json"
    assert 0 == simulate.main(["--like", str(real), "--json", str(out), "--jobs", "1"])
    assert "2 of 3 cases" in capsys.readouterr().out

    results = read(out)
    assert ["outage:0.3:guard:1", "outage:0.3:stock:1"] == list(results)
    guard = results["outage:0.3:guard:1"]
    assert (4, 3) == (len(guard.rounds), len(results["outage:0.3:stock:1"].rounds))
    assert TINY == guard.scenario
    assert 1 < len({each["jobs"] for each in guard.rounds})  # seeds differ
    assert guard.figures == medians(guard.rounds)

    document = json.loads(out.read_text())
    del document["like"]
    twin = tmp_path / "twin.json"
    twin.write_text(json.dumps(document))
    assert 0 == agreement.main([str(twin), str(out)])


def test_more_seeds_are_asked_for(tmp_path: Path) -> None:
    """A short run needs more of them than the real one has rounds; fewer than that there never are."""
    real, out = written(tmp_path / "real.json", entry("guard", [DONE] * 2)), tmp_path / "simulated.json"
    for seeds, rounds in ((5, 5), (1, 2)):
        simulate.main(["--like", str(real), "--json", str(out), "--jobs", "1", "--seeds", str(seeds)])
        assert [rounds] == [len(each.rounds) for each in read(out).values()]


def test_nothing_to_simulate_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of peers alone, or no file at all, is an error that names it."""
    real = written(tmp_path / "real.json", entry("celery", [DONE]))
    for path, said in ((real, "its policies are celery"), (tmp_path / "none.json", "No such file")):
        with pytest.raises(SystemExit) as ended:
            simulate.main(["--like", str(path), "--jobs", "1"])
        assert 2 == ended.value.code
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("scenario", [TINY, outage(8, begins=2, after=8, threads=8)])
def test_a_simulated_run_ends_when_the_real_one_is_given_up(scenario: Scenario) -> None:
    """Attempts of a policy that does not come through grow for as long as they are counted."""
    case = Case(scenario, POLICIES["stock"])
    run = simulated.run(case)
    assert run.figures.undone
    assert run.figures.makespan is None
    # A second is one number; the last one is begun when the run ends.
    assert case.given_up_after / 1000 == pytest.approx(len(run.requests), abs=1.01)


def test_files_of_results_say_how_they_are_made(tmp_path: Path) -> None:
    """Who has the wrong file is told where the right one comes from."""
    with pytest.raises(Unreadable, match=r"write it with: python -m benchmarks.storm --json FILE"):
        read(tmp_path / "none.json")

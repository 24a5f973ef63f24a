from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.policy.backoff import Backoff, Delay, Row, timetable
from dramatiq_guard.policy.duration import LONGEST_DELAY

DOCS = Path(__file__).parents[2] / "docs" / "backoff.md"

u_values = st.floats(0, 1, exclude_max=True)
jitters = st.sampled_from(["full", "equal", "none"]) | st.tuples(st.floats(0, 1), st.floats(0, 1)).map(
    lambda pair: (min(pair), max(pair))
)
durations = st.integers(0, LONGEST_DELAY)


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    low, high = sorted((draw(durations), draw(durations)))
    schedule = draw(st.none() | st.lists(durations, min_size=1, max_size=5))
    return Backoff(low, high, draw(jitters), schedule)


# The defaults


def test_the_defaults_are_those_of_dramatiq_with_ten_to_twenty_percent_of_jitter() -> None:
    """15 seconds to 7 days, (0.10, 0.20), exponential."""
    backoff = Backoff()
    assert backoff.min_backoff == 15_000
    assert backoff.max_backoff == 604_800_000
    assert backoff.jitter == (0.10, 0.20)
    assert backoff.schedule is None


def test_the_wait_doubles_with_each_retry() -> None:
    """Without jitter the waits are min · 2^retries."""
    backoff = Backoff(1_000, 60_000, "none")
    assert [backoff.delay(n, 0.5).milliseconds for n in range(8)] == [
        1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000,
    ]  # fmt: skip


def test_the_timetable_in_the_docs_is_the_one_computed() -> None:
    """docs/backoff.md shows the waits of the defaults; each row is checked."""
    shown = re.findall(
        r"^\| +(\d+) \| +([\d ]+) – ([\d ]+) \| +([\d ]+) – ([\d ]+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE
    )
    computed = [(row.retry, row.low, row.high, row.total_low, row.total_high) for row in timetable(Backoff(), 20)]
    assert [tuple(int(cell.replace(" ", "")) for cell in row) for row in shown] == computed


# Jitter


@pytest.mark.parametrize(
    ("jitter", "low", "high"),
    [
        ((0.10, 0.20), 8_800, 9_600),
        ((0, 0), 8_000, 8_000),
        ("full", 0, 8_000),
        ("equal", 4_000, 8_000),
        ("none", 8_000, 8_000),
    ],
)
def test_each_jitter_has_its_window(jitter: Any, low: int, high: int) -> None:
    """The bounds of each mode around a wait of 8 seconds; u=0 and u=1 reach them."""
    backoff = Backoff(1_000, 600_000, jitter)
    assert backoff.bounds(3) == (low, high)
    assert backoff.delay(3, 0.0).milliseconds == low
    assert backoff.delay(3, 1.0).milliseconds == high


def test_additive_jitter_still_spreads_at_the_cap_and_never_exceeds_it() -> None:
    """At the cap the waits lie between 92 % of it and itself, so that a herd does not return in one instant."""
    assert Backoff(1_000, 60_000).bounds(50) == (55_000, 60_000)
    assert Backoff(1_000, 60_000).delay(50, 0.5) == Delay(57_500, "exponential", capped=True, floored=False)


def test_a_delay_says_whether_it_was_capped() -> None:
    """capped is true from the first retry that the cap shortens."""
    backoff = Backoff(1_000, 8_000, "none")
    assert [backoff.delay(n, 0).capped for n in range(5)] == [False, False, False, False, True]


@pytest.mark.parametrize(("u", "expected"), [(-1.0, 1_100), (7.0, 1_200), (float("nan"), 1_100)])
def test_a_random_number_out_of_range_stays_in_the_window(u: float, expected: int) -> None:
    """Whatever u is, the wait keeps its bounds."""
    assert Backoff(1_000).delay(0, u).milliseconds == expected


# Zero, and a million


def test_zero_is_a_value() -> None:
    """min_backoff=0 retries at once; Dramatiq reads it as 'not given'."""
    assert [Backoff(min_backoff=0).delay(n, 0.9).milliseconds for n in (0, 5, 10**6)] == [0, 0, 0]
    assert Backoff(0, 0).bounds(3) == (0, 0)


def test_a_schedule_entry_of_zero_is_a_value() -> None:
    """schedule=[0, …] retries at once, then waits."""
    backoff = Backoff(schedule=[0, 1_000], jitter="none")
    assert [backoff.delay(n, 0.5).milliseconds for n in range(3)] == [0, 1_000, 1_000]


@pytest.mark.parametrize("retries", [10**6, 10**100])
def test_a_million_retries_do_not_overflow(retries: int) -> None:
    """The power is never computed beyond what the cap needs."""
    assert Backoff().bounds(retries) == (554_400_000, 604_800_000)
    assert Backoff(1, LONGEST_DELAY, "none").delay(retries, 0.5).milliseconds == LONGEST_DELAY


def test_negative_retries_count_as_none() -> None:
    """A nonsensical count gives the first wait."""
    assert Backoff().bounds(-3) == Backoff().bounds(0)


# Schedules


def test_the_last_entry_of_a_schedule_repeats() -> None:
    """After the end of the list its last wait is used again and again."""
    backoff = Backoff(schedule=[60_000, timedelta(minutes=5), 900_000], jitter="none")
    assert [backoff.delay(n, 0).milliseconds for n in (0, 1, 2, 3, 10**6)] == [60_000, 300_000, *[900_000] * 3]
    assert backoff.delay(0, 0).strategy == "schedule"


def test_jitter_and_cap_apply_to_schedules() -> None:
    """A schedule's entries are spread and capped like the exponential waits."""
    backoff = Backoff(max_backoff=120_000, schedule=[60_000, 300_000])
    assert backoff.bounds(0) == (66_000, 72_000)
    assert backoff.bounds(1) == (110_000, 120_000)
    assert backoff.delay(1, 0.5).capped


def test_a_callable_schedule_is_given_the_retries_the_error_and_the_message() -> None:
    """(retries, exception, message) -> milliseconds."""
    seen: list[Any] = []

    def schedule(*arguments: Any) -> int:
        seen.append(arguments)
        return 5_000

    error = KeyError("x")
    delay = Backoff(jitter="none", schedule=schedule).delay(4, 0.5, exception=error, message="m")
    assert delay == Delay(5_000, "schedule", capped=False, floored=False)
    assert seen == [(4, error, "m")]


def test_an_error_that_is_falsy_reaches_the_schedule_nevertheless() -> None:
    """An exception may have a length of zero."""

    class Empty(Exception):
        def __len__(self) -> int:
            return 0

    error, seen = Empty(), []
    Backoff(schedule=lambda _retries, exception, _message: seen.append(exception) or 0).delay(0, 0, exception=error)
    assert seen == [error]


def test_a_schedule_that_raises_falls_back_to_exponential_and_the_delay_says_so() -> None:
    """A faulty schedule does not cost the message its retry."""

    def schedule(retries: int, exception: BaseException, message: Any) -> int:
        raise KeyError(retries)

    delay = Backoff(1_000, jitter="none", schedule=schedule).delay(2, 0.5)
    assert delay == Delay(4_000, "exponential (schedule raised KeyError)", capped=False, floored=False)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "NoneType"),
        ("soon", "str"),
        (True, "bool"),
        (-1, "a number out of range"),
        (float("inf"), "a number out of range"),
        (float("nan"), "a number out of range"),
    ],
)
def test_a_schedule_that_returns_no_duration_falls_back_to_exponential(answer: Any, what: str) -> None:
    """What it returned instead is named by its type, never by its content."""
    delay = Backoff(1_000, jitter="none", schedule=lambda *_: answer).delay(0, 0.5)
    assert (delay.milliseconds, delay.strategy) == (1_000, f"exponential (schedule returned {what})")


def test_a_schedule_may_return_a_timedelta_or_a_huge_number() -> None:
    """Both are durations; the latter is capped."""
    assert Backoff(jitter="none", schedule=lambda *_: timedelta(seconds=2)).delay(0, 0).milliseconds == 2_000  # type: ignore[arg-type, return-value]
    assert Backoff(schedule=lambda *_: 10**400).delay(0, 0) == Delay(554_400_000, "schedule", True, False)


# Retry-After


def test_a_floor_below_the_wait_changes_nothing() -> None:
    """A Retry-After that the backoff satisfies anyway is ignored."""
    assert Backoff(60_000).delay(0, 0.5, floor=1_000) == Backoff(60_000).delay(0, 0.5)


@pytest.mark.parametrize(
    ("jitter", "expected"),
    [
        ((0.10, 0.20), (30_000, 36_000)),
        ("full", (30_000, 36_000)),
        ("equal", (30_000, 36_000)),
        ("none", (30_000, 30_000)),
    ],
)
def test_jitter_lies_on_top_of_a_floor(jitter: Any, expected: tuple[int, int]) -> None:
    """Clients that were given one Retry-After come back spread, and none too early."""
    backoff = Backoff(1_000, 600_000, jitter)
    assert backoff.bounds(0, floor=30_000) == expected
    assert backoff.delay(0, 0.0, floor=30_000).floored


def test_a_floor_prevails_over_the_cap_up_to_seven_days() -> None:
    """What the server asks for counts for more than max_backoff; nothing exceeds 7 days."""
    backoff = Backoff(1_000, 60_000)
    assert backoff.bounds(0, floor=120_000) == (120_000, 144_000)
    assert backoff.delay(0, 0.5, floor=10**30) == Delay(LONGEST_DELAY, "exponential", capped=True, floored=True)


@pytest.mark.parametrize("floor", [0, -1])
def test_a_floor_of_zero_is_no_floor(floor: int) -> None:
    """Retry-After: 0 leaves the backoff as it is."""
    assert Backoff().delay(0, 0.5, floor=floor) == Backoff().delay(0, 0.5)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"jitter": "fulll"}, ValueError, r"unknown jitter 'fulll': write 'full', 'equal', 'none' or two fractions"),
        ({"jitter": None}, TypeError, "unknown jitter None"),
        ({"jitter": (0.1,)}, TypeError, "unknown jitter"),
        ({"jitter": (0.1, "0.2")}, TypeError, "unknown jitter"),
        ({"jitter": (False, True)}, TypeError, "unknown jitter"),
        ({"jitter": (10, 20)}, ValueError, r"0\.10 is 10 %"),
        ({"jitter": (0.2, 0.1)}, ValueError, "0 ≤ a ≤ b ≤ 1"),
        ({"jitter": (-0.1, 0.1)}, ValueError, "0 ≤ a ≤ b ≤ 1"),
        ({"jitter": (0.1, float("nan"))}, ValueError, "0 ≤ a ≤ b ≤ 1"),
        ({"min_backoff": -1}, ValueError, "min_backoff must not be negative"),
        ({"max_backoff": -1}, ValueError, "max_backoff must not be negative"),
        ({"min_backoff": True}, TypeError, "min_backoff must be milliseconds"),
        ({"max_backoff": "1"}, TypeError, "max_backoff must be milliseconds"),
        ({"min_backoff": 2_000, "max_backoff": 1_000}, ValueError, r"min_backoff \(2000 ms\) must not be above"),
        ({"schedule": []}, ValueError, "schedule is empty"),
        ({"schedule": "60"}, TypeError, "schedule must be a list of milliseconds"),
        ({"schedule": 60}, TypeError, "schedule must be a list of milliseconds"),
        ({"schedule": [1, -2]}, ValueError, r"schedule\[1\] must not be negative"),
        ({"schedule": [True]}, TypeError, r"schedule\[0\] must be milliseconds"),
    ],
)
def test_a_wrong_backoff_is_refused_with_what_to_write(arguments: Any, error: type[Exception], says: str) -> None:
    """A mistake is found where the backoff is made, not when the first message fails."""
    with pytest.raises(error, match=says):
        Backoff(**arguments)


def test_durations_may_be_timedeltas_and_pairs_lists() -> None:
    """What came from a config file or is written for people is normalised, so that equal backoffs are equal."""
    written = Backoff(timedelta(seconds=1), timedelta(minutes=1), [0.1, 0.2], [1_000])  # type: ignore[arg-type]
    assert written == Backoff(1_000, 60_000, (0.1, 0.2), (1_000,))
    assert hash(written) == hash(Backoff(1_000, 60_000, (0.1, 0.2), (1_000,)))


def test_more_than_seven_days_count_as_seven_days() -> None:
    """Dramatiq cuts max_backoff silently, and so must existing settings go on working."""
    assert Backoff(max_backoff=timedelta(days=30)).max_backoff == LONGEST_DELAY


# Overriding


def test_what_is_given_replaces_what_was_inherited() -> None:
    """None leaves a part as it is, 0 does not."""
    inherited = Backoff(1_000, 60_000, "full", [5])
    assert inherited.replacing() == inherited
    assert inherited.replacing(min_backoff=0, jitter="none") == Backoff(0, 60_000, "none", [5])
    assert inherited.replacing(max_backoff=9_000, schedule=[7]) == Backoff(1_000, 9_000, "full", [7])


def test_of_two_bounds_that_cross_the_one_given_wins() -> None:
    """An actor that sets only one of min_backoff and max_backoff works under any middleware default."""
    assert Backoff().replacing(max_backoff=5_000) == Backoff(5_000, 5_000)
    assert Backoff(1_000, 5_000).replacing(min_backoff=9_000) == Backoff(9_000, 9_000)


def test_two_given_bounds_that_cross_are_refused() -> None:
    """An override that contradicts itself is a mistake."""
    with pytest.raises(ValueError, match="must not be above"):
        Backoff().replacing(min_backoff=2_000, max_backoff=1_000)


# The timetable


def test_a_timetable_adds_up_the_bounds() -> None:
    """Each row has the bounds of its wait and of its distance from the first failure."""
    assert timetable(Backoff(1_000, 60_000), 2) == (
        Row(1, 1_100, 1_200, 1_100, 1_200, "exponential"),
        Row(2, 2_200, 2_400, 3_300, 3_600, "exponential"),
    )


def test_no_retries_give_an_empty_timetable() -> None:
    """max_retries=0 has no rows."""
    assert timetable(Backoff(), 0) == ()


def test_a_callable_schedule_sees_a_real_exception_in_a_timetable() -> None:
    """A schedule that looks at its exception works without one having been raised."""
    backoff = Backoff(jitter="none", schedule=lambda n, exception, _: 1_000 * (n + 1) + len(exception.args))
    assert [row.low for row in timetable(backoff, 2)] == [1_001, 2_001]


# Properties


@given(backoffs(), st.integers(-1, 10**6), u_values, st.none() | st.integers(-1, 2 * LONGEST_DELAY))
def test_a_delay_lies_within_its_bounds_above_its_floor_and_below_the_cap(
    backoff: Backoff, retries: int, u: float, floor: int | None
) -> None:
    """Bounds, floor and cap hold for every backoff, count and random number."""
    low, high = backoff.bounds(retries, floor=floor)
    delay = backoff.delay(retries, u, floor=floor)
    assert 0 <= low <= delay.milliseconds <= high <= LONGEST_DELAY
    assert delay.milliseconds >= min(floor or 0, LONGEST_DELAY)
    if floor is None:
        assert high <= backoff.max_backoff
        assert not delay.floored


@given(backoffs(), st.integers(0, 60), st.none() | st.integers(0, LONGEST_DELAY))
def test_exponential_bounds_never_shrink(backoff: Backoff, retries: int, floor: int | None) -> None:
    """Neither bound of the next wait is below that of this one, at the cap neither."""
    exponential = Backoff(backoff.min_backoff, backoff.max_backoff, backoff.jitter)
    before, after = exponential.bounds(retries, floor=floor), exponential.bounds(retries + 1, floor=floor)
    assert before[0] <= after[0]
    assert before[1] <= after[1]


@given(backoffs(), st.integers(0, 100), u_values, u_values)
def test_a_delay_grows_with_u(backoff: Backoff, retries: int, u: float, v: float) -> None:
    """The random number picks the place in the window, monotonously."""
    first, second = (backoff.delay(retries, place).milliseconds for place in sorted((u, v)))
    assert first <= second

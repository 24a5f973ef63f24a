from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.policy.backoff import Backoff, timetable
from dramatiq_guard.policy.decision import Counts, Limits, Step, decide
from dramatiq_guard.policy.duration import LONGEST_DELAY
from dramatiq_guard.policy.retention import DAY, LONGEST_DEFERRAL, longest_sleep, retention_for, worst_life
from dramatiq_guard.policy.verdict import Kind, Verdict

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
WEEK = 7 * DAY

#: Dramatiq's own waits, at most: up to twice the plan, never above max_backoff.
STOCK = (0, 1)


def days(milliseconds: int | None) -> float:
    assert milliseconds is not None
    return round(milliseconds / DAY, 1)


@pytest.mark.parametrize(
    ("max_retries", "max_backoff", "sleep", "life"),
    [
        (20, WEEK, WEEK, 46.4 * DAY),
        (10, WEEK, 4.3 * HOUR, 0.4 * DAY),
        (3, WEEK, 2 * MINUTE, 3.5 * MINUTE),
        (20, HOUR, HOUR, 0.6 * DAY),
    ],
)
def test_what_dramatiqs_own_backoff_comes_to(max_retries: int, max_backoff: int, sleep: float, life: float) -> None:
    """By default one copy sleeps up to 7 days, and all of them 46 days."""
    backoff = Backoff(15_000, max_backoff, STOCK)
    assert longest_sleep(backoff, max_retries) == pytest.approx(sleep, rel=0.02)
    assert days(worst_life(backoff, max_retries)) == round(life / DAY, 1)


@pytest.mark.parametrize(
    ("max_retries", "max_backoff", "sleep", "life"),
    [
        (20, WEEK, WEEK, 41.7 * DAY),
        (10, WEEK, 2.56 * HOUR, 0.2 * DAY),
        (3, WEEK, 72 * SECOND, 126 * SECOND),
        (20, HOUR, HOUR, 0.6 * DAY),
    ],
)
def test_what_our_own_backoff_comes_to(max_retries: int, max_backoff: int, sleep: float, life: float) -> None:
    """A jitter of a fifth in place of up to the double makes both shorter."""
    backoff = Backoff(15_000, max_backoff)
    assert longest_sleep(backoff, max_retries) == pytest.approx(sleep, rel=0.02)
    assert days(worst_life(backoff, max_retries)) == round(life / DAY, 1)


@pytest.mark.parametrize(
    "backoff",
    [Backoff(), Backoff(0), Backoff(1), Backoff(1, 10), Backoff(1, 50, "full", [5, 99]), Backoff(jitter="equal")],
)
@pytest.mark.parametrize("max_retries", [0, 1, 2, 3, 20, 40, 100])
def test_they_are_what_the_timetable_shows(backoff: Backoff, max_retries: int) -> None:
    """The longest of its waits, and their sum."""
    rows = timetable(backoff, max_retries)
    assert longest_sleep(backoff, max_retries) == max(LONGEST_DEFERRAL, *(row.high for row in rows), 0)
    assert worst_life(backoff, max_retries) == sum(row.high for row in rows)


def test_a_message_without_retries_can_be_put_off_all_the_same() -> None:
    """By a minute and its jitter."""
    for max_retries in (0, -1):
        assert longest_sleep(Backoff(), max_retries) == LONGEST_DEFERRAL == 72_000
        assert worst_life(Backoff(), max_retries) == 0


def test_unlimited_retries_sleep_no_longer_but_for_ever() -> None:
    """Unless they must start within some time."""
    assert longest_sleep(Backoff(15_000, HOUR), None) == HOUR
    assert longest_sleep(Backoff(schedule=[5, HOUR, 5], jitter="none"), None) == HOUR
    assert worst_life(Backoff(), None) is None
    assert worst_life(Backoff(), None, retry_for=HOUR) == HOUR


def test_any_number_of_retries_is_computed_at_once() -> None:
    """What does not grow any more is multiplied."""
    assert worst_life(Backoff(1, 10, "none"), 10**12) == 1 + 2 + 4 + 8 + (10**12 - 4) * 10
    assert worst_life(Backoff(1, 10, "none", [3, 4]), 10**12) == 3 + (10**12 - 1) * 4


def test_a_schedule_that_is_a_function_is_not_asked() -> None:
    """It counts as max_backoff: 7 days, unless that is lower."""

    def schedule(retries: int, exception: BaseException, message: Any) -> int:
        raise AssertionError("it was asked")

    assert longest_sleep(Backoff(schedule=schedule), 3) == WEEK
    assert longest_sleep(Backoff(schedule=schedule), None) == WEEK
    assert longest_sleep(Backoff(0, HOUR, schedule=schedule), 3) == HOUR
    assert longest_sleep(Backoff(schedule=schedule), 0) == LONGEST_DEFERRAL
    assert worst_life(Backoff(schedule=schedule), 3) == 3 * WEEK
    assert longest_sleep(Backoff(schedule=schedule), 3, asked=5) == WEEK


def test_no_retry_sleeps_beyond_the_time_for_retries() -> None:
    """One that would is not made."""
    assert longest_sleep(Backoff(), 20, retry_for=HOUR) == HOUR
    assert worst_life(Backoff(), 20, retry_for=DAY) == DAY
    assert longest_sleep(Backoff(), 3, retry_for=DAY) == 72_000
    assert worst_life(Backoff(), 3, retry_for=DAY) == 126_000


def test_a_delay_that_somebody_asks_for_counts_with_its_jitter() -> None:
    """A sender's may be longer than the 7 days that a retry has at most."""
    assert longest_sleep(Backoff(), 3, asked=HOUR) == 1.2 * HOUR
    assert longest_sleep(Backoff(jitter="none"), 3, asked=HOUR) == HOUR
    assert longest_sleep(Backoff(), 3, asked=5 * WEEK) == 5 * WEEK
    assert worst_life(Backoff(jitter="none"), 3, asked=HOUR) == 3 * HOUR
    assert worst_life(Backoff(), 3, asked=5 * WEEK) == 3 * WEEK


def test_deferrals_make_a_life_longer() -> None:
    """A thousand of them, 20 hours; unlimited ones, without end."""
    assert worst_life(Backoff(), 0, max_deferrals=1_000) == 72_000_000
    assert worst_life(Backoff(jitter="none"), 3, max_deferrals=2, asked=HOUR) == 5 * HOUR
    assert worst_life(Backoff(), 3, max_deferrals=None) is None
    assert worst_life(Backoff(), None, retry_for=HOUR, max_deferrals=None) is None


def test_a_record_outlives_the_longest_sleep_and_the_redelivery_after_it() -> None:
    """A day at least."""
    assert retention_for(WEEK) == WEEK + HOUR
    assert retention_for(72_000) == DAY
    assert retention_for(DAY - HOUR) == DAY
    assert retention_for(DAY, redelivery=5) == DAY + 5
    assert retention_for(5, floor=0, redelivery=0) == 5


durations = st.integers(0, LONGEST_DELAY)


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    low, high = sorted((draw(durations), draw(durations)))
    jitter: Any = draw(st.sampled_from(["full", "equal", "none", (0.1, 0.2), (0, 1), (0, 0)]))
    schedule: Any = draw(st.none() | st.lists(durations, min_size=1, max_size=5) | st.just(lambda *_: 77_777_777))
    return Backoff(low, high, jitter, schedule)


@given(
    backoffs(),
    st.integers(0, 60),
    st.none() | durations,
    st.lists(
        st.tuples(
            st.sampled_from([Kind.RETRYABLE, Kind.DEFERRED]),
            st.none() | durations,
            st.none() | durations,
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=80,
    ),
)
def test_no_life_of_a_message_exceeds_them(
    backoff: Backoff, max_retries: int, retry_for: int | None, ends: list[tuple[Kind, int | None, int | None, float]]
) -> None:
    """Whatever a message's attempts end with, no sleep is longer than the longest, nor all of them than the life."""
    limits = Limits(max_retries, retry_for, max_deferrals=30)
    asked = max((max(delay or 0, after or 0) for _, delay, after, _ in ends), default=0)
    longest = longest_sleep(backoff, max_retries, retry_for=retry_for, asked=asked)
    life = worst_life(backoff, max_retries, retry_for=retry_for, asked=asked, max_deferrals=30)
    assert life is not None
    retries = deferrals = slept = retrying = 0
    for kind, delay, after, u in ends:
        verdict = Verdict(kind, "x", "", delay=delay, retry_after=after)
        decision = decide(verdict, Counts(retries, deferrals, 0, retrying), limits, backoff, u)
        if decision.delay is None:
            break
        wait = decision.delay.milliseconds
        assert wait <= longest
        slept += wait
        if decision.step is Step.RETRY:
            retries, retrying = retries + 1, retrying + wait
        else:
            deferrals += 1
    assert slept <= life


def test_the_longest_sleep_is_reached() -> None:
    """The numbers are bounds, not guesses: a message of the worst luck sleeps as long."""
    backoff, slept = Backoff(15_000, HOUR), [0]
    verdict = Verdict(Kind.RETRYABLE, "x", "")
    while (decision := decide(verdict, Counts(len(slept) - 1), Limits(20), backoff, 1.0)).delay is not None:
        slept.append(decision.delay.milliseconds)
    assert max(slept) == longest_sleep(backoff, 20)
    assert sum(slept) == worst_life(backoff, 20)

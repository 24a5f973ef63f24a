from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.policy.backoff import Backoff, Delay
from dramatiq_guard.policy.decision import Counts, Decision, Limits, Step, decide
from dramatiq_guard.policy.duration import LONGEST_DELAY
from dramatiq_guard.policy.verdict import Kind, Verdict

PLAIN = Backoff(1_000, 60_000, "none")
RETRYABLE, PERMANENT, FATAL, DEFERRED, INTERRUPTED = (Verdict(kind, f"rule:{kind.value}", "why") for kind in Kind)


def settled(
    verdict: Verdict, counts: Counts = Counts(), limits: Limits = Limits(), backoff: Backoff = PLAIN, **more: Any
) -> Decision:
    return decide(verdict, counts, limits, backoff, more.pop("u", 0.5), **more)


# The table


@pytest.mark.parametrize(
    ("verdict", "left", "none_left", "counted", "exits"),
    [
        (RETRYABLE, (Step.RETRY, None), (Step.GIVE_UP, "exhausted"), True, False),
        (PERMANENT, (Step.GIVE_UP, "permanent"), (Step.GIVE_UP, "permanent"), False, False),
        (FATAL, (Step.RETRY, None), (Step.GIVE_UP, "exhausted"), True, True),
        (DEFERRED, (Step.DEFER, None), (Step.DEFER, None), False, False),
        (INTERRUPTED, (Step.REQUEUE, None), (Step.REQUEUE, None), False, False),
    ],
    ids=[kind.value for kind in Kind],
)
def test_the_table(verdict: Verdict, left: Any, none_left: Any, counted: bool, exits: bool) -> None:
    """Verdict × retries left → step, reason, whether it counts and whether the process exits."""
    for retries, expected in [(19, left), (20, none_left)]:
        decision = settled(verdict, Counts(retries=retries))
        assert (decision.step, decision.reason) == expected
        assert (decision.counted, decision.exit_process) == (counted, exits)
        assert (decision.delay is None) == (decision.step is Step.GIVE_UP)
        assert decision.why


def test_max_retries_zero_gives_up_at_the_first_failure() -> None:
    """0 is a value."""
    assert settled(RETRYABLE, limits=Limits(max_retries=0)).reason == "exhausted"


def test_without_a_limit_retries_go_on() -> None:
    """max_retries=None is unlimited, as in Dramatiq."""
    decision = settled(RETRYABLE, Counts(retries=10**6), Limits(max_retries=None))
    assert (decision.step, decision.delay) == (Step.RETRY, Delay(60_000, "exponential", True, False))
    assert decision.why == "retry 1000001 in 60000 ms (exponential)"


@pytest.mark.parametrize(("rule", "actor", "applies"), [(3, 20, 3), (20, 3, 3), (3, None, 3), (None, 3, 3), (0, 20, 0)])
def test_the_smaller_of_the_rules_limit_and_the_actors_applies(rule: Any, actor: Any, applies: int) -> None:
    """A rule may shorten the patience with one error, never lengthen the actor's."""
    verdict, limits = replace(RETRYABLE, max_retries=rule), Limits(max_retries=actor)
    assert settled(verdict, Counts(retries=applies), limits).step is Step.GIVE_UP
    if applies:
        assert settled(verdict, Counts(retries=applies - 1), limits).step is Step.RETRY


def test_the_reason_says_whose_limit_it_was() -> None:
    """Who wonders why three retries were all finds the rule."""
    verdict = replace(RETRYABLE, max_retries=3)
    assert settled(verdict, Counts(retries=3)).why == "3 retries made, max_retries of rule:retryable is 3"
    assert settled(RETRYABLE, Counts(retries=20)).why == "20 retries made, max_retries is 20"


# throws and retry_when


@pytest.mark.parametrize("verdict", [RETRYABLE, PERMANENT, DEFERRED, INTERRUPTED])
def test_throws_is_consulted_first(verdict: Verdict) -> None:
    """What an actor throws is final, whatever it would mean otherwise."""
    decision = settled(verdict, throws=True, retry_when=True)
    assert (decision.step, decision.reason, decision.counted) == (Step.GIVE_UP, "permanent", False)
    assert not decision.exit_process


def test_an_unfit_process_exits_although_its_error_is_thrown() -> None:
    """throws is about the message, not about the process."""
    assert settled(FATAL, throws=True).exit_process


def test_retry_when_can_end_the_retries() -> None:
    """A predicate that declines gives up with retries left; a fatal error still ends the process."""
    assert settled(RETRYABLE, retry_when=False).reason == "exhausted"
    assert settled(RETRYABLE, retry_when=False).counted
    assert settled(FATAL, retry_when=False).exit_process


def test_retry_when_does_not_lift_max_retries() -> None:
    """Both apply."""
    assert settled(RETRYABLE, Counts(retries=19), retry_when=True).step is Step.RETRY
    assert settled(RETRYABLE, Counts(retries=20), retry_when=True).reason == "exhausted"


# Delays


def test_the_rules_backoff_prevails() -> None:
    """A rule with its own backoff waits by it."""
    verdict = replace(RETRYABLE, backoff=Backoff(jitter="none", schedule=[7]))
    assert settled(verdict).delay == Delay(7, "schedule", False, False)


@pytest.mark.parametrize("asked", [0, 1, 90_000])
def test_a_delay_that_the_error_asked_for_is_exact(asked: int) -> None:
    """No jitter, no max_backoff, and 0 is a value."""
    for u in (0.0, 0.99):
        decision = settled(replace(RETRYABLE, delay=asked), backoff=Backoff(1_000, 60_000), u=u)
        assert decision.delay == Delay(asked, "asked", False, False)


def test_an_asked_delay_is_bounded_like_any_other() -> None:
    """Not below 0, not above 7 days, not before Retry-After."""
    assert settled(replace(RETRYABLE, delay=-5)).delay == Delay(0, "asked", False, False)
    assert settled(replace(RETRYABLE, delay=10**30)).delay == Delay(LONGEST_DELAY, "asked", True, False)
    assert settled(replace(RETRYABLE, delay=5, retry_after=9)).delay == Delay(9, "asked", False, True)


def test_retry_after_is_a_floor() -> None:
    """The wait is not shorter than what the server said, and jitter lies on top."""
    delay = settled(replace(RETRYABLE, retry_after=90_000), backoff=Backoff(1_000, 60_000)).delay
    assert delay == Delay(99_000, "exponential", False, True)


def test_the_schedule_sees_exception_and_message() -> None:
    """Both are handed through to a schedule that is a function."""
    error = KeyError()
    backoff = Backoff(jitter="none", schedule=lambda n, e, m: 5 if (n, e, m) == (2, error, "m") else 6)
    decision = settled(RETRYABLE, Counts(retries=2), backoff=backoff, exception=error, message="m")
    assert decision.delay == Delay(5, "schedule", False, False)


# retry_for


@pytest.mark.parametrize(("elapsed", "step"), [(0, Step.RETRY), (9_000, Step.RETRY), (9_001, Step.GIVE_UP)])
def test_no_retry_starts_after_retry_for(elapsed: int, step: Step) -> None:
    """The elapsed time and the next wait together must not exceed it."""
    decision = settled(RETRYABLE, Counts(elapsed=elapsed), Limits(retry_for=10_000))
    assert decision.step is step
    if step is Step.GIVE_UP:
        assert (decision.reason, decision.counted) == ("exhausted", True)
        assert decision.why == "the next retry, in 1000 ms, would come after retry_for (10000 ms) is over"


def test_retry_for_and_max_retries_both_apply() -> None:
    """Whichever is reached first ends the retries."""
    limits = Limits(max_retries=1, retry_for=10**9)
    assert settled(RETRYABLE, Counts(retries=1), limits).reason == "exhausted"


def test_a_fatal_error_past_retry_for_still_ends_the_process() -> None:
    """Giving up on the message does not heal the process."""
    assert settled(FATAL, Counts(elapsed=10**9), Limits(retry_for=1)).exit_process


# Deferred


def test_deferrals_back_off_to_a_minute() -> None:
    """1 s, 2 s, 4 s … 60 s, counted by deferrals and not by retries."""
    waits = [settled(DEFERRED, Counts(retries=9, deferrals=n)).delay for n in range(8)]
    assert [wait and wait.milliseconds for wait in waits] == [
        1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000,
    ]  # fmt: skip
    assert waits[0] == Delay(1_000, "deferral", False, False)


def test_an_asked_deferral_is_never_shorter_than_asked() -> None:
    """Jitter lies on top, in every mode; 0 is a value."""
    for jitter, expected in [("none", 5_000), ((0.1, 0.2), 5_500), ("full", 5_000), ("equal", 5_000)]:
        delay = settled(replace(DEFERRED, delay=5_000), backoff=Backoff(jitter=jitter), u=0.0).delay  # type: ignore[arg-type]
        assert delay is not None
        assert (delay.milliseconds, delay.strategy) == (expected, "deferral")
    assert settled(replace(DEFERRED, delay=0)).delay == Delay(0, "deferral", False, False)
    assert settled(replace(DEFERRED, delay=-1)).delay == Delay(0, "deferral", False, False)


def test_a_deferral_respects_retry_after() -> None:
    """With an asked delay or without."""
    for asked in (None, 0, 5_000):
        decision = settled(replace(DEFERRED, delay=asked, retry_after=9_000))
        assert decision.delay == Delay(9_000, "deferral", False, True)


def test_deferrals_have_a_cap_of_their_own() -> None:
    """The last deferral is the 1000th; the next gives up, uncounted."""
    assert settled(DEFERRED, Counts(deferrals=999)).step is Step.DEFER
    decision = settled(DEFERRED, Counts(deferrals=1000))
    assert (decision.step, decision.reason, decision.counted) == (Step.GIVE_UP, "deferred_too_often", False)
    assert settled(DEFERRED, Counts(deferrals=10**9), Limits(max_deferrals=None)).step is Step.DEFER


# Interrupted


def test_an_interrupted_message_is_requeued_at_once() -> None:
    """No wait, no attempt."""
    assert settled(INTERRUPTED, Counts(retries=20)).delay == Delay(0, "at once", False, False)


def test_interruptions_have_a_cap_of_their_own() -> None:
    """Five times; then the job is too long for the deploys."""
    assert settled(INTERRUPTED, Counts(interruptions=4)).step is Step.REQUEUE
    decision = settled(INTERRUPTED, Counts(interruptions=5))
    assert (decision.step, decision.reason, decision.counted) == (Step.GIVE_UP, "interrupted_too_often", False)


# Properties

optional = st.none() | st.integers()
jitters = st.sampled_from(["full", "equal", "none", (0.1, 0.2), (0.0, 1.0)])
verdicts = st.builds(
    Verdict,
    st.sampled_from(Kind),
    st.just("rule"),
    st.just("why"),
    optional,
    optional,
    optional,
    st.none() | st.builds(Backoff, jitter=jitters),
)
counts = st.builds(Counts, st.integers(), st.integers(), st.integers(), st.integers())
limits = st.builds(Limits, optional, optional, optional, optional)


@given(
    verdicts,
    counts,
    limits,
    st.builds(Backoff, jitter=jitters),
    st.floats(),
    st.booleans(),
    st.none() | st.booleans(),
)
def test_every_input_has_a_decision_that_is_whole(
    verdict: Verdict,
    counts: Counts,
    limits: Limits,
    backoff: Backoff,
    u: float,
    throws: bool,
    retry_when: bool | None,
) -> None:
    """Nothing raises; a reason comes with giving up and only then; what counts is a retry or its absence."""
    decision = decide(verdict, counts, limits, backoff, u, throws=throws, retry_when=retry_when)
    gave_up = decision.step is Step.GIVE_UP
    assert gave_up == (decision.reason is not None) == (decision.delay is None)
    assert decision.counted == (decision.step is Step.RETRY or decision.reason == "exhausted")
    assert decision.exit_process == (verdict.kind is Kind.FATAL)
    if decision.delay is not None and decision.step is not Step.REQUEUE:
        assert min(max(0, verdict.retry_after or 0), LONGEST_DELAY) <= decision.delay.milliseconds <= LONGEST_DELAY


@given(
    st.integers(0, 30),
    st.lists(st.sampled_from([RETRYABLE, RETRYABLE, FATAL, DEFERRED, INTERRUPTED]), min_size=200, max_size=200),
)
def test_a_message_that_always_fails_is_retried_exactly_max_retries_times(
    max_retries: int, fate: list[Verdict]
) -> None:
    """Deferrals and interruptions in between change nothing about the number of attempts."""
    allowed = Limits(max_retries, max_deferrals=None, max_interruptions=None)
    now, steps = Counts(), []
    for verdict in [*fate, *[RETRYABLE] * 40]:
        decision = decide(verdict, now, allowed, PLAIN, 0.5)
        steps.append(decision.step)
        if decision.step is Step.GIVE_UP:
            break
        now = Counts(
            now.retries + decision.counted,
            now.deferrals + (decision.step is Step.DEFER),
            now.interruptions + (decision.step is Step.REQUEUE),
            now.elapsed + (decision.delay.milliseconds if decision.delay else 0),
        )
    assert steps.count(Step.RETRY) == max_retries
    assert steps[-1] is Step.GIVE_UP


@pytest.mark.parametrize(("asked", "waits"), [(1_234, 1_234), (-5, 0), (8 * 86_400_000, 7 * 86_400_000)])
def test_a_deferral_may_be_exact(asked: int, waits: int) -> None:
    """Whoever has spread the messages already wants no jitter on it; it is bounded like any other."""
    verdict = replace(DEFERRED, delay=asked, exact=True)

    decision = decide(verdict, Counts(), Limits(), Backoff(), 0.9)

    assert decision.step is Step.DEFER
    assert decision.delay is not None
    assert decision.delay.milliseconds == waits
    assert not decision.counted


def test_a_verdict_may_have_a_reason_of_its_own() -> None:
    """It is that of the dead letter."""
    decision = decide(replace(PERMANENT, reason="key_reused"), Counts(), Limits(), Backoff(), 0.0)

    assert (decision.step, decision.reason) == (Step.GIVE_UP, "key_reused")

"""What a breaker promises whatever happens: no more than its rate, one probe at a time, and an end to every outage."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_guard.policy.breaker import Lease, Limits, Mode, Report, State, Tally, force, step
from dramatiq_guard.policy.gate import Gate, Move

LIMITS = Limits()
#: Closed for a minute, at 100 answers per second.
HEALTHY = State(at=60_000, learned=Tally(ok=2_700.0, bad=0.0, ms=27_000.0))

reports = st.fixed_dictionaries(
    {
        "ok": st.integers(0, 200),
        "bad": st.integers(0, 200),
        "wants": st.integers(0, 50),
        "span": st.integers(0, 6_000),
        "retry_after": st.one_of(st.none(), st.integers(0, 5_000)),
        "put_off": st.integers(0, 20),
        "away": st.integers(0, 5_000),
    }
)


def recovering(rate: float) -> State:
    """A recovery that begins at a rate."""
    state = force(replace(HEALTHY, restart=rate), Mode.FORCED_OPEN, 61_000)
    return force(replace(state, restart=rate), Mode.RECOVERING, 62_000)


@settings(max_examples=100, deadline=None)
@given(
    rate=st.floats(1, 2_000),
    asks=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 500), st.integers(0, 9)), min_size=5, max_size=60),
)
def test_no_more_is_let_through_than_the_rate(rate: float, asks: list[tuple[int, int, int]]) -> None:
    """Whoever asks, how often, and how much comes back unused: over any time it is the rate, and the first token."""
    state = recovering(rate)
    granted, allowed, out = 0, 1.0, 0
    now = state.at
    for elapsed, wants, unused in asks:
        now += elapsed
        back = min(unused, out)
        before = state
        state, lease = step(
            LIMITS, state, Report(state.mode, state.since, wants=wants, span=elapsed, unused=back, put_off=1), now
        )
        assert state.mode is Mode.RECOVERING
        allowed += max(before.rate, state.rate) * elapsed / 1000
        granted += lease.tokens - back
        out += lease.tokens - back
        assert granted <= allowed + 1e-6


@settings(max_examples=50, deadline=None)
@given(rate=st.floats(1, 2_000), silence=st.integers(1_000, 9_000))
def test_silence_saves_up_no_burst(rate: float, silence: int) -> None:
    """Who comes after a while gets what one and a half looks are worth, and not all of the while."""
    state = recovering(rate)
    state, lease = step(LIMITS, state, Report(state.mode, state.since, wants=10**6), state.at + silence)

    assert state.mode is Mode.RECOVERING or not lease.tokens
    assert lease.tokens <= max(1.0, 1.5 * state.rate * LIMITS.look / 1000)


@settings(max_examples=100, deadline=None)
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 4_000), st.integers(1, 20), st.sampled_from(["none", "none", "bad", "unused"])),
        min_size=5,
        max_size=60,
    )
)
def test_one_probe_is_out_at_a_time(asks: list[tuple[int, int, str]]) -> None:
    """Another goes when it has failed, has come back unused, or is out for too long; and none of them in haste."""
    state, _ = step(LIMITS, HEALTHY, Report(bad=6, span=50), 60_000)
    now, out_until, failed_at = state.at, 0, state.at
    for elapsed, wants, outcome in asks:
        now += elapsed
        told = outcome if now < out_until else "none"
        if told != "none":
            out_until = 0
        if told == "bad":
            failed_at = now
        report = Report(state.mode, state.since, bad=told == "bad", unused=told == "unused", wants=wants, span=elapsed)
        state, lease = step(LIMITS, state, report, now)
        assert state.mode is Mode.OPEN
        assert lease.tokens <= 1
        if lease.tokens:
            assert now >= out_until, "one is out"
            assert now - failed_at >= LIMITS.probe_after, "one has just failed"
            out_until = now + LIMITS.probe_timeout


@settings(max_examples=150, deadline=None)
@given(
    chaos=st.lists(st.tuples(st.integers(0, 3_000), reports, st.booleans()), max_size=40),
    backlog=st.integers(0, 80),
)
def test_every_outage_ends_soon_after_the_downstream_is_back(
    chaos: list[tuple[int, dict[str, int | None], bool]], backlog: int
) -> None:
    """Whatever was reported before, by whom, and whatever probe was lost: all that waits is let through, and it closes.

    From then on everything succeeds.  A Retry-After of up to five seconds, a lost probe's timeout and the wait for the
    next probe come before; then one message a second is the slowest there is.
    """
    state, now = HEALTHY, HEALTHY.at
    for elapsed, report, current in chaos:
        now += elapsed
        mode, since = (state.mode, state.since) if current else (Mode.CLOSED, 0)
        state, lease = step(LIMITS, state, Report(mode, since, **report), now)  # type: ignore[arg-type]
        assert not lease.tokens or now >= state.floor, "a Retry-After holds"

    began, left, running, look = now, backlog, 0, 200
    while left or running or state.mode is not Mode.CLOSED:
        assert now - began <= 40_000 + 1_000 * backlog, (state.mode, left)
        now += look
        wants = max(1, min(left, 8)) if state.mode is Mode.OPEN else min(left, 8)
        state, lease = step(LIMITS, state, Report(state.mode, state.since, ok=running, wants=wants, span=look), now)
        running = wants if lease.mode is Mode.CLOSED else lease.tokens
        left = max(0, left - running)
        look = min(lease.look, 1_000)
    assert left == 0


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(0, 60)),
            st.tuples(st.just("wait"), st.integers(0, 60)),
            st.tuples(st.just("report"), st.integers(0, 9)),
        ),
        min_size=10,
        max_size=80,
    )
)
def test_a_gate_lets_through_no_more_than_it_was_leased(moves: list[tuple[str, int]]) -> None:
    """Each token admits one message, or is given back with the next report; and they go out one after the other."""
    lease = Lease(Mode.RECOVERING, 9, look=200, apart=50.0, soonest=200, latest=10_200)
    gate, now, leased, admitted = Gate(8, 0), 0, 0, 0
    gate.ask(now)
    gate.learn(lease, now, 0.5)
    for move, number in moves:
        if move == "report":
            report = gate.ask(now)
            assert report.unused == leased - admitted
            assert report.wants == gate.waiting
            leased, admitted = number, 0
            gate.learn(replace(lease, tokens=number), now, 0.5)
            continue
        now += number
        if move == "arrive":
            admitted += gate.arrive(now, 0.5).move is Move.ADMIT
        elif gate.waiting:
            admitted += gate.wait_over(now) is not None
        assert admitted <= leased
        assert 0 <= gate.waiting <= gate.room

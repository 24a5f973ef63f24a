"""The shared breaker and its gates: pure, so every second of an outage can be told here without waiting for it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dramatiq_guard.policy.breaker import Lease, Limits, Mode, Report, State, Tally, force, step
from dramatiq_guard.policy.gate import Gate, Move, waiting_room

LIMITS = Limits()
#: Closed for a minute, at 100 answers per second.
HEALTHY = State(at=60_000, learned=Tally(ok=2_700.0, bad=0.0, ms=27_000.0))


def told(state: State, now: int, limits: Limits = LIMITS, **report: int | None) -> tuple[State, Lease]:
    """A report of a process that knows in which period it is."""
    return step(limits, state, Report(state.mode, state.since, **report), now)  # type: ignore[arg-type]


def opened(now: int = 60_000, **report: int | None) -> State:
    return told(HEALTHY, now, **({"bad": 6, "span": 50} | report))[0]


def recovering(now: int = 70_000, **changes: object) -> State:
    state = told(opened(), now, ok=1, span=200)[0]
    assert state.mode is Mode.RECOVERING
    return replace(state, **changes)  # type: ignore[arg-type]


# Closed


def test_a_closed_breaker_needs_no_tokens_and_few_reports() -> None:
    """A healthy downstream costs one report in seconds."""
    state, lease = told(HEALTHY, 61_000, ok=100, span=1_000)
    assert (state.mode, lease.mode, lease.tokens, lease.look) == (Mode.CLOSED, Mode.CLOSED, 0, 5_000)


def test_it_opens_when_most_of_what_was_tried_lately_fails() -> None:
    """What it did before is remembered as the rate to begin with again."""
    state = opened()
    assert (state.mode, state.opened_at) == (Mode.OPEN, 60_000)
    assert state.restart == pytest.approx(100)


def test_few_failures_among_many_answers_do_not_open_it() -> None:
    """A share below the limit is no outage, however many failures it takes."""
    assert told(HEALTHY, 60_100, ok=100, bad=40, span=250)[0].mode is Mode.CLOSED


def test_fewer_failures_than_the_least_do_not_open_it() -> None:
    """Four failures are four failures."""
    assert opened(bad=4).mode is Mode.CLOSED


def test_a_slow_key_opens_after_failures_in_a_row() -> None:
    """Where little happens, failures count until something succeeds."""
    state = HEALTHY
    for second in range(5):
        assert state.mode is Mode.CLOSED
        state, _ = told(state, 70_000 + 1_000 * second, bad=1, span=1_000)
    assert state.mode is Mode.OPEN


def test_an_answer_ends_the_row() -> None:
    """A success between the failures begins the count anew."""
    state = HEALTHY
    for second in range(8):
        state, _ = told(state, 70_000 + 1_000 * second, bad=1, ok=second == 4, span=1_000)
    assert state.mode is Mode.CLOSED


def test_old_answers_do_not_hide_an_outage() -> None:
    """Of a report that covers seconds only the last moments count as recent."""
    assert told(HEALTHY, 65_000, ok=250, bad=20, span=5_000)[0].mode is Mode.OPEN


def test_a_retry_after_opens_it_and_holds_the_whole_key_back() -> None:
    """Nobody probes before the time that the downstream named, and nobody is put off to an earlier one."""
    state, lease = told(HEALTHY, 60_000, bad=1, span=50, retry_after=30_000)
    assert (state.mode, state.floor, lease.soonest) == (Mode.OPEN, 90_000, 30_000)
    state, lease = told(state, 89_000, wants=1, span=200)
    assert lease.tokens == 0
    assert told(state, 90_000, wants=1, span=200)[1].tokens == 1


def test_a_later_retry_after_holds_the_next_probe_back_too() -> None:
    """Whatever was planned before it."""
    state = told(opened(), 60_100, retry_after=30_000, span=100)[0]
    assert told(state, 89_000, wants=1, span=200)[1].tokens == 0
    assert told(state, 90_100, wants=1, span=200)[1].tokens == 1


def test_a_retry_after_is_limited() -> None:
    """A downstream that asks for a year is asked again within the hour."""
    assert told(HEALTHY, 60_000, bad=1, retry_after=10**12)[0].floor == 60_000 + 3_600_000


# Open


def test_one_probe_is_out_at_a_time() -> None:
    """A second process waits until the first one's probe has an outcome, or has taken too long."""
    state = opened()
    state, lease = told(state, state.probe_at - 1, wants=1, span=100)
    assert lease.tokens == 0
    state, lease = told(state, state.probe_at, wants=3, span=100)
    assert lease.tokens == 1
    state, lease = told(state, state.probe_at + 1, wants=1, span=100)
    assert lease.tokens == 0
    assert told(state, state.probe_until, wants=1, span=100)[1].tokens == 1


def test_a_probe_that_fails_is_followed_by_another_after_a_while() -> None:
    """The longer the outage, the fewer probes."""
    state = opened()
    state, _ = told(state, 61_000, wants=1, span=200)
    failed, _ = told(state, 61_100, bad=1, span=100)
    assert (failed.mode, failed.probe_until) == (Mode.OPEN, 0)
    assert failed.probe_at - 61_100 == 250
    late, _ = told(failed, 60_000 + 3_600_000, bad=1, span=100)
    assert late.probe_at - late.at == 10_000


def test_a_probe_that_was_not_used_is_given_back() -> None:
    """The process had no message left for it."""
    state, _ = told(opened(), 61_000, wants=1, span=200)
    state, lease = told(state, 61_200, unused=1, wants=1, span=200)
    assert lease.tokens == 1


def test_outcomes_of_before_are_no_probes() -> None:
    """A success that was let through while it was closed says nothing about the outage."""
    state = opened()
    late = Report(Mode.CLOSED, 0, ok=50, bad=3, span=1_000)
    after, _ = step(LIMITS, state, late, 60_050)
    assert (after.mode, after.restart > state.restart) == (Mode.OPEN, True)
    assert step(LIMITS, recovering(), late, 70_050)[0].rate == pytest.approx(100, rel=0.05)
    other, _ = step(LIMITS, state, Report(Mode.OPEN, 1, ok=1, span=100), 60_050)
    assert other.mode is Mode.OPEN


def test_a_probe_that_succeeds_begins_the_recovery_at_the_learned_rate() -> None:
    """It does not open the floodgates."""
    state = recovering()
    assert state.rate == pytest.approx(100)


def test_a_recovery_that_learned_nothing_begins_slowly() -> None:
    """A key that has never succeeded has no rate to go by."""
    state, _ = step(LIMITS, State(), Report(bad=6, span=50), 1_000)
    state, _ = told(state, 3_000, ok=1, span=200)
    assert (state.mode, state.rate) == (Mode.RECOVERING, LIMITS.first_rate)
    state, _ = told(state, 3_200, wants=50, span=200)
    grown, _ = told(state, 3_600, wants=50, span=200)
    assert grown.rate > state.rate
    cut, _ = told(grown, 3_700, ok=20, bad=4, wants=50, span=100)
    assert cut.rate == pytest.approx(grown.rate / 2, rel=0.1)
    assert cut.ceiling > cut.rate


# Recovering


def test_tokens_come_at_the_rate() -> None:
    """Whoever asks, together they get no more than the rate allows."""
    state, granted = recovering(), 0
    for tick in range(1, 101):
        state, lease = told(state, 70_000 + 10 * tick, wants=50, span=200)
        granted += lease.tokens
    assert 95 <= granted <= 1 + 1.5 * 100


def test_no_tokens_before_a_floor() -> None:
    """A Retry-After in the middle of a recovery stops it for its time."""
    state, lease = told(recovering(), 71_000, wants=9, span=200, bad=1, retry_after=5_000)
    assert lease.tokens == 0
    assert told(state, 75_999, wants=9, span=200)[1].tokens == 0
    assert told(state, 76_300, wants=9, span=200)[1].tokens > 0


def test_the_rate_grows_while_somebody_waits() -> None:
    """And only then: a rate that nobody uses is not proved."""
    wanted, unwanted = recovering(), recovering()
    for tick in range(1, 11):
        wanted, _ = told(wanted, 70_000 + 200 * tick, wants=90, ok=15, span=200)
        unwanted, _ = told(unwanted, 70_000 + 200 * tick, ok=1, span=200)
    assert wanted.rate > 1.1 * unwanted.rate
    assert unwanted.rate < 120


def test_the_rate_falls_to_what_is_borne_and_remembers_the_limit() -> None:
    """Not to half: what was answered shows how much can be."""
    state = recovering(rate=200.0, at=75_000, cut_at=74_000)
    cut, _ = told(state, 75_200, ok=200, bad=50, wants=90, span=200)
    assert 140 < cut.rate < 180
    assert cut.rate < cut.ceiling <= 170
    again, _ = told(cut, 75_300, ok=10, bad=30, wants=9, span=100)
    assert again.cut_at == cut.cut_at, "what was let through before the cut is not held against it"


def test_near_the_limit_the_rate_grows_slowly_and_then_faster() -> None:
    """Growth begins at half a percent a second, so that the limit is met gently."""
    near = recovering(rate=100.0, ceiling=100.0, at=75_000, cut_at=75_000)
    soon, _ = told(near, 75_100, wants=99, span=100)
    soon, _ = told(replace(near, hungry_at=75_000), 75_400, wants=99, span=100)
    late, _ = told(replace(near, at=85_000, hungry_at=85_000), 85_400, wants=99, span=100)
    below, _ = told(replace(near, rate=50.0, hungry_at=75_000), 75_400, wants=99, span=100)
    assert 1.0 < soon.rate / 100 < 1.005 < late.rate / 100 < below.rate / 50


def test_failures_that_a_cut_does_not_cure_are_taken_for_usual() -> None:
    """A bad shard of four fails at any rate; the other three are not starved for it."""
    state, rates = recovering(usual=0.0), []
    for tick in range(1, 150):
        state, _ = told(state, 70_000 + 200 * tick, ok=15, bad=5, wants=99, span=200)
        rates.append(state.rate)
    assert state.mode is Mode.RECOVERING
    assert state.usual > 0.2
    assert rates[-1] >= 100


def test_failures_that_a_cut_cures_in_part_are_cut_again() -> None:
    """An overload that the first cut did not end is not taken for usual."""
    state = recovering(rate=70.0, at=75_000, cut_at=74_000, cut_from=100.0, cut_ratio=0.4, trial=Tally(50, 0, 900))
    again, _ = told(state, 75_200, ok=9, bad=4, wants=99, span=200)
    assert again.rate < 70
    assert (again.cut_from, again.usual) == (100.0, 0.0)
    early = replace(state, trial=Tally())
    assert told(early, 75_200, ok=9, bad=4, wants=99, span=200)[0].cut_at == 74_000


def test_usual_failures_that_end_are_forgotten() -> None:
    """The share is learned downwards, too."""
    state = recovering(usual=0.3)
    for tick in range(1, 60):
        state, _ = told(state, 70_000 + 200 * tick, ok=20, wants=99, span=200)
    assert state.usual < 0.1


def test_it_opens_again_when_most_fails() -> None:
    """The next recovery begins at what this one proved, and at no less than half."""
    state = recovering(at=75_000, cut_at=74_000, hungry_at=75_000)
    state, _ = told(state, 75_200, ok=20, wants=99, span=200)
    again, _ = told(state, 75_600, bad=40, wants=99, span=200)
    assert again.mode is Mode.OPEN
    assert state.rate / 2 <= again.restart <= state.rate


def test_it_closes_when_nobody_has_had_to_wait_for_seconds() -> None:
    """Not before the last message that was put off is back."""
    state, _ = told(recovering(), 70_200, put_off=20, away=5_000, ok=5, span=200)
    assert state.line_until == pytest.approx(70_200 + 20 * 1000 / state.rate, abs=2)
    state, _ = told(state, 74_000, ok=5, span=200)
    assert state.mode is Mode.RECOVERING
    state, lease = told(state, 78_400, ok=5, span=200)
    assert (state.mode, lease.mode) == (Mode.CLOSED, Mode.CLOSED)


def test_tokens_that_were_not_used_come_back() -> None:
    """But no more of them than the bucket holds."""
    state, lease = told(recovering(level=10.0), 70_000, wants=10, span=200)
    assert (lease.tokens, state.level) == (10, 0.0)
    back, _ = told(state, 70_001, unused=4, span=1)
    assert back.level == pytest.approx(4, abs=0.2)
    assert told(state, 70_001, unused=400, span=1)[0].level <= 31


def test_where_there_are_many_processes_each_asks_more_seldom() -> None:
    """The store is asked at most some hundred times a second, and messages put off come back at the rate of all."""
    state = recovering()
    for tick in range(1, 5_001):
        state, lease = told(state, 70_000 + 2 * tick, wants=1, span=500)
    assert 400 <= lease.look <= 600
    assert lease.apart == pytest.approx(250 * 1000 / state.rate, rel=0.2)


def test_reports_in_the_past_count_as_now() -> None:
    """A clock that goes back stops nothing."""
    state, _ = told(recovering(), 68_500, wants=1, span=200)
    assert state.at == 70_000


def test_a_clock_that_was_far_ahead_is_not_waited_for() -> None:
    """A server whose clock is put right, or another that takes over, must not hold a downstream back for a year."""
    year = 365 * 86_400_000
    state = told(opened(60_000 + year), 60_500 + year, retry_after=3_000, span=100)[0]
    state, lease = told(state, 61_000, wants=1, span=200)
    assert (state.mode, lease.tokens) == (Mode.OPEN, 0)
    assert lease.soonest <= 3_000
    assert told(state, 64_100, wants=1, span=200)[1].tokens == 1

    state = recovering(70_000 + year, level=0.0)
    state, _ = told(state, 71_000, wants=9, span=200)
    assert told(state, 71_300, wants=9, span=200)[1].tokens > 0


def test_a_recovery_is_not_over_because_nobody_was_there() -> None:
    """Workers that boot into it, a minute after the last was stopped, find a backlog and no open floodgate."""
    state, lease = told(recovering(), 130_000, wants=9, span=0)
    assert (state.mode, lease.mode) == (Mode.RECOVERING, Mode.RECOVERING)
    state = force(force(HEALTHY, Mode.FORCED_OPEN, 61_000), Mode.RECOVERING, 62_000)
    assert told(state, 130_000, span=0)[0].mode is Mode.RECOVERING


def test_nobody_is_put_off_for_more_than_a_quarter_of_an_hour() -> None:
    """After a night's pause the last must not come back at noon."""
    night = force(HEALTHY, Mode.FORCED_OPEN, 61_000)
    assert told(night, 8 * 3_600_000, span=200)[1].latest <= 900_200
    of_another_version = State(mode=Mode.FORCED_OPEN, since=1)
    assert told(of_another_version, 1_700_000_000_000, span=200)[1].latest <= 11_000


# By hand


def test_an_operator_may_pause_a_downstream() -> None:
    """Nothing goes through, not even a probe, until another word."""
    state = force(HEALTHY, Mode.FORCED_OPEN, 61_000)
    assert state.restart == pytest.approx(100)
    state, lease = told(state, 10**6, ok=1, wants=9, span=200)
    assert (lease.mode, lease.tokens) == (Mode.FORCED_OPEN, 0)
    assert force(state, Mode.FORCED_OPEN, 10**6) is state
    resumed = force(state, Mode.RECOVERING, 10**6 + 1)
    assert (resumed.mode, resumed.rate) == (Mode.RECOVERING, pytest.approx(100))


def test_an_operator_may_hold_it_closed() -> None:
    """Then nothing opens it, and an old Retry-After is forgotten."""
    state = force(recovering(floor=10**6), Mode.FORCED_CLOSED, 71_000)
    state, lease = told(state, 72_000, bad=500, span=200)
    assert (lease.mode, state.floor) == (Mode.FORCED_CLOSED, 0)


def test_forcing_a_recovery_open_keeps_what_it_began_with() -> None:
    """The rate learned before the outage is still the best that is known."""
    assert force(recovering(), Mode.OPEN, 71_000).restart == pytest.approx(100)
    assert force(recovering(restart=0.0), Mode.CLOSED, 71_000).mode is Mode.CLOSED


def test_an_empty_tally_has_no_ratio_and_no_goodput() -> None:
    """Nothing is divided by nothing."""
    assert (Tally().ratio, Tally().goodput) == (0.0, 0.0)


# The gate


def leased(lease: Lease, room: int = 8, now: int = 0, waiting: int = 0) -> Gate:
    gate = Gate(room, now)
    gate.ask(now)
    gate.learn(replace(lease, tokens=0), now, 0.0)
    for _ in range(waiting):
        assert gate.arrive(now, 0.5, again=True).move is Move.WAIT
    gate.ask(now)
    gate.learn(lease, now, 0.0)
    return gate


OPEN = Lease(Mode.OPEN, 5, look=200, soonest=500, latest=10_500)
DUE = replace(OPEN, soonest=200)
PACED = Lease(Mode.RECOVERING, 9, look=200, line=1_000, apart=50.0, soonest=200, latest=10_200)


def test_a_closed_gate_admits_and_reports_every_few_seconds() -> None:
    """Or at once when something fails, but not for each of many failures."""
    gate = leased(Lease(Mode.CLOSED, 3, look=5_000))
    answer = gate.arrive(10, 0.5)
    assert (answer.move, gate.mode) == (Move.ADMIT, Mode.CLOSED)
    gate.done(answer.period, 20, ok=True)
    assert not gate.due(3_000)
    gate.done(answer.period, 1_000, ok=False, retry_after=7)
    gate.done(answer.period, 1_000, ok=False, retry_after=3)
    assert gate.due(1_000)
    report = gate.ask(1_000)
    assert (report.ok, report.bad, report.retry_after, report.since) == (1, 2, 7, 3)
    assert not gate.due(9_000), "one thread at a time asks"


def test_many_failures_are_told_at_once() -> None:
    """A downstream that refuses at once is not asked a hundred times between two reports."""
    gate = leased(Lease(Mode.CLOSED, 3, look=5_000))
    period = gate.arrive(0, 0.5).period
    for failures in range(1, 5):
        gate.done(period, 10, ok=False)
        assert gate.due(10) == (failures == 4)


def test_what_fails_while_a_report_is_under_way_is_told_after_it() -> None:
    """The answer does not put it off by seconds."""
    gate = leased(Lease(Mode.CLOSED, 3, look=5_000))
    gate.ask(10)
    gate.done(gate.arrive(10, 0.5).period, 12, ok=False)
    assert not gate.due(100)
    gate.learn(Lease(Mode.CLOSED, 3, look=5_000), 15, 0.5)
    assert gate.due(60)


def test_an_open_gate_keeps_one_message_to_probe_with() -> None:
    """The others are put off, somewhere between the soonest and the latest."""
    gate = leased(OPEN)
    assert gate.arrive(0, 0.5).move is Move.WAIT
    away = gate.arrive(0, 0.5)
    assert (away.move, away.delay) == (Move.PUT_OFF, 5_500)
    assert gate.wait_over(10) is None
    gate.ask(100)
    gate.learn(replace(OPEN, tokens=1), 100, 0.5)
    probe = gate.wait_over(100)
    assert probe is not None
    gate.done(probe.period, 160, ok=True)
    assert gate.due(160), "the outcome of a probe is told at once"


def test_a_paused_gate_keeps_nobody_waiting() -> None:
    """No thread is blocked for an operator's sake."""
    assert leased(replace(OPEN, mode=Mode.FORCED_OPEN)).arrive(0, 0.0).move is Move.PUT_OFF


def test_a_queue_is_held_beyond_those_that_may_wait() -> None:
    """While it is open for all but the one that probes, while it recovers for what the room is for, else never."""
    assert leased(Lease(Mode.CLOSED, 3, look=5_000)).hold(100) == 0
    assert [leased(DUE).hold(taken) > 0 for taken in (0, 1)] == [False, True]
    assert leased(OPEN).hold(0) > 0, "no probe is due soon"
    assert leased(replace(OPEN, mode=Mode.FORCED_OPEN)).hold(0) > 0
    assert [leased(PACED, room=8).hold(taken) > 0 for taken in (5, 6)] == [False, True]
    assert leased(PACED, room=8, waiting=6).hold(0) > 0, "those of another queue count, too"
    assert 0 < leased(PACED).hold(8) < leased(DUE).hold(1), "sooner where they have their turns"


def test_what_probes_for_a_held_queue_is_back_sooner() -> None:
    """There is one at a time, so nobody is trampled; and after a long outage it does not come back last."""
    gate = leased(OPEN)
    gate.hold(0)
    gate.arrive(0, 0.5)
    assert gate.give_up(2_000, 0.5).delay == 1_500


def test_a_process_lets_half_of_its_threads_wait() -> None:
    """The others do other work."""
    assert [waiting_room(threads) for threads in (1, 2, 3, 24)] == [1, 1, 1, 12]


def test_tokens_go_out_evenly() -> None:
    """A batch from the delay queue does not reach the downstream as a batch."""
    gate = leased(replace(PACED, tokens=4), waiting=6)
    went = [now for now in range(0, 200, 10) if gate.wait_over(now)]
    assert went == [0, 50, 90, 140]
    assert gate.waiting == 2
    assert gate.wake_at(100) == 180


def test_one_lease_follows_another_without_a_burst() -> None:
    """The first of the next is as far behind the last of this one as they are from each other."""
    gate = leased(replace(PACED, tokens=4), room=9, waiting=9)
    went = [now for now in range(0, 150, 10) if gate.wait_over(now)]
    gate.ask(150)
    gate.learn(replace(PACED, tokens=4), 150, 0.0)
    went += [now for now in range(150, 330, 10) if gate.wait_over(now)]
    assert went == [0, 50, 90, 140, 180, 230, 270, 320]
    gate.ask(400)
    gate.learn(replace(PACED, tokens=1), 400, 0.0)
    assert gate.wait_over(400), "after a while with none it goes at once"


def test_processes_begin_a_recovery_apart() -> None:
    """They may learn of it at one moment; their first messages go at different ones."""
    gate = Gate(8, 0)
    gate.ask(0)
    gate.learn(OPEN, 0, 0.0)
    assert gate.arrive(0, 0.5).move is Move.WAIT
    gate.ask(100)
    gate.learn(replace(PACED, tokens=4), 100, 0.5)
    assert [now for now in (100, 120, 130) if gate.wait_over(now)] == [130]


def test_when_it_closes_those_that_wait_do_not_go_at_once() -> None:
    """A hundred processes with a few each would be a burst that opens it again; who arrives meanwhile goes freely."""
    gate = leased(PACED, waiting=5)
    gate.ask(100)
    gate.learn(Lease(Mode.CLOSED, 10, look=5_000), 100, 0.0)
    assert gate.wake_at(100) == 101
    went = [now for now in range(100, 700, 20) if gate.waiting and gate.wait_over(now)]
    assert went == [100, 200, 300, 400, 500]
    assert gate.arrive(110, 0.5).move is Move.ADMIT


def test_a_token_at_hand_admits_at_once() -> None:
    """A message waits only where there is none, or where others wait."""
    gate = leased(replace(PACED, tokens=2))
    assert gate.arrive(0, 0.5).move is Move.ADMIT
    assert gate.wake_at(10) == 91
    assert gate.arrive(10, 0.5).move is Move.WAIT
    assert gate.arrive(150, 0.5).move is Move.WAIT
    assert gate.wait_over(150) is not None


def test_who_waits_with_nothing_at_hand_asks_soon() -> None:
    """The first to wait does not wait for the regular report."""
    gate = leased(PACED)
    gate.arrive(10, 0.5)
    assert gate.look_at == 50


def test_where_the_room_is_the_limit_the_gate_asks_sooner() -> None:
    """All that was wanted was granted, so more may be had."""
    gate = leased(replace(PACED, tokens=2), waiting=2)
    assert gate.look_at == 180
    assert gate.wait_over(0)
    assert gate.wait_over(120)
    assert gate.look_at == 120


def test_messages_that_were_put_off_before_go_first() -> None:
    """The last places are theirs."""
    gate = leased(PACED, room=4)
    moves = [gate.arrive(0, 0.5).move for _ in range(5)]
    assert moves.count(Move.WAIT) == 3
    assert gate.arrive(0, 0.5, again=True).move is Move.WAIT
    assert gate.arrive(0, 0.5, again=True).move is Move.PUT_OFF


def test_no_more_wait_than_have_their_turn_in_a_second() -> None:
    """A thread is not kept for a token that is far away."""
    gate = leased(replace(PACED, apart=400.0), room=50)
    assert [gate.arrive(0, 0.5, again=True).move for _ in range(4)].count(Move.WAIT) == 2


def test_messages_are_put_off_behind_each_other() -> None:
    """They come back at the rate of the recovery."""
    gate = leased(PACED, waiting=8)
    assert [gate.arrive(0, 0.5).delay for _ in range(4)] == [1_050, 1_100, 1_150, 1_200]
    report = gate.ask(200)
    assert (report.put_off, report.away) == (4, 1_000)


def test_nobody_is_put_off_beyond_the_latest() -> None:
    """Where the line is longer, any place in it is as good as another."""
    gate = leased(replace(PACED, line=10_190), waiting=8)
    assert gate.arrive(0, 0.5).delay == 5_200
    assert gate.arrive(0, 0.0).delay == 200


def test_who_waits_too_long_is_put_off() -> None:
    """A thread has other work."""
    gate = leased(PACED, waiting=1)
    assert gate.give_up(2_000, 0.5).move is Move.PUT_OFF
    assert gate.waiting == 0


def test_a_store_that_is_out_stops_nobody() -> None:
    """Everything is let through, and the store is asked again soon; what came about meanwhile belongs to no period."""
    gate = leased(PACED, waiting=1)
    admitted = leased(PACED).arrive(0, 0.5).period
    gate.ask(100)
    gate.lost(100)
    assert gate.wait_over(100) is not None
    assert gate.arrive(100, 0.5).move is Move.ADMIT
    assert not gate.due(1_000)
    assert gate.due(1_100)
    gate.done(admitted, 200, ok=False)
    assert gate.ask(1_100).bad == 0


def test_a_late_retry_after_is_told_all_the_same() -> None:
    """It names a time, whatever period its message was of."""
    gate = leased(PACED)
    gate.done(-7, 100, ok=False, retry_after=900)
    report = gate.ask(100)
    assert (report.bad, report.retry_after) == (0, 900)


# Always


class Downstream(RuleBasedStateMachine):
    """Processes ask in any order and at any pace; whatever they say, no more is let through than the rate allows."""

    def __init__(self) -> None:
        super().__init__()
        self.state = HEALTHY
        self.now = self.state.at
        self.granted = 0.0
        self.allowed = 0.0

    @rule(
        elapsed=st.integers(0, 3_000),
        ok=st.integers(0, 200),
        bad=st.integers(0, 200),
        wants=st.integers(0, 50),
        span=st.integers(0, 6_000),
        retry_after=st.one_of(st.none(), st.integers(0, 5_000)),
        put_off=st.integers(0, 20),
    )
    def report(self, elapsed: int, **report: int | None) -> None:
        before = self.state
        self.now += elapsed
        self.state, lease = told(before, self.now, **report)
        if before.mode is Mode.RECOVERING is self.state.mode and before.since == self.state.since:
            # A recovery's rate within a step lies between its old one and 1.8 times that.
            paid = max(0, self.now - max(before.at, before.floor))
            self.allowed += 1.8 * before.rate * paid / 1000
            self.granted += lease.tokens
            assert self.granted <= self.allowed + 2 + before.level
        else:
            self.granted = self.allowed = 0.0
        if self.state.mode is Mode.OPEN:
            assert lease.tokens <= 1
        assert self.now >= self.state.floor or lease.tokens == 0

    @invariant()
    def it_stays_within_bounds(self) -> None:
        state = self.state
        assert state.level >= 0
        assert 0 <= state.usual <= 1
        if state.mode is Mode.RECOVERING:
            assert LIMITS.slowest <= state.rate < float("inf")


TestAlways = Downstream.TestCase
TestAlways.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def outage(
    capacity: int, arrivals: int, lasts: int, processes: int, seed: int
) -> tuple[int, int, list[int], list[int]]:
    """A small world in steps of 10 ms: messages, attempts that failed after the recovery, and how long each took."""
    dice = random.Random(seed)
    state = State()
    gates = [Gate(8, 0) for _ in range(processes)]
    queues: list[deque[int]] = [deque() for _ in gates]
    away: list[tuple[int, int, int]] = []
    waits: list[int] = []
    came, late, attempts, bucket, due = 0, 0, [], 0.0, 0.0
    begins, recovers = 10_000, 10_000 + lasts
    now = 0
    while now < recovers + 15 * lasts + 30_000:
        now += 10
        bucket = min(capacity / 10 + 1, bucket + capacity / 100)
        due += arrivals / 100 if now < recovers else 0
        back = [entry for entry in away if entry[0] <= now]
        away = [entry for entry in away if entry[0] > now]
        fresh = [(now, now, 0) for _ in range(int(due))]
        due -= int(due)
        came += len(fresh)
        if now >= recovers and not back and not away and not any(queues):
            break
        admitted: list[tuple[Gate, int, int]] = []
        for _, arrived, again in back + fresh:
            index = dice.randrange(processes)
            answer = gates[index].arrive(now, dice.random(), again=bool(again))
            if answer.move is Move.ADMIT:
                admitted.append((gates[index], arrived, answer.period))
            elif answer.move is Move.WAIT:
                queues[index].append(arrived)
            else:
                away.append((now + answer.delay, arrived, 1))
        for gate, queue in zip(gates, queues, strict=True):
            if gate.due(now):
                state, lease = step(LIMITS, state, gate.ask(now), now)
                gate.learn(lease, now, dice.random())
            while queue and (over := gate.wait_over(now)):
                admitted.append((gate, queue.popleft(), over.period))
        for gate, arrived, period in admitted:
            ok = not begins <= now < recovers and bucket >= 1
            bucket -= ok
            gate.done(period, now, ok=ok)
            if ok:
                waits.append(now - arrived)
            else:
                away.append((now + 1_000 + dice.randrange(1_000), arrived, 0))
                late += now >= recovers
        attempts.append(len(admitted))
    return came, late, waits, attempts


@settings(max_examples=12, deadline=None)
@given(
    capacity=st.integers(20, 200),
    load=st.floats(0.3, 0.8),
    lasts=st.integers(3_000, 12_000),
    processes=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_it_recovers_when_the_downstream_does_and_nobody_starves(
    capacity: int, load: float, lasts: int, processes: int, seed: int
) -> None:
    """Every message is done, within a bound that depends on the outage and the load alone."""
    arrivals = max(1, round(capacity * load))
    came, _, waits, _ = outage(capacity, arrivals, lasts, processes, seed)
    assert len(waits) == came, "some were never done"
    assert max(waits) <= 6 * lasts + 30_000


def test_an_outage_told_once() -> None:
    """One run of the same world, with figures: next to nothing fails after the recovery."""
    came, late, waits, attempts = outage(100, 60, 10_000, 4, seed=1)
    assert len(waits) == came
    assert late <= 60
    assert max(waits) <= 60_000
    assert max(sum(attempts[at : at + 100]) for at in range(2_001, len(attempts))) <= 1.5 * 100


def test_a_gate_lets_messages_through_without_asking_while_it_is_closed() -> None:
    """They are counted in one sum; those of another period say nothing about this one."""
    gate = Gate(4, 0)
    period = gate.free
    assert period is not None

    gate.answered(period, 7)
    gate.answered(period + 1, 5)
    assert gate.ask(1_000).ok == 7

    gate.learn(Lease(Mode.OPEN, 1_000, look=200), 1_000, 0.5)
    assert gate.free is None
    gate.answered(period, 3)
    assert gate.ask(2_000).ok == 0

"""A circuit breaker that many processes share, with a recovery that is paced: a pure function of one small record.

A breaker that only opens and closes makes a storm worse: everything that was put off comes back at once.  This one
lets the load back in at the rate that the downstream is known to bear, and feels its way up from there.

The life of an outage::

    CLOSED      processes count by themselves, and report now and then, or at once when something fails
       │ more than half of what was tried lately failed, or a Retry-After came
    OPEN        nothing is let through but a probe at a time; the pace learned before the outage is remembered
       │ a probe succeeds
    RECOVERING  tokens are handed out at a rate: the learned one first, higher as long as messages wait for them,
       │        lower (to what was really done) when more fails than usual; OPEN again if half of it fails
       │ for some seconds nobody had to wait for a token
    CLOSED

`FORCED_OPEN` and `FORCED_CLOSED` are an operator's: they stay until another word.  A Retry-After holds the whole key
back until it is over, whatever the mode.

`step` is the whole policy, and the only way in which a `State` changes.  A store applies it atomically to the record
that the processes share: it reads the record and the server's time, calls `step`, and writes the new record if nobody
else has meanwhile (compare and set, on a version), or else begins again.  So there is one implementation, this one,
and none in Lua or SQL.  `dramatiq_guard.policy.gate` is the other side: what one process knows and holds.

The rate of the recovery follows M. Welsh, *SEDA* (2003) and the congestion control of TCP: fast growth until the limit
was met once, then slow, and faster the longer ago that was (CUBIC, RFC 9438); a cut does not halve the rate but brings
it to the goodput, which a downstream that rejects what it cannot bear makes known.  Failures that stay when the rate
is cut do not come from the rate: they are accepted as usual, so that one bad shard does not starve the others.

This module must not know the time, chance, a store or a process: `now` is an argument, in milliseconds of any clock
that all reports share.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

__all__ = ["Lease", "Limits", "Mode", "Report", "State", "Tally", "force", "step"]


class Mode(enum.Enum):
    """What the breaker does with messages."""

    CLOSED = "closed"
    OPEN = "open"
    RECOVERING = "recovering"
    FORCED_OPEN = "forced_open"
    FORCED_CLOSED = "forced_closed"

    @property
    def admits_freely(self) -> bool:
        """Whether messages need no token."""
        return self in (Mode.CLOSED, Mode.FORCED_CLOSED)


@dataclass(frozen=True, slots=True)
class Limits:
    """How a breaker judges.  Durations in milliseconds, rates in messages per second.

    Parameters:
      failure_ratio(float): The share of failures above which it opens.
      min_failures(int): Fewer failures than these never open it.
      first_rate(float): Where a recovery begins if no rate, or a lower one, was learned.
      slowest(float): No rate is below this one, so that a recovery always gets on.
      memory(int): The half-life of what is learned while closed.
      alarm(int): The half-life of the outcomes by which it opens.
      look(int): How often a process with waiting messages asks for tokens; more seldom where there are many processes.
      probe_after(int): The shortest wait between two probes.
      probe_timeout(int): After this time a probe without an outcome is given up, and another may go.
      patience(int): How long nobody must have waited for a token before a recovery is over.
      longest_floor(int): No Retry-After holds the key back for longer.
    """

    failure_ratio: float = 0.5
    min_failures: int = 5
    first_rate: float = 10.0
    slowest: float = 1.0
    memory: int = 20_000
    alarm: int = 250
    look: int = 200
    probe_after: int = 250
    probe_timeout: int = 5_000
    patience: int = 3_000
    longest_floor: int = 3_600_000


@dataclass(frozen=True, slots=True)
class Tally:
    """Outcomes and the time they took, the older ones counting less.

    Parameters:
      ok(float): Attempts that the downstream answered.
      bad(float): Attempts that failed for a reason that may pass.
      ms(float): The time they took.
    """

    ok: float = 0.0
    bad: float = 0.0
    ms: float = 0.0

    def after(self, elapsed: int, half_life: int) -> Tally:
        """The same tally so many milliseconds later."""
        left: float = 0.5 ** (elapsed / half_life)
        return Tally(self.ok * left, self.bad * left, self.ms * left + half_life / math.log(2) * (1 - left))

    def plus(self, ok: float, bad: float, ms: float = 0.0) -> Tally:
        """The tally with more outcomes."""
        return Tally(self.ok + ok, self.bad + bad, self.ms + ms)

    @property
    def ratio(self) -> float:
        """The share of failures."""
        return self.bad / (self.ok + self.bad) if self.bad else 0.0

    @property
    def goodput(self) -> float:
        """Answers per second."""
        return self.ok * 1000 / self.ms if self.ms else 0.0


@dataclass(frozen=True, slots=True)
class State:
    """All that is shared about one downstream.

    Parameters:
      mode(Mode): What it does.
      since(int): When that began; tells one period from another.
      at(int): When the last report came.
      opened_at(int): When the outage began that it is in, or recovers from.
      floor(int): Until when a Retry-After holds the key back.
      rate(float): Tokens per second while it recovers.
      restart(float): The rate at which the next recovery begins; 0 if nothing was learned.
      ceiling(float): The rate at which the limit was met last; 0 if it was not.
      cut_at(int): When the rate was cut last.
      cut_from(float): The rate before the first of the cuts that follow on each other; 0 where it bears well.
      cut_ratio(float): The share of failures that led to the first of them.
      level(float): Tokens at hand.
      hungry_at(int): When somebody last had to wait.
      away_until(int): When the last of those that were put off comes back.
      line_until(int): Up to when the recovery's rate is spoken for by those that were put off.
      probe_at(int): When the next probe may go.
      probe_until(int): When the probe that is out is given up; 0 if none is.
      usual(float): The share of failures that does not come from load.
      learned(Tally): What was done while it was closed.
      recent(Tally): What was done in the last moments.
      trial(Tally): What was done since the rate was judged.
      streak(int): Failures in a row, as far as they were reported.
      streak_at(int): When they began.
      best(float): The highest goodput of this recovery.
      present(Tally): Its `ok` is the time that the processes report for; with `ms`, how many there are.
    """

    mode: Mode = Mode.CLOSED
    since: int = 0
    at: int = 0
    opened_at: int = 0
    floor: int = 0
    rate: float = 0.0
    restart: float = 0.0
    ceiling: float = 0.0
    cut_at: int = 0
    cut_from: float = 0.0
    cut_ratio: float = 0.0
    level: float = 0.0
    hungry_at: int = 0
    away_until: int = 0
    line_until: int = 0
    probe_at: int = 0
    probe_until: int = 0
    usual: float = 0.0
    learned: Tally = Tally()
    recent: Tally = Tally()
    trial: Tally = Tally()
    streak: int = 0
    streak_at: int = 0
    best: float = 0.0
    present: Tally = Tally()


@dataclass(frozen=True, slots=True)
class Report:
    """What a process says, and what it wants.

    Parameters:
      mode(Mode): The mode it believes in, in which the outcomes came about.
      since(int): The period of it.
      ok(int): Attempts that the downstream answered since the last report, be it with a permanent error.
      bad(int): Attempts that failed for a reason that may pass.
      span(int): Milliseconds since its last report.
      retry_after(int | None): The longest Retry-After among them.
      wants(int): Messages that are due and wait for a token.
      unused(int): Tokens of the last lease that it did not use.
      put_off(int): Messages it put off since the last report.
      away(int): Milliseconds until the last message that it put off is back.
    """

    mode: Mode = Mode.CLOSED
    since: int = 0
    ok: int = 0
    bad: int = 0
    span: int = 0
    retry_after: int | None = None
    wants: int = 0
    unused: int = 0
    put_off: int = 0
    away: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a report.

    Parameters:
      mode(Mode): What to do with messages from now on.
      since(int): The period, to be named in the next report.
      tokens(int): How many messages may go, spread evenly over the time until the next report.
      look(int): Milliseconds until the next report.
      line(int): Milliseconds until the last place that all processes have given to messages put off.
      apart(float): Milliseconds between two messages that this process puts off behind that, so that those of all
        processes come back at the rate of the recovery; 0 if no rate is known.
      soonest(int): Milliseconds before which no message that is put off should come back.
      latest(int): Milliseconds after which none should.
    """

    mode: Mode
    since: int
    tokens: int = 0
    look: int = 0
    line: int = 0
    apart: float = 0.0
    soonest: int = 0
    latest: int = 0


#: Milliseconds between reports of a closed breaker, where nothing fails.
_CLOSED_LOOK = 5_000
#: Reports per second that all processes together make while it is not closed.
_REPORTS = 500
#: The longest wait between two reports while it is not closed.
_LONGEST_LOOK = 2_000
#: Growth of the rate per second: where nothing was learned; near what was learned; up to a limit; and around it.
_UNKNOWN, _AT_FIRST, _TOWARDS, _AROUND = 0.8, 0.4, 0.05, 0.005
#: Up to this multiple of the rate that was learned the growth is faster.
_NEAR = 1.2
#: Milliseconds after which growth around the limit has doubled.
_QUICKENING = 5_000.0
#: A cut leads to this share of the goodput.
_CUT = 0.97
#: Milliseconds before a new rate shows in the outcomes.
_SETTLE = 500
#: Milliseconds of outcomes that a rate is judged by.
_TRIAL = 2_000
#: So many outcomes are taken for good when the share of the failures is drawn from few.
_DOUBT = 5.0
#: Failures above the usual share that count as too much load.
_EXCESS = 0.02
#: Cuts to this share of the rate prove whether the failures come from it.
_PROOF = 0.75
#: The share of the failures that a cut must leave for them not to come from the load.
_FUTILE = 0.75
#: The probes are at most this share of the load before.
_PROBES = 0.05
#: The longest time for which a message is put off: half the age of the outage, between these.
_PUT_OFF, _LONGEST_PUT_OFF = 10_000, 900_000
#: Processes that have said nothing for so long were not there.
_ABSENT = 10_000
#: Servers that take over from each other may differ by so much.
_SKEW = 2_000


def step(limits: Limits, state: State, report: Report, now: int) -> tuple[State, Lease]:
    """Take in a report, and answer it.

    Parameters:
      limits(Limits): How to judge.
      state(State): What was known.
      report(Report): What a process says and wants.
      now(int): The time; one before the last report's counts as that.

    Returns:
      tuple[State, Lease]: What is known now, and what the process may do.
    """
    if not state.at:
        # The first report of all: what it tells of took as long as it says, and not since 1970.
        state = replace(state, at=now - report.span, opened_at=state.opened_at or now)
    if now < state.at - _SKEW:
        state = _set_back(state, state.at - now)
    now = max(now, state.at)
    state = _pass_time(limits, state, now)
    state = _count(limits, state, report)
    if state.mode is Mode.CLOSED:
        state = _closed(limits, state)
    elif state.mode is Mode.OPEN:
        state = _open(limits, state, report)
    elif state.mode is Mode.RECOVERING:
        state = _recovering(limits, state)
    return _lease(limits, state, report)


def _set_back(state: State, by: int) -> State:
    """The same state on a clock that was ahead, and has been put right: waiting for it might take years."""

    def back(moment: int) -> int:
        return max(0, moment - by)

    return replace(
        state,
        at=back(state.at),
        opened_at=back(state.opened_at),
        floor=back(state.floor),
        cut_at=back(state.cut_at),
        hungry_at=back(state.hungry_at),
        away_until=back(state.away_until),
        line_until=back(state.line_until),
        probe_at=back(state.probe_at),
        probe_until=back(state.probe_until),
        streak_at=back(state.streak_at),
    )


def force(state: State, mode: Mode, now: int) -> State:
    """An operator's word: `FORCED_OPEN`, `FORCED_CLOSED`, or one of the others to let it judge for itself again.

    Parameters:
      state(State): What was known.
      mode(Mode): The mode to be in.
      now(int): The time.

    Returns:
      State: What is known now.
    """
    now = max(now, state.at)
    if mode is state.mode:
        return state
    changed = replace(state, mode=mode, since=now, at=now, opened_at=now, recent=Tally(), trial=Tally(), streak=0)
    if mode is Mode.RECOVERING:
        return _recover(Limits(), replace(changed, restart=state.restart or _capacity(state)))
    if mode in (Mode.OPEN, Mode.FORCED_OPEN):
        restart = state.restart if state.mode is Mode.RECOVERING else _capacity(state) or state.restart
        return replace(changed, restart=restart, probe_at=now, probe_until=0, level=0.0)
    return replace(changed, floor=0)


def _pass_time(limits: Limits, state: State, now: int) -> State:
    elapsed = now - state.at
    recent = state.recent.after(elapsed, limits.alarm)
    if state.mode is Mode.CLOSED:
        return replace(state, at=now, recent=recent, learned=state.learned.after(elapsed, limits.memory))
    present = state.present.after(elapsed, _LONGEST_LOOK)
    if state.mode is not Mode.RECOVERING:
        return replace(state, at=now, recent=recent, present=present)
    paid = max(0, now - max(state.at, state.floor))
    rate = state.rate
    if now - state.hungry_at < _SETTLE:
        rate *= 1 + _growth(state, now) * min(paid, 1_000) / 1000
    full = max(1.0, 1.5 * rate * _look(limits, present) / 1000)
    return replace(
        state,
        at=now,
        recent=recent,
        present=present,
        rate=rate,
        # Where no process was there, there was nobody who could have waited: a recovery is not over for it.
        hungry_at=now if elapsed >= _ABSENT else state.hungry_at,
        level=min(full, state.level + rate * paid / 1000),
        trial=state.trial.plus(0, 0, elapsed),
    )


def _growth(state: State, now: int) -> float:
    """By which share the rate grows in a second."""
    if not state.ceiling:
        if not state.restart:
            return _UNKNOWN
        return _AT_FIRST if state.rate < _NEAR * state.restart else _TOWARDS
    if state.rate < _CUT * state.ceiling:
        return _TOWARDS
    return min(_TOWARDS, _AROUND * (1 + ((now - state.cut_at) / _QUICKENING) ** 2))


def _count(limits: Limits, state: State, report: Report) -> State:
    """Count the outcomes where they belong; those of another period say nothing about this one."""
    if report.retry_after is not None:
        floor = state.at + min(max(0, report.retry_after), limits.longest_floor)
        state = replace(state, floor=max(state.floor, floor))
    free = report.mode is Mode.CLOSED
    if not state.mode.admits_freely:
        longest = 2 * _look(limits, state.present)
        away = max(state.away_until, state.at + report.away if report.away else 0)
        state = replace(state, present=state.present.plus(min(report.span, longest), 0), away_until=away)
    if report.mode is not state.mode or report.since != state.since:
        # What was done just before the outage, but is told only now, belongs to what was learned.
        if free and not state.mode.admits_freely:
            state = replace(state, learned=state.learned.plus(report.ok, 0))
            if report.since < state.since and not state.ceiling and state.mode is Mode.OPEN:
                state = replace(state, restart=max(state.restart, _capacity(state)))
        return state
    state = replace(state, recent=state.recent.plus(report.ok * _weight(report.span, limits.alarm), report.bad))
    if report.bad and not report.ok:
        began = state.streak_at if state.streak else state.at
        state = replace(state, streak=state.streak + report.bad, streak_at=began)
    elif report.ok:
        state = replace(state, streak=0)
    if free:
        return replace(state, learned=state.learned.plus(report.ok, report.bad))
    full = max(1.0, 1.5 * state.rate * _look(limits, state.present) / 1000)
    level = min(full, state.level + report.unused) if state.mode is Mode.RECOVERING else state.level
    line = state.line_until
    if report.put_off and state.rate:
        line = min(max(line, state.at) + round(report.put_off * 1000 / state.rate), state.at + _latest(state))
    return replace(state, trial=state.trial.plus(report.ok, report.bad), level=level, line_until=line)


def _weight(span: int, half_life: int) -> float:
    """What outcomes count that came about over a time, of which the earlier moments have faded."""
    return half_life / math.log(2) * (1 - 0.5 ** (span / half_life)) / span if span else 1.0


def _closed(limits: Limits, state: State) -> State:
    recent = state.recent
    failing = recent.ratio >= limits.failure_ratio and (
        recent.bad >= limits.min_failures
        or (state.streak >= limits.min_failures and state.at - state.streak_at >= limits.alarm)
    )
    if not failing and state.floor <= state.at:
        return state
    learned = _capacity(state)
    # Next to nothing learned says nothing about what can be borne.
    restart = learned if learned >= limits.first_rate else 0.0
    return _opened(limits, replace(state, restart=restart, opened_at=state.at, ceiling=0.0))


def _capacity(state: State) -> float:
    """What the downstream is known to have done per second, and the usual share of failures on top."""
    return state.learned.goodput


def _opened(limits: Limits, state: State) -> State:
    return replace(
        state,
        mode=Mode.OPEN,
        since=state.at,
        probe_at=max(state.floor, state.at + _probe_after(limits, state)),
        probe_until=0,
        recent=Tally(),
        trial=Tally(),
        streak=0,
        level=0.0,
    )


def _probe_after(limits: Limits, state: State) -> int:
    """Milliseconds between probes: few against the load, and fewer the longer the outage lasts."""
    by_load = min(1_000.0, 1000 / (_PROBES * state.restart)) if state.restart else 1_000.0
    by_age = min(10_000.0, 0.015 * (state.at - state.opened_at))
    return round(max(limits.probe_after, by_load, by_age))


def _open(limits: Limits, state: State, report: Report) -> State:
    mine = report.mode is Mode.OPEN and report.since == state.since
    if mine and report.ok:
        return _recover(limits, state)
    if mine and report.bad:
        return replace(
            state,
            probe_at=max(state.floor, state.at + _probe_after(limits, state)),
            probe_until=0,
            recent=Tally(),
        )
    if mine and report.unused:
        return replace(state, probe_until=0)
    return state


def _recover(limits: Limits, state: State) -> State:
    rate = max(limits.slowest, state.restart or limits.first_rate)
    return replace(
        state,
        mode=Mode.RECOVERING,
        since=state.at,
        rate=rate,
        level=1.0,
        recent=Tally(),
        trial=Tally(),
        hungry_at=state.at,
        line_until=state.at,
        cut_at=state.at,
        cut_from=0.0,
        cut_ratio=0.0,
        streak=0,
        best=0.0,
    )


def _recovering(limits: Limits, state: State) -> State:
    recent, trial, now = state.recent, state.trial, state.at
    if recent.bad >= limits.min_failures and recent.ratio >= max(limits.failure_ratio, (1 + state.usual) / 2):
        # What was proved is where to begin next time, but nothing is cut by more than half at once.
        start = max(limits.slowest, min(max(state.best, state.rate / 2), state.rate))
        return _opened(limits, replace(state, restart=start, ceiling=0.0))
    if now - state.cut_at < _SETTLE:
        # What fails meanwhile was let through before the cut, and says how much too high the rate was.
        return replace(state, trial=Tally(), cut_ratio=max(state.cut_ratio, recent.ratio))
    state = replace(state, best=max(state.best, _borne(state)))
    if trial.bad >= 3 and recent.ratio > state.usual + _EXCESS:
        return _too_much(limits, state)
    if trial.ms >= _TRIAL:
        usual = state.usual + 0.3 * (trial.ratio - state.usual)
        state = replace(state, usual=usual, trial=Tally(), cut_from=0.0)
    if now - max(state.hungry_at, state.away_until, state.floor) >= limits.patience:
        return replace(state, mode=Mode.CLOSED, since=now, recent=Tally(), trial=Tally(), streak=0)
    return state


def _too_much(limits: Limits, state: State) -> State:
    """More fails than usual: it is the rate, unless cutting it has not helped."""
    trial, first = state.trial, state.cut_from or state.rate
    if state.rate <= _PROOF * first:
        if trial.ms < _TRIAL / 2:
            return state
        if trial.ratio >= _FUTILE * state.cut_ratio:
            return replace(state, usual=trial.ratio, rate=first, cut_from=0.0, trial=Tally(), cut_at=state.at)
    # What fails now was let through a moment ago, at a lower rate than the present one.
    grown = 1 + _growth(state, state.at) * _SETTLE / 1000
    ceiling = _borne(state) / (1.0 if state.restart else grown)
    if state.cut_from:
        # What is turned away while a full queue drains says nothing new about the limit.
        ceiling = max(ceiling, state.ceiling)
    rate = max(limits.slowest, state.rate / 2, _CUT * _borne(state) / grown if state.ceiling or state.restart else 0.0)
    return replace(
        state,
        rate=rate,
        ceiling=ceiling,
        cut_at=state.at,
        cut_from=first,
        cut_ratio=max(state.recent.ratio, state.cut_ratio if state.cut_from else 0.0),
        trial=Tally(),
    )


def _borne(state: State) -> float:
    """What the downstream bears of the rate, its usual failures included.

    The share of the outcomes says it sooner than their number, since reports come late.
    """
    # Of few outcomes one failure more or less says little.
    ratio = state.recent.bad / (state.recent.ok + state.recent.bad + _DOUBT)
    return state.rate * (1 - max(0.0, ratio - state.usual))


def _look(limits: Limits, present: Tally) -> int:
    """Milliseconds between the reports of one process."""
    return round(min(_LONGEST_LOOK, max(limits.look, _processes(present) * 1000 / _REPORTS)))


def _processes(present: Tally) -> float:
    """How many processes there are: the time that they report for, by the time that has passed."""
    return max(1.0, present.ok / present.ms) if present.ms else 1.0


def _lease(limits: Limits, state: State, report: Report) -> tuple[State, Lease]:
    if state.mode.admits_freely:
        return state, Lease(state.mode, state.since, look=_CLOSED_LOOK)
    look = _look(limits, state.present)
    now, tokens, apart = state.at, 0, 0.0
    soonest = max(look, state.floor - now)
    if state.mode is Mode.OPEN:
        if report.wants and now >= max(state.probe_at, state.floor) and state.probe_until <= now:
            tokens = 1
            state = replace(state, probe_until=now + limits.probe_timeout)
        soonest = max(soonest, state.probe_at - now)
    elif state.mode is Mode.RECOVERING:
        if now >= state.floor:
            tokens = min(report.wants, int(state.level))
            short = report.wants > tokens or (report.put_off and state.level < tokens + 1)
            hungry = now if short else state.hungry_at
            state = replace(state, level=state.level - tokens, hungry_at=hungry)
        apart = _processes(state.present) * 1000 / state.rate
    line = max(0, state.line_until - now)
    return state, Lease(state.mode, state.since, tokens, look, line, apart, soonest, soonest + _latest(state))


def _latest(state: State) -> int:
    """How far a message is put off at most: where an outage has been long, nobody needs to look soon."""
    return min(max(_PUT_OFF, (state.at - state.opened_at) // 2), _LONGEST_PUT_OFF)

"""From an exception to its `Verdict`: the user's rules, then the library's table, then what lies beneath the error.

For one error the first answer of these counts:

1. the actor's rules: its predicates in their order, then the class nearest in the error's MRO;
2. the middleware's, likewise;
3. the built-in table, nearest class first.

What the actor says outright (`Retryable`, `Permanent`, `Fatal`, `Defer`, `dramatiq.Retry`) and a shutdown come before
all predicates; they and the other control errors (MemoryError, …) come before classes that are farther away, since
``permanent=[Exception]`` is about errors, not about these.  A rule that names such a class itself, or one nearer, has
its way.

This module must not know messages, attempts or the time.  It never raises, whatever the exceptions do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import retry_after
from .builtin import CALL_DOES_NOT_FIT, CONTROL, TABLE, WORDS
from .codes import By, Outcome
from .lookthrough import is_alone, look_through
from .names import Name, lineage
from .rule import Matcher, Rule, compile_rules
from .verdict import Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFAULT", "Matcher", "Plan", "Reading", "Rule", "Rules", "compile_rules"]

#: The verdict where no rule names anything.
DEFAULT = Verdict(Kind.RETRYABLE, "default", "no rule names it, and trying again costs less than losing the work")

#: Classes remembered per `Rules`; a program that makes exception classes as it runs must not fill the memory.
_MAX_PLANS = 1_024


@dataclass(frozen=True, slots=True)
class Reading:
    """A row of the table that decides by a code of the exception."""

    name: Name
    by: By

    def read(self, exc: BaseException) -> Verdict | None:
        try:
            return self.verdict(self.by.read(exc))
        except BaseException:  # noqa: BLE001 - any attribute of a stranger's exception may raise
            return None

    def verdict(self, code: object) -> Verdict | None:
        outcome = self.by.outcome(code)
        if outcome is None:
            return None
        label = f"{self.by.code}={code}"
        return Verdict(
            outcome.kind, f"builtin:{self.name}[{label}]", f"{label}: {outcome.why}", max_retries=outcome.max_retries
        )


Step = Verdict | Rule | Reading


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done about the exceptions of one class.

    Parameters:
      cls(type | None): The class, kept alive because its id is what it is found by.
      steps(tuple[Step, ...]): The first that gives a verdict decides.
      final(bool): It is a word of the actor's, or a shutdown.
      waits(bool): The exception says how long to wait, in its `delay`.
      headers: Finds the headers that may say how long.
      fixed(Verdict | None): The verdict, where it depends on the class alone.
    """

    cls: type | None
    steps: tuple[Step, ...]
    final: bool
    waits: bool
    headers: Callable[[Any], Any] | None
    fixed: Verdict | None

    def hinted(self, verdict: Verdict, exc: BaseException, now_ms: int) -> Verdict:
        """The verdict with what the exception says about waiting."""
        if verdict.kind is Kind.PERMANENT or verdict.kind is Kind.INTERRUPTED:
            return verdict
        delay = _delay(exc) if self.waits else None
        floor = self.floor(exc, now_ms)
        return verdict if delay is None and floor is None else replace(verdict, delay=delay, retry_after=floor)

    def floor(self, exc: BaseException, now_ms: int) -> int | None:
        if self.headers is None:
            return None
        try:
            return retry_after.parse(self.headers(exc), now_ms=now_ms)
        except BaseException:  # noqa: BLE001 - as in Reading.read
            return None


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that decides what an exception means.

    Parameters:
      sets(tuple[tuple[Rule, ...], ...]): The users' rules, the most particular set (the actor's) first.
      builtin(bool): False turns the table off; the control errors stay in force.
    """

    sets: tuple[tuple[Rule, ...], ...] = ()
    builtin: bool = True
    _plans: dict[int, Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def classify(self, exc: BaseException, *, call_does_not_fit: bool = False, now_ms: int = 0) -> Verdict:
        """What an exception means.  Never raises.

        Parameters:
          exc(BaseException): The exception.
          call_does_not_fit(bool): It is a TypeError of the call itself, raised before the actor's code ran.
          now_ms(int): The present time in milliseconds since 1970, for a Retry-After that is a date.

        Returns:
          Verdict: `DEFAULT`, which is RETRYABLE, if no rule names it or anything beneath it.
        """
        plan = self._plan_of(exc)
        if plan.fixed is not None and (plan.final or (is_alone(exc) and not call_does_not_fit)):
            return plan.fixed
        return self.trace(exc, call_does_not_fit=call_does_not_fit, now_ms=now_ms)

    def trace(
        self,
        exc: BaseException,
        *,
        call_does_not_fit: bool = False,
        now_ms: int = 0,
        trail: list[str] | None = None,
    ) -> Verdict:
        """`classify`, the long way; *trail* takes the names of the errors that were asked."""

        def own(one: BaseException) -> tuple[Verdict | None, bool]:
            plan = self._plan_of(one)
            verdict = _decided(plan, one)
            if verdict is None and call_does_not_fit and self.builtin:
                verdict = Verdict(CALL_DOES_NOT_FIT.kind, "builtin:call-does-not-fit", CALL_DOES_NOT_FIT.why)
            return (None if verdict is None else plan.hinted(verdict, one, now_ms)), plan.final

        verdict = look_through(exc, own, self._interrupts, trail)
        return self._plan_of(exc).hinted(DEFAULT, exc, now_ms) if verdict is None else verdict

    def plan(self, names: tuple[Name, ...]) -> Plan:
        """What is to be done about a class, given its name and those of its bases, nearest first."""
        table = TABLE if self.builtin else {name: TABLE[name] for name in CONTROL}
        words = [str(name) for name in names]
        control = next((place for place, word in enumerate(words) if word in CONTROL), len(words))
        final = any(word in WORDS for word in words)
        steps: list[Step] = []
        for rules in self.sets:
            if not final:
                steps += [rule for rule in rules if rule.is_predicate]
            found = _nearest(rules, names[: control + 1])
            if found is not None:
                steps.append(found)
                break
        else:
            for name, word in zip(names, words, strict=True):
                for step in table.get(word, ()):
                    steps.append(_verdict(word, step) if isinstance(step, Outcome) else Reading(name, step))
        steps = steps[: 1 + next((place for place, step in enumerate(steps) if isinstance(step, Verdict)), len(steps))]
        waits = any(word in WORDS and WORDS[word].kind in (Kind.RETRYABLE, Kind.DEFERRED) for word in words)
        # The headers are facts about the server, not opinions about the error: users' rules leave them in force.
        readers = (step.headers for word in words for step in TABLE.get(word, ()) if isinstance(step, By))
        headers = next((reader for reader in readers if reader is not None), None)
        first = steps[0] if steps else DEFAULT
        fixed = first if isinstance(first, Verdict) and not (waits or headers) else None
        if not steps and "builtins.BaseExceptionGroup" in words:
            fixed = None
        return Plan(names[0].cls, tuple(steps), final, waits, headers, fixed)

    def _plan_of(self, exc: BaseException) -> Plan:
        # By id, since a metaclass may define __hash__ and __eq__ that raise.
        cls = type(exc)
        plan = self._plans.get(id(cls))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[id(cls)] = self.plan(lineage(cls))
        return plan

    def _interrupts(self, exc: BaseException) -> bool:
        steps = self._plan_of(exc).steps
        return bool(steps) and isinstance(steps[0], Verdict) and steps[0].kind is Kind.INTERRUPTED


def _decided(plan: Plan, exc: BaseException) -> Verdict | None:
    for step in plan.steps:
        verdict = step if isinstance(step, Verdict) else step.ask(exc) if isinstance(step, Rule) else step.read(exc)
        if verdict is not None:
            return verdict
    return None


def _nearest(rules: tuple[Rule, ...], names: tuple[Name, ...]) -> Verdict | None:
    for name in names:
        for rule in rules:
            if not rule.is_predicate and rule.names(name):
                return rule.verdict(f"the rule names {name}")
    return None


def _verdict(word: str, outcome: Outcome) -> Verdict:
    return Verdict(
        outcome.kind,
        f"builtin:{word}",
        outcome.why,
        max_retries=outcome.max_retries,
        reason=outcome.reason,
        exact=outcome.exact,
    )


def _delay(exc: BaseException) -> int | None:
    try:
        delay: Any = exc.delay  # type: ignore[attr-defined]
        if isinstance(delay, timedelta):
            delay = delay / timedelta(milliseconds=1)
        return None if delay is None or math.isnan(delay) or delay < 0 else int(delay)
    except BaseException:  # noqa: BLE001 - as in Reading.read
        return None

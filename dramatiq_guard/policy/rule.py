"""The rules as users write them, and how they are read: each mistake is named when the stack is set up, not at 3 a.m.

It must not know the built-in table, nor in which order rules are asked.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .backoff import Backoff
from .names import Name, canonical, name_of
from .verdict import Kind, Verdict

__all__ = ["Matcher", "Rule", "compile_rules"]

Matcher = type[BaseException] | str | Callable[[BaseException], bool]

_BACKOFF_OPTIONS = {
    "min_backoff": "min_backoff",
    "max_backoff": "max_backoff",
    "jitter": "jitter",
    "backoff": "schedule",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a user's.

    Parameters:
      kind(Kind): What the matching errors mean.
      matcher(Matcher): A class, a qualified class name, or a predicate.
      name(str): Where it was written, e.g. ``actor:permanent[0]``.
      max_retries(int | None): A limit of its own.
      backoff(Backoff | None): A backoff of its own.
    """

    kind: Kind
    matcher: Matcher
    name: str
    max_retries: int | None = None
    backoff: Backoff | None = None

    @property
    def is_predicate(self) -> bool:
        return not isinstance(self.matcher, str | type)

    def names(self, name: Name) -> bool:
        """Whether the rule names this very class."""
        return self.matcher is name.cls if isinstance(self.matcher, type) else name.answers_to(str(self.matcher))

    def verdict(self, why: str) -> Verdict:
        return Verdict(self.kind, self.name, why, max_retries=self.max_retries, backoff=self.backoff)

    def ask(self, exc: BaseException) -> Verdict | None:
        """The verdict of a predicate on *exc*; one that raises makes the error RETRYABLE."""
        try:
            answer = bool(self.matcher(exc))  # type: ignore[operator]
        except BaseException as raised:  # noqa: BLE001 - a predicate that raises must not cost the message its retry
            why = f"the predicate {_called(self.matcher)} raised {name_of(type(raised))}: {_text(raised)}"
            return Verdict(Kind.RETRYABLE, f"{self.name}:predicate-raised", why)
        return self.verdict(f"the predicate {_called(self.matcher)} says so") if answer else None


def compile_rules(
    *,
    origin: str,
    permanent: object = (),
    retryable: object = (),
    fatal: object = (),
    defer: object = (),
) -> tuple[Rule, ...]:
    """Read the rules a user wrote.

    Each element is a class, a qualified class name in a string (the library need not be installed), a predicate
    ``exception -> bool``, or a pair of one of these and its own ``max_retries``, ``min_backoff``, ``max_backoff``,
    ``backoff`` and ``jitter``.  Where predicates of several kinds say yes, the order is fatal, permanent, defer_on,
    retryable.

    Example:
      >>> compile_rules(origin="actor", retryable=[("httpx.HTTPStatusError", {"max_retries": 5})])[0].name
      'actor:retryable[0]'

    Parameters:
      origin(str): Where they were written: ``actor`` or ``middleware``.
      permanent, retryable, fatal, defer: A list or tuple of elements, or one element.

    Returns:
      tuple[Rule, ...]: The rules.

    Raises:
      TypeError: An element is of the wrong type.
      ValueError: A name is not a class name, an option has a wrong value, or two rules name the same class.
    """
    written = (
        (Kind.FATAL, "fatal", fatal),
        (Kind.PERMANENT, "permanent", permanent),
        (Kind.DEFERRED, "defer_on", defer),
        (Kind.RETRYABLE, "retryable", retryable),
    )
    rules = [
        _rule(kind, f"{origin}:{option}[{place}]", element)
        for kind, option, given in written
        for place, element in enumerate(_elements(f"{origin}:{option}", given))
    ]
    _refuse_twice(rules)
    return tuple(rules)


def _elements(name: str, given: object) -> list[object]:
    if isinstance(given, str) or callable(given):
        return [given]
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be a list of rules such as [KeyError], not {reprlib.repr(given)}")
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        raise TypeError(f"{name} is one rule with its options: put it in a list, [({reprlib.repr(given[0])}, {{…}})]")
    return list(given)


def _rule(kind: Kind, name: str, element: object) -> Rule:
    options: object = {}
    if isinstance(element, tuple):
        if len(element) != 2 or not isinstance(element[1], Mapping):
            raise TypeError(f"{name} must be a pair (matcher, {{'max_retries': 3}}), not {reprlib.repr(element)}")
        element, options = element
    return Rule(kind, _matcher(name, element), name, **_options(kind, name, dict(options)))  # type: ignore[call-overload]


def _matcher(name: str, element: object) -> Matcher:
    if isinstance(element, str):
        try:
            return canonical(element)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(element, type):
        if not issubclass(element, BaseException):
            raise TypeError(f"{name} is the class {element.__qualname__}, which is not an exception")
        return element
    if isinstance(element, BaseException):
        raise TypeError(f"{name} is an exception: write its class, {type(element).__qualname__}")
    if not callable(element):
        raise TypeError(
            f"{name} must be an exception class, a class name such as 'httpx.HTTPStatusError' or a predicate, "
            f"not {reprlib.repr(element)}"
        )
    if inspect.iscoroutinefunction(element) or inspect.iscoroutinefunction(getattr(element, "__call__", None)):  # noqa: B004
        raise TypeError(f"{name} is an async function: a predicate must answer at once, write it with def")
    try:
        inspect.signature(element).bind(Exception())
    except TypeError:
        raise TypeError(f"{name}: the predicate {_called(element)} must take one argument, the exception") from None
    except ValueError:
        pass  # some built-in functions do not tell
    return element


def _options(kind: Kind, name: str, options: dict[str, Any]) -> dict[str, Any]:
    unknown = options.keys() - _BACKOFF_OPTIONS.keys() - {"max_retries"}
    if unknown:
        raise ValueError(
            f"{name} has the unknown option {min(map(str, unknown))!r}: "
            f"known are max_retries, {', '.join(_BACKOFF_OPTIONS)}"
        )
    if options and kind is Kind.PERMANENT:
        raise ValueError(f"{name} has options about retries, but a permanent error is never retried: drop them")
    limit = options.get("max_retries")
    if limit is not None and kind is Kind.DEFERRED:
        raise ValueError(f"{name}: a deferral is no attempt and has a cap of its own: drop max_retries")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise TypeError(f"{name}: max_retries must be an int, not {reprlib.repr(limit)}")
    if limit is not None and limit < 0:
        raise ValueError(f"{name}: max_retries must not be negative, got {limit}")
    waits = {_BACKOFF_OPTIONS[key]: value for key, value in options.items() if key in _BACKOFF_OPTIONS}
    try:
        backoff = Backoff().replacing(**waits) if waits else None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return {"max_retries": limit, "backoff": backoff}


def _refuse_twice(rules: list[Rule]) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        if rule.is_predicate:
            continue
        named = str(name_of(rule.matcher)) if isinstance(rule.matcher, type) else str(rule.matcher)
        first = seen.setdefault(named, rule)
        # Two classes may share a name, such as those that a function defines anew at each call.
        if first is not rule and (first.matcher is rule.matcher or str in (type(first.matcher), type(rule.matcher))):
            raise ValueError(f"{first.name} and {rule.name} both name {named}: keep one of them")


def _called(predicate: object) -> str:
    try:
        return str(predicate.__qualname__)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a partial has none, a stranger's object may do anything
        return type(predicate).__qualname__


def _text(raised: BaseException) -> str:
    try:
        return str(raised)[:200]
    except Exception:  # noqa: BLE001 - as in _called
        return "its text cannot be had"

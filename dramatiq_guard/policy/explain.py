"""What would become of an error, and why: the classification as an answer for people.

An exception is classified as a worker would.  A name is looked up, without importing anything: in the modules that
are loaded already, else in the built-in table.
"""

from __future__ import annotations

import errno as errnos
import sys
from dataclasses import dataclass, replace

from .builtin import TABLE
from .names import Name, canonical, lineage
from .rule import Rule
from .rules import DEFAULT, Plan, Rules
from .verdict import Verdict

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict, and the way to it.

    Parameters:
      verdict(Verdict): The verdict.
      path(tuple[str, ...]): The errors that were asked, or the class and its bases if only a name was given.
      unasked(tuple[str, ...]): The predicates that come first but need an exception to be asked.
    """

    verdict: Verdict
    path: tuple[str, ...]
    unasked: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule that decided."""
        return self.verdict.rule

    @property
    def why(self) -> str:
        """The reason, for people."""
        return self.verdict.why


def explain(
    exc_or_name: BaseException | type[BaseException] | str,
    *,
    status: int | str | None = None,
    errno: int | str | None = None,
    sqlstate: str | None = None,
    rules: Rules | None = None,
    now_ms: int = 0,
) -> Explanation:
    """Say what an error means and which rule says so.

    Example:
      >>> explain("httpx.HTTPStatusError", status=503).rule
      'builtin:httpx.HTTPStatusError[status=503]'

    Parameters:
      exc_or_name: An exception, its class, or the qualified name of its class.
      status(int | str): The HTTP, gRPC, SMTP or AMQP status, or the error code, that the error would carry.
      errno(int | str): The errno, as a number or as ``"ECONNRESET"``.
      sqlstate(str): The SQLSTATE.
      rules(Rules): The rules to ask; the built-in table by default.
      now_ms(int): The present time in milliseconds since 1970, for a Retry-After that is a date.

    Returns:
      Explanation: The verdict and the way to it.

    Raises:
      TypeError: It is neither an exception, nor an exception class, nor a string.
      ValueError: The string is not a class name, the errno is unknown, or an exception and a code were given: an
        exception carries its own.
    """
    rules = Rules() if rules is None else rules
    codes = {"status": _number(status), "errno": _errno(errno), "sqlstate": sqlstate}
    if isinstance(exc_or_name, BaseException):
        if any(code is not None for code in codes.values()):
            raise ValueError("an exception carries its own codes: leave out status, errno and sqlstate, or give a name")
        trail: list[str] = []
        verdict = rules.trace(exc_or_name, now_ms=now_ms, trail=trail)
        return Explanation(verdict, tuple(trail))
    if isinstance(exc_or_name, str):
        names = _look_up(canonical(exc_or_name))
    elif isinstance(exc_or_name, type) and issubclass(exc_or_name, BaseException):
        names = lineage(exc_or_name)
    else:
        raise TypeError(f"explain() takes an exception, its class or its qualified name, not {exc_or_name!r}")
    plan = rules.plan(names)
    return Explanation(
        _verdict(plan, codes),
        tuple(str(name) for name in names if name.cls is not object),
        tuple(step.name for step in plan.steps if isinstance(step, Rule)),
    )


def _verdict(plan: Plan, codes: dict[str, int | str | None]) -> Verdict:
    missing: list[str] = []
    for step in plan.steps:
        if isinstance(step, Verdict):
            return step
        if isinstance(step, Rule):
            continue
        code = codes[step.by.code]
        if code is None:
            missing.append(f"{step.name} is decided by its {step.by.code}, which was not given")
        elif (found := step.verdict(code)) is not None:
            return found
    if missing:
        return replace(DEFAULT, why=missing[0])
    if plan.cls is None and not plan.steps:
        why = "the table does not list this name, and what it derives from is not known until its module is imported"
        return replace(DEFAULT, why=why)
    return DEFAULT


def _look_up(given: str) -> tuple[Name, ...]:
    module, _, qualname = given.rpartition(".")
    loaded = getattr(sys.modules.get(module), "__dict__", {}).get(qualname)
    if isinstance(loaded, type) and issubclass(loaded, BaseException):
        return lineage(loaded)
    listed = (Name(*row.rpartition(".")[::2]) for row in TABLE)
    return (next((name for name in listed if name.answers_to(given)), Name(module, qualname)),)


def _number(status: int | str | None) -> int | str | None:
    return int(status) if isinstance(status, str) and status.isdecimal() else status


def _errno(errno: int | str | None) -> int | None:
    if errno is None or isinstance(errno, int):
        return errno
    found: int | None = int(errno) if errno.isdecimal() else getattr(errnos, errno.upper(), None)
    if found is None:
        raise ValueError(f"{errno!r} is no errno of this platform: write it like 'ECONNRESET' or 104")
    return found

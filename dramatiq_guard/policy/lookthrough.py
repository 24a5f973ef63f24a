"""What an error means that says nothing itself: ask what caused it, or what it consists of.

1. An error that a rule names is not looked through, unless a shutdown lies beneath it: an async clean-up that takes
   too long turns `Shutdown` into a RuntimeError, and a message must not be given up because of a deploy.
2. A group means what its parts mean together (`combine`).
3. ``raise … from cause``: the verdict of the cause is taken over.
4. An error raised while another was being handled (`__context__`): that other one may add patience, never take it
   away.  `except KeyError: fetch()` says that the KeyError was expected; if fetch() fails it is to be tried again,
   whatever the KeyError meant.  So PERMANENT is not taken over, nor is a limit of retries.

It must not know how one error by itself is judged.  It is total: cycles, shared parts and graphs of any size end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .names import name_of
from .verdict import Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["combine", "is_alone", "look_through"]

#: Links followed from the error itself, and errors visited in all.  What lies beyond counts as unknown: RETRYABLE.
MAX_DEPTH = 50
MAX_VISITED = 1_000

# The interpreter's own slots: a class that overrides them with a property that raises cannot get in between.
_cause: Any = vars(BaseException)["__cause__"].__get__
_context: Any = vars(BaseException)["__context__"].__get__
_suppressed: Any = vars(BaseException)["__suppress_context__"].__get__
_parts: Any = vars(BaseExceptionGroup)["exceptions"].__get__


def is_alone(exc: BaseException) -> bool:
    """Whether nothing lies beneath the error."""
    return _cause(exc) is None and _context(exc) is None


def look_through(
    exc: BaseException,
    own: Callable[[BaseException], tuple[Verdict | None, bool]],
    interrupts: Callable[[BaseException], bool],
    trail: list[str] | None = None,
) -> Verdict | None:
    """The verdict on an error, from whatever lies beneath it if need be.

    Parameters:
      exc(BaseException): The error.
      own: The verdict on one error by itself, None if no rule names it; and whether it is a word of the actor's that
        ends the matter.
      interrupts: Whether an error by its class alone means INTERRUPTED.
      trail(list[str]): Takes the names of the errors that were asked, for people.

    Returns:
      Verdict | None: None if no rule names anything in sight.
    """
    return _Look(own, interrupts, trail).at(exc, "", 0)


class _Look:
    """One walk through the graph of an error."""

    __slots__ = ("interrupts", "own", "seen", "trail")

    def __init__(self, own: Any, interrupts: Any, trail: list[str] | None) -> None:
        self.own: Callable[[BaseException], tuple[Verdict | None, bool]] = own
        self.interrupts: Callable[[BaseException], bool] = interrupts
        self.trail = trail
        #: By identity; the error is kept with its verdict so that no other can take its place in memory.
        self.seen: dict[int, tuple[BaseException, Verdict | None]] = {}

    def at(self, exc: BaseException, relation: str, depth: int) -> Verdict | None:
        known = self.seen.get(id(exc))
        if known is not None:
            return known[1]
        if depth > MAX_DEPTH or len(self.seen) >= MAX_VISITED:
            return None
        # A cycle finds this entry and learns nothing from it.
        self.seen[id(exc)] = exc, None
        if self.trail is not None:
            self.trail.append(relation + str(name_of(type(exc))))
        verdict = self.decide(exc, depth)
        self.seen[id(exc)] = exc, verdict
        return verdict

    def decide(self, exc: BaseException, depth: int) -> Verdict | None:
        verdict, final = self.own(exc)
        if final:
            return verdict
        if verdict is None and issubclass(type(exc), BaseExceptionGroup):
            verdicts = [self.at(part, "part: ", depth + 1) for part in _parts(exc)[:MAX_VISITED]]
            verdict = combine(verdicts if len(_parts(exc)) <= MAX_VISITED else [*verdicts, None])
        if verdict is not None:
            return self.interruption(exc) or verdict
        cause, context = _beneath(exc)
        if cause is not None:
            return self.at(cause, "cause: ", depth + 1)
        if context is None:
            return None
        verdict = self.at(context, "context: ", depth + 1)
        if verdict is None or verdict.kind is Kind.PERMANENT:
            return None
        return verdict if verdict.max_retries is None else replace(verdict, max_retries=None)

    def interruption(self, exc: BaseException) -> Verdict | None:
        below: BaseException | None = exc
        for _ in range(MAX_DEPTH):
            cause, context = _beneath(below)
            below = context if cause is None else cause
            if below is None:
                return None
            if self.interrupts(below):
                if self.trail is not None:
                    self.trail.append(f"beneath: {name_of(type(below))}")
                return self.own(below)[0]
        return None


def _beneath(exc: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
    cause = _cause(exc)
    return cause, None if cause is not None or _suppressed(exc) else _context(exc)


def combine(verdicts: Sequence[Verdict | None]) -> Verdict | None:
    """The verdict on a group of errors, in whatever order they stand.

    FATAL if any part is: the process is unfit whatever else happened.  Otherwise RETRYABLE if any part is (or is
    unknown, or the parts disagree): giving up would lose the work that may still succeed, trying again costs an
    attempt.  So PERMANENT only if every part is.  DEFERRED and INTERRUPTED, which are not counted, only if no part
    failed for a reason of its own; both together are DEFERRED, for the next attempt has to wait anyway.

    Parameters:
      verdicts(Sequence[Verdict | None]): Those of the parts; None is a part that no rule names.

    Returns:
      Verdict | None: With the longest wait and the smallest limit of the parts that decided; None if all are.
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return None
    kinds = {verdict.kind for verdict in known}
    uncounted = kinds <= {Kind.DEFERRED, Kind.INTERRUPTED}
    unknown = len(known) < len(verdicts)
    if Kind.FATAL in kinds:
        kind = Kind.FATAL
    elif unknown or not (uncounted or kinds == {Kind.PERMANENT}):
        kind = Kind.RETRYABLE
    else:
        kind = Kind.DEFERRED if Kind.DEFERRED in kinds else known[0].kind
    deciding = [verdict for verdict in known if verdict.kind is kind]
    if not deciding:
        return Verdict(kind, "group", f"the {len(verdicts)} errors of the group do not agree")
    delays = [verdict.delay for verdict in deciding if verdict.delay is not None]
    floors = [verdict.retry_after for verdict in deciding if verdict.retry_after is not None]
    limits = [verdict.max_retries for verdict in deciding if verdict.max_retries is not None]
    exact = not unknown and len(delays) == len(deciding)
    return Verdict(
        kind,
        deciding[0].rule,
        f"{len(deciding)} of {len(verdicts)} errors of the group: {deciding[0].why}",
        delay=max(delays) if exact else None,
        # A wait that only some parts asked for is a floor: the others have their backoff.
        retry_after=max(floors if exact else floors + delays, default=None),
        max_retries=min(limits, default=None),
        backoff=next((verdict.backoff for verdict in deciding if verdict.backoff is not None), None),
    )

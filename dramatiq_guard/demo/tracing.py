"""One trace as a tree, for reading.  Pure: spans in, lines out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Span", "tree"]


@dataclass(frozen=True, slots=True)
class Span:
    """What is shown of a span.

    Parameters:
      name(str): Its name.
      trace_id(str): The trace that it belongs to.
      span_id(str): Its id.
      parent_id(str): Its parent's id; empty for a root.
      start(int): When it began, in microseconds.
      end(int): When it ended.
      attributes(Mapping[str, str]): What it says.
      error(bool): Whether its status is Error.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    start: int = 0
    end: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    error: bool = False


#: The attributes that are worth a place in a line, in this order, and how they are introduced there.
_SHOWN: Final = {
    "dramatiq.actor.name": "",
    "dramatiq.message.attempt": "attempt ",
    "error.type": "",
    "dramatiq_guard.verdict": "",
    "dramatiq_guard.rule": "by ",
    "dramatiq_guard.strategy": "",
    "dramatiq_guard.delay": "delay ",
    "dramatiq_guard.retry_after": "Retry-After ",
    "dramatiq_guard.reason": "reason ",
    "dramatiq_guard.outcome": "→ ",
    "dramatiq_guard.settle.sent": "sent ",
}
_SECONDS: Final = frozenset({"dramatiq_guard.delay", "dramatiq_guard.retry_after"})


def tree(spans: Sequence[Span]) -> list[str]:
    """Draw the spans of one trace as a tree, in the order in which they began.

    A span whose parent is not there is drawn as a root: its parent may have been sampled out, or belongs to the
    caller.

    Parameters:
      spans(Sequence[Span]): The spans.

    Returns:
      list[str]: One line each.
    """
    ordered = sorted(spans, key=lambda span: (span.start, span.span_id))
    known = {span.span_id for span in ordered}
    children: dict[str, list[Span]] = {}
    for span in ordered:
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    began = ordered[0].start if ordered else 0
    return [line for root in children.get("", []) for line in _draw(root, children, began, "", "")]


def _draw(span: Span, children: Mapping[str, list[Span]], began: int, first: str, rest: str) -> Iterator[str]:
    yield f"{first}{_describe(span, began)}"
    below = children.get(span.span_id, [])
    for child in below:
        last = child is below[-1]
        yield from _draw(child, children, began, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))


def _describe(span: Span, began: int) -> str:
    told = [
        f"{introduction}{_shown(name, span.attributes[name])}"
        for name, introduction in _SHOWN.items()
        if span.attributes.get(name)
    ]
    mark = " ✗" if span.error else ""
    at, took = (span.start - began) / 1_000, (span.end - span.start) / 1_000
    return f"{span.name}{mark}  +{at:.0f} ms, {took:.1f} ms  {' · '.join(told)}".rstrip()


def _shown(name: str, value: str) -> str:
    return f"{float(value):.2f} s" if name in _SECONDS else value

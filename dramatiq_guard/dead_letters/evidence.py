"""What is kept of an exception: bounded, fast, and never itself the cause of a failure.

An error may carry ten megabytes of text, ten thousand frames, a chain that bites its own tail, or a ``__str__`` that
raises.  This module must not know what a letter is, nor read a source file where `source` is not asked for.
"""

from __future__ import annotations

import linecache
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .fingerprint import own_place, type_name, users_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["ErrorRecord", "ErrorSummary", "compact_traceback", "describe_error", "summarize_error"]

MESSAGE_LIMIT = 8 * 1024
SUMMARY_LIMIT = 200
TRACEBACK_LIMIT = 32 * 1024
FRAMES = 60
CAUSES = 10


class ErrorSummary(NamedTuple):
    """An error in one line of a history."""

    type: str
    message: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The error a message died of.

    Parameters:
      type(str): The qualified name of its class.
      message(str): Its text, 8 KiB at most.
      traceback(str): Its traceback and those of its causes, with source lines, 32 KiB at most.
      causes(tuple[tuple[str, str], ...]): Type and text of what it was raised from, what was being handled when it
        was raised, and the members of a group; ten at most.
    """

    type: str
    message: str
    traceback: str = ""
    causes: tuple[tuple[str, str], ...] = ()


def summarize_error(error: BaseException, *, redact: Callable[[str], str] | None = None) -> ErrorSummary:
    """Sum an error up for the history of its message, in some ten microseconds and without reading any file.

    Parameters:
      error(BaseException): What was raised.
      redact(Callable): Applied to the text before it is cut.

    Returns:
      ErrorSummary: Type, the first 200 characters, and the place in the user's own code.
    """
    message = text_of(error, SUMMARY_LIMIT, redact)
    return ErrorSummary(type_name(type(error)), message, own_place(error.__traceback__))


def describe_error(error: BaseException, *, redact: Callable[[str], str] | None = None) -> ErrorRecord:
    """Take down everything about an error that a letter keeps.  Never raises.

    Parameters:
      error(BaseException): What was raised.
      redact(Callable): Applied to each text before it is cut.

    Returns:
      ErrorRecord: The record.
    """
    causes = tuple((type_name(type(each)), text_of(each, 1024, redact)) for _, each in _chain(error))
    try:
        traceback = compact_traceback(error, FRAMES, source=True, redact=redact)
    except Exception as failure:  # noqa: BLE001 - a broken __cause__ or code object must not cost the letter
        traceback = f"[no traceback: formatting it raised {type(failure).__name__}]"
    return ErrorRecord(
        type=type_name(type(error)), message=text_of(error, MESSAGE_LIMIT, redact), traceback=traceback, causes=causes
    )


def compact_traceback(
    error: BaseException, limit: int = 30, *, source: bool = False, redact: Callable[[str], str] | None = None
) -> str:
    """Format a traceback with its causes, as Python does, but bounded, and from where the user's function was called.

    Parameters:
      error(BaseException): What was raised.
      limit(int): How many frames are shown of each error; of more, the first third and the last two thirds.
      source(bool): Whether source lines are shown, which reads files.
      redact(Callable): Applied to the texts of the errors.

    Returns:
      str: The text, 32 KiB at most.
    """
    parts = [_format_one(error, limit, source, redact)]
    for relation, each in _chain(error):
        parts += (f"\n{relation}\n\n", _format_one(each, limit, source, redact))
        if len(parts) > 10:
            break
    text = "".join(reversed(parts)).rstrip("\n")
    # The end is the error itself, so it is the beginning that goes.
    return text if len(text) <= TRACEBACK_LIMIT else "[…]\n" + text[-TRACEBACK_LIMIT + 4 :]


def text_of(error: BaseException, limit: int, redact: Callable[[str], str] | None = None) -> str:
    """The text of an error, of so many bytes in UTF-8 at most, whatever its ``__str__`` does."""
    try:
        text = str(error)
        whole = len(text)
        text = text[: 4 * limit]  # what is redacted need not be ten megabytes
    except BaseException as failure:  # noqa: BLE001 - the user's __str__ may raise anything
        return f"[{type_name(type(error))} without text: its __str__ raised {type(failure).__name__}]"
    if redact is not None:
        try:
            text = redact(text)
        except BaseException as failure:  # noqa: BLE001 - so may the user's redaction, and then nothing may leak
            return f"[redaction failed: {type(failure).__name__}]"
    if whole <= limit // 4 or (len(text) <= limit and text.isascii()):
        return text
    cut = text.encode("utf-8", "replace")
    if len(cut) <= limit and whole == len(text):
        return text
    note = f" […, {whole} characters in all]" if limit > SUMMARY_LIMIT else "…"
    return cut[: limit - len(note.encode())].decode("utf-8", "ignore") + note


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """What led to an error, nearest first, each once."""
    seen = {id(error)}
    todo = deque(_related(error))
    found = 0
    while todo and found < CAUSES:
        relation, each = todo.popleft()
        if id(each) not in seen:
            seen.add(id(each))
            found += 1
            yield relation, each
            todo.extend(_related(each))


def _related(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    if error.__cause__ is not None:
        yield "The above exception was the direct cause of the following exception:", error.__cause__
    elif error.__context__ is not None and not error.__suppress_context__:
        yield "During handling of the above exception, another exception occurred:", error.__context__
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions[:CAUSES]:
            yield "The above exception is a member of the following group:", each


def _format_one(error: BaseException, limit: int, source: bool, redact: Callable[[str], str] | None) -> str:
    lines = []
    if error.__traceback__ is not None:
        lines.append("Traceback (most recent call last):\n")
        lines += _format_frames(users_part(error.__traceback__), limit, source)
    text = text_of(error, 1024, redact)
    name = type_name(type(error))
    lines.append(f"{name}: {text}\n" if text else f"{name}\n")
    return "".join(lines)


def _format_frames(traceback: TracebackType, limit: int, source: bool) -> list[str]:
    head: list[TracebackType] = []
    step: TracebackType | None = traceback
    while step is not None and len(head) < limit:
        head.append(step)
        step = step.tb_next
    if step is None:
        return [_format_frame(each, source) for each in head]
    tail: deque[TracebackType] = deque(head[limit // 3 :], maxlen=max(1, limit - limit // 3))
    del head[limit // 3 :]
    left_out = 0
    while step is not None:
        tail.append(step)  # and the first of it falls out
        left_out += 1
        step = step.tb_next
    shown = [_format_frame(each, source) for each in (*head, *tail)]
    shown.insert(len(head), f"  [… {left_out} frames left out …]\n")
    return shown


def _format_frame(traceback: TracebackType, source: bool) -> str:
    code = traceback.tb_frame.f_code
    text = f'  File "{code.co_filename}", line {traceback.tb_lineno}, in {code.co_qualname}\n'
    if source:
        found = linecache.getline(code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_globals).strip()
        if found:
            text += f"    {found[:200]}\n"
    return text

"""Whatever an exception holds, taking it down is bounded and never fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_guard.dead_letters.evidence import compact_traceback, describe_error, summarize_error

from .test_fingerprint import caught, compiled


def fail(error: BaseException) -> None:
    raise error


def test_an_ordinary_error() -> None:
    """Type, text, traceback with source lines, and causes."""

    def load() -> None:
        try:
            {}["port"]
        except KeyError as error:
            raise ValueError("bad configuration") from error

    record = describe_error(caught(load))

    assert ("ValueError", "bad configuration", (("KeyError", "'port'"),)) == (
        record.type,
        record.message,
        record.causes,
    )
    assert '{}["port"]' in record.traceback
    assert record.traceback.index("KeyError") < record.traceback.index("direct cause")
    assert record.traceback.endswith("ValueError: bad configuration")


def test_a_context_is_a_cause_unless_suppressed() -> None:
    """`raise … from None` says that what was being handled does not matter."""

    def load(suppress: bool) -> None:
        try:
            {}["port"]
        except KeyError:
            if suppress:
                raise ValueError("x") from None
            raise ValueError("x")

    assert "During handling" in describe_error(caught(load, False)).traceback
    assert () == describe_error(caught(load, True)).causes


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class NoText(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307


@pytest.mark.parametrize("error", [Mute(), NoText()])
def test_an_error_that_cannot_speak(error: Exception) -> None:
    """A `__str__` that raises, or returns no text, is named and costs nothing else."""
    record = describe_error(caught(fail, error))

    assert "without text: its __str__ raised" in record.message
    assert "test_evidence.py" in record.traceback
    assert "without text" in summarize_error(error).message


def test_ten_megabytes_of_text_are_bounded() -> None:
    """8 KiB are kept, with a note of how much there was; 200 characters in a history."""
    error = caught(fail, ValueError("☃" * 10_000_000))
    record = describe_error(error)

    assert len(record.message.encode()) <= 8 * 1024
    assert record.message.endswith("[…, 10000000 characters in all]")
    assert len(record.traceback) < 10_000
    assert len(summarize_error(error).message.encode()) <= 200


def test_a_text_that_fits_is_left_alone() -> None:
    """Nothing is cut off what is short enough."""
    for text in ("", "x" * 200, "x" * 8_192, "ü" * 100):
        assert text == describe_error(ValueError(text)).message
    assert "x" * 200 == summarize_error(ValueError("x" * 200)).message


def test_ten_thousand_frames_are_bounded() -> None:
    """The first and the last frames are kept."""
    deep = compiled("def deep(n):\n    if n == 0:\n        raise ValueError('bottom')\n    deep(n - 1)\n")["deep"]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        error = caught(deep, 10_000)
    finally:
        sys.setrecursionlimit(limit)

    text = compact_traceback(error)

    assert 31 <= text.count("\n") <= 40
    assert "9972 frames left out" in text
    assert "in caught" in text.splitlines()[1]
    assert text.endswith("ValueError: bottom")


def test_a_chain_that_bites_its_tail() -> None:
    """Each error of a loop is shown once."""
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one

    assert (("KeyError", "'two'"),) == describe_error(one).causes


def test_a_long_chain_is_bounded() -> None:
    """Ten causes are enough."""
    error: Exception = ValueError("first")
    for at in range(1_000):
        later = ValueError(str(at))
        later.__cause__ = error
        error = later

    record = describe_error(error)

    assert 10 == len(record.causes)
    assert len(record.traceback) <= 32 * 1024


def test_the_members_of_a_group_are_causes() -> None:
    """What a task group swallowed is shown."""
    record = describe_error(caught(fail, ExceptionGroup("tasks", [ValueError("a"), KeyError("b")])))

    assert (("ValueError", "a"), ("KeyError", "'b'")) == record.causes


@pytest.mark.parametrize("take", [describe_error, summarize_error])
def test_texts_are_redacted_wherever_they_show(take: Callable[..., Any]) -> None:
    """Not in the message, nor in a cause, nor in the traceback's last line."""

    def load() -> None:
        try:
            raise KeyError("secret-1")
        except KeyError as error:
            raise ValueError("secret-2") from error

    taken = take(caught(load), redact=lambda text: "[gone]" if "secret" in text else text)

    assert "[gone]" == taken.message
    assert "'secret-" not in str(taken).replace('raise KeyError("secret-1")', "").replace('secret-2")', "")


def test_a_redaction_that_raises_shows_nothing() -> None:
    """Better no text than the wrong one."""

    def broken(text: str) -> str:
        raise RuntimeError(text)

    assert "[redaction failed: RuntimeError]" == describe_error(ValueError("secret"), redact=broken).message


def test_the_compact_form_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for every failed attempt must not touch the disk."""
    error = caught(fail, ValueError("x"))
    monkeypatch.setattr("linecache.getline", lambda *_: pytest.fail("a file was read"))

    assert "in fail" in compact_traceback(error)
    assert "fail" in summarize_error(error).place

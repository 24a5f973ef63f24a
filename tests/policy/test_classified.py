from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dramatiq_guard.classified import classified
from dramatiq_guard.errors import Defer, Fatal, Permanent, Retryable


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_matching_exception_is_raised_anew_from_the_first() -> None:
    """Its text and its traceback are kept."""
    first = ValueError("no such order")

    with pytest.raises(Permanent, match="no such order") as info, classified(ValueError):
        raise first

    assert first is info.value.__cause__


@pytest.mark.parametrize("word", [Retryable, Permanent, Fatal, Defer])
def test_it_becomes_what_was_asked_for(word: type[Exception]) -> None:
    """Any of the four, for any of the types and their subclasses."""
    with pytest.raises(word), classified(KeyError, OSError, as_=word):
        raise FileNotFoundError("x")


def test_other_exceptions_and_success_pass() -> None:
    """Nothing else is touched."""
    with classified(KeyError) as entered:
        pass
    with pytest.raises(ValueError, match="other"), classified(KeyError):
        raise ValueError("other")

    assert isinstance(entered, classified)


def test_what_says_already_what_it_means_passes() -> None:
    """`classified(Exception)` around a call that raises Defer must not make it permanent."""
    with pytest.raises(Defer), classified(Exception):
        raise Defer("later")


def test_it_decorates_functions_and_coroutine_functions() -> None:
    """A coroutine's errors come when it is awaited."""

    @classified(KeyError, as_=Fatal)
    def plain(key: str) -> int:
        return {"a": 1}[key]

    @classified(KeyError, as_=Fatal)
    async def coroutine(key: str) -> int:
        await asyncio.sleep(0)
        return {"a": 1}[key]

    assert 1 == plain("a") == asyncio.run(coroutine("a"))
    with pytest.raises(Fatal):
        plain("b")
    with pytest.raises(Fatal):
        asyncio.run(coroutine("b"))
    assert "coroutine" == coroutine.__name__


def test_an_exception_without_a_text_is_called_by_its_class() -> None:
    """A __str__ that raises does not change what the error means."""
    with pytest.raises(Permanent, match="Hostile"), classified(Hostile):
        raise Hostile


@pytest.mark.parametrize(
    ("types", "as_", "says"),
    [
        ((), Permanent, "needs the exceptions it is about"),
        ((7,), Permanent, "takes exception classes, not 7"),
        (("KeyError",), Permanent, "takes exception classes"),
        ((KeyError,), ValueError, "must be Retryable, Permanent, Fatal or Defer"),
        ((KeyError,), Permanent("x"), "must be Retryable"),
    ],
)
def test_a_mistake_is_refused_at_once(types: Any, as_: Any, says: str) -> None:
    """Not when the first error comes."""
    with pytest.raises(TypeError, match=says):
        classified(*types, as_=as_)

"""`classified`: says of a few lines of an actor what their errors mean."""

from __future__ import annotations

import functools
import inspect
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .errors import Defer, Fatal, Permanent, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["classified"]

F = TypeVar("F", bound="Callable[..., Any]")

_WORDS = (Retryable, Permanent, Fatal, Defer)


class classified(ContextDecorator):  # noqa: N801 - reads as a statement: with classified(KeyError, as_=Permanent)
    """Raises the given exceptions anew as something that says what they mean.

    `Retryable`, `Permanent`, `Fatal` and `Defer` pass unchanged: they say already what they mean.

    Example:
      >>> with classified(KeyError, as_=Permanent):
      ...     {}["name"]
      Traceback (most recent call last):
      dramatiq_guard.errors.Permanent: 'name'

    Parameters:
      *types(type[BaseException]): The exceptions; their subclasses are meant too.
      as_(type[Exception]): `Retryable`, `Permanent`, `Fatal` or `Defer`, or a subclass of yours that takes the text.

    Raises:
      TypeError: No types, or something that is not an exception class.
    """

    def __init__(self, *types: type[BaseException], as_: type[Exception] = Permanent) -> None:
        if not types:
            raise TypeError("classified() needs the exceptions it is about, e.g. classified(KeyError, as_=Permanent)")
        for given in types:
            if not (isinstance(given, type) and issubclass(given, BaseException)):
                raise TypeError(f"classified() takes exception classes, not {given!r}")
        if not (isinstance(as_, type) and issubclass(as_, _WORDS)):
            raise TypeError(f"as_ must be Retryable, Permanent, Fatal or Defer, or a subclass of one, not {as_!r}")
        self.types = types
        self.as_ = as_

    def __call__(self, fn: F) -> F:
        if not inspect.iscoroutinefunction(fn):
            return super().__call__(fn)

        # ContextDecorator would be done as soon as the coroutine exists.
        @functools.wraps(fn)
        async def inner(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await fn(*args, **kwargs)

        return inner  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, self.types) and not isinstance(exc, _WORDS):
            raise self.as_(_text(exc)) from exc


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a __str__ that raises must not change what the error means
        return type(exc).__qualname__

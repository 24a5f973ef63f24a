"""Stand-ins for the exceptions of libraries that need not be installed, and graphs of exceptions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def fake_class(name: str, *bases: type[BaseException]) -> type[BaseException]:
    """A class of that qualified name, which is all that the table goes by."""
    module, _, qualname = name.rpartition(".")
    return type(qualname, bases or (Exception,), {"__module__": module, "__qualname__": qualname})


def fake(name: str, *args: Any, **attributes: Any) -> BaseException:
    """An exception of a class of that name, with these attributes."""
    exc = fake_class(name)(*args)
    for attribute, value in attributes.items():
        setattr(exc, attribute, value)
    return exc


def response(status: int, **headers: str) -> SimpleNamespace:
    """What HTTP clients hang on their exceptions."""
    return SimpleNamespace(status_code=status, headers={name.replace("_", "-"): text for name, text in headers.items()})


def raised(exc: BaseException, *, cause: BaseException | None = None, context: BaseException | None = None) -> Any:
    """The exception as it arrives when it was raised from, or while handling, another."""
    if cause is not None:
        exc.__cause__ = cause
    if context is not None:
        exc.__context__ = context
    return exc

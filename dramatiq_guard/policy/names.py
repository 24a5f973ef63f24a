"""The names of exception classes, read without running any code of theirs.

A class may define `__module__`, `__qualname__` or a metaclass that raises; what is read here is what the interpreter
itself keeps.
"""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

from .builtin import ALIASES

__all__ = ["Name", "canonical", "lineage", "name_of"]

_mro: Any = vars(type)["__mro__"].__get__
_qualname: Any = vars(type)["__qualname__"].__get__
_module: Any = vars(type)["__module__"].__get__


class Name(NamedTuple):
    """Where a class lives; `cls` is None where only the name is known."""

    module: str
    qualname: str
    cls: type | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    def answers_to(self, given: str) -> bool:
        """Whether a user who writes *given* means this class.

        Inner modules may be left out, since most libraries define their errors in one module and document them in
        another: ``redis.TimeoutError`` is ``redis.exceptions.TimeoutError``.
        """
        outer = given.removesuffix(f".{self.qualname}")
        return outer != given and (self.module == outer or self.module.startswith(f"{outer}."))


def name_of(cls: type) -> Name:
    """The name of a class; never raises."""
    try:
        module = _module(cls)
    except AttributeError:
        module = None
    return Name(module if type(module) is str else "?", _qualname(cls), cls)


def lineage(cls: type) -> tuple[Name, ...]:
    """The names of a class and of its bases, nearest first; never raises."""
    return tuple(name_of(base) for base in _mro(cls, type(cls)))


def canonical(given: str) -> str:
    """The qualified form of a name as users write it: ``IOError`` is ``builtins.OSError``.

    Parameters:
      given(str): A qualified class name, or the bare name of a built-in exception.

    Returns:
      str: The name to compare with.

    Raises:
      ValueError: It is no class name, or a bare name that is not built in.
    """
    if not all(part.isidentifier() or part == "<locals>" for part in given.split(".")):
        raise ValueError(f"{given!r} is not a class name: write it like 'package.module.ClassName'")
    if "." in given:
        return ALIASES.get(given, given)
    found = getattr(builtins, given, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return f"builtins.{found.__qualname__}"
    raise ValueError(f"{given!r} is not a built-in exception: write the module too, like 'package.{given}'")

"""One bug, one fingerprint: the exception's type and the user's own frames.

Line numbers and message text are left out, so that neither an unrelated edit of the file nor the order number in the
message splits a group.  This module must not know what a letter is.
"""

from __future__ import annotations

import sysconfig
from hashlib import sha1
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["FrameName", "fingerprint", "frame_name", "own_place", "type_name", "users_part"]

#: Packages that stand between the worker and the user's function.
HOSTS = frozenset({"dramatiq", "dramatiq_guard"})

_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/", "\\site-packages\\", "\\dist-packages\\")

#: Looked up by file and function, whose strings carry their hashes; a code object would hash its constants each time.
_names: dict[tuple[str, str], FrameName] = {}
_NAMES_LIMIT = 20_000


class FrameName(NamedTuple):
    """What a frame is called in a fingerprint, and whether it is the user's own code."""

    name: str
    own: bool


def type_name(exception_type: type[BaseException]) -> str:
    """The qualified name of an exception class; those of Python itself go without ``builtins.``."""
    module = exception_type.__module__
    return exception_type.__qualname__ if module == "builtins" else f"{module}.{exception_type.__qualname__}"


def frame_name(frame: FrameType) -> FrameName:
    """Name a frame by module and function: a release directory in the file's path would change with each deploy."""
    code = frame.f_code
    key = (code.co_filename, code.co_qualname)
    known = _names.get(key)
    if known is None:
        module = frame.f_globals.get("__name__")
        if not isinstance(module, str) or module == "__main__":
            module = code.co_filename.replace("\\", "/").rpartition("/")[2]
        known = FrameName(f"{module}:{code.co_qualname}", _is_own(code.co_filename, module))
        if len(_names) >= _NAMES_LIMIT:
            _names.clear()
        _names[key] = known
    return known


def _is_own(filename: str, module: str) -> bool:
    if filename.startswith("<frozen") or any(part in filename for part in _INSTALLED):
        return False
    return not filename.startswith(_STDLIB) and module.partition(".")[0] not in HOSTS


def users_part(traceback: TracebackType) -> TracebackType:
    """A traceback without the frames of the worker and the stack that it begins with; all of it if it has no others."""
    step: TracebackType | None = traceback
    while step is not None:
        module = step.tb_frame.f_globals.get("__name__")
        if not isinstance(module, str) or module.partition(".")[0] not in HOSTS:
            return step
        step = step.tb_next
    return traceback


def own_place(traceback: TracebackType | None) -> str:
    """Where the user's code last was when an error arose, as ``file:function:line``.

    Parameters:
      traceback(TracebackType | None): The traceback of the error.

    Returns:
      str: The innermost frame of the user's own; the innermost of all when none is; empty without a traceback.
    """
    own = last = None
    while traceback is not None:
        last = traceback
        if frame_name(traceback.tb_frame).own:
            own = traceback
        traceback = traceback.tb_next
    place = own or last
    if place is None:
        return ""
    code = place.tb_frame.f_code
    return f"{code.co_filename}:{code.co_name}:{place.tb_lineno}"


def fingerprint(error: BaseException | None, *, reason: str = "", actor: str = "") -> str:
    """Say which bug this is.

    Each frame counts once, where it first appears, so the depth of a recursion makes no difference.  Frames of
    libraries, of the standard library and of the worker are dropped unless nothing else remains.

    Parameters:
      error(BaseException | None): What was raised; ``None`` where a message died of something else.
      reason(str): The reason code, which stands in for the error that is not there.
      actor(str): The actor, likewise.

    Returns:
      str: Sixteen hexadecimal digits.
    """
    if error is None:
        return _digest(f"reason:{reason}\nactor:{actor}")
    own: dict[str, None] = {}
    foreign: dict[str, None] = {}
    traceback = error.__traceback__
    while traceback is not None:
        name, is_own = frame_name(traceback.tb_frame)
        (own if is_own else foreign)[name] = None
        traceback = traceback.tb_next
    return _digest("\n".join((_kind(error), *(own or foreign))))


def _kind(error: BaseException, depth: int = 3) -> str:
    name = type_name(type(error))
    if depth and isinstance(error, BaseExceptionGroup):
        inner = sorted({_kind(each, depth - 1) for each in error.exceptions[:100]})
        return f"{name}[{','.join(inner)}]"
    return name


def _digest(text: str) -> str:
    return sha1(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:16]

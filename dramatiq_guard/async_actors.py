"""An async actor's sys.exit ends its message, not the event loop of all the others.

asyncio lets SystemExit and KeyboardInterrupt out of a task into whatever runs the loop.  In a Dramatiq worker that is
one thread for all async actors: it dies, silently, and every async message after that fails within milliseconds.  So
the two travel from the loop to the waiting worker thread inside an ordinary exception, and are raised again there.

Something else may kill the loop all the same, a callback that exits.  Until the process ends for it, what comes to the
loop is put off, and what was on it can be interrupted.

It must not know what becomes of a message.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from dramatiq.asyncio import async_to_sync, get_event_loop_thread
from dramatiq.middleware.threading import Interrupt

from .errors import Defer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["event_loop_is_gone", "spare_the_loop"]

#: Milliseconds for which an async message is put off by a process whose loop is gone: by then the process is, too.
_PUT_OFF: Final = 5_000


class _Carried(Exception):
    """What would have killed the event loop, on its way to the thread that waits for the actor."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


def spare_the_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an async actor's function harmless to the event loop.

    Parameters:
      function(Callable): What Dramatiq calls for an actor.

    Returns:
      Callable: The same for an async actor, without the harm; any other function as it is.
    """
    coroutine_function = _async_function(function)
    if coroutine_function is None:
        return function

    @functools.wraps(coroutine_function)
    async def carrying(*args: Any, **kwargs: Any) -> Any:
        try:
            return await coroutine_function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _Carried(error) from error

    waiting = async_to_sync(carrying)

    @functools.wraps(function)
    def delivering(*args: Any, **kwargs: Any) -> Any:
        if event_loop_is_gone():
            raise Defer("the event loop of this process has died", delay=_PUT_OFF)
        try:
            return waiting(*args, **kwargs)
        except _Carried as carried:
            error = carried.error
        except RuntimeError as refused:
            interrupt = refused.__context__
            if not (isinstance(interrupt, Interrupt) and event_loop_is_gone()):
                raise
            # It can cancel nothing on a loop that is gone, and would look like a failure of the actor's.
            error = interrupt
        raise error

    return delivering


def event_loop_is_gone() -> bool:
    """Whether there was an event loop for async actors, and it has died."""
    thread = get_event_loop_thread()
    return thread is not None and not thread.is_alive()


async def _nothing() -> None:
    """Wrapped to see what Dramatiq's wrapper is made of."""


#: Every function that `async_to_sync` makes has this code; a decorator of the user's that waits by itself has not.
_WAITING: Final = async_to_sync(_nothing).__code__


def _async_function(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]] | None:
    """The async function that Dramatiq has wrapped to be called by a worker thread, if this is such a wrapper."""
    if getattr(function, "__code__", None) is not _WAITING:
        return None
    found: Callable[..., Awaitable[Any]] = function.__wrapped__  # type: ignore[attr-defined]
    return found

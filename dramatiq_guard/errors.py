"""Every error of the library, in one tree.

::

    BaseException
    └── LeaseLost                    raised into an actor whose key another may have taken over (an Interrupt)
    Exception
    ├── Retryable                    raised by an actor: try again, after `delay` if given
    ├── Permanent                    raised by an actor: never try again
    ├── Fatal                        raised by an actor: this process must be replaced
    ├── Defer                        raised by an actor: not now; does not count as an attempt
    └── GuardError                   whatever the library itself has to say
        ├── SetupError               the stack or an option is wrong (stops the boot: also a MiddlewareError)
        ├── StoreError               a store answered with an error
        │   └── StoreUnavailable     a store could not be reached: the barrier holds and repeats
        ├── HeldBack                 internal: its downstream is not to be called now
        ├── FencedOut                a key is held by another run of its work, or not held at all
        ├── MissingKey               the key of an idempotent actor cannot be made of this message
        ├── KeyReused                a key was given with another payload before
        ├── OutcomeUnknown           nobody knows whether the effect of a key happened
        ├── ReplayedFailure          the failure that an earlier delivery of the same work ended with
        ├── Quarantined              internal: a message that kills its workers is not run (a SkipMessage)
        ├── SettlementHeld           internal: the barrier keeps the message unacked (H3)
        └── PutOff                   internal: the delivery leaves by the skip path

The first four are what users raise; they know nothing of Dramatiq, nor does anything in `policy`, which recognises
them by qualified name.  This module imports nothing of the library but `policy.duration`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import MiddlewareError, SkipMessage
from dramatiq.middleware.threading import Interrupt

from .policy.duration import milliseconds

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = [
    "Defer",
    "Fatal",
    "FencedOut",
    "GuardError",
    "HeldBack",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "OutcomeUnknown",
    "Permanent",
    "PutOff",
    "Quarantined",
    "ReplayedFailure",
    "Retryable",
    "SettlementHeld",
    "SetupError",
    "StoreError",
    "StoreUnavailable",
]


class _Raised(Exception):
    """What the four errors that actors raise have in common."""

    def __init__(self, message: str = "", *, delay: int | timedelta | None = None) -> None:
        super().__init__(message)
        self.delay = None if delay is None else milliseconds(delay, "delay")


class Retryable(_Raised):
    """Raised by an actor whose work should be tried again.

    Parameters:
      message(str): What went wrong.
      delay(int | timedelta): The number of milliseconds to wait before the next attempt, instead of the backoff.
    """


class Permanent(_Raised):
    """Raised by an actor whose work can never succeed: it is dead-lettered without another attempt.

    Parameters:
      message(str): What went wrong.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class Fatal(_Raised):
    """Raised by an actor that found its process unfit to go on: the message is retried, the process replaced.

    Parameters:
      message(str): What went wrong.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class Defer(_Raised):
    """Raised by an actor that cannot do its work now: the message is put off, and no attempt is counted.

    Parameters:
      message(str): Why not now.
      delay(int | timedelta): The number of milliseconds to put it off by, instead of the deferral backoff.
    """


class GuardError(Exception):
    """Base class of the errors that the library itself raises."""


class SetupError(GuardError, MiddlewareError, ValueError):
    """The stack, an option or a store is set up wrongly; says what to write instead.

    It is a `MiddlewareError`, because any other exception raised while a worker boots is swallowed (H11).
    """


class StoreError(GuardError):
    """A store answered with an error that trying again will not cure."""


class StoreUnavailable(StoreError):
    """A store could not be reached, or cannot take writes now (timeout, READONLY, OOM, LOADING, recovery)."""


class HeldBack(GuardError):
    """Keeps a message from a downstream that fails or recovers: it is put off by exactly so long, uncounted.

    Parameters:
      message(str): Why.
      delay(int): Milliseconds.
    """

    def __init__(self, message: str, *, delay: int) -> None:
        super().__init__(message)
        self.delay = delay


class FencedOut(GuardError):
    """The key of this run is held by another by now, or by nobody: what was to be written was not."""


class LeaseLost(Interrupt):
    """Interrupts an actor whose lease on its key could not be renewed in time: it must do nothing more.

    The message is put off: whoever has the key finishes its work, or it is run again.
    """


class MissingKey(GuardError):
    """The idempotency key of a message cannot be made: it is dead-lettered as ``missing_key``."""


class KeyReused(GuardError):
    """An idempotency key has been used with another payload: the message is dead-lettered as ``key_reused``."""


class OutcomeUnknown(GuardError):
    """Whether the effect of a key happened is not known: the message is dead-lettered as ``outcome_unknown``."""


class ReplayedFailure(GuardError):
    """Work that failed for good when it was first delivered, and is not tried again.

    Parameters:
      error_type(str): The qualified name of the class of its error.
      text(str): What the error said.
    """

    def __init__(self, error_type: str, text: str) -> None:
        super().__init__(f"{error_type}: {text}")
        self.error_type = error_type
        self.text = text


class SettlementHeld(GuardError, MiddlewareError, BrokerConnectionError):
    """Keeps a message unacked: Dramatiq repeats the settlement of a `BrokerConnectionError` for ever (H3).

    Parameters:
      message(str): What is held, and why.
      again(bool): Whether the settlement is to be repeated at once, since nothing is out.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.again = again


class Quarantined(GuardError, SkipMessage):
    """Keeps a message that has killed too many worker processes from being run; it becomes the letter ``poison``."""


class PutOff(GuardError, SkipMessage):
    """Takes a deferred or interrupted delivery out by the skip path: no failure callback, no error, no attempt."""

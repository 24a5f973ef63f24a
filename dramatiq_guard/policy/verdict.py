"""What an error means for the message that met it.

A verdict is about the error alone; what is done about it, given how often was tried, is a
`dramatiq_guard.policy.decision.Decision`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backoff import Backoff

__all__ = ["Kind", "Verdict"]


class Kind(enum.Enum):
    """The five things an error can mean."""

    #: Trying again may help.
    RETRYABLE = "retryable"
    #: Trying again cannot help.
    PERMANENT = "permanent"
    #: The process is unfit; the message may be fine.
    FATAL = "fatal"
    #: Not now: a key is held, a breaker is open, a rate is used up.  No attempt was made.
    DEFERRED = "deferred"
    #: The process is going down; the message did nothing wrong.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of one error, and which rule says so.

    Parameters:
      kind(Kind): What the error means.
      rule(str): The rule that decided, e.g. ``builtin:builtins.ConnectionError`` or ``actor:permanent[0]``.
      why(str): The reason in a sentence, for people.
      delay(int | None): Milliseconds the error asked for exactly (`Retryable(delay=)`, `Defer(delay=)`,
        `dramatiq.Retry(delay=)`); replaces the backoff.
      retry_after(int | None): Milliseconds before which trying again is pointless (a Retry-After header); a floor
        that jitter never shortens.
      max_retries(int | None): The rule's own limit; the smaller of it and the actor's applies.
      backoff(Backoff | None): The rule's own backoff, instead of the actor's.
      exact(bool): Whether *delay* is meant to the millisecond: whoever chose it has spread the messages already.
      reason(str | None): For PERMANENT: the reason code of the dead letter, if it is not ``permanent``.
    """

    kind: Kind
    rule: str
    why: str
    delay: int | None = None
    retry_after: int | None = None
    max_retries: int | None = None
    backoff: Backoff | None = None
    reason: str | None = None
    exact: bool = False

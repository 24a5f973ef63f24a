"""Errors that are told apart by a code: an HTTP status, an errno, an SQLSTATE, and so on.

What each code means, and how it is found on an exception.  Which classes carry which code is in `builtin`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["AMQP", "AWS", "ERRNO", "GRPC", "HTTP", "LIMIT", "REDIS", "SMTP", "SQLSTATE", "By", "Outcome"]

#: The retries of an error that an operator may cure, but probably not soon: one expired token must not empty a queue
#: into the dead letters, nor may a record that is really gone be asked for twenty times.
LIMIT = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a class or a code means.

    Parameters:
      kind(Kind): The meaning.
      why(str): The reason, as the rest of a sentence.
      max_retries(int | None): A limit of its own.
      reason(str | None): A reason code of its own.
      exact(bool): Whether the delay that the error asks for is meant to the millisecond.
    """

    kind: Kind
    why: str
    max_retries: int | None = None
    reason: str | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class By:
    """A decision by a code that the exception carries.

    Parameters:
      code(str): ``status``, ``errno`` or ``sqlstate``: what it is called in rule names and by `explain`.
      read: Finds the code on the exception.  May fail in any way.
      table(Mapping): The meaning of a code, of its hundred (``"5xx"``) or of an SQLSTATE's class (``"08"``).
      headers: Finds the headers of the response that may say when to try again.  May fail in any way.
    """

    code: str
    read: Callable[[Any], Any]
    table: Mapping[int | str, Outcome]
    headers: Callable[[Any], Any] | None = None

    def outcome(self, code: object) -> Outcome | None:
        """What *code* means, or None if the table does not know it."""
        if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 10_000:
            return self.table.get(int(code)) or self.table.get(f"{code // 100}xx")
        if isinstance(code, str):
            return self.table.get(code) or (self.table.get(code[:2]) if len(code) == 5 else None)
        return None


def _retryable(why: str, codes: str) -> dict[int | str, Outcome]:
    return dict.fromkeys(_codes(codes), Outcome(Kind.RETRYABLE, why))


def _permanent(why: str, codes: str) -> dict[int | str, Outcome]:
    return dict.fromkeys(_codes(codes), Outcome(Kind.PERMANENT, why))


def _limited(why: str, codes: str) -> dict[int | str, Outcome]:
    return dict.fromkeys(_codes(codes), Outcome(Kind.RETRYABLE, why, LIMIT))


def _codes(codes: str) -> list[int | str]:
    return [int(code) if len(code) == 3 and code.isdecimal() else code for code in codes.split()]


def _numbers(table: dict[int | str, Outcome]) -> dict[int | str, Outcome]:
    """The errno table by number; the names that this platform does not have are left out."""
    return {getattr(errno, str(name)): outcome for name, outcome in table.items() if hasattr(errno, str(name))}


HTTP = {
    **_permanent("the server refuses this request as it is", "400 405 406 410 411 413 414 415 422 451"),
    **_retryable("the server cannot answer just now", "408 425 429 5xx"),
    **_limited("an operator or another request may cure it, but hardly soon", "401 403 404 409 423"),
}

ERRNO = _numbers(
    {
        **_retryable(
            "the connection or the network failed",
            "ECONNRESET ECONNREFUSED ECONNABORTED EPIPE ESHUTDOWN ENOTCONN ETIMEDOUT EHOSTUNREACH EHOSTDOWN "
            "ENETUNREACH ENETDOWN ENETRESET EADDRNOTAVAIL EADDRINUSE ENONET EPROTO ESTALE EREMOTEIO EIO",
        ),
        **_retryable("a resource is used up or busy", "EAGAIN EBUSY EINTR EMFILE ENFILE ENOBUFS ENOMEM ENOSPC EDQUOT"),
        **_retryable("somebody else holds it", "EDEADLK ENOLCK ETXTBSY"),
        **_permanent(
            "the path or the permission will be the same next time",
            "ENOENT EACCES EPERM EISDIR ENOTDIR EEXIST ENOTEMPTY ENAMETOOLONG ELOOP EXDEV EFBIG",
        ),
    }
)

SQLSTATE = {
    **_retryable("the connection to the database failed", "08"),
    **_retryable("the transaction was rolled back: a deadlock, a conflict, or a replica's recovery", "40"),
    **_retryable("the database is short of a resource", "53"),
    **_retryable("the database is being stopped, started or told to cancel", "57"),
    **_retryable("somebody else holds the lock", "55P03"),
    **_retryable("the server is a replica, or not yet the primary", "25006"),
    **_permanent("the data does not fit the column", "22"),
    **_permanent("a constraint of the table forbids it", "23"),
    **_permanent("the statement is wrong, or not allowed", "42"),
}

REDIS = {
    **_retryable(
        "the server cannot take the command now",
        "BUSY LOADING MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN TRYAGAIN OOM READONLY NOSCRIPT UNBLOCKED MOVED ASK",
    ),
    **_permanent("the key holds another type, or the keys lie apart", "WRONGTYPE CROSSSLOT"),
    **_limited("the credentials do not allow it", "NOAUTH WRONGPASS NOPERM"),
}

AMQP = {
    **_permanent("the message is too large for the broker", "311"),
    **_retryable("the broker cannot do it now", "313 320 405 506 541"),
    # 406 is also how RabbitMQ ends a channel whose consumer took longer than consumer_timeout.
    **_limited("the broker refuses: a queue, a permission, a precondition, a limit", "403 404 406 530"),
}

AWS = {
    **_retryable(
        "the service is throttling, or failed by itself",
        "Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException "
        "TooManyRequestsException ProvisionedThroughputExceededException RequestLimitExceeded LimitExceededException "
        "BandwidthLimitExceeded SlowDown EC2ThrottledException PriorRequestNotComplete TransactionInProgressException "
        "TransactionConflictException TransactionCanceledException RequestTimeout RequestTimeoutException "
        "InternalError InternalFailure InternalServerError ServiceUnavailable ServiceUnavailableException "
        "IDPCommunicationError",
    ),
    **_limited(
        "the credentials or the resource may be put right, but hardly soon",
        "ExpiredToken ExpiredTokenException RequestExpired InvalidClientTokenId UnrecognizedClientException "
        "AuthFailure AccessDenied AccessDeniedException ResourceNotFoundException",
    ),
}

GRPC = {
    **_retryable(
        "the service cannot answer just now",
        "UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED CANCELLED INTERNAL UNKNOWN",
    ),
    **_permanent("the service refuses this request as it is", "INVALID_ARGUMENT OUT_OF_RANGE UNIMPLEMENTED DATA_LOSS"),
    **_limited(
        "an operator or another request may cure it, but hardly soon",
        "NOT_FOUND PERMISSION_DENIED UNAUTHENTICATED ALREADY_EXISTS FAILED_PRECONDITION",
    ),
}

SMTP = {
    **_retryable("the mail server says: later", "4xx"),
    **_permanent("the mail server says: never", "5xx"),
    **_limited("the mail server wants other credentials", "530 534 535 538"),
}

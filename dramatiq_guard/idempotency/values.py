"""Results and the values of steps as bytes, written by the encoder that Dramatiq's messages are written by.

What cannot be encoded, or is larger than is worth keeping, is left out and said to be: the effect has happened, so the
work must not be run again for it.
"""

from __future__ import annotations

from typing import Any

from dramatiq import get_encoder

from ..errors import ReplayedFailure
from ..stores.idempotency import FAILURE, OMITTED, Finish

__all__ = ["decode", "encode", "failed", "finished", "replayed_failure"]


def encode(value: Any) -> bytes:
    """A value as bytes; raises whatever the encoder raises."""
    return get_encoder().encode({"value": value})


def decode(data: bytes) -> Any:
    """The value of what `encode` wrote."""
    return get_encoder().decode(data)["value"]


def finished(result: Any, max_result: int) -> tuple[Finish, str | None]:
    """How a run that returned is recorded.

    Parameters:
      result(Any): What it returned.
      max_result(int): How many bytes are kept at most.

    Returns:
      tuple[Finish, str | None]: The record, and why the result is not in it.
    """
    if result is None:
        return Finish(), None
    try:
        data = encode(result)
    except Exception as error:  # noqa: BLE001 - encoders are the user's, and may raise anything
        return Finish(None, OMITTED), f"it cannot be encoded ({type(error).__name__}: {error!s:.200})"
    if len(data) > max_result:
        return Finish(None, OMITTED), f"it has {len(data)} bytes, and max_result is {max_result}"
    return Finish(data), None


def failed(error: BaseException) -> Finish:
    """How a run that ended with a failure to be remembered is recorded."""
    kind = type(error)
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a __str__ of the user's
        text = f"[no text: its __str__ raised {type(broken).__name__}]"
    return Finish(encode([f"{kind.__module__}.{kind.__qualname__}", text[:1_000]]), FAILURE)


def replayed_failure(result: bytes) -> ReplayedFailure:
    """The error for a duplicate of a run that failed for good."""
    error_type, text = decode(result)
    return ReplayedFailure(error_type, text)

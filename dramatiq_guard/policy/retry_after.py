"""When a server says that trying again makes sense: `Retry-After` and the usual rate-limit headers.

Total: whatever a server sends, `parse` returns a number or None and never raises.  It must not know where the headers
come from, nor the time: the caller says what time it is.

========================= ========================================================================================
``retry-after-ms``        milliseconds
``retry-after``           seconds, or an HTTP date in any of its three formats (RFC 9110, 10.2.3 and 5.6.7)
``*-reset-after``         seconds
``*-reset``               seconds from now, seconds since 1970 or milliseconds since 1970, told apart by their size
========================= ========================================================================================

where ``*`` is ``ratelimit``, ``x-ratelimit`` or ``x-rate-limit``.  The ``*-reset`` headers accompany every answer of
many servers, so they count only where the ``*-remaining`` of the same family is 0 or absent.
"""

from __future__ import annotations

import email.utils
import math
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .duration import LONGEST_DELAY

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["parse"]

_FAMILIES = ("ratelimit", "x-ratelimit", "x-rate-limit")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: No header that means something is longer, and parsing time stays bounded.
_LONGEST_VALUE = 100

#: As seconds, 31 years from now or the year 2001: nobody means the former.
_SECONDS_SINCE_1970 = 1_000_000_000
#: As seconds since 1970, the year 5138.
_MILLISECONDS_SINCE_1970 = 100_000_000_000


def parse(headers: Mapping[str, str], *, now_ms: int) -> int | None:
    """How long a response asks its client to wait.

    Parameters:
      headers(Mapping[str, str]): The headers of the response; case does not matter, bytes are understood.
      now_ms(int): The present time, in milliseconds since 1970.

    Returns:
      int | None: Milliseconds from now: 0 for a moment that is past, at most 7 days; None where the response does not
        say, or says nothing that can be understood.
    """
    values = {_text(name).lower(): _text(value) for name, value in headers.items()}
    wait = _scaled(values.get("retry-after-ms"), 1)
    if wait is None:
        wait = _scaled(values.get("retry-after"), 1000)
    if wait is None:
        wait = _until_date(values.get("retry-after"), now_ms)
    for family in _FAMILIES:
        if wait is None and _used_up(values.get(f"{family}-remaining")):
            wait = _scaled(values.get(f"{family}-reset-after"), 1000)
            if wait is None:
                wait = _until_reset(values.get(f"{family}-reset"), now_ms)
    return None if wait is None else min(max(0, wait), LONGEST_DELAY)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    return value.strip() if isinstance(value, str) else ""


def _number(value: str | None) -> float | None:
    if value is None or len(value) > _LONGEST_VALUE or not _NUMBER.fullmatch(value):
        return None
    return float(value)


def _scaled(value: str | None, factor: int) -> int | None:
    number = _number(value)
    # Rounded up, for a client must not be early; to six places before, for 0.07 · 1000 is 70.00000000000001.
    return None if number is None else math.ceil(round(number * factor, 6))


def _until_reset(value: str | None, now_ms: int) -> int | None:
    number = _number(value)
    if number is None or number < _SECONDS_SINCE_1970:
        return _scaled(value, 1000)
    return math.ceil(number if number >= _MILLISECONDS_SINCE_1970 else number * 1000) - now_ms


def _until_date(value: str | None, now_ms: int) -> int | None:
    if not value or len(value) > _LONGEST_VALUE:
        return None
    try:
        date = email.utils.parsedate_to_datetime(value)
        # The asctime format names no zone; HTTP knows only GMT.
        since_1970 = (date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return math.ceil(since_1970.total_seconds() * 1000) - now_ms


def _used_up(remaining: str | None) -> bool:
    number = _number(remaining)
    return number is None or number == 0

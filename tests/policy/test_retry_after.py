from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dramatiq_guard.policy.duration import LONGEST_DELAY
from dramatiq_guard.policy.retry_after import parse

#: Sun, 06 Nov 1994 08:49:37 GMT
NOV_1994 = 784_111_777_000
#: 14 Nov 2023
NOW = 1_700_000_000_000

NAMES = [
    "Retry-After",
    "retry-after-ms",
    "RateLimit-Reset",
    "RateLimit-Remaining",
    "X-RateLimit-Reset",
    "X-RateLimit-Remaining",
    "x-ratelimit-reset-after",
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("120", 120_000), ("0", 0), (" 5 ", 5_000), ("1.5", 1_500), ("0.07", 70), ("0.0001", 1), ("3.", 3_000)],
)
def test_retry_after_in_seconds(value: str, expected: int) -> None:
    """Seconds, whole or not, become milliseconds, rounded up."""
    assert parse({"Retry-After": value}, now_ms=NOW) == expected


@pytest.mark.parametrize(
    "date",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "Sun, 06 Nov 1994 09:49:37 +0100",
    ],
)
def test_retry_after_as_a_date(date: str) -> None:
    """All three formats of HTTP are understood."""
    assert parse({"Retry-After": date}, now_ms=NOV_1994 - 5_000) == 5_000


def test_a_past_date_is_zero_and_not_none() -> None:
    """The server did say when: now."""
    assert parse({"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}, now_ms=NOW) == 0
    assert parse({"X-RateLimit-Reset": "1600000000"}, now_ms=NOW) == 0


@pytest.mark.parametrize("headers", [{"retry-after": "5"}, {"RETRY-AFTER": "5"}, {b"Retry-After": b"5"}])
def test_case_and_bytes_do_not_matter(headers: Any) -> None:
    """Header names are case-insensitive, and some clients give bytes."""
    assert parse(headers, now_ms=NOW) == 5_000


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("retry-after-ms", "1234", 1_234),
        ("RateLimit-Reset", "30", 30_000),
        ("X-RateLimit-Reset", "30", 30_000),
        ("X-RateLimit-Reset", "1700000060", 60_000),
        ("X-RateLimit-Reset", "1700000060.5", 60_500),
        ("X-RateLimit-Reset", "1700000060000", 60_000),
        ("X-Rate-Limit-Reset", "1700000060", 60_000),
        ("x-ratelimit-reset-after", "0.25", 250),
    ],
)
def test_the_usual_rate_limit_headers(name: str, value: str, expected: int) -> None:
    """Seconds from now, seconds and milliseconds since 1970 are told apart by their size."""
    assert parse({name: value}, now_ms=NOW) == expected


@pytest.mark.parametrize(("remaining", "expected"), [("0", 30_000), ("0.0", 30_000), ("7", None), ("?", 30_000)])
def test_a_reset_counts_only_when_nothing_remains(remaining: str, expected: int | None) -> None:
    """Servers send Reset with every answer; with requests remaining it says nothing about this failure."""
    assert parse({"RateLimit-Reset": "30", "RateLimit-Remaining": remaining}, now_ms=NOW) == expected
    assert parse({"X-RateLimit-Reset-After": "30", "X-RateLimit-Remaining": remaining}, now_ms=NOW) == expected


def test_retry_after_counts_whatever_remains() -> None:
    """Remaining concerns the Reset headers only."""
    assert parse({"Retry-After": "5", "RateLimit-Remaining": "7"}, now_ms=NOW) == 5_000


def test_the_more_exact_header_is_preferred_and_garbage_passed_over() -> None:
    """Milliseconds before seconds, Retry-After before Reset, and what cannot be read does not hide what can."""
    everything = {"retry-after-ms": "1", "Retry-After": "2", "X-RateLimit-Reset": "3"}
    assert parse(everything, now_ms=NOW) == 1
    assert parse(everything | {"retry-after-ms": "x"}, now_ms=NOW) == 2_000
    assert parse(everything | {"retry-after-ms": "x", "Retry-After": "y"}, now_ms=NOW) == 3_000


@pytest.mark.parametrize(
    "value",
    ["", "soon", "-5", "nan", "inf", "1e3", "1_000", "٣", "5, 5", "Mon, 99 Foo 2024 99:99:99 GMT", "9" * 5_000],
)
def test_garbage_is_none(value: str) -> None:
    """What means nothing is as if it were not there."""
    assert parse(dict.fromkeys(NAMES, value), now_ms=NOW) is None


def test_no_headers_no_wait() -> None:
    """A response without any of the headers says nothing."""
    assert parse({}, now_ms=NOW) is None
    assert parse({"Content-Type": "text/plain"}, now_ms=NOW) is None


@pytest.mark.parametrize("value", ["604801", "9" * 50, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_no_wait_is_longer_than_seven_days(value: str) -> None:
    """A server that asks for a century is held to what Dramatiq can delay."""
    assert parse({"Retry-After": value}, now_ms=NOW) == LONGEST_DELAY


names = st.sampled_from(NAMES) | st.text()
values = st.text() | st.from_regex(r"[0-9]{1,20}(\.[0-9]+)?") | st.binary()
date_parts = st.sampled_from(
    ["Mon,", "1", "06", "Jan", "nov", "99", "1994", "08:49:37", "8:9", "GMT", "+0100", "-", ":", ",", "("]
)


@given(st.dictionaries(names, values), st.integers())
@example({"Retry-After": "Mon, 01 Jan 0001 00:00:00 +2359"}, NOW)
@example({"Retry-After": "Mon, 01 Jan 99999999999 00:00:00 GMT"}, NOW)
@example({"Retry-After": "Mon, 01 Jan 2024 00:00:00 -0000"}, NOW)
@example({"Retry-After": "Mon, 01 Jan 2024 00:00:00 +99999999"}, NOW)
@example({"Retry-After": ", , ,"}, NOW)
def test_whatever_a_server_sends_nothing_is_raised(headers: Any, now_ms: int) -> None:
    """The answer is None or a wait from 0 to 7 days."""
    wait = parse(headers, now_ms=now_ms)
    assert wait is None or 0 <= wait <= LONGEST_DELAY


@given(st.lists(date_parts, max_size=8))
def test_what_looks_like_a_date_never_raises(parts: list[str]) -> None:
    """The standard library's date parser has raised all sorts of errors over the years."""
    wait = parse({"Retry-After": " ".join(parts)}, now_ms=NOW)
    assert wait is None or 0 <= wait <= LONGEST_DELAY

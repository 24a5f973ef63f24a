from __future__ import annotations

from datetime import timedelta

import pytest

from dramatiq_guard.policy.duration import milliseconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (1_500, 1_500), (2.9, 2), (timedelta(seconds=1.5), 1_500), (timedelta(days=7), 604_800_000)],
)
def test_numbers_are_milliseconds_and_timedeltas_are_converted(value: object, expected: int) -> None:
    """A duration is a number of milliseconds or a timedelta."""
    assert milliseconds(value, "min_backoff") == expected


@pytest.mark.parametrize("value", [True, False, "15", None, [1], object])
def test_what_is_no_duration_is_refused_by_name(value: object) -> None:
    """The error says which option is wrong and what it may be; a bool is not a number here."""
    with pytest.raises(TypeError, match=r"min_backoff must be milliseconds \(int\) or a timedelta"):
        milliseconds(value, "min_backoff")


@pytest.mark.parametrize("value", [-1, -0.5, timedelta(seconds=-1)])
def test_a_negative_duration_is_refused(value: object) -> None:
    """No duration is negative."""
    with pytest.raises(ValueError, match="min_backoff must not be negative"):
        milliseconds(value, "min_backoff")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_infinite_duration_is_refused(value: object) -> None:
    """Infinity and NaN are refused rather than overflowing later."""
    with pytest.raises(ValueError, match="must be a finite number"):
        milliseconds(value, "max_backoff")


def test_an_error_about_a_huge_value_stays_short() -> None:
    """The error does not repeat a value of a megabyte."""
    with pytest.raises(TypeError) as caught:
        milliseconds("x" * 1_000_000, "min_backoff")
    assert len(str(caught.value)) < 200

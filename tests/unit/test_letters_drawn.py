"""A letter as it is shown to people, with all that may be missing from it."""

from __future__ import annotations

import io

from rich.console import Console

from dramatiq_guard.cli.letters import show
from dramatiq_guard.dead_letters.letter import Attempt, Letter
from tests.stores.letters import T0
from tests.stores.letters import letter as letter_of


def drawn(letter):
    """What is printed."""
    output = io.StringIO()
    show(letter, Console(file=output, width=200))
    return output.getvalue()


def test_its_attempts_are_shown_and_how_many_were_forgotten():
    """With the wait after each, where there was one."""
    attempts = (
        Attempt(at=T0, type="ValueError", message="no [luck]", place="a.py:pay:7", verdict="retryable", delay=1_500),
        Attempt(at=T0 + 1_500, type="process died", verdict="fatal", rule="crash"),
    )
    text = drawn(letter_of("m", history=attempts, attempts_total=30))

    assert "(2 of 30: the first and the latest)" in text
    assert "ValueError: no [luck]" in text, "what looks like markup is text"
    assert "at a.py:pay:7; retryable by ?; again after" in text
    assert "at ?; fatal by crash\n" in text


def test_all_attempts_are_not_counted():
    """Nothing was forgotten."""
    text = drawn(letter_of("m", history=(Attempt(at=T0, type="ValueError"),), attempts_total=1))
    assert "Attempts" in text
    assert "the first and the latest" not in text


def test_of_a_message_that_nobody_can_decode_the_broker_shows_what_it_held():
    """It has no arguments."""
    letter = Letter.from_raw(b"\xff{no json", queue="default", died_at=T0, broker_id="r-1")
    text = drawn(letter)

    assert "What the broker held" in text
    assert "Arguments" not in text


def test_a_letter_without_an_error_has_no_such_part():
    """An unknown actor raises nothing."""
    assert "The error" not in drawn(letter_of("m", error=""))

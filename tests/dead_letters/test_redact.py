"""Secrets are taken out before anything is written, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.dead_letters.redact import REDACTED, Redaction
from dramatiq_guard.errors import SetupError


@pytest.mark.parametrize(
    "key",
    ["password", "PASSWORD", "db_password", "passwordHash", "apiKey", "X-Api-Key", "STRIPE_SECRET", "authToken", "ssn",
     "cardNumber", "Set-Cookie", "cvv", "session_id"],
)  # fmt: skip
def test_telling_names(key: str) -> None:
    """A name that tells of a secret is recognised in any style."""
    redacted = Redaction().payload((), {key: "s3cret"}, {})

    assert {key: REDACTED} == redacted.kwargs
    assert (f"kwargs.{key}",) == redacted.paths


@pytest.mark.parametrize(
    "key", ["order_id", "max_tokens", "token_count", "passenger", "secretary", "essn_code", "session", "author", "pin"]
)
def test_innocent_names(key: str) -> None:
    """What merely looks alike is left, for each letter that is redacted needlessly cannot be replayed."""
    assert () == Redaction().payload((), {key: "x"}, {}).paths


def test_secrets_in_the_depth() -> None:
    """Dicts and lists are looked through; what holds nothing is nothing to hide."""
    redacted = Redaction().payload(
        ([{"user": "ada", "password": "x"}],), {"card": {"cvv": 123, "token": None}}, {"headers": {"cookie": "c"}}
    )

    assert ([{"user": "ada", "password": REDACTED}],) == redacted.args
    assert {"card": {"cvv": REDACTED, "token": None}} == redacted.kwargs
    assert ("args[0][0].password", "kwargs.card.cvv", "options.headers.cookie") == redacted.paths


def test_positional_arguments_have_the_names_of_parameters() -> None:
    """`login("ada", "s3cret")` hides the second if the actor calls it a password."""
    redacted = Redaction().payload(("ada", "s3cret", "more"), {}, {}, parameter_names=("user", "password"))

    assert ("ada", REDACTED, "more") == redacted.args


def test_what_is_redacted_is_a_copy() -> None:
    """The message itself is not touched."""
    kwargs = {"card": {"cvv": 123}}
    Redaction().payload((), kwargs, {})

    assert {"card": {"cvv": 123}} == kwargs


def test_keys_of_ones_own() -> None:
    """The names can be chosen, and none may be."""
    assert ("kwargs.iban_code",) == Redaction(keys=["iban"]).payload((), {"iban_code": 1, "password": 2}, {}).paths
    assert () == Redaction(keys=()).payload((), {"password": 2}, {}).paths


def test_a_function_sees_every_leaf_and_every_text() -> None:
    """It returns what may be shown."""
    redaction = Redaction(function=lambda path, value: "[iban]" if str(value).startswith("DE") else value)
    redacted = redaction.payload(("DE12", 5), {"to": {"account": ["DE13", "x"]}}, {})

    assert ("[iban]", 5) == redacted.args
    assert {"to": {"account": ["[iban]", "x"]}} == redacted.kwargs
    assert ("args[0]", "kwargs.to.account[0]") == redacted.paths
    assert "[iban]" == redaction.text("DE14 is overdrawn")


def broken(path: str, value: Any) -> Any:
    raise ZeroDivisionError(value)


def test_a_function_that_raises_costs_the_arguments_and_not_the_letter() -> None:
    """The letter says that redaction failed, and shows nothing."""
    message = {
        "queue_name": "q",
        "actor_name": "a",
        "args": ("s3cret",),
        "kwargs": {},
        "options": {"redis_message_id": "r1"},
        "message_id": "m",
        "message_timestamp": 1,
    }
    letter = Letter.from_message(
        message,
        reason="permanent",
        died_at=2,
        exception=ValueError("s3cret"),
        redaction=Redaction(function=broken),
    )

    assert ("[redaction failed: ZeroDivisionError]",) == letter.args
    assert "s3cret" not in letter.to_json()
    assert "r1" == letter.broker_id
    assert not letter.replayable


def test_endless_depth_ends() -> None:
    """A payload nested beyond reason is cut, not followed."""
    deep: Any = "leaf"
    for _ in range(500):
        deep = [deep]

    assert Redaction().payload((deep,), {}, {}).paths


@pytest.mark.parametrize("wrong", [{"keys": "password"}, {"keys": [1]}, {"function": "f"}])
def test_wrong_set_up_is_refused(wrong: dict[str, Any]) -> None:
    """A string in place of a collection of names would match its letters."""
    with pytest.raises(SetupError, match="redact"):
        Redaction(**wrong)

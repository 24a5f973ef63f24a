"""A letter holds everything, survives its own versions, and says whether it can be sent again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dramatiq_guard.dead_letters.letter import Attempt, Letter, Standing, letter_id_of, replay_marker_of
from dramatiq_guard.dead_letters.redact import Redaction
from dramatiq_guard.delivery import CARRIER

MARKER = {"of": "m", "n": 3, "token": "t", "enqueued_at": 7}


def message(**known: Any) -> dict[str, Any]:
    return {
        "queue_name": "default",
        "actor_name": "charge",
        "args": ("order-1",),
        "kwargs": {},
        "options": {"max_retries": 0, "redis_message_id": "r1"},
        "message_id": "m",
        "message_timestamp": 1,
        **known,
    }


def letter(message: dict[str, Any], **known: Any) -> Letter:
    return Letter.from_message(message, **{"reason": "permanent", "died_at": 9, **known})


def test_it_holds_the_message_exactly() -> None:
    """What is kept is what `Message` is made of."""
    assert message() == letter(message()).payload
    assert "r1" == letter(message()).broker_id


def test_its_queue_is_the_canonical_one() -> None:
    """A message that died on its way through the delay queue is replayed on its own."""
    assert "default" == letter(message(queue_name="default.DQ")).queue


def test_its_id_is_the_messages_and_counts_replays() -> None:
    """The same death is the same letter; the death of a replay is another."""
    again = letter(message(options={CARRIER: {"replay": MARKER}}))

    assert "m" == letter(message()).letter_id
    assert ("m~3", "m", 3, 7) == (again.letter_id, again.replay_of, again.replay_n, again.message_timestamp)


@pytest.mark.parametrize(
    "rubbish", [None, 1, [], {"replay": None}, {"replay": {"of": 1, "n": 1}}, {"replay": {"of": "m"}}]
)
def test_rubbish_in_the_options_is_no_replay(rubbish: Any) -> None:
    """Anybody may write into message options."""
    assert {} == replay_marker_of({CARRIER: rubbish})
    assert "m" == letter_id_of("m", {CARRIER: rubbish})


def test_what_json_cannot_hold_leaves_its_repr() -> None:
    """The letter is written all the same, and says that it cannot be sent again."""

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for args, shown in (
        (({1, 2},), "{1, 2}"),
        ((b"x" * 10_000,), "b'xxx"),
        ((Odd(),), "Odd whose __repr__ raised RuntimeError"),
        (({(1, 2): 3},), "(1, 2)"),
        ((cyclic,), "[...]"),
    ):
        written = letter(message(args=args))

        assert shown in written.to_json()
        assert len(written.to_json()) < 10_000
        assert written.unencodable
        assert "cannot be encoded" in (written.unreplayable or "")


def test_a_redacted_letter_says_what_is_missing() -> None:
    """A replay must never send the redaction."""
    written = letter(message(kwargs={"password": "x"}), redaction=Redaction())

    assert ("kwargs.password",) == written.redacted
    assert "kwargs.password" in (written.unreplayable or "")
    assert letter(message(), redaction=Redaction()).replayable


def test_what_cannot_be_decoded_becomes_a_letter() -> None:
    """Its bytes are kept, readable and bounded."""
    written = Letter.from_raw(b"\xff{broken" + b"x" * 100_000, queue="default.DQ", died_at=9)

    assert ("undecodable", "default", "") == (written.reason, written.queue, written.actor)
    assert (written.raw or "").startswith("\\xff{broken")
    assert len(written.raw or "") < 70_000
    assert not written.replayable
    assert written.letter_id == Letter.from_raw(b"\xff{broken" + b"x" * 100_000, queue="q", died_at=10).letter_id


def test_it_survives_json() -> None:
    """What is written is what is read."""
    written = letter(
        message(), exception=ValueError("x"), history=(Attempt(at=1, type="KeyError", delay=5),), trace_id="abc"
    )

    read = Letter.from_json(written.to_json())

    assert written.to_json() == read.to_json()
    assert written.error == read.error
    assert written.history == read.history


def test_fields_of_a_later_version_are_ignored() -> None:
    """An old worker reads what a new one wrote."""
    data = json.loads(letter(message(), exception=ValueError("x"), history=(Attempt(at=1),)).to_json())
    for part in (data, data["error"], data["history"][0], data["standing"]):
        part["invented_later"] = {"x": 1}
    data["standing"]["replay"] = {"n": 1, "token": "t", "invented_later": 1}
    data["standing"]["events"] = [{"at": 1, "what": "replay", "invented_later": 1}]

    assert 1 == Letter.from_json(json.dumps(data)).standing.replay.n  # type: ignore[union-attr]


def test_a_letter_of_the_bare_minimum_is_read() -> None:
    """What an older version did not write yet has a default."""
    data = {
        name: value
        for name, value in letter(message()).as_dict().items()
        if name in ("letter_id", "message_id", "actor", "queue", "reason", "died_at", "message_timestamp")
    }

    assert Standing(state="dead", since=9) == Letter.from_dict(data).standing


@pytest.mark.parametrize("text", ["[]", '{"letter_id": "m"}', "not json"])
def test_what_is_no_letter_is_refused(text: str) -> None:
    """An import of the wrong file says so."""
    with pytest.raises(ValueError, match=r"not a letter|Expecting"):
        Letter.from_json(text)


def test_a_timestamp_that_is_no_number_is_replaced() -> None:
    """A foreign producer may write anything; stores want numbers."""
    assert 9 == letter(message(message_timestamp="yesterday")).message_timestamp


def test_it_knows_the_key_of_its_work() -> None:
    """And until when the key is remembered; a letter that an older version wrote reads as one without a key."""
    written = letter(message(), key="default/charge/message/m", remembered_until=7)
    old = json.loads(written.record())
    del old["key"], old["remembered_until"]

    assert written == Letter.from_json(written.to_json())
    assert ("", None) == (Letter.from_dict(old).key, Letter.from_dict(old).remembered_until)
    assert ("", None) == (letter(message()).key, letter(message()).remembered_until)

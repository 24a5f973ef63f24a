"""What becomes of a part that cannot be settled, of a replay that has been replaced, and of old letters."""

from __future__ import annotations

from types import SimpleNamespace

import dramatiq
import pytest
from dramatiq.middleware import SkipMessage

from dramatiq_guard import DeadLetter
from dramatiq_guard.delivery import Due
from dramatiq_guard.errors import Defer, SetupError, StoreError, StoreUnavailable
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.stores.letters import T0
from tests.stores.letters import letter as letter_of
from tests.unit.conftest import deliver


@pytest.fixture
def store():
    """Where letters are kept."""
    return MemoryDeadLetters()


@pytest.fixture
def guard(store):
    """The middleware, on no broker."""
    return DeadLetter(store)


@pytest.fixture
def failed(broker):
    """A delivery on a broker that has been failed."""
    delivery = deliver("job", args=())
    delivery.stack = SimpleNamespace(broker=broker)
    delivery.message.fail()
    return delivery


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"on_dead_letter": 7}, "on_dead_letter must be a callable, an actor or an actor's name, not 7"),
        ({"max_letters": 0}, "max_letters must be an integer from 1, not 0"),
        ({"max_letters": True}, "max_letters"),
        ({"retention": "30d"}, "retention"),
    ],
)
def test_a_wrong_argument_is_named(store, options, complaint):
    """When the middleware is made."""
    with pytest.raises(SetupError, match=complaint):
        DeadLetter(store, **options)
    with pytest.raises(SetupError, match="store must keep dead letters"):
        DeadLetter(object())


@pytest.mark.parametrize("part", ["retry", "defer", "requeue"])
def test_a_copy_that_cannot_be_sent_becomes_the_messages_letter(guard, store, failed, part):
    """With what stood in its way."""
    guard.give_up(failed, Due(part, lambda: None), TypeError("a set is no JSON"))
    for due in failed.dues:
        due.perform()

    (letter,) = store.page().letters
    assert (letter.message_id, letter.reason, letter.error.message) == ("job", "unencodable", "a set is no JSON")


def test_a_message_that_is_owed_and_cannot_be_sent_gets_a_letter_of_its_own(guard, store, failed):
    """The message that owed it was done."""
    owed = dramatiq.Message("default", "next", (1,), {}, {}, message_id="owed")
    guard.give_up(failed, Due("pipeline", lambda: None, owed), TypeError("a set is no JSON"))
    for due in failed.dues:
        due.perform()

    (letter,) = store.page().letters
    assert (letter.message_id, letter.actor, letter.reason) == ("owed", "next", "unencodable")


def test_what_is_no_message_leaves_no_letter(guard, failed):
    """A callable that raises, say; the settlement has logged it."""
    guard.give_up(failed, Due("on_dead_letter", lambda: None), ValueError())
    assert failed.dues == []


def test_a_letter_that_its_store_refuses_is_in_the_log_whole(guard, failed, caplog):
    """It is the last place that is left."""
    guard.give_up(failed, Due("letter", lambda: None), StoreError("too large"))
    assert failed.dues == []
    assert "refuses the letter of message 'job'" in caplog.text
    assert '"message_id":"job"' in caplog.text.replace('": "', '":"')


def replay(token="t"):
    """A delivery that is a replay of a letter."""
    return deliver("job", dramatiq_guard={"replay": {"of": "letter-1", "n": 1, "token": token}})


def test_a_replay_that_another_has_replaced_does_not_run(guard, store, monkeypatch, caplog):
    """It is dropped, and stores no result."""
    monkeypatch.setattr(store, "admit_replay", lambda of, token, *, now: False)
    delivery = replay()
    with pytest.raises(SkipMessage):
        guard.around(delivery, lambda: pytest.fail("it ran"))
    assert delivery.message.options["store_results"] is False
    assert "another replay has replaced" in caplog.text


def test_a_replay_waits_for_the_store_that_knows_whether_it_may_run(guard, store, monkeypatch):
    """It is put off."""

    def out(*_, **__):
        raise StoreUnavailable("out")

    monkeypatch.setattr(store, "admit_replay", out)
    with pytest.raises(Defer):
        guard.around(replay(), lambda: pytest.fail("it ran"))


@pytest.mark.parametrize("delivery", [replay(), replay(token=""), deliver("job")], ids=["counts", "untold", "none"])
def test_all_other_messages_pass(guard, store, monkeypatch, delivery):
    """A replay that counts among them."""
    monkeypatch.setattr(store, "admit_replay", lambda of, token, *, now: True)
    assert guard.around(delivery, lambda: "result") == "result"


def test_the_success_of_a_replay_is_owed_to_its_letter(guard, store, monkeypatch):
    """Under the token of this replay."""
    recorded = []
    monkeypatch.setattr(store, "record_outcome", lambda *what, now: recorded.append(what))
    delivery = replay()
    delivery.returned = True
    guard.note(delivery)
    for due in delivery.dues:
        due.perform()
    assert recorded == [("letter-1", "t", "succeeded")]


def test_old_letters_are_removed_once_in_a_while_and_never_silently(store, virtual, caplog):
    """By count here; how many nobody had looked at is said."""
    virtual.time = T0
    guard = DeadLetter(store, max_letters=2)
    for number in range(5):
        guard._write(letter_of(f"m{number}", at=number))
        virtual.time += 3_600_000

    assert {letter.message_id for letter in store.page().letters} == {"m3", "m4"}
    assert caplog.text.count("1 beyond the latest 2; nobody had handled 1 of them") == 3


def test_letters_that_cannot_be_removed_are_no_reason_not_to_write_one(guard, store, monkeypatch, caplog):
    """The next one tries again."""

    def broken(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(store, "purge", broken)
    guard._write(letter_of("m"))
    assert store.depth() == 1
    assert "the next letter tries again" in caplog.text


def test_a_letter_that_is_there_is_not_told_twice(guard, virtual, caplog):
    """It was written before a crash."""
    virtual.time = T0
    guard._write(letter_of("m"))
    guard._write(letter_of("m"))
    assert caplog.text.count("is dead") == 1

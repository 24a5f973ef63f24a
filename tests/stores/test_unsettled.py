"""What every store does alike with letters that may have to be withdrawn."""

from __future__ import annotations

import threading

import pytest

from dramatiq_guard.stores.protocols import NOTES_KEPT, DeadLetterStore, Filter, Unsettled

from .letters import T0, death_of_replay, letter
from .test_conformance import begin, ids, token_of

Store = DeadLetterStore


def unsettled(store: Store, before: int = 1_000) -> list[str]:
    return [each.letter_id for each in store.unsettled(before=T0 + before)]


def test_a_new_letter_is_unsettled_until_its_message_is_buried(store: Store) -> None:
    """The note names letter and message, and goes when it is told that the message is gone for good."""
    store.put(letter("a"))
    store.put(letter("b", 1, options={"dramatiq_guard": {"replay": {"of": "b", "n": 2, "token": "t"}}}))

    assert (Unsettled("b~2", "b"), Unsettled("a", "a")) == store.unsettled(before=T0 + 2)

    assert 1 == store.settled(["a", "nobody"], now=T0 + 3)
    assert 0 == store.settled(["a"], now=T0 + 4)
    assert 0 == store.settled([], now=T0 + 4)
    assert ["b~2"] == unsettled(store)


def test_the_latest_deaths_come_first(store: Store) -> None:
    """So many at a time, and none that is too fresh to be anybody's concern."""
    for at in range(6):
        store.put(letter(f"m{at}", at // 2))

    assert ["m3", "m2", "m1"] == [each.letter_id for each in store.unsettled(before=T0 + 2, limit=3)]
    assert [] == unsettled(store, before=0)


def test_a_message_that_did_not_die_after_all_takes_its_letter_back(store: Store) -> None:
    """Nothing of it stays, neither in the counts nor in the groups; and it may die another time."""
    store.put(letter("m"))
    store.put(letter("other", fingerprint="rare", actor="mail"))

    assert store.withdraw("m", now=T0 + 1)
    assert store.withdraw("other", now=T0 + 1)

    assert store.get("m") is None
    assert [] == ids(store.page(Filter(actor="charge")).letters)
    assert (0, None, (), 0) == (store.depth(), store.oldest(), store.groups(), store.count())
    assert [] == unsettled(store)
    assert not store.withdraw("m", now=T0 + 2)
    assert store.put(letter("m", 9))
    assert (1, T0 + 9) == (store.depth(), store.oldest())
    assert ["m"] == unsettled(store)


def test_a_settled_letter_stays(store: Store) -> None:
    """Its message is buried: what succeeds now is another copy, and the letter is the only trace of this one."""
    store.put(letter("m"))
    store.settled(["m"], now=T0 + 1)

    assert not store.withdraw("m", now=T0 + 2)
    assert not store.withdraw("nobody", now=T0 + 2)
    assert 1 == store.depth()


def test_a_death_that_is_written_again_settles_nothing_and_notes_nothing(store: Store) -> None:
    """The barrier repeats itself, before the burial and, late, after it."""
    store.put(letter("m"))
    store.put(letter("m", 5))
    assert ["m"] == unsettled(store)

    store.settled(["m"], now=T0 + 6)
    store.put(letter("m"))

    assert [] == unsettled(store)


@pytest.mark.parametrize("state", ["discarded", "replaying", "replayed"])
def test_a_letter_in_somebody_s_hands_is_not_withdrawn(store: Store, state: str) -> None:
    """Whoever works on it shall find it; once it is dead again it may go."""
    store.put(letter("m"))
    if state == "discarded":
        store.discard(["m"], now=T0 + 1)
    else:
        (taken,) = begin(store, "m").letters
        if state == "replayed":
            store.finish_replay([token_of(taken)], now=T0 + 2)

    assert not store.withdraw("m", now=T0 + 3)
    assert ["m"] == ids(store.page(Filter(states=(state,))).letters)

    if state == "replaying":
        store.abandon_replay([token_of(taken)], now=T0 + 4)
    else:
        store.restore(["m"], now=T0 + 4)
    assert store.withdraw("m", now=T0 + 5)


def test_a_letter_that_died_again_is_unsettled_again(store: Store) -> None:
    """A new death of the same message is a new burial."""
    store.put(letter("m"))
    store.settled(["m"], now=T0 + 1)
    store.discard(["m"], now=T0 + 2)

    assert store.put(letter("m", 5))

    assert ["m"] == unsettled(store)
    assert [] == unsettled(store, before=5)
    assert store.withdraw("m", now=T0 + 6)


def test_a_replay_that_did_not_die_after_all(store: Store) -> None:
    """Its letter is withdrawn, and the letter it came from hears of the success instead of the death."""
    store.put(letter("m"))
    (taken,) = begin(store, "m").letters
    store.put(death_of_replay(taken, 20))

    assert store.withdraw("m~1", now=T0 + 30)
    assert store.record_outcome(*token_of(taken), "succeeded", now=T0 + 31)

    read = store.get("m")
    assert read is not None
    assert read.standing.replay is not None
    assert ("succeeded", None) == (read.standing.replay.outcome, read.standing.replay.died_as)


def test_notes_go_with_their_letters_and_after_eight_days(store: Store) -> None:
    """No broker delivers a message again that late, and a note must not outlive what it is about."""
    store.put(letter("old", 0))
    store.put(letter("young", 10))
    store.put(letter("youngest", 20))

    store.purge(now=T0 + 100, max_age=95)
    assert ["youngest", "young"] == unsettled(store)

    store.purge(now=T0 + 15 + NOTES_KEPT)
    assert ["youngest"] == unsettled(store)
    assert 2 == store.depth()
    assert not store.withdraw("young", now=T0 + 15 + NOTES_KEPT)


def test_of_settling_and_withdrawing_at_once_one_comes_first(store: Store) -> None:
    """A letter is withdrawn, or its note was gone before: never both, never neither."""
    for at in range(10):
        name = f"m{at}"
        store.put(letter(name))
        answers: dict[str, int] = {}
        start = threading.Barrier(2)

        def settle(name: str = name, start: threading.Barrier = start, answers: dict[str, int] = answers) -> None:
            start.wait()
            answers["settled"] = store.settled([name], now=T0 + 1)

        def withdraw(name: str = name, start: threading.Barrier = start, answers: dict[str, int] = answers) -> None:
            start.wait()
            answers["withdrawn"] = store.withdraw(name, now=T0 + 1)

        threads = [threading.Thread(target=settle), threading.Thread(target=withdraw)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert 1 == answers["settled"] + answers["withdrawn"]
        assert answers["withdrawn"] == (store.get(name) is None)

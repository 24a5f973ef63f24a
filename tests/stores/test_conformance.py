"""What every store of letters does alike."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dramatiq_guard.dead_letters.letter import Attempt, Letter
from dramatiq_guard.errors import SetupError
from dramatiq_guard.stores.protocols import DAY, DeadLetterStore, Filter

from .letters import T0, death_of_replay, letter

Store = DeadLetterStore


def ids(letters: Any) -> list[str]:
    return [each.letter_id for each in letters]


def begin(store: Store, *letter_ids: str, at: int = 10, owner: str = "one", **known: Any) -> Any:
    return store.begin_replay(letter_ids, owner=owner, now=T0 + at, **known)


def token_of(taken: Letter) -> tuple[str, str]:
    assert taken.standing.replay is not None
    return taken.letter_id, taken.standing.replay.token


# -- Writing and reading ---------------------------------------------------------------------------------------------


def test_what_was_written_is_read(store: Store) -> None:
    """A letter comes back as it was put, whatever its arguments hold."""
    written = letter(
        args=("Ünïcode ☃ \0", 2**60, None, [1.5, {"deep": [True]}]),
        kwargs={"key": "va\ud800lue"},
        options={"redis_message_id": "r1", "max_retries": 0},
        history=(Attempt(at=T0, type="ValueError", place="a.py:f:1", delay=100), Attempt(at=T0 + 1, why="gone")),
        attempts_total=2,
        trace_id="t",
        code_version="v1",
        redelivered=True,
        key='default/charge/key/["str","☃"]',
        remembered_until=T0 + 2**40,
    )

    assert store.put(written) is True

    read = store.get("m")
    assert read is not None
    assert written.to_json() == read.to_json()
    assert "dead" == read.state
    assert T0 == read.standing.since


def test_a_missing_letter_is_none(store: Store) -> None:
    """There is no letter where none was put."""
    assert store.get("nobody") is None


def test_the_same_death_is_written_once(store: Store) -> None:
    """A barrier that repeats itself, and a message redelivered after a crash, make no second letter."""
    assert store.put(letter("m", 0)) is True
    assert store.put(letter("m", 0)) is False
    assert store.put(letter("m", 5, reason="permanent")) is False

    read = store.get("m")
    assert read is not None
    assert "exhausted" == read.reason
    assert 1 == store.depth()


def test_a_name_that_databases_refuse_is_no_obstacle(store: Store) -> None:
    """An unknown actor may be called anything."""
    store.put(letter("m", actor="a\0b\ud800", reason="unknown_actor"))

    assert ["m"] == ids(store.page(Filter(actor="a\0b\ud800")).letters)


def test_of_writers_at_once_one_is_the_first(store: Store) -> None:
    """Threads that put the same letter agree on who was first."""
    new: list[bool] = []
    threads = [threading.Thread(target=lambda: new.append(store.put(letter()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 == sum(new)
    assert 8 == len(new)


# -- Paging and filters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("where", [Filter(), Filter(actor="a1"), Filter(states=("dead", "discarded"))])
def test_pages_cover_everything_once(store: Store, limit: int, where: Filter) -> None:
    """Whatever the size of a page, all pages together are all letters, the latest death first, ids deciding ties."""
    for at in range(20):
        store.put(letter(f"m{at:02}", at // 6, actor=f"a{at % 2}", fingerprint=f"f{at % 3}"))
    store.discard(["m03", "m04", "m10"], now=T0)

    found, cursor, pages = [], None, 0
    while True:
        page = store.page(where, limit=limit, cursor=cursor)
        assert len(page.letters) <= limit
        found += ids(page.letters)
        pages += 1
        cursor = page.cursor
        if cursor is None:
            break

    expected = [f"m{at:02}" for at in reversed(range(20))]
    if where.actor:
        expected = [each for each in expected if int(each[1:]) % 2 == 1]
    if "discarded" not in where.states:
        expected = [each for each in expected if each not in ("m03", "m04", "m10")]
    assert expected == found
    assert max(1, -(-len(expected) // limit)) == pages


def test_pages_stand_still_while_letters_come_and_go(store: Store) -> None:
    """A cursor survives new letters, and the loss of the very letter that it points at."""
    for at in range(6):
        store.put(letter(f"m{at}", at))
    first = store.page(limit=2)
    store.put(letter("new", 99))
    store.discard(["m4"], now=T0)

    second = store.page(limit=2, cursor=first.cursor)

    assert ["m5", "m4"] == ids(first.letters)
    assert ["m3", "m2"] == ids(second.letters)


def test_a_foreign_cursor_is_refused(store: Store) -> None:
    """A cursor that no page returned gets an error that says so."""
    with pytest.raises(ValueError, match="not a cursor"):
        store.page(cursor="page 2")


def test_an_empty_page_is_refused(store: Store) -> None:
    """A page holds at least one letter."""
    with pytest.raises(ValueError, match="at least one"):
        store.page(limit=0)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Filter(), ["d", "c", "b", "a"]),
        (Filter(queue="slow"), ["b"]),
        (Filter(actor="mail"), ["c"]),
        (Filter(reason="permanent"), ["d"]),
        (Filter(error_type="KeyError"), ["c"]),
        (Filter(error_type="builtins.KeyError"), ["c"]),
        (Filter(error_type=""), ["d"]),
        (Filter(fingerprint="other"), ["c", "b"]),
        (Filter(fingerprint="other", queue="slow"), ["b"]),
        (Filter(fingerprint="other", queue="nowhere"), []),
        (Filter(died_after=T0 + 10), ["d", "c", "b"]),
        (Filter(died_before=T0 + 10), ["a"]),
        (Filter(died_after=T0 + 10, died_before=T0 + 30), ["c", "b"]),
        (Filter(actor="charge", died_after=T0 + 10, died_before=T0 + 30), ["b"]),
        (Filter(text="ORDER-7"), ["c", "a"]),
        (Filter(text="order-7", actor="mail"), ["c"]),
        (Filter(text="%"), []),
        (Filter(states=("discarded",)), ["e"]),
        (Filter(states=("dead", "discarded")), ["e", "d", "c", "b", "a"]),
        (Filter(states=("replaying",)), []),
    ],
    ids=repr,
)
def test_filters(store: Store, where: Filter, expected: list[str]) -> None:
    """Each condition narrows what is found; page, refs, count and groups agree."""
    store.put(letter("a", 0, args=("order-7",)))
    store.put(letter("b", 10, queue="slow", fingerprint="other"))
    store.put(letter("c", 20, actor="mail", error="KeyError", fingerprint="other", kwargs={"to": "Order-77"}))
    store.put(letter("d", 30, reason="permanent", error="", fingerprint="third"))
    store.put(letter("e", 40))
    store.discard(["e"], now=T0 + 50)

    assert expected == ids(store.page(where).letters)
    assert expected == [ref.letter_id for ref in store.refs(where)[0]]
    assert len(expected) == store.count(where)
    assert len(expected) == sum(each.count for each in store.groups(where))


def test_an_unknown_state_is_refused() -> None:
    """A filter for a state that there is not names those that there are."""
    with pytest.raises(SetupError, match="dead, replaying, replayed, discarded"):
        Filter(states=("buried",))


def test_groups_sum_up_each_bug(store: Store) -> None:
    """A group counts the letters of one fingerprint and says where and when they arose; the biggest comes first."""
    store.put(letter("a", 0))
    store.put(letter("b", 5, actor="refund", queue="slow", reason="permanent"))
    store.put(letter("c", 9))
    store.put(letter("d", 7, fingerprint="rare", error="KeyError"))
    store.put(letter("e", 99))
    store.discard(["e"], now=T0)

    biggest, rare = store.groups()

    assert ("bug", 3, T0, T0 + 9, "c") == (
        biggest.fingerprint,
        biggest.count,
        biggest.first_seen,
        biggest.last_seen,
        biggest.latest,
    )
    assert ("charge", "refund") == biggest.actors
    assert ("default", "slow") == biggest.queues
    assert ("exhausted", "permanent") == biggest.reasons
    assert ("rare", 1, ("KeyError",)) == (rare.fingerprint, rare.count, rare.error_types)


def test_refs_carry_when_the_message_was_enqueued(store: Store) -> None:
    """A replay can be put in the order of the first enqueueing."""
    store.put(letter("late", 0, enqueued_at=T0 - 1))
    store.put(letter("early", 9, enqueued_at=T0 - 9))

    refs, _ = store.refs()

    assert ["early", "late"] == [ref.letter_id for ref in sorted(refs)]


def test_depth_and_oldest(store: Store) -> None:
    """Each state is counted by itself."""
    assert (0, None) == (store.depth(), store.oldest())
    store.put(letter("a", 3))
    store.put(letter("b", 1))
    store.put(letter("c", 2))
    store.discard(["b"], now=T0)

    assert (2, T0 + 2) == (store.depth(), store.oldest())
    assert (1, T0 + 1) == (store.depth("discarded"), store.oldest("discarded"))


# -- Replay ----------------------------------------------------------------------------------------------------------


def test_a_replay_from_beginning_to_success(store: Store) -> None:
    """The letter goes from dead to replaying to replayed, and learns of the success."""
    store.put(letter())

    begun = begin(store, "m", by="ada", why="fixed in v2")
    (taken,) = begun.letters
    assert ("replaying", "ada", "fixed in v2", 1) == (
        taken.state,
        taken.standing.by,
        taken.standing.why,
        taken.standing.replay.n,
    )
    assert 1 == store.finish_replay([token_of(taken)], now=T0 + 11)
    assert store.admit_replay(*token_of(taken), now=T0 + 12)
    assert store.record_outcome(*token_of(taken), "succeeded", now=T0 + 13)

    read = store.get("m")
    assert read is not None
    sent = read.standing.replay
    assert sent is not None
    assert "replayed" == read.state
    assert (T0 + 11, T0 + 12, "succeeded", T0 + 13) == (
        sent.enqueued_at,
        sent.delivered_at,
        sent.outcome,
        sent.outcome_at,
    )
    assert [("replay", "ada")] == [(event.what, event.by) for event in read.standing.events]
    assert [] == ids(store.page().letters)


def test_a_double_click_replays_once(store: Store) -> None:
    """The second of two replays takes nothing and is told why."""
    store.put(letter("a"))

    first, second = begin(store, "a", "nobody"), begin(store, "a", owner="two")

    assert ["a"] == ids(first.letters)
    assert (("nobody", "missing"),) == first.refused
    assert () == second.letters
    assert (("a", "replaying"),) == second.refused


def test_of_replays_at_once_one_takes_each_letter(store: Store) -> None:
    """However many replay at once, each letter is taken by one."""
    names = [f"m{at}" for at in range(20)]
    for name in names:
        store.put(letter(name))
    taken: list[str] = []
    threads = [
        threading.Thread(target=lambda owner=owner: taken.extend(ids(begin(store, *names, owner=owner).letters)))
        for owner in ("one", "two", "three", "four")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(names) == sorted(taken)


def test_letters_are_taken_in_the_order_asked_for(store: Store) -> None:
    """The caller decides the order of a replay."""
    for name in "abc":
        store.put(letter(name))

    assert ["c", "a", "b"] == ids(begin(store, "c", "a", "b").letters)


def test_a_replay_that_died_is_taken_over_when_its_lease_is_over(store: Store) -> None:
    """Not before; and the copy that the first may have sent is then turned away, so the job runs once."""
    store.put(letter())
    (first,) = begin(store, "m", lease=100).letters

    assert (("m", "replaying"),) == begin(store, "m", at=50, owner="two").refused
    (second,) = begin(store, "m", at=110, owner="two").letters

    assert first.standing.replay.n == second.standing.replay.n
    assert not store.admit_replay(*token_of(first), now=T0 + 111)
    assert store.admit_replay(*token_of(second), now=T0 + 112)
    assert 0 == store.finish_replay([token_of(first)], now=T0 + 113)


def test_a_replay_that_died_after_its_copy_arrived_is_not_taken_over(store: Store) -> None:
    """Once the copy has arrived the letter is replayed, whatever became of the sender."""
    store.put(letter())
    (taken,) = begin(store, "m", lease=100).letters

    assert store.admit_replay(*token_of(taken), now=T0 + 20)

    assert (("m", "replayed"),) == begin(store, "m", at=500).refused
    assert store.admit_replay(*token_of(taken), now=T0 + 501), "its retries and redeliveries are the same copy"


def test_an_abandoned_replay_leaves_the_letter_dead(store: Store) -> None:
    """What was not handed to the broker can be replayed again; a copy that got there all the same is turned away."""
    store.put(letter())
    (taken,) = begin(store, "m").letters

    assert 1 == store.abandon_replay([token_of(taken)], now=T0 + 11, why="broker down")

    read = store.get("m")
    assert read is not None
    assert ("dead", None, "broker down") == (read.state, read.standing.replay, read.standing.why)
    assert not store.admit_replay(*token_of(taken), now=T0 + 12)
    assert ["m"] == ids(begin(store, "m", at=13).letters)


def test_the_copy_of_a_letter_that_is_gone_may_run(store: Store) -> None:
    """Retention does not take a message's life."""
    assert store.admit_replay("purged", "token", now=T0)


def test_a_replay_that_dies_is_linked_both_ways(store: Store) -> None:
    """Each letter names the other, also when the sender never came to note that it had sent."""
    store.put(letter())
    (taken,) = begin(store, "m").letters
    again = death_of_replay(taken, 30)

    assert store.put(again) is True
    assert store.put(again) is False

    old, new = store.get("m"), store.get("m~1")
    assert old is not None
    assert new is not None
    assert ("m", 1, "dead") == (new.replay_of, new.replay_n, new.state)
    assert ("replayed", "died", "m~1", T0 + 30) == (
        old.state,
        old.standing.replay.outcome,
        old.standing.replay.died_as,
        old.standing.replay.outcome_at,
    )
    (next_one,) = begin(store, "m~1", at=40).letters
    assert 2 == next_one.standing.replay.n
    store.put(death_of_replay(next_one, 50))
    assert store.get("m~2") is not None


def test_another_death_of_a_replayed_letter_shows(store: Store) -> None:
    """A copy that no replay sent, which dies after its letter was dealt with, is not swallowed."""
    store.put(letter("m", 0))
    store.discard(["m"], now=T0 + 5, by="ada")

    assert store.put(letter("m", 0)) is False, "this is the barrier repeating itself"
    assert store.put(letter("m", 9, reason="permanent")) is True

    read = store.get("m")
    assert read is not None
    assert ("dead", "permanent", T0 + 9) == (read.state, read.reason, read.standing.since)
    assert ["discarded", "died again"] == [event.what for event in read.standing.events]
    assert [1] == [group.count for group in store.groups()]


# -- Laying aside ----------------------------------------------------------------------------------------------------


def test_discard_and_restore(store: Store) -> None:
    """Only what is dead is discarded, only what is discarded is restored, and each is noted."""
    store.put(letter("a"))
    store.put(letter("b"))
    begin(store, "b")

    assert ("a",) == store.discard(["a", "b", "nobody"], now=T0 + 20, by="ada", why="test data")
    assert () == store.discard(["a"], now=T0 + 21)
    assert ("a",) == store.restore(["a", "b", "nobody"], now=T0 + 22, by="bob")

    read = store.get("a")
    assert read is not None
    assert ("dead", T0 + 22, "bob") == (read.state, read.standing.since, read.standing.by)
    assert [("discarded", "ada", "test data"), ("restored", "bob", "")] == [
        (event.what, event.by, event.why) for event in read.standing.events
    ]


def test_a_replay_that_was_never_heard_of_can_be_restored(store: Store) -> None:
    """If the broker lost the copy the letter can be taken back; if the copy turns up after all it is turned away."""
    for name in ("lost", "arrived"):
        store.put(letter(name))
    lost, arrived = begin(store, "lost", "arrived").letters
    store.finish_replay([token_of(lost), token_of(arrived)], now=T0 + 11)
    store.admit_replay(*token_of(arrived), now=T0 + 12)

    assert ("lost",) == store.restore(["lost", "arrived"], now=T0 + 20)
    assert not store.admit_replay(*token_of(lost), now=T0 + 21)
    (again,) = begin(store, "lost", at=22).letters
    assert 2 == again.standing.replay.n


# -- Retention -------------------------------------------------------------------------------------------------------


def test_what_is_too_old_is_removed_and_named(store: Store) -> None:
    """Retention says what it took, and how much of it nobody had dealt with."""
    store.put(letter("old", 0))
    store.put(letter("old and discarded", 1))
    store.put(letter("young", 10 * DAY))
    store.discard(["old and discarded"], now=T0)

    purged = store.purge(now=T0 + 30 * DAY + 2)

    assert {"old", "old and discarded"} == set(purged.letter_ids)
    assert (2, 0, 1, False) == (purged.by_age, purged.by_count, purged.never_handled, purged.more)
    assert ["young"] == ids(store.page(Filter(states=("dead", "discarded"))).letters)
    assert store.get("old") is None
    assert 1 == store.count()
    assert 0 == store.purge(now=T0 + 30 * DAY + 2).total


def test_of_too_many_those_that_were_dealt_with_go_first(store: Store) -> None:
    """Then the oldest; what is being replayed stays."""
    for at, name in enumerate(("replaying", "dead", "discarded", "replayed", "young")):
        store.put(letter(name, at))
    (taken,) = begin(store, "replayed").letters
    store.finish_replay([token_of(taken)], now=T0)
    begin(store, "replaying")
    store.discard(["discarded"], now=T0)

    first = store.purge(now=T0, max_count=3)
    second = store.purge(now=T0, max_count=2)
    third = store.purge(now=T0, max_count=0)

    assert ("replayed", "discarded") == first.letter_ids
    assert (0, 2, 0) == (first.by_age, first.by_count, first.never_handled)
    assert (("dead",), 1) == (second.letter_ids, second.never_handled)
    assert ("young",) == third.letter_ids
    assert 1 == store.depth("replaying")


def test_retention_works_in_steps(store: Store) -> None:
    """One call removes so many at most, and says that there is more."""
    for at in range(5):
        store.put(letter(f"m{at}", at))

    assert [(2, True), (2, True), (1, False)] == [
        (purged.total, purged.more) for purged in (store.purge(now=T0 + 31 * DAY, limit=2) for _ in range(3))
    ]


def test_it_answers(store: Store) -> None:
    """A store that is there and set up raises nothing."""
    store.ping()

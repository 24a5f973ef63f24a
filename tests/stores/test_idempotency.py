"""What every store of idempotency keys does alike: each row of the table of its protocol, and what follows from it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dramatiq_guard.stores.idempotency import (
    ABSENT,
    BUSY,
    DONE,
    FAILURE,
    FREE,
    FRESH,
    HELD,
    MISMATCH,
    OMITTED,
    PARKED,
    TAKEOVER,
    Claim,
    Ended,
    Finish,
    IdempotencyStore,
    Record,
)
from tests.support.waiting import wait_until

DAY = 24 * 60 * 60 * 1_000
#: So long that it is not over during a test, and so short that waiting for it costs nothing.
LONG, SHORT = 60_000, 20
#: How far two readings of one time may be apart where a server keeps what is left of it.
ABOUT = 2_000
EVERY_BYTE = bytes(range(256))


_owners = itertools.count(1)


def claim(store: IdempotencyStore, key: str = "k", **known: Any) -> Claim:
    """Claim a key, by default for an owner that nobody else is."""
    return store.claim(key, **{"owner": f"owner {next(_owners)}", "lease": LONG, "retention": DAY, **known})


def read(store: IdempotencyStore, key: str = "k") -> Record:
    record = store.get(key)
    assert record is not None
    return record


def run_out(store: IdempotencyStore, key: str = "k", **known: Any) -> Claim:
    """Claim a key with a lease that is over by the time this returns, by the store's own clock."""
    claimed = claim(store, key, lease=SHORT, **known)
    until = read(store, key).lease_until
    wait_until(lambda: store.posture().now >= until, describe="the lease to be over")
    return claimed


def parked(store: IdempotencyStore, key: str = "k", **known: Any) -> Claim:
    claimed = claim(store, key, **known)
    assert store.park(key, claimed.fence)
    return claimed


def done(store: IdempotencyStore, key: str = "k", result: bytes | None = b"r", flags: int = 0, **known: Any) -> Claim:
    claimed = claim(store, key, **known)
    assert Ended(DONE, ours=True) == store.complete(key, claimed.fence, Finish(result, flags), retention=DAY)
    return claimed


# -- claim -----------------------------------------------------------------------------------------------------------


def test_the_claim_of_an_absent_key_is_fresh(idempotency: IdempotencyStore) -> None:
    """It is held from now on, by the clock of the store."""
    claimed = claim(idempotency, owner="me")

    assert (FRESH, 1, 0, True) == (claimed.answer, claimed.attempts, claimed.crashes, claimed.same)
    assert claimed.fence > 0
    assert claimed.first_claim_at == claimed.now
    assert {} == claimed.steps
    assert abs(claimed.now - idempotency.posture().now) < LONG
    record = read(idempotency)
    assert (HELD, claimed.fence, "me", 1) == (record.state, record.fence, record.owner, record.attempts)
    assert claimed.now + LONG == record.lease_until
    assert claimed.now == record.first_claim_at
    assert abs(record.expires_at - (claimed.now + LONG + DAY)) <= ABOUT
    assert (None, None, 0) == (record.fingerprint, record.result, record.flags)


def test_the_claim_of_a_held_key_is_busy(idempotency: IdempotencyStore) -> None:
    """It learns how long the lease runs, and changes nothing."""
    claimed = claim(idempotency)
    before = read(idempotency)

    busy = claim(idempotency, owner="you", lease=DAY, park=True)

    assert (BUSY, claimed.fence, 1) == (busy.answer, busy.fence, busy.attempts)
    assert 0 < busy.lease_left <= LONG
    _same(before, read(idempotency))


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("park", [False, True])
def test_an_owner_that_was_not_told_asks_again(idempotency: IdempotencyStore, over: bool, park: bool) -> None:
    """It has the key already, by the same fence, whether or not its lease is over; nothing is counted."""
    take = run_out if over else claim
    taken = take(idempotency, owner="Ünïcode ☃", fingerprint=b"f", retention=10_000)
    idempotency.step("k", taken.fence, "s", b"v")

    again = claim(idempotency, owner="Ünïcode ☃", fingerprint=b"f", lease=2 * LONG, park=park)

    assert (FRESH, taken.fence, 1, 0, {"s": b"v"}) == (
        again.answer,
        again.fence,
        again.attempts,
        again.crashes,
        again.steps,
    )
    record = read(idempotency)
    assert (HELD, again.now + 2 * LONG) == (record.state, record.lease_until)
    assert abs(record.expires_at - (again.now + 2 * LONG + DAY)) <= ABOUT
    assert taken.first_claim_at == again.first_claim_at == record.first_claim_at
    assert BUSY == claim(idempotency, park=park).answer
    assert Ended(DONE, ours=True) == idempotency.complete("k", taken.fence, Finish(), retention=DAY)


def test_an_owner_that_was_fenced_out_is_like_any_other(idempotency: IdempotencyStore) -> None:
    """Its name gets it nothing once another has the key, or once it gave it back."""
    run_out(idempotency, owner="me")
    taken = claim(idempotency, owner="you")
    assert BUSY == claim(idempotency, owner="me").answer
    idempotency.release("k", taken.fence)

    again = claim(idempotency, owner="you")

    assert (FRESH, 3, 1) == (again.answer, again.attempts, again.crashes)
    assert again.fence > taken.fence
    claim(idempotency, "m", owner="me", fingerprint=b"1")
    assert MISMATCH == claim(idempotency, "m", owner="me", fingerprint=b"2").answer


def test_the_claim_of_a_free_key_is_fresh(idempotency: IdempotencyStore) -> None:
    """What the steps recorded is given to it; it counts, and the record's age is that of its first claim."""
    first = claim(idempotency)
    assert idempotency.step("k", first.fence, "charge", b"id")
    assert idempotency.release("k", first.fence)

    again = claim(idempotency, owner="you")

    assert (FRESH, 2, 0) == (again.answer, again.attempts, again.crashes)
    assert again.fence > first.fence
    assert first.first_claim_at == again.first_claim_at
    assert {"charge": b"id"} == again.steps
    assert ("you", HELD) == (read(idempotency).owner, read(idempotency).state)


def test_the_claim_of_a_key_whose_lease_is_over_is_a_takeover(idempotency: IdempotencyStore) -> None:
    """It counts the crash, and finds the steps."""
    first = run_out(idempotency)
    assert idempotency.step("k", first.fence, "charge", b"id")

    taken = claim(idempotency, owner="you")

    assert (TAKEOVER, 2, 1) == (taken.answer, taken.attempts, taken.crashes)
    assert taken.fence > first.fence
    assert first.first_claim_at == taken.first_claim_at
    assert {"charge": b"id"} == taken.steps
    assert BUSY == claim(idempotency).answer


def test_a_lease_that_ran_out_may_park_the_key(idempotency: IdempotencyStore) -> None:
    """Nobody gets it: whether the effect happened is for a person or a reconciliation to say."""
    first = run_out(idempotency, owner="me")
    idempotency.step("k", first.fence, "s", b"v")

    answer = claim(idempotency, owner="you", park=True)

    assert (PARKED, first.fence, 1, 1) == (answer.answer, answer.fence, answer.attempts, answer.crashes)
    assert {} == answer.steps, "they are for whoever goes on"
    record = read(idempotency)
    assert (PARKED, "me", 0) == (record.state, record.owner, record.lease_until)
    assert PARKED == claim(idempotency).answer


def test_parking_is_only_for_leases_that_ran_out(idempotency: IdempotencyStore) -> None:
    """An absent, a free and a done key are claimed as ever."""
    first = claim(idempotency, park=True)
    assert FRESH == first.answer
    idempotency.release("k", first.fence)
    again = claim(idempotency, park=True)
    assert FRESH == again.answer
    idempotency.complete("k", again.fence, Finish(), retention=DAY)
    assert DONE == claim(idempotency, park=True).answer


def test_the_claim_of_a_done_key_gets_the_result(idempotency: IdempotencyStore) -> None:
    """And changes nothing, however often it comes."""
    finished = done(idempotency, result=b"r", flags=FAILURE)
    before = read(idempotency)

    for _ in range(2):
        answer = claim(idempotency, owner="you")
        assert (DONE, b"r", FAILURE) == (answer.answer, answer.result, answer.flags)
        assert (finished.fence, 1, {}) == (answer.fence, answer.attempts, answer.steps)
    _same(before, read(idempotency))


def test_the_claim_of_a_parked_key_is_told_so(idempotency: IdempotencyStore) -> None:
    """And changes nothing."""
    parked(idempotency)
    before = read(idempotency)

    assert PARKED == claim(idempotency, owner="you").answer
    _same(before, read(idempotency))


# -- fingerprints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [HELD, "over", FREE, DONE, PARKED])
def test_another_fingerprint_is_a_mismatch(idempotency: IdempotencyStore, state: str) -> None:
    """Wherever the record stands; and nothing is changed."""
    _put(idempotency, state, fingerprint=b"\0one")
    before = read(idempotency)

    answer = claim(idempotency, fingerprint=b"\0two", park=True)

    assert (MISMATCH, False, None) == (answer.answer, answer.same, answer.result)
    _same(before, read(idempotency))


@pytest.mark.parametrize(
    ("state", "expected"), [(HELD, BUSY), ("over", TAKEOVER), (FREE, FRESH), (DONE, DONE), (PARKED, PARKED)]
)
def test_another_fingerprint_may_go_on(idempotency: IdempotencyStore, state: str, expected: str) -> None:
    """It is said, and a key that is taken has the new one from then on."""
    _put(idempotency, state, fingerprint=b"one")

    answer = claim(idempotency, fingerprint=b"two", strict=False)

    assert (expected, False) == (answer.answer, answer.same)
    taken = expected in (FRESH, TAKEOVER)
    assert (b"two" if taken else b"one") == read(idempotency).fingerprint


@pytest.mark.parametrize(("known", "asked"), [(None, b"one"), (b"one", None), (b"one", b"one"), (None, None)])
def test_no_fingerprint_fits_all(idempotency: IdempotencyStore, known: bytes | None, asked: bytes | None) -> None:
    """Neither one that was not kept nor one that is not given is compared; what is given is kept when it is taken."""
    _put(idempotency, FREE, fingerprint=known)

    answer = claim(idempotency, fingerprint=asked)

    assert (FRESH, True) == (answer.answer, answer.same)
    assert (asked or known) == read(idempotency).fingerprint


def test_an_empty_fingerprint_is_one(idempotency: IdempotencyStore) -> None:
    """It is told from none."""
    claim(idempotency, fingerprint=b"")

    assert b"" == read(idempotency).fingerprint
    assert MISMATCH == claim(idempotency, fingerprint=b"x").answer


# -- complete --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [None, b"", b"r", EVERY_BYTE, b"\xff\xfe\0\r\n", "☃".encode(), bytes(1_000_000), os.urandom(1_000_000)],
    ids=["none", "empty", "one", "every byte", "no text", "text", "1 MB of nought", "1 MB"],
)
def test_a_result_comes_back_as_it_was_given(idempotency: IdempotencyStore, result: bytes | None) -> None:
    """Whatever its bytes are, and none is told from an empty one."""
    done(idempotency, result=result, flags=OMITTED if result is None else 0)

    answer = claim(idempotency)

    assert answer.result == result
    assert read(idempotency).result == result
    assert (OMITTED if result is None else 0) == answer.flags == read(idempotency).flags


def test_a_key_that_is_done_is_held_by_nobody(idempotency: IdempotencyStore) -> None:
    """Its fence and its steps stay; nobody is named as its owner, and no lease runs."""
    claimed = claim(idempotency, fingerprint=b"f")
    idempotency.step("k", claimed.fence, "s", b"v")
    idempotency.complete("k", claimed.fence, Finish(b"r", FAILURE), retention=DAY)

    record = read(idempotency)

    assert (DONE, claimed.fence, "", 0) == (record.state, record.fence, record.owner, record.lease_until)
    assert (b"f", {"s": b"v"}, b"r", FAILURE) == (record.fingerprint, record.steps, record.result, record.flags)
    assert (1, 0, claimed.now) == (record.attempts, record.crashes, record.first_claim_at)


def test_a_complete_may_be_repeated(idempotency: IdempotencyStore) -> None:
    """Whoever lost the reply asks again; the first result stands."""
    finished = done(idempotency, result=b"first")

    assert Ended(DONE, ours=True) == idempotency.complete("k", finished.fence, Finish(b"second"), retention=DAY)
    assert b"first" == claim(idempotency).result


def test_a_holder_whose_lease_is_over_may_still_complete(idempotency: IdempotencyStore) -> None:
    """As long as nobody has taken the key over."""
    claimed = run_out(idempotency)

    assert Ended(DONE, ours=True) == idempotency.complete("k", claimed.fence, Finish(b"r"), retention=DAY)


def test_whoever_finishes_a_key_that_is_missing_notes_it(idempotency: IdempotencyStore) -> None:
    """A flush or an eviction does not make anybody forget what he did."""
    claimed = claim(idempotency)
    assert idempotency.forget("k")

    assert Ended(DONE, ours=True) == idempotency.complete(
        "k", claimed.fence, Finish(EVERY_BYTE, FAILURE), retention=DAY
    )

    answer = claim(idempotency)
    assert (DONE, EVERY_BYTE, FAILURE, claimed.fence) == (answer.answer, answer.result, answer.flags, answer.fence)
    record = read(idempotency)
    assert (1, 0, "", 0, {}) == (record.attempts, record.crashes, record.owner, record.lease_until, record.steps)
    assert abs(record.expires_at - (answer.now + DAY)) < LONG
    assert claimed.now <= record.first_claim_at <= answer.now


def test_a_holder_that_is_fenced_out_gets_the_result_of_the_other(idempotency: IdempotencyStore) -> None:
    """It becomes a duplicate of whoever took over and finished."""
    zombie = run_out(idempotency)
    taken = claim(idempotency)
    idempotency.complete("k", taken.fence, Finish(EVERY_BYTE, FAILURE), retention=DAY)

    ended = idempotency.complete("k", zombie.fence, Finish(b"mine"), retention=DAY)

    assert Ended(DONE, ours=False, result=EVERY_BYTE, flags=FAILURE) == ended
    assert EVERY_BYTE == claim(idempotency).result


@pytest.mark.parametrize("state", [HELD, FREE, PARKED])
def test_a_holder_that_is_fenced_out_is_told_what_stands_in_its_way(idempotency: IdempotencyStore, state: str) -> None:
    """It has nothing to say about a key that another holds, gave back or left to be decided."""
    zombie = run_out(idempotency)
    _put(idempotency, state)
    before = read(idempotency)

    assert Ended(state, ours=False) == idempotency.complete("k", zombie.fence, Finish(b"mine"), retention=DAY)
    _same(before, read(idempotency))


# -- renew, step, release, park --------------------------------------------------------------------------------------


def test_a_lease_is_renewed(idempotency: IdempotencyStore) -> None:
    """From now on, whatever was left of it; and nothing else is changed."""
    claimed = claim(idempotency, owner="me", lease=1_000)
    before = read(idempotency)

    assert (True,) == idempotency.renew([("k", claimed.fence)], lease=LONG)

    record = read(idempotency)
    assert claimed.now + LONG <= record.lease_until <= idempotency.posture().now + LONG
    assert abs(before.expires_at - record.expires_at) <= ABOUT
    assert (HELD, claimed.fence, "me") == (record.state, record.fence, record.owner)


def test_a_lease_that_is_over_is_renewed_if_nobody_was_quicker(idempotency: IdempotencyStore) -> None:
    """A heartbeat that comes late still saves the run."""
    claimed = run_out(idempotency)

    assert (True,) == idempotency.renew([("k", claimed.fence)], lease=LONG)
    assert BUSY == claim(idempotency).answer


def test_a_record_outlives_its_lease(idempotency: IdempotencyStore) -> None:
    """Whoever runs for longer than the retention is renewed for as long as it runs."""
    claimed = claim(idempotency, lease=5_000, retention=1)

    assert (True,) == idempotency.renew([("k", claimed.fence)], lease=LONG)

    record = read(idempotency)
    assert record.expires_at >= record.lease_until - ABOUT
    assert record.lease_until >= claimed.now + LONG


def test_many_leases_are_renewed_at_once(idempotency: IdempotencyStore) -> None:
    """Each is answered by itself, in the order asked; no claims are no trouble."""
    claimed = [(f"k{at}", claim(idempotency, f"k{at}").fence) for at in range(100)]
    idempotency.release(*claimed[7])
    idempotency.complete(*claimed[8], Finish(), retention=DAY)
    idempotency.forget("k9")

    answers = idempotency.renew([*claimed, ("k1", claimed[1][1] - 1), ("nobody's", 5)], lease=LONG)

    assert [7, 8, 9, 100, 101] == [at for at, held in enumerate(answers) if not held]
    assert 102 == len(answers)
    assert () == idempotency.renew([], lease=LONG)


@pytest.mark.parametrize("name", ["charge", "", "1", "Ünïcode ☃ 𝄞", "line:3", 'quo"ted', "back\\slash", "x" * 5_000])
def test_a_step_is_kept_under_any_name(idempotency: IdempotencyStore, name: str) -> None:
    """With any bytes for its value."""
    claimed = run_out(idempotency)
    assert idempotency.step("k", claimed.fence, name, EVERY_BYTE)
    assert idempotency.step("k", claimed.fence, "another", b"")

    assert {name: EVERY_BYTE, "another": b""} == read(idempotency).steps == claim(idempotency).steps


def test_a_step_may_be_recorded_again(idempotency: IdempotencyStore) -> None:
    """A step that runs at most once notes first that it started, and then what came of it."""
    claimed = claim(idempotency)
    assert idempotency.step("k", claimed.fence, "mail", b"started")
    assert idempotency.step("k", claimed.fence, "mail", b"sent")

    assert {"mail": b"sent"} == read(idempotency).steps


def test_steps_are_kept_over_release_takeover_parking_and_the_end(idempotency: IdempotencyStore) -> None:
    """They only grow."""
    claimed = claim(idempotency)
    idempotency.step("k", claimed.fence, "1", b"a")
    idempotency.release("k", claimed.fence)
    claimed = run_out(idempotency)
    idempotency.step("k", claimed.fence, "2", b"b")
    claimed = claim(idempotency)
    assert {"1": b"a", "2": b"b"} == claimed.steps
    idempotency.park("k", claimed.fence)
    idempotency.resolve("k", done=False)
    claimed = claim(idempotency)
    assert {"1": b"a", "2": b"b"} == claimed.steps
    idempotency.complete("k", claimed.fence, Finish(), retention=DAY)
    assert {"1": b"a", "2": b"b"} == read(idempotency).steps


@pytest.mark.parametrize(("verb", "state"), [("release", FREE), ("park", PARKED)])
def test_a_holder_gives_its_key_back(idempotency: IdempotencyStore, verb: str, state: str) -> None:
    """Undone, or not knowing whether it is done; also when its lease is over, if nobody was quicker."""
    for take in (claim, run_out):
        claimed = take(idempotency, verb + take.__name__, owner="me")
        assert getattr(idempotency, verb)(verb + take.__name__, claimed.fence)

        record = read(idempotency, verb + take.__name__)
        assert (state, claimed.fence, 0) == (record.state, record.fence, record.lease_until)
        assert (1, 0, "me", None) == (record.attempts, record.crashes, record.owner, record.result)


@pytest.mark.parametrize("state", [HELD, FREE, DONE, PARKED, ABSENT])
def test_only_the_holder_changes_a_key(idempotency: IdempotencyStore, state: str) -> None:
    """Whoever comes with a fence that is not current is refused, and nothing is changed."""
    zombie = run_out(idempotency)
    fences = [zombie.fence, zombie.fence - 1, 0]
    if state == ABSENT:
        idempotency.forget("k")
    else:
        _put(idempotency, state)
        current = read(idempotency).fence
        fences += [current + 1] if state == HELD else [current, current + 1]
    before = idempotency.get("k")

    for fence in fences:
        assert (False,) == idempotency.renew([("k", fence)], lease=LONG)
        assert not idempotency.step("k", fence, "s", b"v")
        assert not idempotency.release("k", fence)
        assert not idempotency.park("k", fence)
    _same(before, idempotency.get("k"))


# -- resolve, forget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PARKED, HELD])
def test_a_person_says_that_it_is_done(idempotency: IdempotencyStore, state: str) -> None:
    """With a result or without; whoever still runs it is fenced out and gets what was decided."""
    for key, finish in (("one", Finish(EVERY_BYTE, FAILURE)), ("two", None)):
        zombie = parked(idempotency, key) if state == PARKED else run_out(idempotency, key)

        assert state == idempotency.resolve(key, done=True, finish=finish)

        result, flags = (finish.result, finish.flags) if finish else (None, 0)
        answer = claim(idempotency, key)
        assert (DONE, result, flags) == (answer.answer, answer.result, answer.flags)
        assert answer.fence > zombie.fence
        assert (0 if state == PARKED else 1) == answer.crashes
        assert Ended(DONE, ours=False, result=result, flags=flags) == idempotency.complete(
            key, zombie.fence, Finish(b"mine"), retention=DAY
        )


@pytest.mark.parametrize("state", [PARKED, HELD])
def test_a_person_says_that_it_is_to_be_run_again(idempotency: IdempotencyStore, state: str) -> None:
    """Whoever still runs it is fenced out, and the next claim is fresh."""
    zombie = parked(idempotency) if state == PARKED else run_out(idempotency)

    assert state == idempotency.resolve("k", done=False)

    assert FREE == read(idempotency).state
    assert Ended(FREE, ours=False) == idempotency.complete("k", zombie.fence, Finish(b"mine"), retention=DAY)
    assert (FRESH, 2) == (claim(idempotency).answer, read(idempotency).attempts)


@pytest.mark.parametrize(("state", "answer"), [(HELD, BUSY), (FREE, FREE), (DONE, DONE), (ABSENT, ABSENT)])
@pytest.mark.parametrize("is_done", [True, False])
def test_where_there_is_nothing_to_decide_nothing_is(
    idempotency: IdempotencyStore, state: str, answer: str, is_done: bool
) -> None:
    """A run that goes on, one that may begin and one that is over are left alone."""
    if state != ABSENT:
        _put(idempotency, state)
    before = idempotency.get("k")

    assert answer == idempotency.resolve("k", done=is_done, finish=Finish(b"x"))
    _same(before, idempotency.get("k"))


@pytest.mark.parametrize("state", [HELD, FREE, DONE, PARKED])
def test_any_key_can_be_forgotten(idempotency: IdempotencyStore, state: str) -> None:
    """Its next claim is as if it had never been, but for the fence."""
    _put(idempotency, state)
    fence = read(idempotency).fence

    assert idempotency.forget("k")

    assert idempotency.get("k") is None
    assert not idempotency.forget("k")
    again = claim(idempotency)
    assert (FRESH, 1, {}) == (again.answer, again.attempts, again.steps)
    assert again.fence > fence


def test_fences_grow_over_absence(idempotency: IdempotencyStore) -> None:
    """Whatever happens to the record, no fence comes twice."""
    fences = []
    for _ in range(5):
        fences.append(claim(idempotency).fence)
        idempotency.release("k", fences[-1])
        fences.append(claim(idempotency).fence)
        idempotency.forget("k")
    assert sorted(set(fences)) == fences


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_record_is_forgotten_when_its_retention_is_over(idempotency: IdempotencyStore) -> None:
    """For every method, wherever it stood, and whether or not somebody has purged it yet."""
    states = ("over", FREE, DONE, PARKED)
    for state in states:
        _put(idempotency, state, state, lease=SHORT, retention=1_500)
    fences = {state: read(idempotency, state).fence for state in states}

    wait_until(lambda: not any(map(idempotency.get, states)), describe="the records to be over")

    assert () == tuple(_pages(idempotency))
    for key, fence in fences.items():
        assert ABSENT == idempotency.resolve(key, done=True)
        assert not idempotency.release(key, fence)
        assert not idempotency.step(key, fence, "s", b"")
        assert (False,) == idempotency.renew([(key, fence)], lease=LONG)
        assert not idempotency.forget(key)
        again = claim(idempotency, key, fingerprint=b"another")
        assert (FRESH, 1, 0, {}, True) == (again.answer, again.attempts, again.crashes, again.steps, again.same)
        assert again.fence > fence


def test_a_record_that_is_over_is_completed_anew(idempotency: IdempotencyStore) -> None:
    """Just as one that was lost, though the store may not have removed it yet."""
    claimed = claim(idempotency, lease=SHORT, retention=SHORT)
    wait_until(lambda: idempotency.get("k") is None, describe="the record to be over")

    assert Ended(DONE, ours=True) == idempotency.complete("k", claimed.fence, Finish(b"r"), retention=DAY)
    assert (DONE, b"r") == (claim(idempotency).answer, claim(idempotency).result)


def test_each_claim_gives_the_record_its_full_time(idempotency: IdempotencyStore) -> None:
    """A key that failed for days is kept as long as one that was done at once; nothing else touches its time."""
    first = claim(idempotency, retention=10_000)
    idempotency.release("k", first.fence)
    assert abs(read(idempotency).expires_at - (first.now + LONG + 10_000)) <= ABOUT
    again = claim(idempotency, retention=DAY)
    idempotency.step("k", again.fence, "s", b"v")
    idempotency.complete("k", again.fence, Finish(b"r"), retention=1)

    assert abs(read(idempotency).expires_at - (again.now + LONG + DAY)) <= ABOUT


def test_a_purge_removes_what_is_over_and_nothing_else(idempotency: IdempotencyStore) -> None:
    """So many at a time; a server that lets them expire has none to remove."""
    for at in range(5):
        claim(idempotency, f"over{at}", lease=1, retention=1)
    idempotency.mark("over", retention=1)
    idempotency.reserve("over", "me", ttl=1)
    last = idempotency.posture().now
    claim(idempotency, "kept")
    idempotency.mark("kept", retention=DAY)
    idempotency.reserve("kept", "me", ttl=DAY)
    wait_until(lambda: idempotency.posture().now > last + 2, describe="them to be over")

    removed = [idempotency.purge(limit=3) for _ in range(4)]

    assert removed in ([3, 3, 1, 0], [0, 0, 0, 0])
    assert HELD == read(idempotency, "kept").state
    assert idempotency.marked("kept")
    assert "me" == idempotency.reserve("kept", "you", ttl=DAY)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_keys_do_not_meet(idempotency: IdempotencyStore) -> None:
    """Each has its own record, whatever it is made of."""
    keys = ["a", "a:1", "{a}", "a}b{c", "{}", "*", "a?", "[a]", "a\\", "'; --", " ", "%", "a_", "x" * 255]
    fences = {key: claim(idempotency, key, owner=f"owner of {key}").fence for key in keys}

    for key in keys:
        assert f"owner of {key}" == read(idempotency, key).owner
        assert fences[key] == read(idempotency, key).fence
    assert set(keys) == {record.key for record in _pages(idempotency)}


def test_an_owner_may_have_any_name(idempotency: IdempotencyStore) -> None:
    """It is for people."""
    claim(idempotency, owner="Ünïcode ☃")

    assert "Ünïcode ☃" == read(idempotency).owner


@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_pages_lead_to_every_key_once(idempotency: IdempotencyStore, limit: int) -> None:
    """However small they are, with all that `get` says of each."""
    keys = {f"k{at}" for at in range(40)}
    for key in keys:
        done(idempotency, key, result=key.encode())

    found = list(_pages(idempotency, limit=limit))

    assert sorted(keys) == sorted(record.key for record in found)
    for record in found:
        _same(idempotency.get(record.key), record)


@pytest.mark.parametrize("prefix", ["a*", "a?b", "[a-z]", "a\\", "a_", "a%", "", "nothing", "☃"])
def test_a_prefix_is_taken_literally(idempotency: IdempotencyStore, prefix: str) -> None:
    """No character of it stands for others."""
    keys = ["a*", "a*1", "ab", "a?b", "axb", "[a-z]", "[a-z]1", "b", "a\\1", "a\\*", "a_1", "a%1", "aa1"]
    for key in keys:
        claim(idempotency, key)

    found = {record.key for record in _pages(idempotency, prefix=prefix)}

    assert {key for key in keys if key.startswith(prefix)} == found


@pytest.mark.parametrize("states", [(), (HELD,), (FREE, DONE), (PARKED,), (HELD, FREE, DONE, PARKED)])
def test_states_are_picked(idempotency: IdempotencyStore, states: tuple[str, ...]) -> None:
    """One whose lease is over is still held."""
    for state in (HELD, FREE, DONE, PARKED, "over"):
        _put(idempotency, state, state)
    standing = {HELD: HELD, FREE: FREE, DONE: DONE, PARKED: PARKED, "over": HELD}

    found = {record.key for record in _pages(idempotency, states=states, limit=2)}

    assert {key for key, state in standing.items() if not states or state in states} == found


def test_a_page_holds_something(idempotency: IdempotencyStore) -> None:
    """A limit below 1 is a mistake."""
    with pytest.raises(ValueError, match="at least one"):
        idempotency.page(limit=0)


# -- marks and reservations ------------------------------------------------------------------------------------------


def test_a_name_is_noted_for_a_while(idempotency: IdempotencyStore) -> None:
    """And noted again for longer."""
    assert not idempotency.marked("m")
    idempotency.mark("m", retention=SHORT)
    wait_until(lambda: not idempotency.marked("m"), describe="the mark to be over")
    idempotency.mark("m", retention=SHORT)
    idempotency.mark("m", retention=DAY)

    assert idempotency.marked("m")
    assert not idempotency.marked("n")


def test_the_first_who_asks_has_a_name(idempotency: IdempotencyStore) -> None:
    """All who ask later are told who; it alone can give it back."""
    assert "me" == idempotency.reserve("n", "me", ttl=DAY)
    assert "me" == idempotency.reserve("n", "you", ttl=DAY)
    assert "me" == idempotency.reserve("n", "me", ttl=DAY)
    assert "you" == idempotency.reserve("another", "you", ttl=DAY)

    assert not idempotency.unreserve("n", "you")
    assert not idempotency.unreserve("nobody's", "you")
    assert idempotency.unreserve("n", "me")
    assert not idempotency.unreserve("n", "me")
    assert "you" == idempotency.reserve("n", "you", ttl=DAY)


def test_a_name_is_free_again_after_its_time(idempotency: IdempotencyStore) -> None:
    """Whoever had it may not give it back then; and asking again does not lengthen it."""
    idempotency.reserve("n", "me", ttl=SHORT)
    idempotency.reserve("n", "me", ttl=DAY)

    wait_until(lambda: "you" == idempotency.reserve("n", "you", ttl=DAY), describe="the name to be free")

    assert not idempotency.unreserve("n", "me")


def test_keys_marks_and_reservations_are_kept_apart(idempotency: IdempotencyStore) -> None:
    """One name may be all three."""
    idempotency.mark("n", retention=DAY)
    assert "me" == idempotency.reserve("n", "me", ttl=DAY)
    assert FRESH == claim(idempotency, "n").answer

    assert idempotency.forget("n")
    assert idempotency.marked("n")
    assert idempotency.unreserve("n", "me")
    assert idempotency.marked("n")
    assert () == tuple(_pages(idempotency))


# -- the server ------------------------------------------------------------------------------------------------------


def test_a_store_says_what_it_is(idempotency: IdempotencyStore) -> None:
    """For the checks at boot."""
    posture = idempotency.posture()

    assert posture.engine in type(idempotency).__name__.lower() or posture.engine == "postgresql"
    assert posture.server
    assert posture.server == idempotency.posture().server
    assert posture.now <= idempotency.posture().now
    assert posture.evicts is None
    assert isinstance(idempotency, IdempotencyStore)
    idempotency.ping()


def _put(store: IdempotencyStore, state: str, key: str = "k", **known: Any) -> None:
    """Bring a key to a state; ``over`` is held with a lease that ran out."""
    if state == HELD:
        claim(store, key, **known)
    elif state == "over":
        run_out(store, key, **{name: value for name, value in known.items() if name != "lease"})
    elif state == DONE:
        done(store, key, **known)
    else:
        claimed = claim(store, key, **known)
        assert store.release(key, claimed.fence) if state == FREE else store.park(key, claimed.fence)


def _pages(store: IdempotencyStore, **known: Any) -> Iterator[Record]:
    cursor, first = None, True
    while first or cursor is not None:
        page = store.page(cursor=cursor, **known)
        yield from page.records
        cursor, first = page.cursor, False


def _same(one: Record | None, other: Record | None) -> None:
    """Compare two readings of a record; a store that keeps a time to live is off by the milliseconds of reading it."""
    if one is None or other is None:
        assert one is other
        return
    assert abs(one.expires_at - other.expires_at) <= ABOUT
    assert _timeless(one) == _timeless(other)


def _timeless(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__slots__ if name != "expires_at"}

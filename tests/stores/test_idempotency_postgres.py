"""Idempotency keys on PostgreSQL: what a call costs the server, and rows that are kept with their key or not at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from dramatiq_guard.errors import FencedOut, StoreError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import (
    BUSY,
    DONE,
    FREE,
    FRESH,
    HELD,
    MISMATCH,
    PARKED,
    Claim,
    Ended,
    Finish,
    TransactionalStore,
)
from dramatiq_guard.stores.postgres import connection as postgres_connection
from dramatiq_guard.stores.postgres import places
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

DAY = 24 * 60 * 60 * 1_000
_owners = itertools.count(1)


@pytest.fixture
def url(postgres_url: str) -> str:
    """The URL of a database with the tables, and one of the user's."""
    apply_schema(postgres_url)
    sql(postgres_url, "CREATE TABLE payments (id serial PRIMARY KEY, what text)")
    return postgres_url


@pytest.fixture
def store(url: str) -> Iterator[TransactionalStore]:
    """A store on it."""
    yield from opened(url)


def opened(target: Any) -> Iterator[TransactionalStore]:
    with closing(connect(target)) as stores:
        assert isinstance(stores.idempotency, TransactionalStore)
        yield stores.idempotency


def sql(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def payments(url: str) -> int:
    return int(sql(url, "SELECT count(*) FROM payments")[0][0])


def claim(store: TransactionalStore, key: str = "k", **known: Any) -> Claim:
    return store.claim(key, **{"owner": f"owner {next(_owners)}", "lease": 60_000, "retention": DAY, **known})


def inbox(store: TransactionalStore, key: str = "k", **known: Any) -> Any:
    return store.inbox(key, owner=f"owner {next(_owners)}", retention=DAY, **known)


def pay(connection: Any, what: str = "") -> None:
    connection.execute("INSERT INTO payments (what) VALUES (%s)", (what,))


def state_of(store: TransactionalStore, key: str = "k") -> str | None:
    record = store.get(key)
    return None if record is None else record.state


def at_once(work: Callable[[], object], threads: int) -> list[Any]:
    """Do something in many threads at once, and give what each returned or raised."""
    found: list[Any] = []
    gate = threading.Barrier(threads)

    def run() -> None:
        gate.wait()
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
    assert threads == len(found), "some did not come to an end"
    return found


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_nothing_but_a_claim_touches_an_index(url: str, store: TransactionalStore) -> None:
    """Renewals, steps, ends and releases find room on the page of their row."""
    for n in range(300):
        claimed = claim(store, f"k{n}")
        assert (True,) == store.renew([(f"k{n}", claimed.fence)], lease=60_000)
        assert store.step(f"k{n}", claimed.fence, "s", b"value")
        if n % 3:
            assert store.complete(f"k{n}", claimed.fence, Finish(b"result"), retention=DAY).ours
        elif n % 2:
            assert store.release(f"k{n}", claimed.fence)
        else:
            assert store.park(f"k{n}", claimed.fence)

    def counted() -> tuple[int, int]:
        ((updates, hot),) = sql(url, "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'keys'")
        return updates, hot

    store.close()  # with it the server counts what it has not counted yet
    wait_until(lambda: counted()[0] == 900, describe=counted)
    assert (900, 900) == counted()


def test_a_duplicate_writes_nothing(url: str, store: TransactionalStore) -> None:
    """Neither a row, nor a lock, nor the log: it only reads; and so does a claim that is busy."""
    held, done = claim(store, "held"), claim(store, "done")
    store.complete("done", done.fence, Finish(b"r"), retention=DAY)

    def unmoved() -> bool:
        """Whether the log of the server stood still; something else may have written to it meanwhile."""
        before = sql(url, "SELECT pg_current_wal_insert_lsn()")
        for _ in range(50):
            assert (DONE, b"r") == (claim(store, "done").answer, claim(store, "done").result)
            assert (BUSY, held.fence) == (claim(store, "held").answer, claim(store, "held").fence)
        return before == sql(url, "SELECT pg_current_wal_insert_lsn()")

    wait_until(unmoved, describe="the log to stand still")


def test_a_call_is_one_round_trip(url: str) -> None:
    """So are many renewals; and a transaction costs none beyond the user's own: its first and its last hold ours."""
    with FaultyProxy(url) as proxy, closing(connect(proxy.url)) as stores:
        store = stores.idempotency
        assert isinstance(store, TransactionalStore)
        others = [(f"o{n}", claim(store, f"o{n}").fence) for n in range(20)]
        with store.atomic(*others[0], Finish()) as connection, connection.cursor():
            pass

        def turns(work: Callable[[], object]) -> int:
            proxy.forget()
            work()
            return proxy.turns

        def atomic() -> None:
            with store.atomic(*others[1], Finish()) as connection:
                pay(connection)

        def own() -> None:
            with inbox(store, "inbox") as box:
                pay(box.connection)
                box.commit(Finish())

        def done() -> None:
            with inbox(store, "inbox") as box:
                assert DONE == box.claim.answer

        claimed = []
        assert 1 == turns(lambda: claimed.append(claim(store)))
        assert 1 == turns(lambda: claim(store)), "busy"
        assert 1 == turns(lambda: store.renew(others, lease=60_000))
        assert 1 == turns(lambda: store.step("k", claimed[0].fence, "s", b"v"))
        assert 1 == turns(lambda: store.complete("k", claimed[0].fence, Finish(), retention=DAY))
        assert 1 == turns(lambda: claim(store)), "done"
        assert 3 == turns(atomic), "BEGIN, the user's, COMMIT"
        assert 3 == turns(own), "the same"
        assert 2 == turns(done)


def test_what_is_over_is_removed_in_batches(url: str, store: TransactionalStore) -> None:
    """As many at a time as was asked for; whatever somebody else has in his hands is passed over."""
    sql(
        url,
        "INSERT INTO dramatiq_guard.keys SELECT 'over:' || n, 'done', n, '', 0, NULL, 1, 0, NULL, NULL, 0, 0, n "
        "FROM generate_series(1, 20000) AS n",
    )
    claim(store, "live")
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM dramatiq_guard.keys WHERE key IN ('over:1', 'over:7') FOR UPDATE")
        batches = []
        while not batches or batches[-1] == 3_000:
            batches.append(store.purge(limit=3_000))

    assert [3_000] * 6 + [1_998] == batches
    assert 2 == store.purge()
    assert [("live",)] == sql(url, "SELECT key FROM dramatiq_guard.keys")


def test_what_is_over_is_found_by_an_index(url: str) -> None:
    """A purge does not look at what lives, nor a claim at anything but its key."""
    (indexes,) = zip(*sql(url, "SELECT indexdef FROM pg_indexes WHERE tablename = 'keys' ORDER BY 1"), strict=True)

    assert ["(expires_at)", "(key)"] == [index[index.rindex("(") :] for index in indexes]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("found", ["absent", "free", "over"])
def test_of_many_one_gets_the_key(url: str, isolation: str, found: str) -> None:
    """At any isolation level who loses the race is told that the key is busy, and has no error."""
    option = isolation.replace(" ", "%5C%20")
    for store in opened(f"{url}?options=-c%20default_transaction_isolation%3D{option}"):
        for n in range(5):
            key = f"k{n}"
            if found != "absent":
                first = claim(store, key, lease=1)
                if found == "free":
                    assert store.release(key, first.fence)
                else:
                    wait_until(lambda first=first: store.posture().now > first.now + 1)
            answers = at_once(lambda key=key: claim(store, key).answer, 10)
            assert [BUSY] * 9 == sorted(answers)[:9], answers
            assert sorted(answers)[9] in (FRESH, "takeover")


def test_a_row_that_is_locked_too_long_is_busy(url: str, store: TransactionalStore) -> None:
    """Where the server does not let claims wait, one that had to is not an error."""
    store.release("k", claim(store).fence)
    for impatient in opened(f"{url}?options=-c%20lock_timeout%3D50"):
        with psycopg.connect(url) as other:
            other.execute("SELECT FROM dramatiq_guard.keys FOR UPDATE")

            assert BUSY == claim(impatient).answer


def test_who_may_only_read_and_write_its_tables_can_use_it(url: str) -> None:
    """The store needs no more of the server, not even to say which one it is."""
    role = f"guard_{url.rpartition('_')[2]}"
    sql(url, f"CREATE ROLE {role} LOGIN")
    try:
        sql(
            url,
            f"GRANT USAGE ON SCHEMA dramatiq_guard TO {role}; "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dramatiq_guard TO {role}; "
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA dramatiq_guard TO {role}",
        )
        for store in opened(url.replace("postgres@", f"{role}@")):
            store.ping()
            assert store.posture().server
            store.complete("k", claim(store).fence, Finish(), retention=DAY)
            with inbox(store, "i") as box:
                box.commit(Finish())
            assert DONE == state_of(store, "i")
    finally:
        sql(url, f"DROP OWNED BY {role}; DROP ROLE {role}")


# -- atomic ----------------------------------------------------------------------------------------------------------


def test_rows_and_key_are_committed_together(url: str, store: TransactionalStore) -> None:
    """After it the key is done, with the result."""
    held = claim(store)
    with store.atomic("k", held.fence, Finish(b"r", 2)) as connection:
        pay(connection)
        assert (HELD, 0) == (state_of(store), payments(url)), "nobody sees anything before the end"

    assert 1 == payments(url)
    duplicate = claim(store)
    assert (DONE, b"r", 2) == (duplicate.answer, duplicate.result, duplicate.flags)
    assert Ended(DONE, ours=True) == store.complete("k", held.fence, Finish(), retention=DAY)


def test_a_step_is_committed_with_its_rows(url: str, store: TransactionalStore) -> None:
    """The key is still held, and the next run finds the step."""
    held = claim(store)
    with store.atomic("k", held.fence, Finish(b"\0\xff"), step="booked") as connection:
        pay(connection)

    assert (1, HELD) == (payments(url), state_of(store))
    assert store.release("k", held.fence)
    assert {"booked": b"\0\xff"} == claim(store).steps


def test_an_exception_rolls_everything_back(url: str, store: TransactionalStore) -> None:
    """It comes out as it was raised, also one of the driver's; and the connection serves again."""
    held = claim(store)
    with pytest.raises(KeyError):
        with store.atomic("k", held.fence, Finish()) as connection:
            pay(connection)
            raise KeyError
    with pytest.raises(psycopg.errors.UndefinedTable):
        with store.atomic("k", held.fence, Finish()) as connection:
            pay(connection)
            connection.execute("SELECT * FROM nowhere")

    assert (0, HELD) == (payments(url), state_of(store))
    with store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
    assert (1, DONE) == (payments(url), state_of(store))


@pytest.mark.parametrize("became", ["taken", "done", "released", "forgotten", "parked"])
@pytest.mark.parametrize("step", [None, "s"])
def test_whoever_is_fenced_out_leaves_no_rows(
    url: str, store: TransactionalStore, became: str, step: str | None
) -> None:
    """Whatever became of the key, and even while the transaction was open."""
    held = claim(store, lease=1)
    before = None
    with pytest.raises(FencedOut, match=f"k is not held with fence {held.fence}"):
        with store.atomic("k", held.fence, Finish(b"late"), step=step) as connection:
            pay(connection)
            if became == "taken":
                wait_until(lambda: store.posture().now > held.now + 1)
                assert "takeover" == claim(store).answer
            elif became == "done":
                store.complete("k", held.fence, Finish(b"first"), retention=DAY)
            elif became == "forgotten":
                store.forget("k")
            else:
                (store.release if became == "released" else store.park)("k", held.fence)
            before = store.get("k")

    assert 0 == payments(url)
    assert before == store.get("k")


@pytest.mark.parametrize("kind", ["atomic", "inbox"])
def test_a_connection_that_is_killed_leaves_nothing(url: str, store: TransactionalStore, kind: str) -> None:
    """The key can be completed, or claimed, by the next one; nobody waits."""
    held = claim(store) if kind == "atomic" else None
    with pytest.raises(StoreUnavailable):
        if held is not None:
            with store.atomic("k", held.fence, Finish()) as connection:
                pay(connection)
                kill(url, connection)
        else:
            with inbox(store) as box:
                pay(box.connection)
                kill(url, box.connection)
                box.commit(Finish())

    assert (0, HELD if held else None) == (payments(url), state_of(store))
    if held is not None:
        with store.atomic("k", held.fence, Finish()) as connection:
            pay(connection)
    else:
        with inbox(store) as box:
            pay(box.connection)
            box.commit(Finish())
    assert (1, DONE) == (payments(url), state_of(store))


def kill(url: str, connection: Any) -> None:
    pid = connection.info.backend_pid
    sql(url, f"SELECT pg_terminate_backend({pid})")
    wait_until(lambda: not sql(url, f"SELECT FROM pg_stat_activity WHERE pid = {pid}"))


@pytest.mark.parametrize("kind", ["atomic", "inbox"])
@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_commit_inside_is_refused(url: str, store: TransactionalStore, kind: str, verb: str) -> None:
    """psycopg does that, before anything is torn."""
    with pytest.raises(psycopg.ProgrammingError):
        if kind == "atomic":
            with store.atomic("k", claim(store).fence, Finish()) as connection:
                pay(connection)
                getattr(connection, verb)()
        else:
            with inbox(store) as box:
                pay(box.connection)
                getattr(box.connection, verb)()

    assert 0 == payments(url)
    assert DONE != state_of(store)


@pytest.mark.parametrize("kind", ["atomic", "inbox"])
@pytest.mark.parametrize("verb", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
def test_a_transaction_that_was_ended_by_hand_completes_nothing(
    url: str, store: TransactionalStore, kind: str, verb: str
) -> None:
    """Nobody hinders a statement that says so, but it does not go unnoticed."""
    with pytest.raises(StoreError, match="ended inside"):
        if kind == "atomic":
            with store.atomic("k", claim(store).fence, Finish()) as connection:
                pay(connection)
                connection.execute(verb)
                pay(connection)
        else:
            with inbox(store) as box:
                pay(box.connection)
                box.connection.execute(verb)
                pay(box.connection)
                box.commit(Finish())

    assert DONE != state_of(store)
    with inbox(store, "another") as box:
        box.commit(Finish())
    assert DONE == state_of(store, "another"), "whoever comes next has a connection in order"


@pytest.mark.parametrize("kind", ["atomic", "inbox"])
def test_an_answer_to_a_commit_that_is_lost(url: str, kind: str) -> None:
    """Nobody knows whether it happened, until it is looked at."""
    with FaultyProxy(url) as proxy, closing(connect(proxy.url)) as stores:
        store = stores.idempotency
        assert isinstance(store, TransactionalStore)
        proxy.lose_reply(matching=b"COMMIT")
        with pytest.raises(StoreUnavailable):
            if kind == "atomic":
                with store.atomic("k", claim(store).fence, Finish()) as connection:
                    pay(connection)
            else:
                with inbox(store) as box:
                    pay(box.connection)
                    box.commit(Finish())

        assert (DONE, 1) == (state_of(store), payments(url))


@pytest.mark.parametrize("kind", ["atomic", "inbox"])
def test_a_constraint_that_is_checked_at_the_end(url: str, store: TransactionalStore, kind: str) -> None:
    """It is the user's error, and comes out as such; nothing is kept."""
    sql(url, "ALTER TABLE payments ADD UNIQUE (what) DEFERRABLE INITIALLY DEFERRED")
    with pytest.raises(psycopg.errors.UniqueViolation):
        if kind == "atomic":
            with store.atomic("k", claim(store).fence, Finish()) as connection:
                pay(connection), pay(connection)
        else:
            with inbox(store) as box:
                pay(box.connection), pay(box.connection)
                box.commit(Finish())

    assert 0 == payments(url)
    assert DONE != state_of(store)


def test_an_error_that_was_swallowed_inside(url: str, store: TransactionalStore) -> None:
    """A transaction that failed cannot be committed, and says so."""
    with pytest.raises(StoreError, match="aborted"):
        with store.atomic("k", claim(store).fence, Finish()) as connection:
            pay(connection)
            with pytest.raises(psycopg.errors.UndefinedTable):
                connection.execute("SELECT * FROM nowhere")

    assert (0, HELD) == (payments(url), state_of(store))


def test_savepoints_inside(url: str, store: TransactionalStore) -> None:
    """A part of the user's work may fail by itself."""
    with store.atomic("k", claim(store).fence, Finish()) as connection:
        with connection.transaction():
            pay(connection, "kept")
        with pytest.raises(KeyError), connection.transaction():
            pay(connection, "dropped")
            raise KeyError

    assert [("kept",)] == sql(url, "SELECT what FROM payments")
    assert DONE == state_of(store)


def test_the_users_statements_may_take_their_time(
    url: str, store: TransactionalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our patience with the server is not for them; it is again for the commit."""
    held = claim(store)
    monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 300)
    with store.atomic("k", held.fence, Finish()) as connection:
        connection.execute("SELECT pg_sleep(0.7)")
        pay(connection)
    assert (1, DONE) == (payments(url), state_of(store))

    sql(
        url,
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON payments DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow()",
    )
    with pytest.raises(StoreUnavailable):
        with store.atomic("j", claim(store, "j").fence, Finish()) as connection:
            pay(connection)


# -- inbox -----------------------------------------------------------------------------------------------------------


def test_an_inbox_commits_the_key_with_the_rows(url: str, store: TransactionalStore) -> None:
    """Whoever comes later finds it done, by either way; there was no record before."""
    with inbox(store, fingerprint=b"f") as box:
        assert (FRESH, 1, 0, {}) == (box.claim.answer, box.claim.attempts, box.claim.crashes, box.claim.steps)
        assert box.claim.fence > 0
        pay(box.connection)
        assert (None, 0) == (state_of(store), payments(url))
        box.commit(Finish(b"r", 1))

    assert 1 == payments(url)
    record = store.get("k")
    assert record is not None
    assert (DONE, box.claim.fence, b"f", b"r", 1) == (
        *(record.state, record.fence, record.fingerprint, record.result, record.flags),
    )
    assert DAY - 60_000 < record.expires_at - record.first_claim_at <= DAY + 60_000
    assert (DONE, b"r") == (claim(store).answer, claim(store).result)
    with inbox(store) as box:
        assert (DONE, b"r", 1) == (box.claim.answer, box.claim.result, box.claim.flags)
        with pytest.raises(StoreError, match="nothing to commit"):
            box.commit(Finish())


@pytest.mark.parametrize("raised", [None, KeyError, KeyboardInterrupt])
def test_an_inbox_that_is_left_keeps_nothing(
    url: str, store: TransactionalStore, raised: type[BaseException] | None
) -> None:
    """By an exception or by the end of it: the next one is fresh."""
    with pytest.raises(raised) if raised is not None else nullcontext():
        with inbox(store) as box:
            pay(box.connection)
            if raised is not None:
                raise raised

    assert (0, None) == (payments(url), state_of(store))
    assert FRESH == claim(store).answer


def test_while_an_inbox_is_open_its_key_is_busy(url: str, store: TransactionalStore) -> None:
    """For every other, at once; nobody waits for its end.  A zombie that would note its end is turned away, too."""
    with inbox(store) as box:
        pay(box.connection)
        answer = claim(store, lease=5_000)
        assert (BUSY, 5_000) == (answer.answer, answer.lease_left)
        with inbox(store) as other:
            assert BUSY == other.claim.answer
            assert other.claim.lease_left > 0
        assert Ended(HELD, ours=False) == store.complete("k", 999, Finish(b"zombie"), retention=DAY)
        assert FRESH == claim(store, "another").answer
        box.commit(Finish(b"r"))

    assert (DONE, b"r", 1) == (claim(store).answer, claim(store).result, payments(url))


def test_of_many_inboxes_one_runs(url: str, store: TransactionalStore) -> None:
    """However they meet, there is one row; the others are busy or find it done."""

    def work() -> str:
        with inbox(store) as box:
            if box.claim.answer == FRESH:
                pay(box.connection)
                box.commit(Finish(b"r"))
            return str(box.claim.answer)

    answers = []
    while not answers or answers.count(DONE) < 20:
        answers = at_once(work, 20)
        assert {FRESH, BUSY, DONE} >= set(answers), answers

    assert 1 == payments(url)


@pytest.mark.parametrize("state", ["free", "over", "resolved", "expired"])
def test_an_inbox_goes_on_with_what_is_free(url: str, store: TransactionalStore, state: str) -> None:
    """What was given back, resolved or left alone; its steps and its age are those of the record."""
    first = claim(
        store, lease=1 if state in ("over", "expired") else 60_000, retention=1 if state == "expired" else DAY
    )
    store.step("k", first.fence, "s", b"v")
    if state == "free":
        store.release("k", first.fence)
    elif state == "resolved":
        store.park("k", first.fence)
        store.resolve("k", done=False)
    else:
        wait_until(lambda: store.posture().now > first.now + 2)

    with inbox(store) as box:
        assert (FRESH, state == "over") == (box.claim.answer, bool(box.claim.crashes))
        assert box.claim.fence > first.fence
        assert ({} if state == "expired" else {"s": b"v"}) == box.claim.steps
        assert (1 if state == "expired" else 2) == box.claim.attempts
        pay(box.connection)
        box.commit(Finish(b"r"))

    record = store.get("k")
    assert record is not None
    assert (DONE, b"r", box.claim.fence, box.claim.attempts, box.claim.steps, box.claim.first_claim_at) == (
        *(record.state, record.result, record.fence, record.attempts, record.steps, record.first_claim_at),
    )
    assert Ended(DONE, ours=False, result=b"r") == store.complete("k", first.fence, Finish(), retention=DAY)


def test_an_inbox_is_told_what_stands_in_its_way(store: TransactionalStore) -> None:
    """A running lease, a key that is parked, another payload."""
    held = claim(store, fingerprint=b"f")
    with inbox(store) as box:
        assert (BUSY, held.fence) == (box.claim.answer, box.claim.fence)
        assert 0 < box.claim.lease_left <= 60_000
    with inbox(store, fingerprint=b"g") as box:
        assert (MISMATCH, False) == (box.claim.answer, box.claim.same)
    store.park("k", held.fence)
    with inbox(store) as box:
        assert PARKED == box.claim.answer
    store.resolve("k", done=False)
    with inbox(store, fingerprint=b"g", strict=False) as box:
        assert (FRESH, False) == (box.claim.answer, box.claim.same)


@pytest.mark.parametrize("became", ["renewed", "done", "forgotten"])
def test_an_inbox_whose_key_was_changed_meanwhile_is_fenced_out(
    url: str, store: TransactionalStore, became: str
) -> None:
    """It took over from a holder that was not dead, and that goes on."""
    first = claim(store, lease=1)
    wait_until(lambda: store.posture().now > first.now + 1)
    if became == "forgotten":
        with inbox(store) as box:
            pay(box.connection)
            store.forget("k")
            box.commit(Finish())
        assert (1, DONE) == (payments(url), state_of(store)), "then there is nobody in the way"
        return
    with pytest.raises(FencedOut):
        with inbox(store) as box:
            assert FRESH == box.claim.answer
            pay(box.connection)
            if became == "done":
                store.complete("k", first.fence, Finish(b"first"), retention=DAY)
            else:
                store.renew([("k", first.fence)], lease=60_000)
            box.commit(Finish(b"second"))

    assert (0, HELD if became == "renewed" else DONE) == (payments(url), state_of(store))


# -- how many at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["url", "pool", "small pool"])
def test_many_inboxes_leave_room_for_short_calls(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait for a place, those that have one can still ask the store, and all come to their end."""
    monkeypatch.setattr(postgres_connection, "MAX_TRANSACTIONS", 3)
    monkeypatch.setattr(postgres_connection, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 20_000)
    numbers = itertools.count()
    size = 2 if kind == "small pool" else 4
    pool = None if kind == "url" else ConnectionPool(url, min_size=1, max_size=size, open=True)

    for store in opened(url if pool is None else pool):

        def work(store: TransactionalStore = store) -> bool:
            key = f"k{next(numbers)}"
            with inbox(store, key) as box:
                held = claim(store, f"other {key}")
                pay(box.connection)
                assert (True,) == store.renew([(f"other {key}", held.fence)], lease=60_000)
                box.commit(Finish())
            return store.complete(f"other {key}", held.fence, Finish(), retention=DAY).ours

        assert [True] * 50 == at_once(work, 50)
    assert 50 == payments(url)
    if pool is not None:
        pool.close()


def test_a_transaction_that_finds_no_place_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is unavailable for it, which costs a message no attempt; its key is not touched."""
    monkeypatch.setattr(postgres_connection, "MAX_TRANSACTIONS", 1)
    for store in opened(url):
        monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 50)
        with inbox(store, "one") as box:
            (failure,) = at_once(lambda: inbox(store, "two").__enter__(), 1)
            assert isinstance(failure, StoreUnavailable)
            assert "1 transactions open already" in str(failure)
            monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 5_000)
            assert FRESH == claim(store, "two").answer
            box.commit(Finish())


def test_a_transactions_connection_is_used_again(url: str, store: TransactionalStore) -> None:
    """After any end that is in order; what its user set on it stays away from our statements."""
    pids = set()
    for n in range(5):
        with inbox(store, f"k{n}") as box:
            pids.add(box.connection.info.backend_pid)
            box.connection.row_factory = dict_row
            box.connection.execute("SET search_path = pg_catalog")
            if n % 2:
                box.commit(Finish())
    with pytest.raises(KeyError), inbox(store, "error") as box:
        raise KeyError
    with inbox(store, "k1") as box:
        pids.add(box.connection.info.backend_pid)

    assert 1 == len(pids)
    assert DONE == box.claim.answer
    with inbox(store, "k2") as box:
        kill(url, box.connection)
    with inbox(store, "k2") as box:
        assert box.connection.info.backend_pid not in pids


def test_a_pool_gets_its_connections_back_as_they_were(url: str) -> None:
    """Whatever the pool's connections are set to, and whatever happened to one."""
    with ConnectionPool(url, min_size=2, max_size=2, open=True, kwargs={"row_factory": dict_row}) as pool:
        for store in opened(pool):
            assert FREE == (store.release("k", claim(store).fence) and state_of(store))
            with store.atomic("k", claim(store).fence, Finish()) as connection:
                pay(connection)
                assert {"n": 1} == connection.execute("SELECT count(*) AS n FROM payments").fetchone()
            with pytest.raises(FencedOut), store.atomic("k", 1, Finish()) as connection:
                pay(connection)
            with pytest.raises(StoreUnavailable), store.atomic("k", 1, Finish()) as connection:
                kill(url, connection)
            for _ in range(3):
                with inbox(store, "i"):
                    pass
        with pool.connection() as connection:
            assert not connection.autocommit
        assert 1 == payments(url)


def test_a_place_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork all places are free: whoever has one is in another process."""
    own = places.Places(1, "taken")
    with own.place(timeout=0):
        with pytest.raises(StoreUnavailable, match="taken"), own.place(timeout=0):
            pass
        monkeypatch.setattr(places.os, "getpid", lambda: -1)
        with own.place(timeout=0):
            pass

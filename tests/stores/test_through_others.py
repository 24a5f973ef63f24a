"""The stores on PostgreSQL through SQLAlchemy and Django: their connections, and their transactions for the user."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import django
import django.db
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from django.db.transaction import TransactionManagementError
from sqlalchemy.orm import Session

from dramatiq_guard.errors import FencedOut, SetupError, StoreError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import BUSY, DONE, FRESH, HELD, Claim, Finish, Record, TransactionalStore
from dramatiq_guard.stores.postgres.schema import apply_schema, schema_status
from dramatiq_guard.stores.protocols import Stores
from tests.support.waiting import wait_until

from .letters import T0, letter

DAY = 24 * 60 * 60 * 1_000
KINDS = ("sqlalchemy", "django")
_owners = itertools.count(1)


@pytest.fixture
def url(postgres_url: str) -> str:
    """The URL of a database with a table of the user's."""
    sql(postgres_url, "CREATE TABLE payments (id serial PRIMARY KEY, what text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    return postgres_url


@pytest.fixture
def engine(url: str) -> Iterator[sqlalchemy.Engine]:
    """An engine on it."""
    made = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@pytest.fixture
def alias(url: str) -> Iterator[str]:
    """Django's URL of it."""
    if not settings.configured:
        settings.configure(LOGGING_CONFIG=None)
        django.setup()
    known = psycopg.conninfo.conninfo_to_dict(url)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": known["host"],
        "PORT": known["port"],
        "NAME": known["dbname"],
        "USER": known["user"],
    }
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    django.db.connections.settings = django.db.connections.configure_settings({"default": database, "lite": sqlite})
    yield "django://default"
    django.db.connections["default"].close()
    del django.db.connections["default"]


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> Any:
    """An engine, and Django's URL."""
    return request.getfixturevalue("engine" if request.param == "sqlalchemy" else "alias")


@pytest.fixture
def stores(target: Any) -> Iterator[Stores]:
    """The stores of it, with their tables."""
    apply_schema(target)
    with closing(connect(target)) as connected:
        yield connected


@pytest.fixture
def store(stores: Stores) -> TransactionalStore:
    """Its keys."""
    assert isinstance(stores.idempotency, TransactionalStore)
    return stores.idempotency


def sql(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def payments(url: str) -> list[str]:
    return [what for (what,) in sql(url, "SELECT what FROM payments ORDER BY what")]


def claim(store: TransactionalStore, key: str = "k", **known: Any) -> Claim:
    return store.claim(key, **{"owner": f"owner {next(_owners)}", "lease": 60_000, "retention": DAY, **known})


def inbox(store: TransactionalStore, key: str = "k", **known: Any) -> Any:
    return store.inbox(key, owner=f"owner {next(_owners)}", retention=DAY, **known)


def run(connection: Any, statement: str) -> None:
    """Run a statement as a user of SQLAlchemy or Django would."""
    if isinstance(connection, sqlalchemy.Connection):
        connection.execute(sqlalchemy.text(statement))
    else:
        with connection.cursor() as cursor:
            cursor.execute(statement)


def pay(connection: Any, what: str = "paid") -> None:
    run(connection, f"INSERT INTO payments (what) VALUES ('{what}')")


def driver(connection: Any) -> Any:
    if isinstance(connection, sqlalchemy.Connection):
        return connection.connection.driver_connection
    return connection.connection


def read(store: TransactionalStore, key: str = "k") -> Record:
    record = store.get(key)
    assert record is not None
    return record


def state_of(store: TransactionalStore, key: str = "k") -> str | None:
    record = store.get(key)
    return None if record is None else record.state


def kill_all(url: str) -> None:
    statement = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    sql(url, f"SELECT pg_terminate_backend(pid) {statement}")
    wait_until(lambda: not sql(url, f"SELECT {statement}"))


def test_all_stores_work(target: Any, stores: Stores) -> None:
    """Letters, deliveries, crashes and keys, with the bytes and the JSON in them."""
    assert schema_status(target).ready
    assert stores.dead_letters.put(letter())
    assert 1 == len(stores.dead_letters.discard(["m"], now=T0, by="me", why="why"))
    read = stores.dead_letters.get("m")
    assert read is not None
    assert ["discarded"] == [event.what for event in read.standing.events]
    assert stores.deliveries.claim("m", 1, "f", now=T0)
    with closing(stores.deliveries.crashes.starter("p")) as starter:
        assert starter.start("m", now=T0)
        assert starter.flush()
    keys = stores.idempotency
    keys.ping()
    held = keys.claim("k", owner="me ☃", lease=60_000, retention=DAY, fingerprint=b"\0\xff")
    assert keys.step("k", held.fence, "s ☃", b"\0\xff")
    assert (True, False) == keys.renew([("k", held.fence), ("k", 1)], lease=60_000)
    record = keys.page(prefix="k", states=[HELD]).records[0]
    assert ({"s ☃": b"\0\xff"}, b"\0\xff", "me ☃") == (record.steps, record.fingerprint, record.owner)
    assert keys.complete("k", held.fence, Finish(b"\0\xff"), retention=DAY).ours
    answer = keys.claim("k", owner="you", lease=60_000, retention=DAY, fingerprint=b"\0\xff")
    assert (DONE, b"\0\xff") == (answer.answer, answer.result)
    keys.mark("m", retention=DAY)
    assert keys.marked("m")
    assert "me" == keys.reserve("r", "me", ttl=DAY)
    assert 0 == keys.purge()


def test_rows_and_key_are_committed_together(url: str, store: TransactionalStore) -> None:
    """A key or a step of it, or an inbox."""
    held = claim(store)
    with store.atomic("k", held.fence, Finish(b"v"), step="s") as connection:
        pay(connection, "step")
        assert [] == payments(url)
    assert {"s": b"v"} == read(store).steps
    with store.atomic("k", held.fence, Finish(b"r")) as connection:
        pay(connection, "key")
    with inbox(store, "i") as box:
        pay(box.connection, "inbox")
        box.commit(Finish(b"r"))
    with inbox(store, "i") as box:
        assert (DONE, b"r") == (box.claim.answer, box.claim.result)

    assert (DONE, DONE) == (state_of(store), state_of(store, "i"))
    assert ["inbox", "key", "step"] == payments(url)


def test_an_exception_rolls_everything_back(url: str, store: TransactionalStore) -> None:
    """It comes out as it was raised; also what is broken at the commit, as SQLAlchemy or Django calls it."""
    held = claim(store)
    with pytest.raises(KeyError), store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
        raise KeyError
    with pytest.raises(KeyError), inbox(store, "i") as box:
        pay(box.connection)
        raise KeyError
    with inbox(store, "i") as box:
        pay(box.connection)
    with pytest.raises((sqlalchemy.exc.IntegrityError, django.db.IntegrityError)):
        with store.atomic("k", held.fence, Finish()) as connection:
            pay(connection)
            pay(connection)

    assert (HELD, None, []) == (state_of(store), state_of(store, "i"), payments(url))
    with store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
    assert (DONE, ["paid"]) == (state_of(store), payments(url))


def test_whoever_is_fenced_out_leaves_no_rows(url: str, store: TransactionalStore) -> None:
    """The key is somebody else's by then."""
    held = claim(store, lease=1)
    wait_until(lambda: store.posture().now > held.now + 1)
    taken = claim(store)

    with pytest.raises(FencedOut), store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)

    assert [] == payments(url)
    assert (HELD, taken.fence) == (state_of(store), read(store).fence)


def test_a_connection_that_is_killed_leaves_nothing(url: str, store: TransactionalStore) -> None:
    """Before the commit; and the next one has another."""
    held = claim(store)
    with pytest.raises(StoreUnavailable), store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
        kill_all(url)
    assert [] == payments(url)

    with store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
    assert (DONE, ["paid"]) == (state_of(store), payments(url))


def test_connections_that_died_while_they_were_idle(url: str, stores: Stores) -> None:
    """A call finds another; so does a transaction after a call."""
    store = stores.idempotency
    assert isinstance(store, TransactionalStore)
    held = claim(store)
    kill_all(url)

    assert BUSY == claim(store).answer
    with suppress(StoreUnavailable), inbox(store, "i"):  # one of SQLAlchemy's may have gone unnoticed
        pass
    with store.atomic("k", held.fence, Finish()) as connection:
        pay(connection)
    assert ["paid"] == payments(url)


@pytest.mark.parametrize("verb", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
def test_a_transaction_that_was_ended_by_hand_completes_nothing(url: str, store: TransactionalStore, verb: str) -> None:
    """In a statement of its own, past all that would refuse it."""
    with pytest.raises(StoreError, match="ended inside"):
        with store.atomic("k", claim(store).fence, Finish()) as connection:
            pay(connection)
            driver(connection).execute(verb)

    assert HELD == state_of(store)


def test_while_an_inbox_is_open_its_key_is_busy(url: str, store: TransactionalStore) -> None:
    """For all other threads, at once."""
    found: list[str] = []

    def look() -> None:
        found.append(claim(store).answer)
        with inbox(store) as other:
            found.append(other.claim.answer)
        if settings.configured:
            django.db.connections.close_all()  # each thread has its own

    with inbox(store) as box:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(30)
        pay(box.connection)
        box.commit(Finish())

    assert [BUSY, BUSY] == found
    assert ["paid"] == payments(url)


def test_many_inboxes_come_to_their_end(url: str, engine: sqlalchemy.Engine) -> None:
    """With a pool of two one at a time is open, and a short call of its finds the other connection."""
    small = sqlalchemy.create_engine(engine.url, pool_size=2, max_overflow=0)
    apply_schema(small)
    store = connect(small).idempotency
    assert isinstance(store, TransactionalStore)
    numbers, ended = itertools.count(), []

    def work() -> None:
        key = f"k{next(numbers)}"
        with inbox(store, key) as box:
            pay(box.connection, key)
            assert FRESH == claim(store, f"other {key}").answer
            box.commit(Finish())
        ended.append(key)

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    small.dispose()

    assert 50 == len(ended) == len(payments(url))


# -- SQLAlchemy ------------------------------------------------------------------------------------------------------


def test_a_sessions_commit_ends_a_savepoint(url: str, engine: sqlalchemy.Engine) -> None:
    """And its rollback takes back what came after it."""
    apply_schema(engine)
    store = connect(engine).idempotency
    assert isinstance(store, TransactionalStore)
    held = claim(store)
    with store.atomic("k", held.fence, Finish()) as connection:
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            session.execute(sqlalchemy.text("INSERT INTO payments (what) VALUES ('kept')"))
            session.commit()
            assert [] == payments(url)
            session.execute(sqlalchemy.text("INSERT INTO payments (what) VALUES ('dropped')"))
            session.rollback()
    assert (DONE, ["kept"]) == (state_of(store), payments(url))

    with pytest.raises(FencedOut), store.atomic("k", held.fence, Finish()) as connection:
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            session.execute(sqlalchemy.text("INSERT INTO payments (what) VALUES ('late')"))
            session.commit()
    assert ["kept"] == payments(url), "a commit that ended a savepoint keeps nothing by itself"


@pytest.mark.parametrize("by", ["connection", "transaction", "session"])
def test_a_commit_of_the_connection_is_refused(url: str, engine: sqlalchemy.Engine, by: str) -> None:
    """Before anything is torn, and with what to write."""
    apply_schema(engine)
    store = connect(engine).idempotency
    assert isinstance(store, TransactionalStore)
    with pytest.raises(StoreError, match="create_savepoint"):
        with store.atomic("k", claim(store).fence, Finish()) as connection:
            pay(connection)
            if by == "connection":
                connection.commit()
            elif by == "transaction":
                connection.get_transaction().commit()
            else:
                session = Session(bind=connection, join_transaction_mode="control_fully")
                session.execute(sqlalchemy.text("SELECT 1"))
                session.commit()

    assert (HELD, []) == (state_of(store), payments(url))
    with pytest.raises(StoreError, match="create_savepoint"), inbox(store, "i") as box:
        pay(box.connection)
        box.connection.commit()
    assert (None, []) == (state_of(store, "i"), payments(url))


def test_a_rollback_of_the_connection_completes_nothing(url: str, engine: sqlalchemy.Engine) -> None:
    """The rows before it are gone, so those after it go, too, and the key is not done."""
    apply_schema(engine)
    store = connect(engine).idempotency
    assert isinstance(store, TransactionalStore)
    with pytest.raises(StoreError, match="ended inside"):
        with store.atomic("k", claim(store).fence, Finish()) as connection:
            pay(connection, "before")
            connection.rollback()
            pay(connection, "after")

    assert (HELD, []) == (state_of(store), payments(url))


def test_an_engine_without_transactions(engine: sqlalchemy.Engine) -> None:
    """In AUTOCOMMIT every statement of the user's would be kept: that is refused before the first."""
    apply_schema(engine)
    store = connect(engine.execution_options(isolation_level="AUTOCOMMIT")).idempotency
    assert isinstance(store, TransactionalStore)
    held = claim(store)
    with pytest.raises(SetupError, match="AUTOCOMMIT"), store.atomic("k", held.fence, Finish()):
        pass


def test_an_engine_of_another_dialect() -> None:
    """The error names it."""
    with pytest.raises(SetupError, match=r"postgresql\+psycopg2"):
        connect(sqlalchemy.create_engine("postgresql+psycopg2://localhost/app"))
    with pytest.raises(SetupError, match=r"sqlite\+pysqlite"):
        connect(sqlalchemy.create_engine("sqlite://"))


# -- Django ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def django_store(alias: str) -> TransactionalStore:
    """The keys of Django's database."""
    apply_schema(alias)
    store = connect(alias).idempotency
    assert isinstance(store, TransactionalStore)
    return store


def test_djangos_own_transactions_inside(url: str, django_store: TransactionalStore) -> None:
    """``atomic()`` inside is a savepoint; what waits for the commit is called after it."""
    called: list[list[str]] = []
    with django_store.atomic("k", claim(django_store).fence, Finish()) as connection:
        assert connection is django.db.connections["default"]
        with django.db.transaction.atomic():
            pay(connection, "kept")
        with suppress(KeyError), django.db.transaction.atomic():
            pay(connection, "dropped")
            raise KeyError
        django.db.transaction.on_commit(lambda: called.append(payments(url)))
        assert [] == called

    assert [["kept"]] == called
    assert DONE == state_of(django_store)


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_commit_of_djangos_is_refused(url: str, django_store: TransactionalStore, verb: str) -> None:
    """By Django, before anything is torn."""
    with pytest.raises(TransactionManagementError):
        with django_store.atomic("k", claim(django_store).fence, Finish()) as connection:
            pay(connection)
            getattr(django.db.transaction, verb)()

    assert (HELD, []) == (state_of(django_store), payments(url))


def test_a_transaction_that_is_to_be_rolled_back(url: str, django_store: TransactionalStore) -> None:
    """Django would do that without a word; the key is not done, and somebody is told."""
    with pytest.raises(StoreError):
        with django_store.atomic("k", claim(django_store).fence, Finish()) as connection:
            pay(connection)
            django.db.transaction.set_rollback(True)

    assert (HELD, []) == (state_of(django_store), payments(url))


def test_a_transaction_that_is_open_already(django_store: TransactionalStore) -> None:
    """Nothing would be committed at the end of ours: that is refused."""
    held = claim(django_store)
    with django.db.transaction.atomic():
        with pytest.raises(RuntimeError, match="durable"), django_store.atomic("k", held.fence, Finish()):
            pass
    assert HELD == state_of(django_store)


def test_a_call_inside_belongs_to_the_transaction(django_store: TransactionalStore) -> None:
    """A thread has one connection."""
    with suppress(KeyError), django_store.atomic("k", claim(django_store).fence, Finish()):
        assert FRESH == claim(django_store, "inside").answer
        raise KeyError

    assert None is state_of(django_store, "inside")


def test_a_database_that_is_none_of_djangos(alias: str) -> None:
    """The error says which."""
    with pytest.raises(SetupError, match="nowhere"):
        connect("django://nowhere")
    with pytest.raises(SetupError, match="sqlite"):
        connect("django://lite")

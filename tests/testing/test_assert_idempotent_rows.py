"""`assert_idempotent` with a test database: rows that are committed with their key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import dramatiq
import psycopg
import pytest

from dramatiq_guard import GuardError, IdempotencyGuard, JitterBackoff, connect, current_delivery, install
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import Stores
from dramatiq_guard.testing import assert_idempotent

from .shop import Gateway, complaint

NOWHERE = "postgresql://127.0.0.1:1/production"


@pytest.fixture(autouse=True)
def _broker_of_production() -> None:
    broker = dramatiq.brokers.stub.StubBroker()
    install(broker, JitterBackoff(), IdempotencyGuard(connect(NOWHERE).idempotency))
    dramatiq.set_broker(broker)


@pytest.fixture
def database(postgres_url: str) -> Iterator[Stores]:
    """The database of the test suite, with the tables of the guard and one of the application."""
    apply_schema(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("create table payments (order_id text)")
    with closing(connect(postgres_url)) as stores:
        yield stores


@pytest.fixture
def payments(postgres_url: str, database: Stores) -> Iterator[Callable[[], int]]:
    """How many payments are on the books."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def payments() -> int:
            row = connection.execute("select count(*) from payments").fetchone()
            assert row is not None
            return int(row[0])

        yield payments


def test_rows_by_atomic_are_written_once(database: Stores, payments: Callable[[], int]) -> None:
    """They are committed with the key, or neither is."""

    @dramatiq.actor(idempotency_key="order:{order}", idempotent="atomic")
    def book(order: str) -> dict[str, str]:
        with current_delivery().atomic(result={"order": order}) as connection:
            connection.execute("insert into payments values (%s)", (order,))
        return {"order": order}

    assert_idempotent(book, "o-1", effect=payments, store=database.idempotency)

    assert database.idempotency.page().records == ()


def test_rows_of_an_inbox_are_written_once(database: Stores, payments: Callable[[], int]) -> None:
    """The whole actor is one transaction."""

    @dramatiq.actor(idempotency_key="order:{order}", idempotent="inbox")
    def book(order: str) -> None:
        current_delivery().connection.execute("insert into payments values (%s)", (order,))

    assert_idempotent(book, "o-1", effect=payments, store=database.idempotency)


def test_what_is_not_in_the_transaction_is_found(
    database: Stores, payments: Callable[[], int], gateway: Gateway
) -> None:
    """An effect elsewhere is repeated in these modes as in any."""

    @dramatiq.actor(idempotency_key="order:{order}", idempotent="atomic")
    def book(order: str) -> None:
        gateway.charge(order, 1)
        with current_delivery().atomic() as connection:
            connection.execute("insert into payments values (%s)", (order,))

    def effect() -> dict[str, int]:
        return {"charges": len(gateway.charges), "payments": payments()}

    with pytest.raises(AssertionError) as failure:
        assert_idempotent(book, "o-1", effect=effect, store=database.idempotency)

    lines = complaint(failure)
    assert [line.partition("; ")[0] for line in lines] == [
        "killed before the transaction: charges 1 → 2",
        "killed before the commit: charges 1 → 2",
    ]
    assert "write rows by the connection of the transaction" in lines[0]


def test_actors_in_lease_mode_may_use_the_database_too(
    postgres_url: str, database: Stores, payments: Callable[[], int]
) -> None:
    """Rows that are written beside the guard are found where they are doubled."""

    @dramatiq.actor(idempotency_key="order:{order}")
    def book(order: str) -> None:
        with psycopg.connect(postgres_url) as connection:
            connection.execute("insert into payments values (%s)", (order,))

    with pytest.raises(AssertionError, match="killed between the effect and its record: payments 1 → 2"):
        assert_idempotent(book, "o-1", effect=payments, store=database.idempotency)


def test_without_a_database_these_modes_are_refused() -> None:
    """No store in memory can show what is one commit."""

    @dramatiq.actor(idempotency_key="order:{order}", idempotent="inbox")
    def book(order: str) -> None: ...

    with pytest.raises(GuardError, match=r"idempotent='inbox'.*store=connect\('postgresql://…'\).idempotency"):
        assert_idempotent(book, "o-1", effect=[])

"""The servers of these tests; the store of keys is a Redis of its own, apart from the broker's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import ForeignRabbitMQ, PrivateRabbitMQ

from .world import Servers


@pytest.fixture(scope="module")
def server(rabbitmq: PrivateRabbitMQ | ForeignRabbitMQ) -> PrivateRabbitMQ:
    """The RabbitMQ that all tests share."""
    if isinstance(rabbitmq, ForeignRabbitMQ):
        pytest.skip("this test looks into RabbitMQ, and DRAMATIQ_GUARD_TEST_RABBITMQ_URL names one that is not ours")
    return rabbitmq.start()


@pytest.fixture(scope="module")
def store_valkey() -> Iterator[PrivateValkey]:
    """The Redis of the keys, which tests may kill, flush and start again."""
    with PrivateValkey(aof=True) as store:
        yield store


@pytest.fixture(scope="module")
def servers(store_valkey: PrivateValkey, postgres: PrivatePostgres) -> Iterator[Servers]:
    """A Redis to be the broker, one for the keys, and a database."""
    name = f"kills_{uuid.uuid4().hex[:12]}"
    with PrivateValkey() as broker:
        yield Servers(broker.url, broker.url_of(1), store_valkey.url, postgres.create_database(name)).prepare()
    postgres.drop_database(name)

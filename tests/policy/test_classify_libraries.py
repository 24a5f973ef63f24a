"""The table against the libraries themselves: names, attributes and bases are what the table takes them for."""

from __future__ import annotations

import importlib
import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import aiohttp
import asyncpg
import botocore.exceptions
import grpc
import httpx
import jsonschema
import marshmallow
import pika.exceptions
import psycopg
import psycopg2
import psycopg2.errors
import psycopg_pool
import pydantic
import pytest
import redis
import requests
import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.orm
import urllib3
from django.core.exceptions import ObjectDoesNotExist
from django.db.utils import DatabaseErrorWrapper

from dramatiq_guard.policy.builtin import ALIASES, TABLE
from dramatiq_guard.policy.explain import explain
from dramatiq_guard.policy.rules import Rules, compile_rules
from dramatiq_guard.policy.verdict import Kind

PERMANENT, RETRYABLE, LIMITED = (Kind.PERMANENT, None), (Kind.RETRYABLE, None), (Kind.RETRYABLE, 3)

#: Rows for classes that the installed version of their library does not have (any more).
ELSEWHERE = {"pydantic.error_wrappers.ValidationError", "valkey.exceptions.CrossSlotTransactionError"}


def meaning(exc: BaseException) -> tuple[Kind, int | None]:
    verdict = Rules().classify(exc)
    assert verdict.rule.startswith("builtin:"), verdict
    return verdict.kind, verdict.max_retries


def caught(call: Any) -> BaseException:
    with pytest.raises(BaseException) as info:
        call()
    return info.value


@pytest.fixture(scope="module")
def closed_port() -> int:
    """A port where nobody listens."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.parametrize("name", sorted(TABLE.keys() - ELSEWHERE))
def test_each_name_of_the_table_is_the_qualified_name_of_a_class(name: str) -> None:
    """A library that moves its exceptions fails here first."""
    module, _, qualname = name.rpartition(".")
    cls = getattr(importlib.import_module(module), qualname)

    assert name == f"{cls.__module__}.{cls.__qualname__}"


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_each_alias_leads_to_its_class(alias: str, name: str) -> None:
    """Both names are those of one class."""
    module, _, attribute = alias.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)

    assert name == f"{cls.__module__}.{cls.__qualname__}"


#: As the documentation of their libraries spells them.
PUBLIC_NAMES = """
httpx.HTTPStatusError requests.HTTPError redis.TimeoutError asyncpg.UniqueViolationError psycopg.errors.UniqueViolation
aiohttp.ClientResponseError django.db.IntegrityError pydantic.ValidationError jsonschema.ValidationError grpc.RpcError
grpc.aio.AioRpcError dramatiq.middleware.Shutdown
"""


@pytest.mark.parametrize("name", PUBLIC_NAMES.split())
def test_public_names_in_users_rules_reach_their_class(name: str) -> None:
    """So a user need not know in which inner module a class lives."""
    module, _, qualname = name.rpartition(".")
    cls = getattr(importlib.import_module(module), qualname)
    rules = Rules((compile_rules(origin="actor", fatal=[name]),))

    assert "actor:fatal[0]" == explain(cls, rules=rules).rule


@pytest.mark.parametrize(("status", "expected"), [(400, PERMANENT), (404, LIMITED), (429, RETRYABLE), (503, RETRYABLE)])
def test_http_clients_by_status_with_retry_after(status: int, expected: tuple[Kind, int | None]) -> None:
    """httpx, requests and aiohttp, as their own raise_for_status makes them."""
    headers = {"Retry-After": "7"}
    via_httpx = caught(
        httpx.Response(status, headers=headers, request=httpx.Request("GET", "http://x")).raise_for_status
    )
    answer = requests.Response()
    answer.status_code = status
    answer.headers.update(headers)
    via_requests = caught(answer.raise_for_status)
    via_aiohttp = aiohttp.ClientResponseError(SimpleNamespace(real_url="http://x"), (), status=status, headers=headers)

    for exc in (via_httpx, via_requests, via_aiohttp):
        assert expected == meaning(exc)
        assert (None if expected == PERMANENT else 7_000) == Rules().classify(exc).retry_after


def test_connections_refused_are_retryable_in_every_client(closed_port: int) -> None:
    """The most usual failure of all."""
    url = f"http://127.0.0.1:{closed_port}/"
    engine = sqlalchemy.create_engine(f"postgresql+psycopg://u:p@127.0.0.1:{closed_port}/db")
    pool = urllib3.PoolManager(retries=False)

    for call in (
        lambda: httpx.get(url),
        lambda: requests.get(url, timeout=5),
        lambda: pool.request("GET", url),
        lambda: urllib3.PoolManager(retries=1).request("GET", url),
        lambda: redis.Redis(port=closed_port, retry=None).ping(),
        lambda: psycopg.connect(f"host=127.0.0.1 port={closed_port} user=u"),
        lambda: psycopg2.connect(f"host=127.0.0.1 port={closed_port} user=u"),
        engine.connect,
    ):
        assert RETRYABLE == meaning(caught(call))


def test_malformed_addresses_are_permanent() -> None:
    """No attempt will make sense of them."""
    for call in (lambda: httpx.get("nonsense"), lambda: requests.get("nonsense", timeout=5)):
        assert PERMANENT == meaning(caught(call))
    assert PERMANENT == meaning(caught(lambda: urllib3.util.parse_url("http://[")))
    assert PERMANENT == meaning(aiohttp.InvalidURL("nonsense"))


def test_a_body_that_is_not_json_is_permanent() -> None:
    """requests has a class of its own, which is a RequestException too."""
    answer = requests.Response()
    answer._content = b"<html>"

    assert PERMANENT == meaning(caught(answer.json))
    assert PERMANENT == meaning(caught(httpx.Response(200, content=b"<html>").json))


def test_urllib3_and_requests_retries_used_up_on_a_status() -> None:
    """The status is in the text only."""
    used_up = urllib3.exceptions.MaxRetryError(
        None, "/", urllib3.exceptions.ResponseError("too many 404 error responses")
    )  # type: ignore[arg-type]

    assert LIMITED == meaning(used_up)
    assert LIMITED == meaning(requests.exceptions.RetryError(used_up))
    assert RETRYABLE == meaning(requests.exceptions.RetryError("x"))


def test_postgres_errors_by_sqlstate_in_three_drivers_and_two_orms() -> None:
    """A unique violation is permanent, a serialization failure is not, however it is wrapped."""
    for unique, conflict in (
        (psycopg.errors.UniqueViolation("x"), psycopg.errors.SerializationFailure("x")),
        (asyncpg.UniqueViolationError("x"), asyncpg.SerializationError("x")),
    ):
        assert PERMANENT == meaning(unique)
        assert RETRYABLE == meaning(conflict)
        assert PERMANENT == meaning(sqlalchemy.exc.IntegrityError("x", {}, unique))
        assert RETRYABLE == meaning(sqlalchemy.exc.IntegrityError("x", {}, conflict))
        assert RETRYABLE == meaning(sqlalchemy.exc.DBAPIError("x", {}, conflict))
    assert PERMANENT == meaning(psycopg2.errors.UniqueViolation("x"))
    assert RETRYABLE == meaning(psycopg2.errors.SerializationFailure("x"))
    assert RETRYABLE == meaning(psycopg.errors.ReadOnlySqlTransaction("x"))
    assert PERMANENT == meaning(psycopg.errors.UndefinedTable("x"))
    assert PERMANENT == meaning(asyncpg.UndefinedTableError("x"))


def test_django_wraps_the_drivers_error_and_the_sqlstate_is_found() -> None:
    """As its own wrapper raises it."""

    def wrapped(exc: Exception) -> BaseException:
        def call() -> None:
            with DatabaseErrorWrapper(SimpleNamespace(Database=psycopg, errors_occurred=False)):
                raise exc

        return caught(call)

    assert PERMANENT == meaning(wrapped(psycopg.errors.UniqueViolation("x")))
    assert RETRYABLE == meaning(wrapped(psycopg.errors.DeadlockDetected("x")))
    assert PERMANENT == meaning(wrapped(psycopg.errors.UndefinedColumn("x")))
    assert "sqlstate=42703" in Rules().classify(wrapped(psycopg.errors.UndefinedColumn("x"))).rule
    assert LIMITED == meaning(type("DoesNotExist", (ObjectDoesNotExist,), {})())


def test_sqlalchemy_over_sqlite_goes_by_class() -> None:
    """Where there is no SQLSTATE; an error of Python's inside a statement is looked through."""
    engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.pool.QueuePool, pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("create table t (id integer primary key)"))
        connection.execute(sqlalchemy.text("insert into t values (1)"))
        twice = caught(lambda: connection.execute(sqlalchemy.text("insert into t values (1)")))
        nothing = caught(lambda: connection.execute(sqlalchemy.text("select id from t where id = 9")).one())
        exhausted = caught(lambda: engine.pool._do_get() if engine.pool.__dict__.update(_timeout=0) is None else None)
    engine.dispose()

    assert PERMANENT == meaning(twice)
    assert LIMITED == meaning(nothing)
    assert RETRYABLE == meaning(exhausted)


def test_an_exhausted_psycopg_pool_is_retryable() -> None:
    """By its class."""
    assert RETRYABLE == meaning(psycopg_pool.PoolTimeout("x"))
    assert "builtin:psycopg_pool.PoolTimeout" == Rules().classify(psycopg_pool.PoolTimeout("x")).rule


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("LOADING Redis is loading the dataset in memory", RETRYABLE),
        ("READONLY You can't write against a read only replica.", RETRYABLE),
        ("OOM command not allowed when used memory > 'maxmemory'.", RETRYABLE),
        ("MISCONF Redis is configured to save RDB snapshots", RETRYABLE),
        ("CLUSTERDOWN Hash slot not served", RETRYABLE),
        ("MASTERDOWN Link with MASTER is down", RETRYABLE),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", PERMANENT),
        ("NOAUTH Authentication required.", LIMITED),
        ("WRONGPASS invalid username-password pair", LIMITED),
        ("NOPERM User default has no permissions", LIMITED),
        ("CROSSSLOT Keys in request don't hash to the same slot", PERMANENT),
    ],
)
def test_redis_answers_as_its_client_makes_exceptions_of_them(answer: str, expected: tuple[Kind, int | None]) -> None:
    """Some codes become classes and lose their code."""
    from redis._parsers import BaseParser

    assert expected == meaning(BaseParser.parse_error(answer))


def test_pika_by_reply_code() -> None:
    """As the broker closes channels and connections."""
    assert LIMITED == meaning(pika.exceptions.ChannelClosedByBroker(404, "NOT_FOUND"))
    assert PERMANENT == meaning(pika.exceptions.ChannelClosedByBroker(311, "CONTENT_TOO_LARGE"))
    assert RETRYABLE == meaning(pika.exceptions.ConnectionClosedByBroker(320, "CONNECTION_FORCED"))
    assert RETRYABLE == meaning(pika.exceptions.StreamLostError("x"))
    assert RETRYABLE == meaning(pika.exceptions.UnroutableError([]))


def test_botocore_by_code_and_status() -> None:
    """Errors of modelled services are subclasses made at run time."""

    def error(code: str, status: int) -> BaseException:
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}}
        no_such_key = type("NoSuchKey", (botocore.exceptions.ClientError,), {})
        return no_such_key({"Error": {"Code": code}, "ResponseMetadata": metadata}, "GetObject")

    assert RETRYABLE == meaning(error("SlowDown", 503))
    assert RETRYABLE == meaning(error("ThrottlingException", 400))
    assert LIMITED == meaning(error("NoSuchKey", 404))
    assert PERMANENT == meaning(error("ValidationException", 400))
    assert RETRYABLE == meaning(botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"))
    assert PERMANENT == meaning(botocore.exceptions.ParamValidationError(report="x"))


def test_grpc_refused_is_unavailable(closed_port: int) -> None:
    """A real call to a port where nobody listens."""
    with grpc.insecure_channel(f"127.0.0.1:{closed_port}") as channel:
        exc = caught(lambda: channel.unary_unary("/a/b")(b"", timeout=5))

    assert RETRYABLE == meaning(exc)
    assert "builtin:grpc.RpcError[status=UNAVAILABLE]" == Rules().classify(exc).rule
    aio = grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert PERMANENT == meaning(aio)


def test_validation_errors_are_permanent() -> None:
    """pydantic 2 and 1, jsonschema, marshmallow."""

    class Order(pydantic.BaseModel):
        cents: int

    class Schema(marshmallow.Schema):
        cents = marshmallow.fields.Integer()

    assert PERMANENT == meaning(caught(lambda: Order(cents="many")))  # type: ignore[arg-type]
    assert PERMANENT == meaning(caught(lambda: jsonschema.validate(1, {"type": "string"})))
    assert PERMANENT == meaning(caught(lambda: Schema().load({"cents": "many"})))

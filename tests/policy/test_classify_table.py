from __future__ import annotations

import errno
import json
import re
import smtplib
import socket
import ssl
import urllib.error
from email.message import Message
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dramatiq_guard.policy.builtin import TABLE
from dramatiq_guard.policy.rules import DEFAULT, Rules
from dramatiq_guard.policy.verdict import Kind

from .errors import fake, fake_class, response

DOCS = Path(__file__).parents[2] / "docs" / "classification.md"

PERMANENT, RETRYABLE, LIMITED = (Kind.PERMANENT, None), (Kind.RETRYABLE, None), (Kind.RETRYABLE, 3)

REFUSED = (400, 405, 406, 410, 411, 413, 414, 415, 422, 451)
BUSY = (408, 425, 429, 500, 501, 502, 503, 504, 507, 511, 599)
CURABLE = (401, 403, 404, 409, 423)
UNKNOWN = (100, 200, 302, 402, 407, 412, 416, 418, 428, 600)


def meaning(exc: BaseException) -> tuple[Kind, int | None]:
    verdict = Rules().classify(exc)
    return verdict.kind, verdict.max_retries


@pytest.mark.parametrize(
    ("statuses", "expected"), [(REFUSED, PERMANENT), (BUSY, RETRYABLE), (CURABLE, LIMITED), (UNKNOWN, RETRYABLE)]
)
@pytest.mark.parametrize(
    ("name", "carry"),
    [
        ("httpx.HTTPStatusError", lambda status: {"response": response(status)}),
        ("requests.exceptions.HTTPError", lambda status: {"response": response(status)}),
        ("aiohttp.client_exceptions.ClientResponseError", lambda status: {"status": status, "headers": None}),
        ("urllib.error.HTTPError", lambda status: {"code": status, "headers": Message()}),
        (
            "urllib3.exceptions.MaxRetryError",
            lambda status: {"reason": Exception(f"too many {status} error responses")},
        ),
        (
            "botocore.exceptions.ClientError",
            lambda status: {
                "response": {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
            },
        ),
    ],
)
def test_http_errors_are_told_apart_by_their_status(
    name: str, carry: Any, statuses: tuple[int, ...], expected: tuple[Kind, int | None]
) -> None:
    """Whichever client raises them."""
    assert dict.fromkeys(statuses, expected) == {status: meaning(fake(name, **carry(status))) for status in statuses}


def test_the_rule_says_class_and_status() -> None:
    """So that a person can look it up."""
    assert (
        "builtin:httpx.HTTPStatusError[status=503]"
        == Rules().classify(fake("httpx.HTTPStatusError", response=response(503))).rule
    )


def test_an_unknown_status_is_the_default() -> None:
    """The table does not guess."""
    assert DEFAULT == Rules().classify(fake("httpx.HTTPStatusError", response=response(418)))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ECONNRESET ETIMEDOUT EPIPE ECONNREFUSED EHOSTUNREACH ENETUNREACH EAGAIN EINTR EMFILE ENOSPC", RETRYABLE),
        ("ENOENT EACCES EPERM EISDIR ENOTDIR EEXIST ENAMETOOLONG ELOOP", PERMANENT),
        ("EINVAL EBADF", RETRYABLE),
    ],
)
def test_os_errors_are_told_apart_by_their_errno(names: str, expected: tuple[Kind, int | None]) -> None:
    """Also where a class of one's own is raised with it."""
    own = fake_class("app.DiskError", OSError)
    for name in names.split():
        assert expected == meaning(OSError(getattr(errno, name), "x")), name
        assert expected == meaning(own(getattr(errno, name), "x")), name


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (FileNotFoundError("no errno"), PERMANENT),
        (PermissionError("no errno"), PERMANENT),
        (TimeoutError(), RETRYABLE),
        (ConnectionError(), RETRYABLE),
        (BrokenPipeError(), RETRYABLE),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), RETRYABLE),
        (ssl.SSLError(1, "errno 1 is EPERM on another scale"), RETRYABLE),
        (json.JSONDecodeError("x", "{", 1), PERMANENT),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), PERMANENT),
        (UnicodeEncodeError("ascii", "é", 0, 1, "x"), PERMANENT),
        (urllib.error.URLError("x"), RETRYABLE),
        (OSError("no errno at all"), RETRYABLE),
        (fake_class("app.Odd", OSError)("E17", "errno is a string"), RETRYABLE),
        (fake_class("app.Lost", ConnectionError)("a subclass of ours"), RETRYABLE),
    ],
)
def test_pythons_own_errors(exc: BaseException, expected: tuple[Kind, int | None]) -> None:
    """By class, where the class says enough."""
    assert expected == meaning(exc)


DRIVERS = [
    ("psycopg.", lambda state: {"sqlstate": state}),
    ("psycopg2.", lambda state: {"pgcode": state}),
    ("sqlalchemy.exc.", lambda state: {"orig": SimpleNamespace(sqlstate=state)}),
    ("sqlalchemy.exc.", lambda state: {"orig": SimpleNamespace(pgcode=state)}),
    ("django.db.utils.", lambda state: {"__cause__": fake("psycopg.Error", sqlstate=state)}),
    ("django.db.utils.", lambda state: {"__cause__": fake("psycopg2.Error", pgcode=state)}),
]
SQLSTATES = [
    ("08000 08006 40001 40P01 53300 57014 57P01 57P03 55P03 25006", RETRYABLE),
    ("22001 22P02 23505 23503 42P01 42601 42501", PERMANENT),
]


@pytest.mark.parametrize(("states", "expected"), SQLSTATES)
@pytest.mark.parametrize(("module", "carry"), DRIVERS)
def test_databases_are_told_apart_by_sqlstate(
    module: str, carry: Any, states: str, expected: tuple[Kind, int | None]
) -> None:
    """The SQLSTATE knows better than the class: an IntegrityError with 40001 is a conflict."""
    for state in states.split():
        for name in ("OperationalError", "IntegrityError", "DataError", "InterfaceError"):
            assert expected == meaning(fake(module + name, **carry(state))), (state, name)


@pytest.mark.parametrize(("states", "expected"), SQLSTATES)
@pytest.mark.parametrize(
    ("name", "carry"),
    [
        ("asyncpg.exceptions._base.PostgresError", lambda state: {"sqlstate": state}),
        ("psycopg.Error", lambda state: {"sqlstate": state}),
        ("sqlalchemy.exc.DBAPIError", lambda state: {"orig": SimpleNamespace(sqlstate=state)}),
    ],
)
def test_the_base_class_of_a_driver_goes_by_sqlstate_too(
    name: str, carry: Any, states: str, expected: tuple[Kind, int | None]
) -> None:
    """Errors of classes that the table does not list derive from it."""
    assert {expected} == {meaning(fake(name, **carry(state))) for state in states.split()}


@pytest.mark.parametrize("module", ["psycopg", "psycopg2", "sqlalchemy.exc", "django.db.utils"])
def test_without_an_sqlstate_the_class_decides(module: str) -> None:
    """As when there was no server to answer, or another database."""
    assert RETRYABLE == meaning(fake(f"{module}.OperationalError"))
    assert f"builtin:{module}.OperationalError" == Rules().classify(fake(f"{module}.OperationalError")).rule
    assert RETRYABLE == meaning(fake(f"{module}.InterfaceError", sqlstate="99999"))
    assert PERMANENT == meaning(fake(f"{module}.IntegrityError"))
    assert PERMANENT == meaning(fake(f"{module}.DataError"))


@pytest.mark.parametrize(
    "name",
    [
        "psycopg_pool.PoolTimeout",
        "psycopg_pool.TooManyRequests",
        "psycopg2.pool.PoolError",
        "sqlalchemy.exc.TimeoutError",
        "redis.exceptions.MaxConnectionsError",
        "urllib3.exceptions.EmptyPoolError",
        "httpx.PoolTimeout",
    ],
)
def test_an_exhausted_pool_is_retryable(name: str) -> None:
    """The next attempt finds a connection."""
    assert (Kind.RETRYABLE, f"builtin:{name}") == (
        Rules().classify(fake(name)).kind,
        Rules().classify(fake(name)).rule,
    )


@pytest.mark.parametrize("name", ["sqlalchemy.exc.NoResultFound", "django.core.exceptions.ObjectDoesNotExist"])
def test_a_row_that_is_not_there_is_looked_for_again_but_not_for_ever(name: str) -> None:
    """A message may overtake the commit of the row it is about, or the replica that it is read from."""
    assert LIMITED == meaning(fake(name))


@pytest.mark.parametrize("package", ["redis", "valkey"])
@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("ConnectionError", ("x",), RETRYABLE),
        ("TimeoutError", ("x",), RETRYABLE),
        ("BusyLoadingError", ("x",), RETRYABLE),
        ("ReadOnlyError", ("x",), RETRYABLE),
        ("OutOfMemoryError", ("x",), RETRYABLE),
        ("MasterDownError", ("x",), RETRYABLE),
        ("AuthenticationError", ("x",), LIMITED),
        ("NoPermissionError", ("x",), LIMITED),
        ("DataError", ("x",), PERMANENT),
        ("ClusterCrossSlotError", ("x",), PERMANENT),
        ("ResponseError", ("WRONGTYPE Operation against a key holding the wrong kind of value",), PERMANENT),
        ("ResponseError", ("MISCONF Redis is configured to save RDB snapshots",), RETRYABLE),
        ("ResponseError", ("NOPERM this user has no permissions",), LIMITED),
        ("ResponseError", ("value is not an integer or out of range",), RETRYABLE),
        ("ResponseError", ("",), RETRYABLE),
        ("ResponseError", (), RETRYABLE),
    ],
)
def test_redis_by_class_and_by_the_code_of_the_answer(
    package: str, name: str, args: tuple[str, ...], expected: tuple[Kind, int | None]
) -> None:
    """The code is the first word of what the server says."""
    assert expected == meaning(fake(f"{package}.exceptions.{name}", *args))


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("AMQPConnectionError", None, RETRYABLE),
        ("ConnectionClosedByBroker", 320, RETRYABLE),
        ("ConnectionClosedByBroker", 541, RETRYABLE),
        ("ConnectionClosedByBroker", 530, LIMITED),
        ("ChannelClosedByBroker", 404, LIMITED),
        ("ChannelClosedByBroker", 406, LIMITED),
        ("ChannelClosedByBroker", 311, PERMANENT),
        ("ChannelClosedByBroker", 405, RETRYABLE),
        ("ProbableAuthenticationError", None, LIMITED),
    ],
)
def test_pika_by_reply_code(name: str, code: int | None, expected: tuple[Kind, int | None]) -> None:
    """406 is limited, since a slow consumer's channel is closed with it as well."""
    assert expected == meaning(fake(f"pika.exceptions.{name}", reply_code=code))


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ThrottlingException", 400, RETRYABLE),
        ("ProvisionedThroughputExceededException", 400, RETRYABLE),
        ("ExpiredToken", 400, LIMITED),
        ("ResourceNotFoundException", 400, LIMITED),
        ("ValidationException", 400, PERMANENT),
        ("NoSuchKey", 404, LIMITED),
        ("Unheard", 503, RETRYABLE),
    ],
)
def test_botocore_by_code_then_by_status(code: str, status: int, expected: tuple[Kind, int | None]) -> None:
    """AWS throttles with status 400."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}}

    assert expected == meaning(fake("botocore.exceptions.ClientError", response=answer))


def test_botocore_carries_retry_after_too() -> None:
    """In the headers of the response's metadata."""
    metadata = {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "9"}}
    exc = fake("botocore.exceptions.ClientError", response={"Error": {"Code": "x"}, "ResponseMetadata": metadata})

    assert 9_000 == Rules().classify(exc).retry_after


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED INTERNAL UNKNOWN CANCELLED", RETRYABLE),
        ("INVALID_ARGUMENT OUT_OF_RANGE UNIMPLEMENTED DATA_LOSS", PERMANENT),
        ("NOT_FOUND PERMISSION_DENIED UNAUTHENTICATED ALREADY_EXISTS FAILED_PRECONDITION", LIMITED),
    ],
)
def test_grpc_by_status(codes: str, expected: tuple[Kind, int | None]) -> None:
    """Read from code(), as its exceptions have it."""
    status = Enum("StatusCode", codes)
    for code in status:
        assert expected == meaning(fake("grpc.RpcError", code=lambda code=code: code)), code


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (smtplib.SMTPDataError(451, b"later"), RETRYABLE),
        (smtplib.SMTPDataError(552, b"full"), PERMANENT),
        (smtplib.SMTPConnectError(421, b"busy"), RETRYABLE),
        (smtplib.SMTPAuthenticationError(535, b"credentials"), LIMITED),
        (smtplib.SMTPServerDisconnected("x"), RETRYABLE),
        (smtplib.SMTPRecipientsRefused({"a@b": (550, b"unknown")}), PERMANENT),
        (smtplib.SMTPRecipientsRefused({"a@b": (550, b"unknown"), "c@d": (450, b"later")}), RETRYABLE),
        (smtplib.SMTPRecipientsRefused({}), RETRYABLE),
    ],
)
def test_smtp_by_code(exc: BaseException, expected: tuple[Kind, int | None]) -> None:
    """4xx is for now, 5xx is for good."""
    assert expected == meaning(exc)


@pytest.mark.parametrize(
    "name",
    [
        "pydantic_core._pydantic_core.ValidationError",
        "pydantic.error_wrappers.ValidationError",
        "pydantic.v1.error_wrappers.ValidationError",
        "jsonschema.exceptions.ValidationError",
        "marshmallow.exceptions.ValidationError",
        "django.core.exceptions.ValidationError",
        "httpx.InvalidURL",
        "httpx.UnsupportedProtocol",
        "requests.exceptions.MissingSchema",
        "requests.exceptions.JSONDecodeError",
        "urllib3.exceptions.LocationParseError",
        "botocore.exceptions.ParamValidationError",
    ],
)
def test_what_does_not_fit_its_shape_is_permanent(name: str) -> None:
    """The same data has the same shape next time."""
    assert PERMANENT == meaning(fake(name))


@pytest.mark.parametrize(
    "code", [None, "", "x" * 10_000, pytest.param(10**5_000, id="huge"), -1, True, 5.5, b"503", [503], object()]
)
@pytest.mark.parametrize("name", ["httpx.HTTPStatusError", "psycopg.Error", "builtins.OSError"])
def test_a_code_of_a_strange_type_or_size_is_no_code(name: str, code: object) -> None:
    """Whatever a library or a test double puts there."""
    exc = fake(name, response=SimpleNamespace(status_code=code, headers={}), sqlstate=code, errno=code)

    assert DEFAULT.rule == Rules().classify(exc).rule


def test_the_documentation_has_every_family_of_the_table() -> None:
    """docs/classification.md and the table are kept in sync."""
    text = DOCS.read_text()
    families = {re.split(r"[.]", name)[0] for name in TABLE}

    assert set() == {family for family in families if f"`{family}" not in text}

"""What the library knows about errors without being told: a table keyed by qualified class name.

Names, not classes, so that nothing has to be imported, or even installed, to be classified.  A row is a sequence of
steps: a `By` that finds an answer decides, an `Outcome` always does; where a row has no answer the class's bases are
asked in their order.  Errors that say nothing about trying again (KeyError, ValueError, …) are left out on purpose.

Keep in sync with docs/classification.md.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .codes import AMQP, AWS, ERRNO, GRPC, HTTP, LIMIT, REDIS, SMTP, SQLSTATE, By, Outcome
from .verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIASES", "CALL_DOES_NOT_FIT", "CONTROL", "TABLE", "WORDS"]

Row = tuple["By | Outcome", ...]


def _rows(module: str, names: str, *row: By | Outcome) -> dict[str, Row]:
    return {f"{module}.{name}": row for name in names.split()}


def _first(*paths: str) -> Callable[[Any], Any]:
    """A reader of the first attribute path that leads to something."""

    def read(exc: Any) -> Any:
        for path in paths:
            try:
                found = attrgetter(path)(exc)
            except AttributeError:
                continue
            if found is not None:
                return found
        return None

    return read


def _retries_used_up(exc: Any) -> int:
    """The status in urllib3's "too many 503 error responses", or in requests' wrapper of it."""
    reason = exc.reason if hasattr(exc, "reason") else exc.args[0].reason
    return int(reason.args[0].split()[2])


_LATER = Outcome(Kind.RETRYABLE, "the connection failed, or the answer did not come in time")
_POOL = Outcome(Kind.RETRYABLE, "every connection of the pool is in use")
_DATABASE = Outcome(Kind.RETRYABLE, "the database could not be reached, or could not go on")
_ROW = Outcome(Kind.RETRYABLE, "the row may not be committed, or not yet replicated", LIMIT)
_CREDENTIALS = Outcome(Kind.RETRYABLE, "the credentials are refused or missing", LIMIT)
_ADDRESS = Outcome(Kind.PERMANENT, "the address or the header is malformed")
_ARGUMENT = Outcome(Kind.PERMANENT, "the client does not accept these arguments")
_INVALID = Outcome(Kind.PERMANENT, "the data does not have the required shape")
_TEXT = Outcome(Kind.PERMANENT, "the text is malformed and will be so next time")
_PATH = Outcome(Kind.PERMANENT, "the path or the permission will be the same next time")

_RESPONSE = By("status", attrgetter("response.status_code"), HTTP, attrgetter("response.headers"))
_AIOHTTP = By("status", attrgetter("status"), HTTP, attrgetter("headers"))
_URLLIB = By("status", attrgetter("code"), HTTP, attrgetter("headers"))
_USED_UP = By("status", _retries_used_up, HTTP)
_ERRNO = By("errno", attrgetter("errno"), ERRNO)
_SQLSTATE = By("sqlstate", _first("sqlstate", "pgcode"), SQLSTATE)
_ORIG = By("sqlstate", _first("orig.sqlstate", "orig.pgcode"), SQLSTATE)
_CAUSE = By("sqlstate", _first("__cause__.sqlstate", "__cause__.pgcode"), SQLSTATE)
_REDIS = By("status", lambda exc: exc.args[0].split(None, 1)[0], REDIS)
_AMQP = By("status", attrgetter("reply_code"), AMQP)
_AWS = By("status", lambda exc: exc.response["Error"]["Code"], AWS)
_AWS_HTTP = By(
    "status",
    lambda exc: exc.response["ResponseMetadata"]["HTTPStatusCode"],
    HTTP,
    lambda exc: exc.response["ResponseMetadata"]["HTTPHeaders"],
)
_GRPC = By("status", lambda exc: exc.code().name, GRPC)
_SMTP = By("status", attrgetter("smtp_code"), SMTP)
# One recipient that may be served later is enough for another attempt.
_RECIPIENTS = By("status", lambda exc: min(code for code, _ in exc.recipients.values()), SMTP)


def _dbapi(module: str, base: str, by: By) -> dict[str, Row]:
    """The classes of a DB-API driver; the SQLSTATE, where there is one, knows better than the class."""
    return {
        **_rows(module, base, by),
        **_rows(module, "OperationalError InterfaceError", by, _DATABASE),
        **_rows(module, "IntegrityError", by, SQLSTATE["23"]),
        **_rows(module, "DataError", by, SQLSTATE["22"]),
    }


def _redis(package: str) -> dict[str, Row]:
    module = f"{package}.exceptions"
    return {
        **_rows(module, "ConnectionError TimeoutError BusyLoadingError", _LATER),
        **_rows(module, "MaxConnectionsError", _POOL),
        **_rows(module, "ResponseError", _REDIS),
        **_rows(
            module,
            "ReadOnlyError OutOfMemoryError NoScriptError ClusterDownError MasterDownError TryAgainError",
            REDIS["READONLY"],
        ),
        **_rows(module, "AuthenticationError AuthorizationError NoPermissionError", _CREDENTIALS),
        **_rows(module, "DataError", _ARGUMENT),
        **_rows(module, "ClusterCrossSlotError CrossSlotTransactionError", REDIS["CROSSSLOT"]),
    }


_OWN = {
    "dramatiq_guard.errors.HeldBack": Outcome(Kind.DEFERRED, "its downstream is held back", exact=True),
    "dramatiq_guard.errors.LeaseLost": Outcome(Kind.DEFERRED, "another may have taken its key over"),
    "dramatiq_guard.errors.FencedOut": Outcome(Kind.DEFERRED, "another has taken its key over"),
    "dramatiq_guard.errors.MissingKey": Outcome(
        Kind.PERMANENT, "its idempotency key cannot be made", reason="missing_key"
    ),
    "dramatiq_guard.errors.KeyReused": Outcome(
        Kind.PERMANENT, "its idempotency key was used with another payload", reason="key_reused"
    ),
    "dramatiq_guard.errors.OutcomeUnknown": Outcome(
        Kind.PERMANENT, "nobody knows whether its effect happened", reason="outcome_unknown"
    ),
    "dramatiq_guard.errors.ReplayedFailure": Outcome(Kind.PERMANENT, "the same work failed for good before"),
}

#: What an actor, or the shutdown, says outright: asked before any predicate, and never looked through.
WORDS = {
    "dramatiq_guard.errors.Retryable": Outcome(Kind.RETRYABLE, "the actor asked to be tried again"),
    "dramatiq_guard.errors.Permanent": Outcome(Kind.PERMANENT, "the actor said that trying again cannot help"),
    "dramatiq_guard.errors.Fatal": Outcome(Kind.FATAL, "the actor found its process unfit"),
    "dramatiq_guard.errors.Defer": Outcome(Kind.DEFERRED, "the actor asked to be put off"),
    "dramatiq.errors.Retry": Outcome(Kind.RETRYABLE, "the actor asked to be tried again"),
    "dramatiq.middleware.shutdown.Shutdown": Outcome(Kind.INTERRUPTED, "the worker is shutting down"),
    **_OWN,
}

#: In force even with ``builtin=False``.
CONTROL = {
    **WORDS,
    "dramatiq.errors.RateLimitExceeded": Outcome(Kind.RETRYABLE, "the rate limit or the mutex is used up"),
    "dramatiq.middleware.time_limit.TimeLimitExceeded": Outcome(Kind.RETRYABLE, "the actor ran into its time limit"),
    "builtins.MemoryError": Outcome(Kind.FATAL, "the process is out of memory"),
    "builtins.SystemExit": Outcome(Kind.FATAL, "something told the process to end"),
    "builtins.KeyboardInterrupt": Outcome(Kind.FATAL, "something told the process to end"),
    "builtins.GeneratorExit": Outcome(Kind.FATAL, "the interpreter is taking the code down"),
}

#: A TypeError of the call itself: no class says so, the seam does.
CALL_DOES_NOT_FIT = Outcome(Kind.PERMANENT, "the arguments do not fit the actor's signature")

TABLE: dict[str, Row] = {
    **{name: (outcome,) for name, outcome in CONTROL.items()},
    # Python
    **_rows("builtins", "OSError", _ERRNO),
    **_rows("builtins", "TimeoutError ConnectionError BlockingIOError InterruptedError", _LATER),
    **_rows(
        "builtins", "FileNotFoundError PermissionError IsADirectoryError NotADirectoryError FileExistsError", _PATH
    ),
    # Their errno counts on another scale: EAI_NONAME, and 1 for "something about SSL".
    **_rows("socket", "gaierror herror", _LATER),
    **_rows("ssl", "SSLError", _LATER),
    **_rows("builtins", "UnicodeError", _TEXT),
    **_rows("json.decoder", "JSONDecodeError", _TEXT),
    **_rows("http.client", "HTTPException", _LATER),
    **_rows("http.client", "InvalidURL", _ADDRESS),
    **_rows("urllib.error", "HTTPError", _URLLIB),
    **_rows("urllib.error", "URLError", _LATER),
    **_rows("smtplib", "SMTPResponseException SMTPAuthenticationError", _SMTP),
    **_rows("smtplib", "SMTPRecipientsRefused", _RECIPIENTS),
    **_rows("smtplib", "SMTPException SMTPServerDisconnected", _LATER),
    # HTTP clients
    **_rows("httpx", "HTTPStatusError", _RESPONSE),
    **_rows("httpx", "TransportError TimeoutException ConnectTimeout ReadTimeout WriteTimeout NetworkError", _LATER),
    **_rows("httpx", "ConnectError ReadError WriteError CloseError ProxyError RemoteProtocolError", _LATER),
    **_rows("httpx", "DecodingError", _LATER),
    **_rows("httpx", "PoolTimeout", _POOL),
    **_rows("httpx", "UnsupportedProtocol InvalidURL", _ADDRESS),
    **_rows("requests.exceptions", "HTTPError", _RESPONSE),
    **_rows("requests.exceptions", "RetryError", _USED_UP, _LATER),
    **_rows("requests.exceptions", "RequestException ConnectionError Timeout ConnectTimeout ReadTimeout", _LATER),
    **_rows("requests.exceptions", "SSLError ProxyError ChunkedEncodingError ContentDecodingError", _LATER),
    **_rows("requests.exceptions", "InvalidURL InvalidSchema InvalidHeader MissingSchema URLRequired", _ADDRESS),
    **_rows("requests.exceptions", "InvalidJSONError JSONDecodeError", _TEXT),
    **_rows("urllib3.exceptions", "MaxRetryError", _USED_UP, _LATER),
    **_rows("urllib3.exceptions", "HTTPError TimeoutError ConnectTimeoutError ReadTimeoutError ProtocolError", _LATER),
    **_rows("urllib3.exceptions", "NewConnectionError NameResolutionError SSLError ProxyError DecodeError", _LATER),
    **_rows("urllib3.exceptions", "EmptyPoolError", _POOL),
    **_rows("urllib3.exceptions", "LocationValueError LocationParseError InvalidHeader", _ADDRESS),
    **_rows("aiohttp.client_exceptions", "ClientResponseError", _AIOHTTP),
    **_rows("aiohttp.client_exceptions", "ClientConnectionError ClientOSError ClientConnectorError", _LATER),
    **_rows("aiohttp.client_exceptions", "ServerDisconnectedError ServerTimeoutError ClientPayloadError", _LATER),
    **_rows("aiohttp.client_exceptions", "InvalidURL", _ADDRESS),
    # Databases
    **_dbapi("psycopg", "Error", _SQLSTATE),
    **_dbapi("psycopg2", "Error", _SQLSTATE),
    **_dbapi("sqlalchemy.exc", "DBAPIError", _ORIG),
    **_dbapi("django.db.utils", "Error", _CAUSE),
    **_rows("asyncpg.exceptions._base", "PostgresError", _SQLSTATE),
    **_rows("psycopg_pool", "PoolTimeout TooManyRequests", _POOL),
    **_rows("psycopg2.pool", "PoolError", _POOL),
    **_rows("sqlalchemy.exc", "TimeoutError", _POOL),
    **_rows("sqlalchemy.exc", "NoResultFound", _ROW),
    **_rows("django.core.exceptions", "ObjectDoesNotExist", _ROW),
    # Services
    **_redis("redis"),
    **_redis("valkey"),
    **_rows("pika.exceptions", "AMQPConnectionError AMQPChannelError", _AMQP, _LATER),
    **_rows("pika.exceptions", "ConnectionClosedByBroker ChannelClosedByBroker", _AMQP, _LATER),
    **_rows("pika.exceptions", "AuthenticationError ProbableAuthenticationError", _CREDENTIALS),
    **_rows("pika.exceptions", "ProbableAccessDeniedError", _CREDENTIALS),
    **_rows("botocore.exceptions", "ClientError", _AWS, _AWS_HTTP),
    **_rows("botocore.exceptions", "HTTPClientError ConnectionError EndpointConnectionError", _LATER),
    **_rows("botocore.exceptions", "ConnectTimeoutError ReadTimeoutError ConnectionClosedError", _LATER),
    **_rows("botocore.exceptions", "NoCredentialsError CredentialRetrievalError", _CREDENTIALS),
    **_rows("botocore.exceptions", "ParamValidationError", _ARGUMENT),
    **_rows("grpc", "RpcError", _GRPC),
    # Validation
    **_rows("pydantic_core._pydantic_core", "ValidationError", _INVALID),
    **_rows("pydantic.error_wrappers", "ValidationError", _INVALID),
    **_rows("pydantic.v1.error_wrappers", "ValidationError", _INVALID),
    **_rows("jsonschema.exceptions", "ValidationError SchemaError", _INVALID),
    **_rows("marshmallow.exceptions", "ValidationError", _INVALID),
    **_rows("django.core.exceptions", "ValidationError", _INVALID),
}

#: Public names of classes that live elsewhere.  A name that leaves out inner modules (redis.TimeoutError) needs none.
ALIASES = {
    "pydantic.ValidationError": "pydantic_core._pydantic_core.ValidationError",
    "asyncio.TimeoutError": "builtins.TimeoutError",
    "concurrent.futures.TimeoutError": "builtins.TimeoutError",
    "socket.timeout": "builtins.TimeoutError",
    "socket.error": "builtins.OSError",
}

from __future__ import annotations

import doctest
import errno
from typing import Any

import pytest

from dramatiq_guard.policy import explain as module
from dramatiq_guard.policy.explain import explain
from dramatiq_guard.policy.rules import DEFAULT, Rules, compile_rules
from dramatiq_guard.policy.verdict import Kind

from .errors import fake, raised, response


def test_the_example_is_true() -> None:
    """The one in the docstring."""
    assert (0, 1) == doctest.testmod(module)


def test_an_exception_is_explained_with_the_way_to_its_verdict() -> None:
    """Verdict, rule, reason, and the errors that were asked."""
    busy = fake("httpx.HTTPStatusError", response=response(503))
    explanation = explain(raised(RuntimeError(), cause=ExceptionGroup("x", [busy])))

    assert Kind.RETRYABLE is explanation.verdict.kind
    assert "builtin:httpx.HTTPStatusError[status=503]" == explanation.rule
    assert "1 of 1 errors of the group: status=503: the server cannot answer just now" == explanation.why
    assert (
        "builtins.RuntimeError",
        "cause: builtins.ExceptionGroup",
        "part: httpx.HTTPStatusError",
    ) == explanation.path


def test_the_way_names_the_shutdown_that_lay_beneath() -> None:
    """It outweighs the rule that names the error on top."""
    from dramatiq.middleware import Shutdown

    explanation = explain(raised(ConnectionError(), context=Shutdown()))

    assert ("builtins.ConnectionError", "beneath: dramatiq.middleware.shutdown.Shutdown") == explanation.path
    assert Kind.INTERRUPTED is explanation.verdict.kind


def test_the_way_names_what_was_being_handled() -> None:
    """As a context."""
    assert ("builtins.KeyError", "context: builtins.OSError") == explain(raised(KeyError(), context=OSError())).path


@pytest.mark.parametrize(
    ("name", "codes", "kind", "rule"),
    [
        ("some.library.not.installed", {}, Kind.RETRYABLE, "default"),
        ("httpx.HTTPStatusError", {"status": 503}, Kind.RETRYABLE, "builtin:httpx.HTTPStatusError[status=503]"),
        ("httpx.HTTPStatusError", {"status": "422"}, Kind.PERMANENT, "builtin:httpx.HTTPStatusError[status=422]"),
        ("httpx.HTTPStatusError", {"status": 418}, Kind.RETRYABLE, "default"),
        ("httpx.HTTPStatusError", {}, Kind.RETRYABLE, "default"),
        ("psycopg.Error", {"sqlstate": "23505"}, Kind.PERMANENT, "builtin:psycopg.Error[sqlstate=23505]"),
        ("psycopg.OperationalError", {}, Kind.RETRYABLE, "builtin:psycopg.OperationalError"),
        ("OSError", {"errno": "ENOENT"}, Kind.PERMANENT, f"builtin:builtins.OSError[errno={errno.ENOENT}]"),
        ("OSError", {"errno": "104"}, Kind.RETRYABLE, "builtin:builtins.OSError[errno=104]"),
        ("OSError", {"errno": errno.EPIPE}, Kind.RETRYABLE, f"builtin:builtins.OSError[errno={errno.EPIPE}]"),
        ("grpc.RpcError", {"status": "UNAVAILABLE"}, Kind.RETRYABLE, "builtin:grpc.RpcError[status=UNAVAILABLE]"),
        (
            "botocore.exceptions.ClientError",
            {"status": "503"},
            Kind.RETRYABLE,
            "builtin:botocore.exceptions.ClientError[status=503]",
        ),
        ("IsADirectoryError", {}, Kind.PERMANENT, "builtin:builtins.IsADirectoryError"),
        ("ConnectionResetError", {}, Kind.RETRYABLE, "builtin:builtins.ConnectionError"),
        ("KeyError", {}, Kind.RETRYABLE, "default"),
    ],
)
def test_a_name_is_explained_from_the_table(name: str, codes: dict[str, Any], kind: Kind, rule: str) -> None:
    """With the code that the error would carry; the library need not be installed."""
    explanation = explain(name, **codes)

    assert (kind, rule) == (explanation.verdict.kind, explanation.rule)


def test_a_name_without_its_inner_modules_is_found_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library is not loaded."""
    import sys

    for loaded in ("valkey", "valkey.exceptions"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)

    assert ("valkey.exceptions.DataError",) == explain("valkey.DataError").path


def test_what_is_missing_for_an_answer_is_said() -> None:
    """A code that decides, or the class's bases."""
    assert "decided by its status, which was not given" in explain("httpx.HTTPStatusError").why
    assert "its module is imported" in explain("some.library.Error").why
    assert DEFAULT.why == explain("KeyError").why


def test_a_name_whose_module_is_loaded_is_explained_by_its_bases() -> None:
    """Nothing is imported for it."""
    import urllib.error

    assert "builtin:urllib.error.URLError" == explain("urllib.error.ContentTooShortError").rule
    assert urllib.error.__name__ in explain("urllib.error.ContentTooShortError").path[0]


def test_a_class_is_explained_with_its_bases() -> None:
    """Nearest first."""
    assert ("builtins.KeyError", "builtins.LookupError", "builtins.Exception", "builtins.BaseException") == explain(
        KeyError
    ).path


def test_users_rules_are_asked() -> None:
    """Predicates need an exception: for a name they are listed as not asked."""
    rules = Rules((compile_rules(origin="actor", permanent=["shop.Declined"], fatal=[lambda exc: True]),))

    assert "actor:permanent[0]" == explain("shop.Declined", rules=rules).rule
    assert ("actor:fatal[0]",) == explain("shop.Declined", rules=rules).unasked
    assert "actor:fatal[0]" == explain(KeyError(), rules=rules).rule
    assert () == explain(KeyError(), rules=rules).unasked


def test_retry_after_dates_are_relative_to_the_given_time() -> None:
    """As in classify."""
    dated = fake("httpx.HTTPStatusError", response=response(429, Retry_After="Thu, 01 Jan 1970 00:01:00 GMT"))

    assert 50_000 == explain(dated, now_ms=10_000).verdict.retry_after


@pytest.mark.parametrize(
    ("given", "codes", "error", "says"),
    [
        (7, {}, TypeError, "takes an exception, its class or its qualified name, not 7"),
        (int, {}, TypeError, "takes an exception"),
        ("no such class", {}, ValueError, "is not a class name"),
        ("Unheard", {}, ValueError, "is not a built-in exception"),
        (KeyError("x"), {"status": 503}, ValueError, "carries its own codes"),
        ("OSError", {"errno": "ENONSENSE"}, ValueError, "'ENONSENSE' is no errno"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    given: Any, codes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """With what to write instead."""
    with pytest.raises(error, match=says):
        explain(given, **codes)


def test_each_error_is_asked_once() -> None:
    """Also where the causes go round in a circle."""
    first = KeyError()
    raised(first, cause=raised(ValueError(), cause=first))

    assert ("builtins.KeyError", "cause: builtins.ValueError") == explain(first).path

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest

from dramatiq_guard.policy.backoff import Backoff
from dramatiq_guard.policy.rules import Rule, compile_rules
from dramatiq_guard.policy.verdict import Kind


def predicate(exc: BaseException) -> bool:
    return False


async def asynchronous(exc: BaseException) -> bool:
    return False


class Asynchronous:
    async def __call__(self, exc: BaseException) -> bool:
        return False


def test_every_kind_of_element_becomes_a_rule_named_after_its_place() -> None:
    """The order is that in which predicates are asked."""
    rules = compile_rules(
        origin="actor",
        retryable=["httpx.HTTPStatusError", (predicate, {"max_retries": 3})],
        permanent=[KeyError],
        fatal=["MemoryError"],
        defer=(OSError,),
    )

    assert (
        Rule(Kind.FATAL, "builtins.MemoryError", "actor:fatal[0]"),
        Rule(Kind.PERMANENT, KeyError, "actor:permanent[0]"),
        Rule(Kind.DEFERRED, OSError, "actor:defer_on[0]"),
        Rule(Kind.RETRYABLE, "httpx.HTTPStatusError", "actor:retryable[0]"),
        Rule(Kind.RETRYABLE, predicate, "actor:retryable[1]", 3),
    ) == rules


def test_no_rules_are_no_rules() -> None:
    """The default of a middleware."""
    assert () == compile_rules(origin="middleware")


@pytest.mark.parametrize("given", [KeyError, "KeyError", predicate])
def test_one_element_need_not_stand_in_a_list(given: Any) -> None:
    """As with Dramatiq's throws."""
    assert ["actor:permanent[0]"] == [rule.name for rule in compile_rules(origin="actor", permanent=given)]


@pytest.mark.parametrize(
    "given", [functools.partial(isinstance, KeyError()), bool, [].append, functools.partial(predicate)]
)
def test_any_callable_of_one_argument_is_a_predicate(given: Any) -> None:
    """Also those whose signature Python does not know."""
    if isinstance(given, type):
        given = functools.partial(given)

    assert compile_rules(origin="actor", permanent=[given])[0].is_predicate


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"max_retries": 0}, None),
        ({"min_backoff": 0}, Backoff(min_backoff=0)),
        ({"max_backoff": 5_000}, Backoff(5_000, 5_000)),
        ({"min_backoff": timedelta(seconds=1), "max_backoff": 9_000}, Backoff(1_000, 9_000)),
        ({"backoff": [1_000, 2_000]}, Backoff(schedule=(1_000, 2_000))),
        ({"jitter": "full"}, Backoff(jitter="full")),
    ],
)
def test_options_make_a_backoff(options: dict[str, Any], expected: Backoff | None) -> None:
    """They are the actor's own option names; what is not given has Dramatiq's default."""
    (rule,) = compile_rules(origin="actor", retryable=[(KeyError, options)])

    assert (expected, options.get("max_retries")) == (rule.backoff, rule.max_retries)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"permanent": 7}, TypeError, "actor:permanent must be a list of rules such as [KeyError], not 7"),
        ({"permanent": {KeyError}}, TypeError, "actor:permanent must be a list"),
        ({"permanent": None}, TypeError, "actor:permanent must be a list"),
        ({"retryable": (KeyError, {"max_retries": 3})}, TypeError, "put it in a list"),
        ({"retryable": [(KeyError, 3)]}, TypeError, "actor:retryable[0] must be a pair (matcher, {'max_retries': 3})"),
        ({"retryable": [(KeyError, OSError, {})]}, TypeError, "actor:retryable[0] must be a pair"),
        ({"permanent": [KeyError, 7]}, TypeError, "actor:permanent[1] must be an exception class, a class name"),
        ({"permanent": [int]}, TypeError, "actor:permanent[0] is the class int, which is not an exception"),
        ({"permanent": [KeyError("x")]}, TypeError, "write its class, KeyError"),
        ({"permanent": ["Unheard"]}, ValueError, "actor:permanent[0]: 'Unheard' is not a built-in exception"),
        ({"permanent": ["print"]}, ValueError, "'print' is not a built-in exception: write the module too"),
        ({"permanent": ["int"]}, ValueError, "'int' is not a built-in exception"),
        ({"permanent": ["httpx HTTPError"]}, ValueError, "'httpx HTTPError' is not a class name"),
        ({"permanent": ["httpx..HTTPError"]}, ValueError, "is not a class name: write it like"),
        ({"permanent": [""]}, ValueError, "'' is not a class name"),
        ({"permanent": [lambda: True]}, TypeError, "must take one argument, the exception"),
        ({"permanent": [asynchronous]}, TypeError, "actor:permanent[0] is an async function"),
        ({"permanent": [Asynchronous()]}, TypeError, "actor:permanent[0] is an async function"),
        ({"permanent": [(KeyError, {"max_retries": 3})]}, ValueError, "a permanent error is never retried"),
        ({"defer": [(KeyError, {"max_retries": 3})]}, ValueError, "a deferral is no attempt"),
        ({"retryable": [(KeyError, {"max_tries": 3})]}, ValueError, "unknown option 'max_tries'"),
        ({"retryable": [(KeyError, {7: 3})]}, ValueError, "unknown option '7'"),
        ({"retryable": [(KeyError, {"max_retries": "3"})]}, TypeError, "max_retries must be an int, not '3'"),
        ({"retryable": [(KeyError, {"max_retries": True})]}, TypeError, "max_retries must be an int"),
        ({"retryable": [(KeyError, {"max_retries": -1})]}, ValueError, "max_retries must not be negative, got -1"),
        (
            {"retryable": [(KeyError, {"min_backoff": -1})]},
            ValueError,
            "actor:retryable[0]: min_backoff must not be neg",
        ),
        ({"retryable": [(KeyError, {"jitter": "some"})]}, ValueError, "actor:retryable[0]: unknown jitter 'some'"),
        ({"retryable": [(KeyError, {"backoff": 5})]}, TypeError, "actor:retryable[0]: "),
        (
            {"permanent": [KeyError], "retryable": [OSError, KeyError]},
            ValueError,
            "actor:permanent[0] and actor:retryable[1] both name builtins.KeyError: keep one of them",
        ),
        ({"permanent": ["KeyError", KeyError]}, ValueError, "both name builtins.KeyError"),
        ({"permanent": ["a.B", "a.B"]}, ValueError, "both name a.B"),
    ],
)
def test_a_mistake_is_named_with_its_place(given: dict[str, Any], error: type[Exception], says: str) -> None:
    """When the rules are written, not when an error meets them."""
    with pytest.raises(error) as info:
        compile_rules(origin="actor", **given)

    assert says in str(info.value)
    assert str(info.value).startswith("actor:")


def test_two_classes_of_one_name_may_both_be_named() -> None:
    """A function may define a class anew at each call."""

    def make() -> type[Exception]:
        class Local(Exception):
            pass

        return Local

    assert 2 == len(compile_rules(origin="actor", permanent=[make()], retryable=[make()]))

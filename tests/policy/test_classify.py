from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_guard.errors import Defer, Fatal, Permanent, Retryable
from dramatiq_guard.policy.backoff import Backoff
from dramatiq_guard.policy.rules import DEFAULT, Rules, compile_rules
from dramatiq_guard.policy.verdict import Kind

from .errors import fake, fake_class, response


class Declined(Exception):
    pass


class Expired(Declined):
    pass


def rules(*sets: dict[str, Any], builtin: bool = True) -> Rules:
    """Rules of an actor and, if there are two sets, of the middleware around it."""
    origins = ("actor", "middleware")
    return Rules(tuple(compile_rules(origin=origin, **given) for origin, given in zip(origins, sets)), builtin)


def kind(exc: BaseException, *sets: dict[str, Any], builtin: bool = True) -> Kind:
    return rules(*sets, builtin=builtin).classify(exc).kind


def rule(exc: BaseException, *sets: dict[str, Any], builtin: bool = True) -> str:
    return rules(*sets, builtin=builtin).classify(exc).rule


@pytest.mark.parametrize("exc", [KeyError("x"), ValueError("x"), RuntimeError("x"), Declined(), AttributeError("x")])
def test_an_error_that_no_rule_names_is_retryable(exc: Exception) -> None:
    """KeyError, ValueError and the like are not guessed at."""
    assert DEFAULT == Rules().classify(exc)
    assert (Kind.RETRYABLE, "default") == (DEFAULT.kind, DEFAULT.rule)


def test_the_nearest_class_decides() -> None:
    """A rule about a class is about its subclasses too, unless another rule names one that is nearer."""
    given = {"permanent": [Declined], "retryable": [Expired]}

    assert "actor:permanent[0]" == rule(Declined(), given)
    assert "actor:retryable[0]" == rule(Expired(), given)
    assert "actor:permanent[0]" == rule(Expired(), {"permanent": [Declined], "retryable": [Exception]})


def test_the_actor_is_asked_before_the_middleware_and_the_middleware_before_the_table() -> None:
    """The more particular set wins, even with a class that is farther away."""
    assert "actor:retryable[0]" == rule(Expired(), {"retryable": [Exception]}, {"permanent": [Expired]})
    assert "middleware:permanent[0]" == rule(Expired(), {"retryable": [KeyError]}, {"permanent": [Declined]})
    assert "middleware:permanent[0]" == rule(ConnectionResetError(), {}, {"permanent": [OSError]})
    assert "builtin:builtins.ConnectionError" == rule(ConnectionResetError(), {}, {})


def test_a_class_can_be_named_in_a_string() -> None:
    """The library it belongs to is not imported; inner modules may be left out, as in its documentation."""
    for given in ("shop.gateway.errors.Refused", "shop.Refused", "shop.gateway.Refused"):
        assert Kind.PERMANENT is kind(fake("shop.gateway.errors.Refused"), {"permanent": [given]})
    for given in ("shop.gate.Refused", "op.Refused", "shop.gateway.errors.Other", "shop.gateway.errors.used"):
        assert Kind.RETRYABLE is kind(fake("shop.gateway.errors.Refused"), {"permanent": [given]})


def test_a_class_inside_a_class_can_be_named_in_a_string() -> None:
    """Django's DoesNotExist lives inside its model."""
    missing = fake("shop.Order")
    type(missing).__qualname__ = "Order.DoesNotExist"
    type(missing).__module__ = "shop.models"

    assert "actor:permanent[0]" == rule(missing, {"permanent": ["shop.models.Order.DoesNotExist"]})


@pytest.mark.parametrize(
    ("given", "exc"),
    [
        ("KeyError", KeyError()),
        ("IOError", OSError()),
        ("builtins.KeyError", KeyError()),
        ("asyncio.TimeoutError", TimeoutError()),
        ("socket.timeout", TimeoutError()),
        ("dramatiq.RateLimitExceeded", dramatiq.RateLimitExceeded("x")),
        ("pydantic.ValidationError", fake("pydantic_core._pydantic_core.ValidationError")),
    ],
)
def test_a_class_answers_to_the_name_that_people_know(given: str, exc: BaseException) -> None:
    """Bare names of built-in exceptions, and public names of classes that live elsewhere."""
    assert "actor:fatal[0]" == rule(exc, {"fatal": [given]})


def test_predicates_are_asked_in_their_order_before_the_classes_of_their_set() -> None:
    """A predicate looks at the exception itself, so it is more particular than any class."""
    given = {"permanent": [Expired, lambda exc: "gone" in str(exc)], "fatal": [lambda exc: "fire" in str(exc)]}

    assert "actor:permanent[1]" == rule(Expired("gone"), given)
    assert "actor:fatal[0]" == rule(Expired("gone in fire"), given)
    assert "actor:permanent[0]" == rule(Expired("late"), given)
    assert "middleware:retryable[0]" == rule(OSError("x"), {"permanent": [KeyError]}, {"retryable": [lambda exc: True]})


def test_the_middlewares_predicates_come_after_the_actors_classes() -> None:
    """One set is done with before the next is asked."""
    assert "actor:permanent[0]" == rule(Declined(), {"permanent": [Declined]}, {"fatal": [lambda exc: True]})


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("raised", [ValueError("no .response here"), SystemExit(3), Hostile()])
def test_c30_a_predicate_that_raises_makes_the_error_retryable(raised: BaseException) -> None:
    """Whatever it raises, the message is not lost, and the verdict says which predicate it was."""

    def bad_response(exc: BaseException) -> bool:
        raise raised

    verdict = rules({"permanent": [KeyError, bad_response]}).classify(Declined())

    assert (Kind.RETRYABLE, "actor:permanent[1]:predicate-raised") == (verdict.kind, verdict.rule)
    assert "bad_response" in verdict.why
    assert type(raised).__name__ in verdict.why


def test_a_predicate_whose_answer_has_no_truth_value_counts_as_one_that_raised() -> None:
    """As numpy's arrays have none."""

    class Answer:
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    assert "actor:defer_on[0]:predicate-raised" == rule(Declined(), {"defer": [lambda exc: Answer()]})


def test_a_predicate_without_a_name_is_called_by_its_type() -> None:
    """An object with __call__ is a predicate too."""

    class Always:
        def __call__(self, exc: BaseException) -> bool:
            return True

    assert "Always" in rules({"permanent": [Always()]}).classify(Declined()).why


def test_a_rule_has_its_own_limit_and_backoff() -> None:
    """They travel in the verdict."""
    given = {
        "retryable": [(Declined, {"max_retries": 0, "min_backoff": 1_000, "max_backoff": 2_000, "jitter": "none"})]
    }
    verdict = rules(given).classify(Declined())

    assert 0 == verdict.max_retries
    assert Backoff(1_000, 2_000, "none") == verdict.backoff


@pytest.mark.parametrize(
    ("exc", "expected", "delay"),
    [
        (Retryable("x"), Kind.RETRYABLE, None),
        (Retryable("x", delay=5_000), Kind.RETRYABLE, 5_000),
        (Retryable("x", delay=0), Kind.RETRYABLE, 0),
        (Permanent("x"), Kind.PERMANENT, None),
        (Fatal("x"), Kind.FATAL, None),
        (Defer("x", delay=timedelta(seconds=2)), Kind.DEFERRED, 2_000),
        (dramatiq.Retry("x", delay=7_000), Kind.RETRYABLE, 7_000),
        (dramatiq.Retry("x"), Kind.RETRYABLE, None),
        (dramatiq.RateLimitExceeded("x"), Kind.RETRYABLE, None),
        (TimeLimitExceeded(), Kind.RETRYABLE, None),
        (Shutdown(), Kind.INTERRUPTED, None),
        (MemoryError(), Kind.FATAL, None),
        (SystemExit(), Kind.FATAL, None),
        (KeyboardInterrupt(), Kind.FATAL, None),
        (GeneratorExit(), Kind.FATAL, None),
    ],
)
@pytest.mark.parametrize("builtin", [True, False])
def test_control_errors_are_in_force_with_and_without_the_table(
    exc: BaseException, expected: Kind, delay: int | None, builtin: bool
) -> None:
    """What the actor says outright, Dramatiq's own errors, and those that concern the process."""
    verdict = Rules(builtin=builtin).classify(exc)

    assert (expected, delay) == (verdict.kind, verdict.delay)
    assert f"builtin:{type(exc).__module__}.{type(exc).__qualname__}" == verdict.rule


@pytest.mark.parametrize("exc", [Retryable("x"), Defer("x"), Fatal("x"), dramatiq.Retry("x"), Shutdown()])
def test_predicates_are_not_asked_about_what_the_actor_says(exc: BaseException) -> None:
    """`permanent=[lambda exc: True]` must not give a message up because of a deploy."""
    asked = []

    def sloppy(exc: BaseException) -> bool:
        asked.append(exc)
        return True

    assert Kind.PERMANENT is not kind(exc, {"permanent": [sloppy]})
    assert [] == asked


@pytest.mark.parametrize("exc", [Retryable("x"), Shutdown(), MemoryError(), dramatiq.RateLimitExceeded("x")])
def test_a_broad_class_leaves_control_errors_alone(exc: BaseException) -> None:
    """`permanent=[Exception]` is about errors, not about words, the process or the shutdown."""
    assert rule(exc).startswith("builtin:")
    assert rule(exc) == rule(exc, {"permanent": [BaseException]}, {"permanent": [Exception]})


def test_a_rule_that_names_a_control_error_has_its_way() -> None:
    """So can rate limits be deferred, and words of one's own be given a meaning."""

    class Busy(Retryable):
        pass

    assert "actor:defer_on[0]" == rule(dramatiq.RateLimitExceeded("x"), {"defer": [dramatiq.RateLimitExceeded]})
    assert "actor:retryable[0]" == rule(Shutdown(), {"retryable": [Shutdown]})
    verdict = rules({"retryable": [(Busy, {"max_retries": 50})]}).classify(Busy(delay=5_000))
    assert ("actor:retryable[0]", 50, 5_000) == (verdict.rule, verdict.max_retries, verdict.delay)


@pytest.mark.parametrize("delay", ["soon", -1, float("nan"), float("inf"), object()])
def test_a_delay_that_is_none_is_ignored(delay: object) -> None:
    """A subclass may have set the attribute to anything."""
    exc = Retryable("x")
    exc.delay = delay  # type: ignore[assignment]

    assert None is Rules().classify(exc).delay


def test_a_delay_may_be_a_timedelta() -> None:
    """As everywhere."""
    exc = Defer("x")
    exc.delay = timedelta(milliseconds=1_500)  # type: ignore[assignment]

    assert 1_500 == Rules().classify(exc).delay


def test_without_the_table_only_users_rules_classify() -> None:
    """`builtin=False`."""
    assert "default" == rule(ConnectionResetError(), builtin=False)
    assert "default" == rule(FileNotFoundError(2, "x"), builtin=False)
    assert "actor:permanent[0]" == rule(ConnectionResetError(), {"permanent": [OSError]}, builtin=False)


def test_a_call_that_does_not_fit_is_permanent() -> None:
    """The seam knows it; an actor's own TypeError stays unnamed."""
    misfit = TypeError("missing 1 required positional argument")

    assert Kind.PERMANENT is Rules().classify(misfit, call_does_not_fit=True).kind
    assert "builtin:call-does-not-fit" == Rules().classify(misfit, call_does_not_fit=True).rule
    assert DEFAULT == Rules().classify(misfit)
    assert DEFAULT == Rules(builtin=False).classify(misfit, call_does_not_fit=True)
    user = rules({"retryable": [TypeError]})
    assert "actor:retryable[0]" == user.classify(misfit, call_does_not_fit=True).rule


def test_retry_after_is_read_from_the_response() -> None:
    """In whatever form, and as a floor beside the verdict."""
    busy = fake("httpx.HTTPStatusError", response=response(503, Retry_After="120"))
    dated = fake("httpx.HTTPStatusError", response=response(429, Retry_After="Thu, 01 Jan 1970 00:01:00 GMT"))

    assert 120_000 == Rules().classify(busy).retry_after
    assert 50_000 == Rules().classify(dated, now_ms=10_000).retry_after


def test_retry_after_holds_whoever_classified_the_error() -> None:
    """It is a fact about the server; a rule of the user's, or an unknown status, does not change it."""
    name = "httpx.HTTPStatusError"
    busy = fake(name, response=response(429, Retry_After="60"))
    odd = fake(name, response=response(418, Retry_After="60"))

    for given in ({"retryable": [name]}, {"defer": [lambda exc: True]}, {"fatal": [Exception]}):
        assert 60_000 == rules(given).classify(busy).retry_after
    assert ("default", 60_000) == (Rules().classify(odd).rule, Rules().classify(odd).retry_after)
    assert 60_000 == Rules(builtin=False).classify(busy).retry_after
    assert None is rules({"permanent": [name]}).classify(busy).retry_after


def test_headers_that_cannot_be_read_are_ignored() -> None:
    """As where requests raises without a response."""
    assert None is Rules().classify(fake("requests.exceptions.HTTPError", response=None)).retry_after
    broken = fake("httpx.HTTPStatusError", response=response(503))
    broken.response.headers = 7  # type: ignore[attr-defined]
    assert (Kind.RETRYABLE, None) == (Rules().classify(broken).kind, Rules().classify(broken).retry_after)


def test_equal_rules_are_equal_whatever_they_have_classified() -> None:
    """What they remember is no part of what they are."""
    used, unused = rules({"permanent": [Declined]}), rules({"permanent": [Declined]})
    used.classify(Declined())

    assert used == unused


def test_classes_made_at_run_time_do_not_fill_the_memory() -> None:
    """What is remembered about classes is bounded."""
    ours = Rules()
    first = fake_class("app.Temporary")
    ours.classify(first())
    gone = weakref.ref(first)
    del first

    for _ in range(1_500):
        ours.classify(fake_class("app.Temporary")())
    gc.collect()

    assert gone() is None
    assert len(ours._plans) <= 1_024

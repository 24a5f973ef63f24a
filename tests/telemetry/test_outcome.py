"""What became of an attempt, in one word, and whether it failed."""

from __future__ import annotations

import pytest
from dramatiq.errors import RateLimitExceeded, Retry
from dramatiq.middleware import SkipMessage

from dramatiq_guard.policy.decision import Decision, Step
from dramatiq_guard.policy.verdict import Kind, Verdict
from dramatiq_guard.telemetry.outcome import failed, outcome_of
from tests.telemetry.test_facade import delivery


def decided(step: Step) -> Decision:
    return Decision(step, None, None, counted=False, exit_process=False, why="")


@pytest.mark.parametrize(
    ("step", "outcome", "is_failure"),
    [
        (Step.RETRY, "retried", True),
        (Step.GIVE_UP, "dead_lettered", True),
        (Step.DEFER, "deferred", False),
        (Step.REQUEUE, "interrupted", False),
    ],
)
@pytest.mark.parametrize("skipped", [True, False])
def test_a_decision_is_the_outcome(step: Step, outcome: str, is_failure: bool, skipped: bool) -> None:
    """Whichever path the delivery leaves by; a deferral and an interruption are no failures."""
    it = delivery()
    it.decision = decided(step)
    error = None if skipped else ValueError()

    assert outcome_of(it, error, skipped=skipped, resent=False) == outcome
    assert failed(it, error, None) is (is_failure and not skipped)


@pytest.mark.parametrize(
    ("error", "skipped", "resent", "message_failed", "outcome"),
    [
        (None, False, False, False, "succeeded"),
        (None, False, False, True, "dead_lettered"),
        (None, True, False, False, "skipped"),
        (None, True, False, True, "dead_lettered"),
        (ValueError(), False, True, False, "retried"),
        (ValueError(), False, False, True, "dead_lettered"),
        (ValueError(), False, False, False, None),
    ],
)
def test_without_a_decision_the_message_tells(
    error: Exception | None, skipped: bool, resent: bool, message_failed: bool, outcome: str | None
) -> None:
    """Under stock Retries the message says what became of it; where nobody has decided, there is no word for it."""
    it = delivery()
    it.message.failed = message_failed

    assert outcome_of(it, error, skipped=skipped, resent=resent) == outcome


@pytest.mark.parametrize("kind", [Kind.DEFERRED, Kind.INTERRUPTED])
def test_a_verdict_of_not_now_is_no_failure(kind: Kind) -> None:
    """A deferral that is not decided yet is none either."""
    it = delivery()
    it.verdict = Verdict(kind, "builtin:x", "because")

    assert not failed(it, ValueError(), None)


@pytest.mark.parametrize(
    ("error", "throws", "is_failure"),
    [
        (Retry("later"), None, False),
        (RateLimitExceeded("later"), None, False),
        (SkipMessage(), None, False),
        (ValueError(), None, True),
        (ValueError(), ValueError, False),
        (ValueError(), (KeyError, ValueError), False),
        (ValueError(), KeyError, True),
        (ValueError(), "ValueError", True),
        (SystemExit(), None, True),
    ],
)
def test_what_was_announced_is_no_failure(error: BaseException, throws: object, is_failure: bool) -> None:
    """A retry that was asked for, a used-up rate, a skip and what `throws` names; a wrong `throws` names nothing."""
    assert failed(delivery(), error, throws) is is_failure

"""``explain``: what an error would be taken for."""

from __future__ import annotations


def test_a_verdict_comes_with_its_rule_and_its_reason(call):
    """Three questions are answered: what, by which rule, why."""
    outcome = call("explain", "httpx.HTTPStatusError", "--status", "503")

    assert outcome.code == 0
    assert "httpx.HTTPStatusError: RETRYABLE" in outcome.out
    assert "builtin:httpx.HTTPStatusError[status=503]" in outcome.out


def test_a_rule_with_a_limit_of_its_own_says_so(call):
    """An expired token is tried again, but not for long."""
    assert "3 retries" in call("explain", "httpx.HTTPStatusError", "--status", "401").out


def test_json_is_one_document(call):
    """Programs read the same answer."""
    document = call("explain", "OSError", "--errno", "ENOENT", "--json").document

    assert (document["error"], document["kind"]) == ("OSError", "permanent")


def test_the_rules_of_an_application_are_asked_first(call, application):
    """What would really happen depends on the user's own rules."""
    name = application(
        """
        from dramatiq.brokers.stub import StubBroker
        from dramatiq_guard import Classify, install

        broker = StubBroker()
        install(broker, Classify(permanent=["builtins.KeyError"]))
        """
    )

    assert call("explain", "KeyError", "--json").document["kind"] == "retryable"
    assert call("explain", "KeyError", "--broker", f"{name}:broker", "--json").document["kind"] == "permanent"


def test_a_broker_without_rules_is_refused(call, application):
    """There is nothing to ask on plain Dramatiq."""
    name = application("from dramatiq.brokers.stub import StubBroker\nbroker = StubBroker()")
    outcome = call("explain", "KeyError", "--broker", f"{name}:broker")

    assert outcome.code == 2
    assert "has no Classify" in outcome.err


def test_nonsense_is_refused_with_what_may_be_written(call):
    """An errno that does not exist is no reason to guess."""
    outcome = call("explain", "OSError", "--errno", "NOPE")

    assert outcome.code == 2
    assert "'NOPE' is no errno of this platform" in outcome.err

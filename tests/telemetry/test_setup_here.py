"""`configure_telemetry` in this process: what is set up, once, and what is left to those who were there before."""

from __future__ import annotations

import os

import pytest
from opentelemetry import _logs as logs
from opentelemetry import metrics, trace

from dramatiq_guard import configure_telemetry
from dramatiq_guard.errors import SetupError
from dramatiq_guard.telemetry import setup

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def providers(monkeypatch):
    """The providers that were set, by what they are for; and when they are flushed."""
    for name, value in (("_plan", None), ("_done_in", None)):
        monkeypatch.setattr(setup, name, value)
    found: dict[str, object] = {}
    monkeypatch.setattr(trace, "set_tracer_provider", lambda each: found.__setitem__("traces", each))
    monkeypatch.setattr(metrics, "set_meter_provider", lambda each: found.__setitem__("metrics", each))
    monkeypatch.setattr(logs, "set_logger_provider", lambda each: found.__setitem__("logs", each))
    monkeypatch.setattr(setup, "flush_at_exit", lambda: found.__setitem__("flushed", "at exit"))
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    for name in ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
    yield found
    for name in ("traces", "metrics", "logs"):
        if name in found:
            found[name].shutdown()


def test_a_worker_sets_up_traces_and_metrics_for_its_service(providers):
    """Each process under an id of its own; its end flushes by itself."""
    configure_telemetry(NOWHERE, service_name="shop", headers={"x-token": "secret"})
    assert providers == {}, "before the fork nothing is set up"
    setup.boot()

    assert set(providers) == {"traces", "metrics"}
    resource = providers["traces"].resource.attributes
    assert resource["service.name"] == "shop"
    assert resource["service.instance.id"]


def test_it_is_set_up_once(providers, caplog):
    """Also where it is asked for again, which is said."""
    configure_telemetry(NOWHERE)
    setup.boot()
    first = dict(providers)
    setup.boot()
    configure_telemetry(NOWHERE, service_name="late")

    assert providers == first
    assert "came too late" in caplog.text


def test_without_a_wish_nothing_is_set_up(providers):
    """`boot` is called by every worker."""
    setup.boot()
    setup._set_up()
    assert providers == {}


def test_a_producer_flushes_when_it_exits(providers):
    """Nobody else would."""
    configure_telemetry(NOWHERE)
    setup._set_up()
    assert providers["flushed"] == "at exit"


def test_an_id_of_the_users_stays(providers, monkeypatch):
    """From OpenTelemetry's own variable."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine")
    configure_telemetry(NOWHERE)
    setup.boot()
    assert providers["traces"].resource.attributes["service.instance.id"] == "mine"


def test_what_the_application_has_set_up_is_left_to_it(providers, recorder, caplog):
    """Traces and metrics each by itself."""
    caplog.set_level("INFO")
    configure_telemetry(NOWHERE)
    setup.boot()

    assert providers == {}
    assert "leaves traces to it" in caplog.text
    assert "leaves metrics to it" in caplog.text


def test_logs_are_exported_where_exceptions_are_wanted_as_logs(providers, monkeypatch):
    """OpenTelemetry's own opt-in."""
    monkeypatch.setattr(setup.exceptions, "wants_logs", lambda: True)
    configure_telemetry(NOWHERE)
    setup.boot()
    assert set(providers) == {"traces", "metrics", "logs"}


def test_a_fork_of_a_process_that_is_set_up_is_set_up(monkeypatch):
    """Its provider cannot be replaced; one of a process that is not, is not."""
    monkeypatch.setattr(setup, "_done_in", None)
    setup._again_in_child()
    assert setup._done_in is None
    monkeypatch.setattr(setup, "_done_in", 1)
    setup._again_in_child()
    assert setup._done_in == os.getpid()


@pytest.mark.parametrize("how", ["missing", "broken"])
def test_a_missing_package_is_named_with_the_extra(monkeypatch, how):
    """Also where what it is in is missing."""

    def find_spec(name):
        if how == "broken":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(setup.importlib.util, "find_spec", find_spec)
    with pytest.raises(SetupError, match=r"pip install 'dramatiq-guard\[otel\]'"):
        configure_telemetry()

"""`configure_telemetry`: what real processes export by OTLP, and that their end is bounded, collector up or down."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import configure_telemetry
from dramatiq_guard.errors import SetupError
from dramatiq_guard.telemetry import setup, signals
from dramatiq_guard.testing.private_server import free_port
from tests.support.waiting import wait_until
from tests.support.workers import Workers
from tests.telemetry.otlp import Tap

APP = """
import os
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AgeLimit
from dramatiq_guard import configure_telemetry
from dramatiq_guard.middleware.tracing import Tracing

configure_telemetry(os.environ["OTLP"], service_name="shop", headers={"x-token": "secret"})
broker = RedisBroker(url=os.environ["REDIS_URL"])
broker.add_middleware(Tracing(flush_timeout=int(os.environ.get("FLUSH", 5_000))), before=AgeLimit)
dramatiq.set_broker(broker)


@dramatiq.actor(min_backoff=1, max_backoff=1, max_retries=1)
def work(n):
    if n == "bad":
        raise ValueError("this is no order")
    print("worked on", n, flush=True)


if __name__ == "__main__":
    for n in range(5):
        work.send(n)
    work.send("bad")
"""


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test configured."""
    monkeypatch.setattr(setup, "_plan", None)
    monkeypatch.setattr(setup, "_done_in", None)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop_app.py").write_text(APP)
    return tmp_path


def produce(app: Path, redis_url: str, otlp: str, **settings: str) -> None:
    """Send six messages from a process of its own, a plain script."""
    env = {**os.environ, **settings, "REDIS_URL": redis_url, "OTLP": otlp}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = root
    subprocess.run([sys.executable, str(app / "shop_app.py")], env=env, check=True, timeout=60)


def test_spans_and_metrics_arrive_after_sigterm(app: Path, redis_url: str) -> None:
    """From producer and two worker processes: everything has arrived once the worker has ended, in one trace each."""
    with Tap() as tap:
        produce(app, redis_url, tap.endpoint)
        sent = tap.wait_span("send default", 6)
        env = {"REDIS_URL": redis_url, "OTLP": tap.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        with Workers("shop_app", processes=2, path=app, env=env) as workers:
            wait_until(lambda: workers.log.count("worked on") == 5 and "Retries exceeded" in workers.log, 30)
            before = [span for span in tap.spans if span.name == "process default"]
            workers.term()
            assert workers.wait(60) == 0
        processed = tap.wait_span("process default", 7)
        tap.wait_span("retry default")
        tap.wait_metric("messaging.process.duration")
        tap.wait_metric("messaging.client.consumed.messages")

    assert before == [], "the test must fail without a flush at the end"
    assert {span.trace_id for span in processed} == {span.trace_id for span in sent}
    assert len({span.trace_id for span in sent}) == 6
    outcomes = sorted(_attributes(span)["dramatiq_guard.outcome"] for span in processed)
    assert outcomes == ["dead_lettered", "retried", *["succeeded"] * 5]


def _attributes(span: object) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}  # type: ignore[attr-defined]


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A collector that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("collector", ["refuses", "never answers"])
def test_a_worker_ends_though_the_collector_is_down(
    request: pytest.FixtureRequest, app: Path, redis_url: str, collector: str
) -> None:
    """With no collector to be reached, the messages are worked on, and the worker ends well within a bound."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    if collector == "never answers":
        endpoint = request.getfixturevalue("black_hole")
    broker = RedisBroker(url=redis_url)  # type: ignore[no-untyped-call]
    broker.declare_queue("default")
    for n in range(5):
        broker.enqueue(dramatiq.Message("default", "work", (n,), {}, {}))
    broker.close()
    # The exporter itself would go on trying for longer than this test waits.
    env = {"REDIS_URL": redis_url, "OTLP": endpoint, "FLUSH": "1000", "OTEL_EXPORTER_OTLP_TIMEOUT": "300000"}
    with Workers("shop_app", path=app, env=env) as workers:
        wait_until(lambda: workers.log.count("worked on") == 5, 30)
        workers.term()
        assert workers.wait(40) == 0


def test_logs_arrive_where_they_are_asked_for(app: Path, redis_url: str) -> None:
    """With OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN=logs the exceptions come as log records."""
    with Tap() as tap:
        produce(app, redis_url, tap.endpoint)
        env = {"REDIS_URL": redis_url, "OTLP": tap.endpoint, "OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN": "logs"}
        with Workers("shop_app", path=app, env=env) as workers:
            wait_until(lambda: "Retries exceeded" in workers.log, 30)
            workers.signal(signal.SIGTERM)
            assert workers.wait(60) == 0
        wait_until(lambda: len(tap.logs) >= 2, 15)

    assert {record.event_name for record in tap.logs} == {"messaging.process.exception"}


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "", "http://", 4318])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    """The error says what to write."""
    with pytest.raises(SetupError, match=r"endpoint='http://localhost:4318'"):
        configure_telemetry(endpoint)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_a_missing_sdk_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without the otel extra, the error names the package and how to install it."""
    find_spec = importlib.util.find_spec

    def hide(name: str, package: str | None = None) -> object:
        if name == missing:
            raise ModuleNotFoundError(name)
        return find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(SetupError, match=r"pip install 'dramatiq-guard\[otel\]'"):
        configure_telemetry("http://localhost:4318")


def test_nothing_is_set_up_where_it_is_configured() -> None:
    """The call only notes what is wanted: a process that forks afterwards has no SDK yet."""
    code = """
import sys
from dramatiq_guard import configure_telemetry
configure_telemetry("http://127.0.0.1:9")
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk.")], "an SDK was imported"
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(root)})


def test_an_sdk_of_the_users_own_is_left_alone(request: pytest.FixtureRequest) -> None:
    """Where providers are set already, configure_telemetry changes nothing."""
    recorder = request.getfixturevalue("recorder")
    configure_telemetry("http://127.0.0.1:9")
    tracer = signals.tracer()
    assert tracer is not None
    tracer.start_span("mine").end()

    assert [span.name for span in recorder.spans] == ["mine"]


def test_configuring_after_the_fact_is_said(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    """A second call, when telemetry is set up already, has no effect and says so."""
    request.getfixturevalue("recorder")
    configure_telemetry("http://127.0.0.1:9")
    signals.tracer()
    configure_telemetry("http://127.0.0.1:10")

    assert "came too late" in caplog.text


def test_a_producer_ends_though_the_collector_is_down(app: Path, redis_url: str, black_hole: str) -> None:
    """A script that has sent its messages exits within a bound, and the messages are there."""
    produce(app, redis_url, black_hole, OTEL_EXPORTER_OTLP_TIMEOUT="300000")

    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("dramatiq:default") == 6

"""The private Valkey keeps its port and, with the append-only file, its data, whatever is done to it."""

from __future__ import annotations

import os
import signal

import pytest
import redis

from dramatiq_guard.testing.private_server import ServerDidNotStart
from dramatiq_guard.testing.valkey import PrivateValkey


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL], ids=lambda sig: sig.name)
def test_answered_writes_survive_with_the_append_only_file(own_valkey: PrivateValkey, sig: signal.Signals) -> None:
    """Stopped or killed, the server comes back at the same URL with every write that it answered."""
    with redis.Redis.from_url(own_valkey.url) as client:
        client.set("kept", 7)
    url = own_valkey.url
    own_valkey.restart(sig)

    assert url == own_valkey.url
    with redis.Redis.from_url(url) as client:
        assert b"7" == client.get("kept")


def test_data_are_gone_without_the_append_only_file() -> None:
    """A restart without it is a flush."""
    with PrivateValkey() as valkey, redis.Redis.from_url(valkey.url) as client:
        client.set("kept", 7)
        valkey.restart()

        assert client.get("kept") is None


def test_a_frozen_server_answers_once_it_is_thawed(own_valkey: PrivateValkey) -> None:
    """While it is frozen a client times out; after it the server is there as if nothing had been."""
    own_valkey.pause()
    with redis.Redis.from_url(own_valkey.url, socket_timeout=0.2, retry=None) as client:
        with pytest.raises(redis.TimeoutError):
            client.ping()
        own_valkey.resume()
        assert client.ping()


def test_a_frozen_server_can_be_stopped_and_closed() -> None:
    """Nothing is left behind: neither the process nor its directory."""
    valkey = PrivateValkey().start()
    pid, directory = valkey.pid, valkey.directory
    valkey.pause()
    valkey.close()

    assert not valkey.running
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_cannot_start_says_why() -> None:
    """The error holds the end of the server's log."""
    with pytest.raises(ServerDidNotStart, match="nonsense"), PrivateValkey(extra=("--nonsense", "1")):
        pytest.fail("it started")


def test_the_database_is_empty_in_each_test(redis_client: redis.Redis) -> None:
    """The fixture flushes before the test."""
    assert 0 == redis_client.dbsize()

"""Scripts run on connections that are kept; a connection that went away, and a server that forgot, cost nothing."""

from __future__ import annotations

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dramatiq_guard import clock
from dramatiq_guard.settle.redis_scripts import Scripts
from dramatiq_guard.testing.valkey import PrivateValkey

SCRIPT = 'return redis.call("incrby", KEYS[1], ARGV[1])'

pytestmark = pytest.mark.redis


class Later(clock.SystemClock):
    """A clock that is put forward."""

    ahead = 0

    def monotonic(self) -> int:
        return super().monotonic() + self.ahead


def test_a_script_is_run_with_its_keys_and_arguments(redis_url: str) -> None:
    """What it answers comes back, and one connection is used over and over."""
    client = redis.Redis.from_url(redis_url)
    scripts = Scripts(client)

    assert [2, 4, 6] == [scripts[SCRIPT](("n",), (2,)) for _ in range(3)]
    assert 1 == len(client.connection_pool._in_use_connections)


def test_a_server_that_forgot_its_scripts_is_told_again(redis_url: str) -> None:
    """After a restart or a failover the script is not known there."""
    client = redis.Redis.from_url(redis_url)
    scripts = Scripts(client)
    scripts[SCRIPT](("n",), (1,))
    client.script_flush()

    assert 2 == scripts[SCRIPT](("n",), (1,))


def test_an_error_of_the_script_passes_and_harms_no_connection(redis_url: str) -> None:
    """What redis-py raises is raised, and the next one is answered as if nothing had been."""
    client = redis.Redis.from_url(redis_url)
    scripts = Scripts(client)
    client.set("text", "abc")
    with pytest.raises(redis.ResponseError):
        scripts[SCRIPT](("text",), (1,))

    assert 5 == scripts[SCRIPT](("n",), (5,))


def test_a_connection_that_rested_is_looked_at_before_it_is_used(redis_url: str) -> None:
    """A server closes connections that are idle: that is noticed before anything is sent."""
    client = redis.Redis.from_url(redis_url)
    scripts = Scripts(client)
    scripts[SCRIPT](("n",), (1,))
    redis.Redis.from_url(redis_url).client_kill_filter(_type="normal", skipme=True)
    later = Later()
    later.ahead = 2_000
    with clock.use(later):
        assert 2 == scripts[SCRIPT](("n",), (1,))


def test_after_a_restart_no_more_than_one_command_fails(own_valkey: PrivateValkey) -> None:
    """The connections that are kept are dropped together."""
    client = redis.Redis.from_url(own_valkey.url)
    scripts = Scripts(client)
    connections = scripts._connections
    now = clock.monotonic()
    taken = [connections.take(now) for _ in range(3)]
    for each in taken:
        connections.give(each, now)
    own_valkey.restart()
    with pytest.raises(redis.ConnectionError):
        scripts[SCRIPT](("n",), (1,))

    assert 1 == scripts[SCRIPT](("n",), (1,))


def test_a_server_that_does_not_answer_is_not_waited_for_longer_than_the_client_says(own_valkey: PrivateValkey) -> None:
    """The kernel ends the wait, and what is raised is what redis-py raises when Python's own timeout is over."""
    client = redis.Redis.from_url(own_valkey.url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
    scripts = Scripts(client)
    scripts[SCRIPT](("n",), (1,))
    (kept, _), *_ = scripts._connections._kept
    assert kept._sock.gettimeout() is None

    other = redis.Redis.from_url(own_valkey.url)
    other.client_pause(60_000, all=False)
    with pytest.raises(redis.TimeoutError):
        scripts[SCRIPT](("n",), (1,))

    other.client_unpause()
    assert scripts[SCRIPT](("n",), (1,)) >= 2
    kept.disconnect()


def test_a_connection_that_goes_back_to_its_pool_has_its_own_timeout_again(redis_url: str) -> None:
    """Whoever takes it next finds it as the client was set up."""
    client = redis.Redis.from_url(redis_url, socket_timeout=7)
    scripts = Scripts(client)
    scripts[SCRIPT](("n",), (1,))
    scripts._connections.clear()

    connection = client.connection_pool.get_connection()
    assert 7 == connection._sock.gettimeout()
    connection.disconnect()


@pytest.mark.parametrize("kind", [redis.BlockingConnectionPool, redis.ConnectionPool])
def test_what_others_may_wait_for_is_not_kept(kind: type[redis.ConnectionPool], redis_url: str) -> None:
    """Of a pool of two, or one whose users wait in line, every connection goes back at once."""
    client = redis.Redis(connection_pool=kind.from_url(redis_url, max_connections=2))
    scripts = Scripts(client)

    assert [1, 2] == [scripts[SCRIPT](("n",), (1,)) for _ in range(2)]
    assert not scripts._connections._kept


def test_a_client_of_another_kind_runs_scripts_its_own_way() -> None:
    """Whatever has no connections that can be taken is called as it is."""

    class Client:
        connection_pool = object()

        def register_script(self, source: str) -> object:
            return lambda keys, args: (source, keys, args)

    assert (SCRIPT, ("n",), (1,)) == Scripts(Client())[SCRIPT](("n",), (1,))

"""What the tests stand on: real servers, real workers, and faults.

Fixtures (tests/conftest.py)
============================

====================  ========  =====================================================================================
name                  scope     gives
====================  ========  =====================================================================================
`valkey`              session   `PrivateValkey` that all tests share: do not kill, stop or freeze this one
`redis_url`           function  the URL of its database 0, flushed before the test
`redis_client`        function  a `redis.Redis` on `redis_url`, closed afterwards
`redis_broker`        function  a `RedisBroker` on `redis_url` with Dramatiq's default middleware, set as the global
                                broker, closed afterwards
`own_valkey`          function  a `PrivateValkey(aof=True)` of the test's own, to kill, stop, freeze and restart
`postgres`            session   `PrivatePostgres` that all tests share: do not kill this one
`postgres_url`        function  the URL of a new, empty database in it, dropped afterwards
`own_postgres`        function  a `PrivatePostgres` of the test's own, to kill and restart (about 2 s)
`rabbitmq`            session   `PrivateRabbitMQ` (or `ForeignRabbitMQ`, with `.url` only): booting takes 5 to 30 s
`private_rabbitmq`    function  the same, for tests that restart it, close its connections or raise its alarms; skipped
                                where it is a foreign one; a test that stops it need not start it again
`rabbitmq_url`        function  its URL with a new, empty virtual host, deleted afterwards
`rabbitmq_broker`     function  a `RabbitmqBroker` on `rabbitmq_url`, with `confirm_delivery=True`, set as the global
                                broker, closed afterwards
`stub_broker`         function  a `StubBroker` with Dramatiq's default middleware, set as the global broker
`stub_worker`         function  a started `Worker` on `stub_broker` (10 ms timeout, 4 threads), stopped afterwards
====================  ========  =====================================================================================

A test that uses one of them gets the mark of the server (`redis`, `postgres`, `rabbitmq`) by itself:
`pytest -m "not rabbitmq"`.  With `CI=true` a server that does not start fails the tests; elsewhere a missing RabbitMQ
skips them, and the summary says how to install it.

A test that interrupts threads in this process (time limits, `Shutdown`) gets `pytest.mark.untraced`: on CPython 3.11 it
would hang under coverage.

Classes and functions
=====================

`dramatiq_guard.testing.valkey.PrivateValkey(*, aof=False, extra=(), port=None)`
    `.url`, `.url_of(database)`; and what every private server has: `.port`, `.pid`, `.running`, `.log`, `.directory`,
    `start()`, `stop(sig=SIGTERM)`, `kill()`, `pause()` (SIGSTOP), `resume()`, `restart(sig=SIGTERM)` (same port, same
    data), `close()`; a context manager.  `free_port()` is beside it in `private_server`.
`tests.support.postgres.PrivatePostgres(*, extra=())`
    `.url`, `.url_of(database)`, `create_database(name)`, `drop_database(name)`, `sql(statement, database="test")`, and
    the above.
`tests.support.rabbitmq.PrivateRabbitMQ()` (a restart takes about 7 s)
    `.url`, `.url_of(vhost)`, `add_vhost(name)`, `delete_vhost(name)`, `erlang(code)`, `ctl(*arguments)`,
    `close_all_connections()`,
    `memory_alarm()` (a context manager: publishers are blocked inside), and the above.
`tests.support.proxy.FaultyProxy(url or (host, port))`
    A context manager.  `.url`, `.port`, `through(url)`; `delay(seconds)`, `blackhole(replies_only=False)`, `refuse()`,
    `cut_after(bytes)`, `lose_reply(nth=1, matching=b"") -> threading.Event`, `cut()`, `heal()`; `.turns`,
    `.conversations` (each with `turns`, `bytes_up`, `bytes_down`, `open`), `.open_connections`, `forget()`.
`tests.support.workers.Workers(module, *, processes=1, threads=2, path=None, env=None, arguments=(), queues=(),
ready_within=30.0)`
    A context manager that starts `python -m dramatiq` and waits until it is ready.  `start()`, `wait_ready()`,
    `.pid` (master), `.pids` (workers), `.alive` (all), `term()`, `kill()`, `signal(sig)`,
    `signal_worker(sig, index=0)`,
    `signal_group(sig)`, `wait(timeout=30) -> exit code`, `.log`, `wait_log(text, timeout=15)`, `close()`.
`tests.support.waiting.wait_until(condition, timeout=10.0, describe="the condition", *, interval=0.02)`
    Polls; returns the first true value; an AssertionError at the deadline, with `describe` (a text or a function).
"""

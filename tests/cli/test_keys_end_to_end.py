"""From a worker that is killed to a person's decision and what comes of it: real processes, a real server."""

from __future__ import annotations

import shlex
import sys

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until
from tests.support.workers import Workers

KEY = 'default/charge/key/["list",[["str","order:{}"],["int",17]]]'

APP = """
    import os
    import signal
    from pathlib import Path

    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend
    from dramatiq_guard import DeadLetter, IdempotencyGuard, JitterBackoff, connect, install

    LEDGER = Path({ledger!r})

    broker = RedisBroker(url={url!r}, heartbeat_timeout=1_000, maintenance_chance=1_000_000)
    broker.add_middleware(Results(backend=RedisBackend(url={url!r})))
    dramatiq.set_broker(broker)
    stores = connect({url!r})
    install(
        broker,
        JitterBackoff(),
        DeadLetter(stores.dead_letters),
        IdempotencyGuard(stores.idempotency, lease=900, on_crash="park"),
    )

    @dramatiq.actor(idempotency_key="order:{{order_id}}", store_results=True)
    def charge(order_id):
        with LEDGER.open("a") as ledger:
            ledger.write(f"charged {{order_id}}\\n")
        if len(LEDGER.read_text().splitlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "charged by the actor"
"""


@pytest.mark.parametrize(
    ("decision", "runs", "result"),
    [
        (["--retry"], 2, "charged by the actor"),
        (["--done", "--result", '{"id": "ch_9"}'], 1, {"id": "ch_9"}),
    ],
    ids=["retry", "done"],
)
def test_work_whose_outcome_nobody_knows_is_decided_by_a_person(call, application, tmp_path, decision, runs, result):
    """It stays parked, whoever replays it, until its key is resolved; then it is run once, or not at all."""
    ledger = tmp_path / "ledger"
    with PrivateValkey() as server:
        name = application(APP.format(ledger=str(ledger), url=server.url))
        letters = connect(server.url).dead_letters
        assert call("keys", "list", "--broker", f"{name}:broker").out == "No key waits for anybody.\n"
        message = sys.modules[name].charge.send(17)

        def died(count):
            """The latest letter, when there have been so many deaths."""
            return wait_until(
                lambda: next((each for each in letters.page().letters if each.replay_n == count), None),
                timeout=60,
                describe=lambda: workers.log[-3_000:],
            )

        with Workers(name, path=tmp_path, ready_within=0) as workers:
            wait_until(lambda: workers.process.poll() is not None, timeout=60, describe=lambda: workers.log[-3_000:])
        with Workers(name, path=tmp_path, ready_within=60) as workers:
            letter = died(0)
            assert (letter.letter_id, letter.reason, letter.key) == (message.message_id, "outcome_unknown", KEY)
            (waiting,) = call("keys", "list", "--store", server.url, "--json").document["keys"]
            assert (waiting["key"], waiting["state"], waiting["crashes"]) == (KEY, "parked", 1)

            # Whoever only replays it comes no further.
            assert call("dead", "replay", f"{name}:broker", letter.letter_id).code == 0
            letter = died(1)
            assert letter.reason == "outcome_unknown"
            assert ledger.read_text() == "charged 17\n"

            resolved = call("keys", "resolve", KEY, "--broker", f"{name}:broker", *decision, "--yes")
            assert resolved.code == 0, resolved.err
            command = shlex.split(resolved.out.splitlines()[-1])
            assert command == ["dramatiq-guard", "dead", "replay", f"{name}:broker", letter.letter_id]
            assert call(*command[1:]).code == 0

            wait_until(
                lambda: letters.get(letter.letter_id).standing.replay.outcome == "succeeded",
                timeout=60,
                describe=lambda: workers.log[-3_000:],
            )
            assert ledger.read_text() == "charged 17\n" * runs
            assert message.get_result(block=True, timeout=10_000) == result
            assert letters.depth() == 0
            assert call("keys", "show", KEY, "--store", server.url, "--json").document["state"] == "done"

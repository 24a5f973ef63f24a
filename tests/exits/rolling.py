"""A rolling deploy under load: two masters are restarted in turns while thousands of messages with effects run.

``python -m tests.exits.rolling --restarts 20 --messages 5000`` says what came of them, and exits 1 unless every message
had its effect once, none was lost, and no retry was burnt by a restart.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import redis

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until
from tests.support.workers import Workers


def roll(restarts: int, messages: int, *, guarded: bool = False) -> list[str]:
    """Send, restart, and say what is not as it should be.

    Parameters:
      restarts(int): How many times a master is told to stop and another one is started.
      messages(int): How many messages are sent.
      guarded(bool): Whether the effects have idempotency keys.
    """
    with tempfile.TemporaryDirectory() as directory, PrivateValkey(aof=True) as valkey:
        ledger = Path(directory) / "effects"
        ledger.touch()
        environment = {
            "ROLLING_URL": valkey.url,
            "ROLLING_LEDGER": str(ledger),
            "ROLLING_GUARDED": "yes" if guarded else "",
        }
        os.environ.update(environment)
        from tests.exits.rolling_app import broker, effect, stores

        dice = random.Random(1)
        for number in range(messages):
            effect.send(number, dice.randrange(5, 60))
        codes = []
        fleet = [_started(environment) for _ in range(2)]
        try:
            for restart in range(restarts):
                old = fleet[restart % 2]
                old.term()
                codes.append(old.wait(30))
                old.close()
                fleet[restart % 2] = _started(environment)
            client = redis.Redis.from_url(valkey.url)
            wait_until(
                lambda: not client.hlen("dramatiq:default.msgs") and not client.hlen("dramatiq:default.DQ.msgs"),
                timeout=600,
                describe="everything to be worked off",
            )
        finally:
            for workers in fleet:
                workers.close()
        effects = Counter(line.split()[0] for line in ledger.read_text().splitlines())
        attempts = {line.split()[0]: int(line.split()[1]) for line in ledger.read_text().splitlines()}
        letters = stores.dead_letters.depth()
        stores.close()
        broker.close()
    wrong = [f"exit codes {Counter(codes)}, wanted only 0"] if any(codes) else []
    wrong += [f"{messages - len(effects)} messages were lost"] if len(effects) != messages else []
    wrong += (
        [f"{sum(n > 1 for n in effects.values())} messages had their effect twice"] if max(effects.values()) > 1 else []
    )
    wrong += [f"{letters} dead letters"] if letters else []
    burnt = [number for number, attempt in attempts.items() if attempt != (2 if int(number) % 10 == 0 else 1)]
    return [*wrong, *([f"{len(burnt)} retries were burnt"] if burnt else [])]


def _started(environment: dict[str, str]) -> Workers:
    workers = Workers("tests.exits.rolling_app", threads=4, env=environment).start()
    workers.wait_ready()
    return workers


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.exits.rolling", description=__doc__)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--messages", type=int, default=5_000)
    parser.add_argument("--guarded", action="store_true", help="give the effects idempotency keys")
    arguments = parser.parse_args()
    wrong = roll(arguments.restarts, arguments.messages, guarded=arguments.guarded)
    print(
        *(wrong or [f"{arguments.messages} messages, each with its effect once, over {arguments.restarts} restarts"]),
        sep="\n",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

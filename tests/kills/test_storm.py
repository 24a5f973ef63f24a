"""Workers are killed again and again, at any moment, while many guarded jobs run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.waiting import wait_until

from .world import Servers, world

#: How many jobs of each kind there are, and how often a process is killed.
_JOBS, _KILLS = 60, 12


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_each_job_has_one_charge_and_one_row_whoever_is_killed(
    broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """A process takes the place of each that is killed; in the end all is done, once."""
    if broker == "rabbitmq":
        servers = replace(servers, rabbitmq=request.getfixturevalue("server"))
    dice = random.Random(5)
    with world(servers, broker, "postgresql") as here:
        messages = {
            f"{actor}-{number}": here.send(actor, f"{actor}-{number}", "a moment")
            for number in range(_JOBS)
            for actor in ("key", "step", "atomic", "inbox")
        }
        for _ in range(_KILLS):
            with here.workers(threads=4, KILLS_MAX_CRASHES="100") as workers:
                enough = len(here.noted("began")) + dice.randrange(4, 24)
                wait_until(
                    lambda enough=enough: len(here.noted("began")) >= enough or not here.left(),
                    60,
                    lambda log=workers: f"{enough} runs:\n{log.log}",
                )
                workers.kill()
                here.logs.append(workers.log)
        with here.working(threads=4, KILLS_MAX_CRASHES="100"):
            here.wait_settled()
        charges, rows = here.gateway.charges(), here.rows()
        assert dict.fromkeys(messages, 1) == {job: len(made) for job, made in charges.items()}
        assert {job: 1 for job in messages if job.startswith(("atomic", "inbox"))} == rows
        for job, message in messages.items():
            assert charges[job] == [here.result(message)]
        assert not here.letters()

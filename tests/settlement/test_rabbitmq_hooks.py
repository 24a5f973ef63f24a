"""RabbitMQ: whoever listens to the hooks of messages hears under the stack what plain Dramatiq would tell."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from dramatiq.middleware import Middleware, SkipMessage

from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")

WHATS = ("enqueue", "process_message", "ack", "nack", "delay_message")
HOOKS = [*(f"{side}_{what}" for what in WHATS for side in ("before", "after")), "after_skip_message"]


class Listener(Middleware):
    """A user's own middleware: writes down each hook of each job, and skips the jobs that are named so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: list[tuple[str, Any, str]] = []
        for hook in HOOKS:
            setattr(self, hook, self._hear(hook))

    def _hear(self, hook: str) -> Callable[..., None]:
        def hear(broker: Any, message: Any, *rest: Any, **outcome: Any) -> None:
            with self._lock:
                self._heard.append((message.args[0], message, hook))
            if hook == "before_process_message" and message.args[0] == "skipped":
                raise SkipMessage("not today")

        return hear

    @property
    def hooks(self) -> list[tuple[str, str]]:
        """The hooks of each job, in order."""
        with self._lock:
            return [(key, hook) for key, _, hook in self._heard]

    def ends(self) -> Counter[str]:
        """How many copies of each job have come to their end."""
        return Counter(key for key, hook in self.hooks if hook in ("after_ack", "after_nack"))

    def deliveries(self) -> Counter[tuple[str, ...]]:
        """The job and the hooks of each copy that was delivered or enqueued; those of several overlap."""
        chains: dict[int, list[str]] = {}
        for key, message, hook in self._heard:
            chains.setdefault(id(message), [key]).append(hook)
        return Counter(tuple(chain) for chain in chains.values())


def _listen(rabbitmq: PrivateRabbitMQ, url: str, *, stock: bool) -> Listener:
    """Run jobs that end in every way, and listen."""
    listener = Listener()
    world = World(rabbitmq, url, stock=stock, middleware=[listener])
    for name in ("sync", "async"):
        world.send(f"good-{name}", sync=name == "sync")
        world.send(f"again-{name}", fails=2, sync=name == "sync")
        world.send(f"refused-{name}", refused=True, sync=name == "sync")
        world.send(f"delayed-{name}", delay=300, sync=name == "sync")
    world.send("skipped")
    world.send_unknown("unknown")
    copies = {"again-sync": 5, "again-async": 5, "delayed-sync": 2, "delayed-async": 2}
    with world.working(threads=4):
        wait_until(
            lambda: listener.ends() == {key: copies.get(key, 1) for key, _ in listener.hooks},
            20,
            lambda: f"the ends of all jobs: {listener.ends()}",
        )
    return listener


def test_a_users_middleware_is_not_taken_for_one_of_the_stack(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """It may have attributes of any name: what it calls its notes or its deliveries is its own affair."""
    names = ("around", "note", "decide", "give_up", "verdict", "redaction", "buried", "bury_undecodable", "deliveries")
    theirs = type("Theirs", (Middleware,), dict.fromkeys((*names, "store", "open_letterbox"), "theirs"))
    world = World(private_rabbitmq, rabbitmq_url, middleware=[theirs()])
    world.send("job", fails=1)
    world.send("refused", refused=True)
    with world.working(threads=2):
        world.finish()
        world.check()


def test_a_listener_hears_what_it_hears_on_plain_dramatiq(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str) -> None:
    """Each copy of each job goes through the same hooks in the same order; only the copy that a failed attempt owes is
    enqueued between its before_ack and its after_ack."""
    stack = _listen(private_rabbitmq, rabbitmq_url, stock=False)
    stock = _listen(private_rabbitmq, rabbitmq_url, stock=True)

    assert stock.deliveries() == stack.deliveries()
    again = [hook for key, hook in stack.hooks if key == "again-sync" and "delay" not in hook]
    assert ["after_process_message", "before_ack", "before_enqueue", "after_enqueue"] == again[3:7]

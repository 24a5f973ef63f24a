"""A clock on which waiting takes no time, deliveries without a broker, and consumers that note what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import clock
from dramatiq_guard.delivery import Delivery, stamp


class VirtualClock(clock.SystemClock):
    """A clock that moves only when somebody waits, and then at once.

    Attributes:
      time(int): Milliseconds, on both scales.
      waits(list[int]): The waits, one after the other.
      meanwhile(Callable): What happens during a wait.
    """

    def __init__(self) -> None:
        #: Threads that tests before this one left behind: they are no part of it, and would spin on a clock that jumps.
        self.others = set(threading.enumerate()) - {threading.current_thread()}
        self.time = 1_800_000_000_000
        self.waits: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def now(self) -> int:
        return self.time

    def monotonic(self) -> int:
        return self.time

    def wait(self, event: Any, milliseconds: int) -> bool:
        if threading.current_thread() in self.others:
            return bool(event.wait(milliseconds / 1000))
        if not event.is_set():
            self.waits.append(milliseconds)
            assert len(self.waits) < 10_000, "somebody waits for ever"
            self.meanwhile()
            self.time += milliseconds
        return event.is_set()


@pytest.fixture
def virtual() -> Iterator[VirtualClock]:
    """The clock that everything uses during the test."""
    virtual = VirtualClock()
    with clock.use(virtual):
        yield virtual


class NotingConsumer:
    """A guarded consumer that notes what it is told, and raises what the test has put there.

    Attributes:
      heard(list): What it was told: the word, and the message's id.
      raising(list): Errors for the next calls; ``None`` lets one pass.
    """

    queue_name = "default"
    drained = True

    def __init__(self, stack: Any = None) -> None:
        self.stack = stack
        self.heard: list[tuple[str, str]] = []
        self.raising: list[BaseException | None] = []
        self.lives = True

    def ack(self, message: Any) -> None:
        self._hear("ack", message)

    def nack(self, message: Any) -> None:
        self._hear("nack", message)

    def promote(self, message: Any) -> None:
        self._hear("promote", message)

    def hand_back(self, messages: list[Any]) -> int:
        for message in messages:
            self._hear("hand_back", message)
        return len(messages)

    def holds(self, delivery: Delivery) -> bool:
        return self.lives

    def carry_on(self, delivery: Delivery) -> None:
        self._hear("carry_on", delivery.message)

    def alive(self) -> bool:
        return self.lives

    def _hear(self, word: str, message: Any) -> None:
        if self.raising and (error := self.raising.pop(0)) is not None:
            raise error
        self.heard.append((word, message.message_id))


@pytest.fixture
def noting() -> type[NotingConsumer]:
    """The class of consumers that note what they are told."""
    return NotingConsumer


def deliver(name: str = "job", consumer: Any = None, queue_name: str = "default", **options: Any) -> Delivery:
    """A message as it arrives from a consumer; its id is the name of its actor."""
    message: dramatiq.Message[Any] = dramatiq.Message(queue_name, name, (), {}, options, message_id=name)
    return stamp(MessageProxy(message), consumer)


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    """A broker in memory with no middleware at all, which is the global one during the test."""
    broker = StubBroker(middleware=[])
    dramatiq.set_broker(broker)
    broker.declare_queue("default")
    yield broker
    broker.close()

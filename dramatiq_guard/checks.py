"""The set-up checks: the boot runs the fatal ones and logs the others, so that a wrong stack never meets a message.

Each check says what is wrong, with what, and what to write instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger
from dramatiq.middleware import Retries

from . import host
from .errors import SetupError, StoreUnavailable
from .options import check_actor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Broker

__all__ = ["CHECKS", "Problem", "Setup", "guards_of", "problems", "run"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is checked.

    Parameters:
      broker(Broker): The broker with its middlewares and actors.
      allow_unconfirmed(bool): Whether publishing without confirms was accepted.
    """

    broker: Broker
    allow_unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the set-up.

    Parameters:
      check(str): The name of the check that found it.
      what(str): What is wrong and what to do about it.
      fatal(bool): Whether a worker must not boot with it.
    """

    check: str
    what: str
    fatal: bool = True


def run(setup: Setup) -> None:
    """Check the set-up before a worker boots.

    Raises:
      SetupError: Naming every fatal problem.
    """
    found = list(problems(setup))
    logger = get_logger("dramatiq_guard", "checks")
    for problem in found:
        if not problem.fatal:
            logger.warning("%s (%s)", problem.what, problem.check)
    fatal = [problem.what for problem in found if problem.fatal]
    if fatal:
        raise SetupError("The worker does not start. " + " ".join(fatal))


def problems(setup: Setup) -> Iterator[Problem]:
    """Everything that is wrong with the set-up."""
    for check in CHECKS:
        yield from check(setup)


def guards_of(broker: Broker) -> list[Any]:
    """The guard middlewares of a broker.

    By their place in the stack: a user's own middleware may well have an attribute of the name of something of ours.
    """
    return [m for m in broker.middleware if isinstance(getattr(type(m), "place", None), int)]


def _guards(setup: Setup) -> list[Any]:
    return guards_of(setup.broker)


def one_retry_middleware(setup: Setup) -> Iterator[Problem]:
    """Two Retries make 7 runs and 5 dead letters of one message (H6); none acks failures as done."""
    retrying = [type(m).__name__ for m in setup.broker.middleware if isinstance(m, Retries)]
    if len(retrying) > 1:
        yield Problem(
            "one_retry_middleware",
            f"The broker has {len(retrying)} retry middlewares ({', '.join(retrying)}), and each would retry every "
            "message: use install(broker, …), which replaces Dramatiq's, or leave Retries out of middleware=[…].",
        )
    elif not retrying and _guards(setup):
        yield Problem(
            "one_retry_middleware",
            "The broker has no retry middleware, so a failed message would be acked as if it were done: add "
            "JitterBackoff() (max_retries=0 if nothing shall be retried).",
        )


def each_once(setup: Setup) -> Iterator[Problem]:
    """No guard middleware stands twice in a stack."""
    names = [type(m).__name__ for m in _guards(setup)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("each_once", f"{name} is {names.count(name)} times in the broker's middleware: leave one.")


def in_order(setup: Setup) -> Iterator[Problem]:
    """The guard middlewares stand in the order that their hooks lean on."""
    guards = _guards(setup)
    expected = sorted(guards, key=lambda m: m.place)
    if guards != expected:
        yield Problem(
            "in_order",
            "The guard middlewares stand in the wrong order. Use install(broker, …), which knows the order, or write "
            "them as: " + ", ".join(type(m).__name__ for m in expected) + ".",
        )


def confirmed_publishing(setup: Setup) -> Iterator[Problem]:
    """A retry that RabbitMQ never confirmed may be lost although the original was acked."""
    if host.publishes_unconfirmed(setup.broker):
        yield Problem(
            "confirmed_publishing",
            "RabbitmqBroker publishes without confirms, so a retry may be lost while its original is acked: write "
            "RabbitmqBroker(confirm_delivery=True, …), or install(…, allow_unconfirmed=True) to accept it.",
            fatal=not setup.allow_unconfirmed,
        )


def sound_actor_options(setup: Setup) -> Iterator[Problem]:
    """Actors that were declared before the stack was added have not been checked yet."""
    for actor in setup.broker.actors.values():
        try:
            check_actor(actor)
        except SetupError as error:
            yield Problem("sound_actor_options", f"{error}.")


def known_callbacks(setup: Setup) -> Iterator[Problem]:
    """A callback to an actor that this worker does not know cannot be sent."""
    for actor in setup.broker.actors.values():
        for option in ("on_retry_exhausted", "on_dead_letter", "on_failure", "on_success"):
            target = actor.options.get(option)
            if isinstance(target, str) and target not in setup.broker.actors:
                yield Problem(
                    "known_callbacks",
                    f"Actor {actor.actor_name!r} names {target!r} in {option}, which is not declared here: import the "
                    "module that declares it.",
                    fatal=False,
                )


def stores_answer(setup: Setup) -> Iterator[Problem]:
    """A store that is not set up stops the boot; one that is out of reach does not: the barrier waits for it."""
    for middleware in _guards(setup):
        store = getattr(middleware, "store", None)
        if store is None:
            continue
        try:
            store.ping()
        except StoreUnavailable as error:
            meanwhile = getattr(middleware, "without_store", "messages that need it wait")
            yield Problem(
                "stores_answer",
                f"The store of {type(middleware).__name__} does not answer ({error}); {meanwhile}.",
                fatal=False,
            )
        except SetupError as error:
            yield Problem("stores_answer", f"{type(middleware).__name__}: {error}")


def of_the_middlewares(setup: Setup) -> Iterator[Problem]:
    """What a middleware knows to be wrong with its own set-up."""
    for middleware in _guards(setup):
        if hasattr(middleware, "problems"):
            yield from middleware.problems(setup)


#: Every check, in the order in which their findings are reported.
CHECKS: Final[tuple[Callable[[Setup], Iterator[Problem]], ...]] = (
    one_retry_middleware,
    each_once,
    in_order,
    confirmed_publishing,
    sound_actor_options,
    known_callbacks,
    stores_answer,
    of_the_middlewares,
)

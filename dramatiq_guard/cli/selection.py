"""The options with which the dead-letter verbs say which store, and which letters.

Every verb that acts takes either the ids of letters, or filters, or ``--all``; never everything by accident.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from .. import clock
from ..dead_letters.letter import DEAD, STATES
from ..stores.protocols import Filter
from .target import load_broker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dramatiq import Broker

    from ..stores.protocols import DeadLetterStore

__all__ = ["Selection", "filter_options", "open_store", "store_options"]

_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class _Age(click.ParamType[int]):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read an age such as ``90s``, ``30min``, ``2h`` or ``7d``, in milliseconds."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)\s*([a-z]+)", value.strip())
        if found is None or found[2] not in _UNITS:
            self.fail(f"{value!r} is no age: write it like 90s, 30min, 2h or 7d", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant.

    Parameters:
      ids(tuple[str, ...]): These, if there are any.
      where(Filter): All that match, otherwise.
      narrowed(bool): Whether any filter was given.
    """

    ids: tuple[str, ...]
    where: Filter
    narrowed: bool

    def chosen(self, *, everything: bool) -> Filter | Sequence[str]:
        """What to act on.

        Parameters:
          everything(bool): Whether ``--all`` was given.

        Raises:
          click.UsageError: If nothing was chosen, or ids and filters at once.
        """
        if self.ids and (self.narrowed or everything):
            raise click.UsageError("Name letters by their ids, or by filters, but not by both.")
        if self.ids:
            return self.ids
        if not (self.narrowed or everything):
            raise click.UsageError("Say which letters: their ids, filters such as --reason or --actor, or --all.")
        return self.where


_FILTERS: Final = (
    click.option("--queue", help="Died on this queue."),
    click.option("--actor", help="Meant for this actor."),
    click.option("--reason", help="Died of this reason, as in exhausted, permanent, unknown_actor."),
    click.option("--error-type", help="Died of an error of this class (qualified name)."),
    click.option("--fingerprint", help="Died of this bug."),
    click.option("--newer-than", type=_Age(), help="Died within this time, as in 2h or 7d."),
    click.option("--older-than", type=_Age(), help="Died longer ago than this."),
    click.option("--text", help="This stands in the arguments."),
)


def filter_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the filters; it gets them as one `Selection`, called ``selection``."""

    def select(
        *args: Any,
        queue: str | None,
        actor: str | None,
        reason: str | None,
        error_type: str | None,
        fingerprint: str | None,
        newer_than: int | None,
        older_than: int | None,
        text: str | None,
        **options: Any,
    ) -> Any:
        now = clock.now()
        narrow: dict[str, Any] = {
            "queue": queue,
            "actor": actor,
            "reason": reason,
            "error_type": error_type,
            "fingerprint": fingerprint,
            "died_after": None if newer_than is None else now - newer_than,
            "died_before": None if older_than is None else now - older_than,
            "text": text,
        }
        states = options.pop("states", None) or (DEAD,)
        where = Filter(states=tuple(states), **narrow)
        narrowed = any(value is not None for value in narrow.values())
        return verb(*args, selection=Selection(options.pop("ids", ()), where, narrowed), **options)

    select.__name__, select.__doc__ = verb.__name__, verb.__doc__
    select.__dict__.update(verb.__dict__)
    for option in reversed(_FILTERS):
        select = option(select)
    return select


def state_option(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb ``--state``, which may be given more than once."""
    choice = click.Choice(STATES)
    return click.option("--state", "states", type=choice, multiple=True, help=f"[default: {DEAD}]")(verb)


_STORE: Final = (
    click.option(
        "--store", "url", metavar="URL", envvar="DRAMATIQ_GUARD_STORE", help="Where all is kept.", show_envvar=True
    ),
    click.option("--prefix", default="dramatiq-guard", show_default=True, help="What the keys begin with, on Redis."),
    click.option("--schema", default="dramatiq_guard", show_default=True, help="The tables' schema, on PostgreSQL."),
)


def store_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that `open_store` takes."""
    for option in reversed(_STORE):
        verb = option(verb)
    return verb


@contextmanager
def open_store(
    url: str | None, prefix: str, schema: str, target: str | None
) -> Iterator[tuple[DeadLetterStore, Broker | None]]:
    """Open the store that a verb is about: the one at the URL, else that of the broker's DeadLetter.

    Parameters:
      url(str | None): The URL of the store.
      prefix(str): What its keys begin with, on Redis.
      schema(str): The schema of its tables, on PostgreSQL.
      target(str | None): ``module:broker``.

    Returns:
      Iterator[tuple[DeadLetterStore, Broker | None]]: The store, and the broker where there is one.

    Raises:
      click.UsageError: If neither leads to a store.
    """
    from ..middleware.dead_letter import DeadLetter
    from ..stores.connect import connect

    broker = None if target is None else load_broker(target)
    if url is not None:
        stores = connect(url, prefix=prefix, schema=schema)
        try:
            yield stores.dead_letters, broker
        finally:
            stores.close()
        return
    if broker is None:
        raise click.UsageError(
            "Say where the letters are: --store redis://… or postgresql://…, DRAMATIQ_GUARD_STORE in the environment, "
            "or --broker module:broker."
        )
    for middleware in broker.middleware:
        if isinstance(middleware, DeadLetter):
            yield middleware.store, broker
            return
    raise click.UsageError(f"The broker {target} has no DeadLetter, so it names no store: give --store URL.")

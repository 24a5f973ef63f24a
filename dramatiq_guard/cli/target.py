"""Finding the user's broker: ``module:broker``, named as for the ``dramatiq`` command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click
from dramatiq.cli import import_broker

if TYPE_CHECKING:
    from dramatiq import Broker

__all__ = ["load_broker"]


def load_broker(target: str) -> Broker:
    """Import the user's module and find the broker in it.

    Parameters:
      target(str): ``module:broker``, or ``module`` for the global broker that it sets; looked for in the current
        directory first, as by ``dramatiq``.

    Returns:
      Broker: The broker.

    Raises:
      click.UsageError: If it cannot be imported; says which module, and what it raised.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = target.partition(":")[0]
    try:
        _, broker = import_broker(target)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise click.UsageError(
                f"There is no module {error.name!r} here ({os.getcwd()}): start from the directory that `dramatiq "
                f"{target}` is started from, or set PYTHONPATH."
            ) from error
        raise click.UsageError(
            f"Importing {module!r} failed: it needs {error.name!r}, which is not installed."
        ) from error
    except ImportError as error:
        raise click.UsageError(f"{error} Name the broker as for the dramatiq command: module:broker.") from error
    except Exception as error:  # the user's module may raise anything
        raise click.UsageError(f"Importing {module!r} raised {type(error).__name__}: {error}") from error
    found: Broker = broker
    return found

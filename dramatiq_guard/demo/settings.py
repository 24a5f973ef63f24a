"""What the demo's processes must know of one another, passed in the environment."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Final, Self

__all__ = ["Settings"]

_PREFIX: Final = "DRAMATIQ_GUARD_DEMO_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Where everything is.

    Parameters:
      broker(str): The URL of the broker, and of the store.
      downstream(str): The URL of the downstream.
      stock(str): ``yes`` for plain Dramatiq without the stack.
      collector(str): The OTLP endpoint that traces are sent to; empty for none.
    """

    broker: str
    downstream: str
    stock: str = ""
    collector: str = ""

    def to_environment(self) -> dict[str, str]:
        """Give the environment for a process of the demo."""
        return os.environ | {_PREFIX + name.upper(): value for name, value in asdict(self).items()}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings that the demo gave this process.

        Raises:
          RuntimeError: If there are none: this module is for the demo's own processes.
        """
        try:
            return cls(**{name: os.environ[_PREFIX + name.upper()] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise RuntimeError(
                f"{error.args[0]} is not set: the demo's workers are started by `dramatiq-guard demo`, not by hand"
            ) from None

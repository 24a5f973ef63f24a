"""How the demo says what is going on while it goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Lines", "Live", "Progress", "Standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where things stand at one moment."""

    promised: int = 0
    served: int = 0
    refused: int = 0
    dead: int = 0
    unsettled: int = 0

    def __str__(self) -> str:
        return (
            f"{self.promised} promised · {self.served} served · {self.refused} refusals met · "
            f"{self.dead} dead letters · {self.unsettled} in the broker"
        )


class Progress(Protocol):
    """Gets told what happens."""

    def say(self, text: str) -> None:
        """Something began or was done."""
        ...

    def show(self, standing: Standing) -> None:
        """Things stand like this now."""
        ...


class Lines:
    """Plain lines, one for each change worth a line.

    Parameters:
      console(Console): Where they go.
      every(int): How many looks go by between two lines.
    """

    def __init__(self, console: Console, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._looks = 0

    def say(self, text: str) -> None:
        """Print the text."""
        self._console.print(f"· {text}", highlight=False, markup=False)

    def show(self, standing: Standing) -> None:
        """Print where things stand, now and then."""
        if self._looks % self._every == 0:
            self._console.print(f"  {standing}", highlight=False, markup=False, soft_wrap=True)
        self._looks += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Live:
    """One line on a terminal that is drawn anew, below the lines that stay.

    Parameters:
      console(Console): The terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting …")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(f"[bold]·[/] {text}", highlight=False)

    def show(self, standing: Standing) -> None:
        """Draw the line anew."""
        self._status.update(str(standing))

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

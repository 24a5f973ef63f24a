"""``dramatiq-guard demo``: real workers, a flaky downstream, and what became of every message."""

from __future__ import annotations

import signal
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from .output import as_json, console

if TYPE_CHECKING:
    from types import FrameType

    from ..demo.report import Report

__all__ = ["demo"]

_NEEDED: Final = ("redis", "requests", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


@click.command(short_help="Send messages into trouble and account for every one.")
@click.option("--stock", is_flag=True, help="Run the same on plain Dramatiq, and see the difference.")
@click.option("--json", "json_", is_flag=True, help="Print the outcome as one JSON document.")
@click.option("--mischief/--no-mischief", default=True, hidden=True, help="Restart the broker and kill a worker.")
@click.pass_context
def demo(context: click.Context, *, stock: bool, json_: bool, mischief: bool) -> None:
    """Start a private Valkey, a flaky downstream and real workers, send a few hundred messages, and say what became of
    every one, by two ledgers that the stack does not write.

    Meanwhile a worker is killed and the broker is stopped and started again. Nothing is left behind. Exit code 0 only
    if every message is accounted for.
    """
    report = _run(stock=stock, mischief=mischief, quiet=json_)
    if json_:
        as_json(report.as_dict())
    else:
        from ..demo.drawing import draw

        draw(report, console())
    context.exit(0 if report.accounted else 1)


def _run(*, stock: bool, mischief: bool, quiet: bool) -> Report:
    try:
        # What the demo's processes will need, so that it is missed here and not in their logs.
        for module in _NEEDED:
            import_module(module)
        from ..demo.processes import ProcessEnded
        from ..demo.progress import Lines, Live
        from ..demo.run import Mischief, run
        from ..testing.private_server import ServerDidNotStart
    except ModuleNotFoundError as error:
        raise click.UsageError(f"The demo needs {error.name}: run pip install 'dramatiq-guard[demo]'") from error
    out = console(stderr=quiet)
    progress = Live(out) if out.is_terminal else Lines(out)
    told_to_stop = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal told_to_stop
        told_to_stop = True
        raise KeyboardInterrupt

    # A polite kill ends the demo as Ctrl-C does: what it started is ended first.
    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with progress:
            report = run(progress, stock=stock, mischief=Mischief(restart_broker=mischief, kill_worker=mischief))
    except (ProcessEnded, ServerDidNotStart) as error:
        if told_to_stop:
            raise KeyboardInterrupt from error
        raise click.ClickException(str(error)) from error
    finally:
        for number, disposition in former.items():
            signal.signal(number, disposition)
    if told_to_stop:
        # Python drops what is raised in a destructor, also when it was a signal that raised it.
        raise KeyboardInterrupt
    return report

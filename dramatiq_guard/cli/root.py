"""The command group: which verbs there are, and how an error ends the process.

An error of the library is a sentence for its reader and an exit code, never a traceback.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from ..errors import GuardError, SetupError, StoreUnavailable
from ..version import __version__
from .breaker import breaker
from .dead import dead
from .demo import demo
from .explain import explain
from .keys import keys
from .probe import main as answer_probe
from .schedule import schedule
from .schema import schema
from .simulate import simulate

__all__ = ["cli", "run"]


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the verbs in the order in which one meets them."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb, and turn the library's errors into Click's."""
        try:
            return super().invoke(ctx)
        except SetupError as error:
            raise click.UsageError(str(error)) from error
        except StoreUnavailable as error:
            raise click.ClickException(f"{error}\nIs the server up, and is this its URL?") from error
        except GuardError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dramatiq-guard")
def cli() -> None:
    """Look at, and act on, what dramatiq-guard does with failing messages.

    Exit codes: 0 all is well, 1 something failed or was found wanting, 2 the call itself was wrong.
    """


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Answer an orchestrator's probe from the workers' files.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def probe(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Answer a probe; it reads its arguments itself, so that it needs neither Click nor the time to import it."""
    context.exit(answer_probe(arguments))


for _verb in (demo, explain, schedule, simulate, dead, keys, breaker, schema, probe):
    cli.add_command(_verb)


def run() -> int:
    """Run the verb on the command line, and give its exit code."""
    try:
        code = cli.main(prog_name="dramatiq-guard", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("Stopped.\n")
        return 130
    return code if isinstance(code, int) else 0

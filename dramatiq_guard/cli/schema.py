"""``dramatiq-guard schema``: the tables on PostgreSQL, made by a person or a deploy and never by a worker."""

from __future__ import annotations

from dataclasses import asdict

import click

from .output import as_json

__all__ = ["schema"]

_schema_option = click.option(
    "--schema", "name", default="dramatiq_guard", show_default=True, help="The schema that the tables are in."
)
_json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")


@click.group(short_help="Make the tables on PostgreSQL, or see whether they are up to date.")
def schema() -> None:
    """Make the tables on PostgreSQL, or see whether they are up to date."""


@schema.command()
@click.argument("url")
@_schema_option
@_json_option
def apply(url: str, *, name: str, json_: bool) -> None:
    """Take the steps that the database at URL has not taken yet.

    Safe to repeat, and to run from two deploys at once.

    Example: dramatiq-guard schema apply postgresql://localhost/app
    """
    from ..stores.postgres.schema import apply_schema

    before = apply_schema(url, schema=name)
    if json_:
        as_json({"schema": name, "done": before.missing, "unknown": before.unknown})
        return
    for step in before.missing:
        click.echo(f"{name}: {step} done")
    click.echo(f"{name} is up to date.")
    _tell_unknown(name, before.unknown)


@schema.command()
@click.argument("url")
@_schema_option
@_json_option
@click.pass_context
def status(context: click.Context, url: str, *, name: str, json_: bool) -> None:
    """Say which steps the database at URL has taken. Exit code 1 if any is missing."""
    from ..stores.postgres.schema import schema_status

    found = schema_status(url, schema=name)
    if json_:
        as_json(asdict(found) | {"ready": found.ready})
    elif found.ready:
        click.echo(f"{name} is up to date (step {max(found.applied)}).")
        _tell_unknown(name, found.unknown)
    else:
        click.echo(f"{name} lacks {', '.join(found.missing)}: run dramatiq-guard schema apply")
    context.exit(0 if found.ready else 1)


def _tell_unknown(name: str, unknown: tuple[int, ...]) -> None:
    if unknown:
        click.echo(f"{name} also has steps of a later version: {', '.join(map(str, unknown))}.")

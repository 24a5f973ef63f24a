"""``dramatiq-guard explain``: what an error would be taken for, and which rule says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..policy.explain import explain as look_up
from .output import as_json, console, duration
from .target import load_broker

if TYPE_CHECKING:
    from ..policy.explain import Explanation
    from ..policy.rules import Rules

__all__ = ["explain"]


@click.command(short_help="Say what an error would be taken for, and why.")
@click.argument("error", metavar="ERROR_CLASS")
@click.option("--status", help="The HTTP, gRPC, SMTP or AMQP status, or the error code, that it would carry.")
@click.option("--errno", help="Its errno, as in 104 or ECONNRESET.")
@click.option("--sqlstate", help="Its SQLSTATE, as in 40001.")
@click.option("--broker", "target", metavar="MODULE:BROKER", help="Ask the rules of this broker's Classify too.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def explain(
    error: str,
    *,
    status: str | None,
    errno: str | None,
    sqlstate: str | None,
    target: str | None,
    json_: bool,
) -> None:
    """Say what an error of class ERROR_CLASS would be taken for, which rule says so, and why.

    Nothing is imported for it, except what --broker names.

    Example: dramatiq-guard explain httpx.HTTPStatusError --status 503
    """
    rules = None if target is None else _rules_of(target)
    try:
        found = look_up(error, status=status, errno=errno, sqlstate=sqlstate, rules=rules)
    except (TypeError, ValueError) as wrong:
        raise click.UsageError(str(wrong)) from wrong
    if json_:
        as_json(_document(error, found))
        return
    out = console()
    verdict = found.verdict
    out.print(f"{error}: [bold]{verdict.kind.value.upper()}[/]")
    lines = {"rule": found.rule, "why": found.why}
    if verdict.max_retries is not None:
        lines["at most"] = f"{verdict.max_retries} retries"
    if verdict.delay is not None:
        lines["after"] = duration(verdict.delay)
    if len(found.path) > 1:
        lines["asked"] = ", ".join(found.path)
    if found.unasked:
        lines["not asked"] = f"{', '.join(found.unasked)} (predicates need an exception)"
    for name, text in lines.items():
        out.print(f"  {name:9} {text}", markup=False, soft_wrap=True)


def _document(error: str, found: Explanation) -> dict[str, Any]:
    verdict = asdict(found.verdict)
    return {"error": error, **verdict, "kind": found.verdict.kind.value, "path": found.path, "unasked": found.unasked}


def _rules_of(target: str) -> Rules:
    from ..middleware.classify import Classify

    for middleware in load_broker(target).middleware:
        if isinstance(middleware, Classify):
            return middleware.rules
    raise click.UsageError(f"The broker {target} has no Classify: leave --broker out to ask the built-in table.")

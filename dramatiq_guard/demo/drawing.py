"""The report as people see it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from .accounting import Fate, Fault, rows
from .plan import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from .accounting import Account, Row
    from .report import Group, Report

__all__ = ["draw"]


def draw(report: Report, console: Console) -> None:
    """Print the whole report.

    Parameters:
      report(Report): What was found.
      console(Console): Where to.
    """
    console.print()
    console.print(_by_kind(report.accounts, "What became of every message"))
    if report.groups:
        console.print(_by_bug(report.groups, stock=report.stock))
    if report.trace:
        console.print("One message, one trace:", style="bold")
        for line in report.trace:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print()
    if report.replayed is not None:
        console.print(_by_kind(_touched(report), "After the fix and the replay"))
        console.print(
            f"{report.replayed.sent} of {report.replayed.asked} dead letters were replayed after the fix; "
            f"{report.replayed.left} others stay, with their reasons, for someone to decide about."
        )
    for event in report.events:
        console.print(f"· {event}", highlight=False, markup=False)
    for sentence in _verdict(report):
        console.print(sentence)


def _by_kind(accounts: Iterable[Account], title: str) -> Table:
    table = Table(title=title, title_justify="left", show_footer=True)
    entries = rows(accounts)
    fates = [fate for fate in Fate if fate in (Fate.DONE, Fate.DEAD) or any(row.fates.get(fate) for row in entries)]
    says = {kind.name: kind.says for kind in KINDS}
    total = Counter[Fate]()
    for row in entries:
        total.update(row.fates)
    table.add_column("kind", footer="all")
    table.add_column("messages", justify="right", footer=str(sum(total.values()) - total[Fate.NOT_DUE]))
    for fate in fates:
        table.add_column(_FATE_TITLES[fate], justify="right", footer=str(total[fate]))
    table.add_column(
        "requests (planned)", justify="right", footer=_requests(_sum(entries, "requests"), _sum(entries, "planned"))
    )
    table.add_column("", footer="")
    for row in sorted(entries, key=lambda row: list(says).index(row.kind)):
        table.add_row(
            row.kind,
            str(row.messages - row.fates.get(Fate.NOT_DUE, 0)),
            *(str(row.fates.get(fate, 0) or "·") for fate in fates),
            _requests(row.requests, row.planned),
            _remark(row, says[row.kind]),
        )
    return table


_FATE_TITLES = {
    Fate.DONE: "done",
    Fate.DEAD: "dead letters",
    Fate.WAITING: "waiting",
    Fate.STRANDED: "stranded",
    Fate.LOST: "LOST",
    Fate.NOT_DUE: "not due yet",
}


def _sum(entries: list[Row], name: str) -> int:
    return sum(getattr(row, name) for row in entries)


def _requests(made: int, planned: int) -> str:
    return f"{made} ({planned})"


def _remark(row: Row, says: str) -> Text:
    if not row.faults:
        return Text(f"✓ {says}")
    faults = "\n".join(f"✗ {count} × {fault.value}" for fault, count in row.faults.items())
    return Text(faults, style="red")


def _by_bug(groups: Iterable[Group], *, stock: bool) -> Table:
    title = "Dead letters, as the broker keeps them" if stock else "Dead letters by fingerprint"
    table = Table("count", "reason", "the error", "fingerprint", title=title, title_justify="left")
    for group in groups:
        table.add_row(str(group.count), group.reason or "?", Text(group.title), group.fingerprint[:12])
    return table


def _touched(report: Report) -> list[Account]:
    """The accounts of the kinds that the replay has to do with."""
    assert report.replayed is not None  # noqa: S101 - asked for by draw alone
    before = {account.job.name: account for account in report.accounts}
    kinds = {account.job.kind for account in report.replayed.accounts if before.get(account.job.name) != account}
    return [account for account in report.replayed.accounts if account.job.kind in kinds]


#: The faults whose messages are named, and how many of them: those that nobody would ever find.
_NAMED: Final = frozenset({Fault.LOST, Fault.STRANDED, Fault.DOUBLED})
_SHOWN: Final = 12


def _names(report: Report, fault: Fault) -> str:
    accounts = [*report.accounts, *(report.replayed.accounts if report.replayed is not None else ())]
    names = list(dict.fromkeys(account.job.name for account in accounts if fault in account.faults))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _verdict(report: Report) -> Iterator[Text]:
    messages = sum(account.fate is not Fate.NOT_DUE for account in report.accounts)
    took = f" ({report.seconds:.0f} s)"
    if report.accounted:
        yield Text(f"Every one of {messages} messages is accounted for, and was tried as planned.{took}", "bold green")
        return
    whose = "Plain Dramatiq" if report.stock else "The stack"
    yield Text(f"{whose} leaves messages unaccounted for{took}:", "bold red")
    for fault, count in report.faults.items():
        yield Text(f"  {count} of {messages}: {fault.value}", "red")
        if fault in _NAMED:
            yield Text(f"    {_names(report, fault)}")
    if report.stock:
        yield Text("There is nothing to replay the dead letters with, and no trace of what happened to any message.")
        yield Text("Run it again without --stock to see the difference.")

"""What the demo found, as plain values; how it is drawn is for `drawing`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .accounting import Account, Fate, Fault, rows

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Group", "Replayed", "Report"]


@dataclass(frozen=True, slots=True)
class Group:
    """The dead letters of one bug.

    Parameters:
      count(int): How many.
      reason(str): The reason code; empty where nothing says it.
      title(str): The first line of the latest one's error.
      fingerprint(str): What they have in common.
    """

    count: int
    reason: str
    title: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The second act: what became of the letters that were replayed after the fix.

    Parameters:
      asked(int): How many letters were to be replayed.
      sent(int): How many were handed to the broker.
      left(int): How many letters were left where they are, because no fix of the downstream cures them.
      accounts(tuple[Account, ...]): What became of every message by then.
    """

    asked: int
    sent: int
    left: int
    accounts: tuple[Account, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that the demo found.

    Parameters:
      stock(bool): Whether this was plain Dramatiq.
      accounts(tuple[Account, ...]): What became of every message.
      groups(tuple[Group, ...]): The dead letters by bug.
      replayed(Replayed | None): The second act; ``None`` where there is nothing to replay with.
      trace(tuple[str, ...]): One trace, drawn line by line; empty where there is none.
      events(tuple[str, ...]): What was done to the broker and the workers.
      seconds(float): How long it took.
    """

    stock: bool
    accounts: tuple[Account, ...]
    groups: tuple[Group, ...] = ()
    replayed: Replayed | None = None
    trace: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def faults(self) -> dict[Fault, int]:
        """What is wrong, and with how many messages, over both acts."""
        found = _faults(self.accounts)
        if self.replayed is not None:
            found |= {
                fault: max(count, found.get(fault, 0)) for fault, count in _faults(self.replayed.accounts).items()
            }
        return found

    @property
    def accounted(self) -> bool:
        """Whether every message was found where it belongs, with its reason, and was tried as often as planned."""
        replay_done = self.replayed is None or self.replayed.sent == self.replayed.asked
        return bool(self.accounts) and not self.faults and replay_done

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        document = {
            "mode": "stock" if self.stock else "stack",
            "accounted": self.accounted,
            "seconds": round(self.seconds, 1),
            "events": list(self.events),
            **_summary(self.accounts),
            "faults": {fault.name.lower(): count for fault, count in self.faults.items()},
            "groups": [
                {"count": group.count, "reason": group.reason, "title": group.title, "fingerprint": group.fingerprint}
                for group in self.groups
            ],
            "trace": list(self.trace),
            "replay": None,
        }
        if self.replayed is not None:
            document["replay"] = {
                "asked": self.replayed.asked,
                "sent": self.replayed.sent,
                "left": self.replayed.left,
                **_summary(self.replayed.accounts),
            }
        return document


def _faults(accounts: Iterable[Account]) -> dict[Fault, int]:
    found = Counter(fault for account in accounts for fault in account.faults)
    return {fault: found[fault] for fault in Fault if found[fault]}


def _summary(accounts: tuple[Account, ...]) -> dict[str, Any]:
    fates = Counter(account.fate for account in accounts)
    return {
        "messages": len(accounts) - fates[Fate.NOT_DUE],
        "fates": {fate.value: fates[fate] for fate in Fate},
        "kinds": {
            row.kind: {
                "messages": row.messages - row.fates.get(Fate.NOT_DUE, 0),
                "fates": {fate.value: count for fate, count in row.fates.items()},
                "faults": {fault.name.lower(): count for fault, count in row.faults.items()},
                "requests": row.requests,
                "planned": row.planned,
            }
            for row in rows(accounts)
        },
        "misses": [
            {
                "job": account.job.name,
                "fate": account.fate.value,
                "requests": account.requests,
                "planned": account.job.requests,
                "faults": sorted(fault.name.lower() for fault in account.faults),
            }
            for account in accounts
            if account.faults
        ],
    }

"""Letters for the tests of stores."""

from __future__ import annotations

from typing import Any

from dramatiq_guard.dead_letters.letter import ErrorRecord, Letter

#: A moment in 2025: what happens in these tests happens some milliseconds after it.
T0 = 1_750_000_000_000


def letter(
    message_id: str = "m",
    at: int = 0,
    *,
    error: str = "ValueError",
    fingerprint: str = "bug",
    options: dict[str, Any] | None = None,
    **known: Any,
) -> Letter:
    """A letter that died `at` milliseconds after `T0`."""
    message = {
        "queue_name": known.pop("queue", "default"),
        "actor_name": known.pop("actor", "charge"),
        "args": known.pop("args", ("order-1", 100)),
        "kwargs": known.pop("kwargs", {}),
        "options": options or {},
        "message_id": message_id,
        "message_timestamp": known.pop("enqueued_at", T0 - 1_000),
    }
    return Letter.from_message(
        message,
        reason=known.pop("reason", "exhausted"),
        died_at=T0 + at,
        error=ErrorRecord(type=error, message="boom", traceback="…") if error else None,
        fingerprint=fingerprint,
        **known,
    )


def death_of_replay(replayed: Letter, at: int, **known: Any) -> Letter:
    """The letter that the replay of another becomes when it dies too."""
    sent = replayed.standing.replay
    assert sent is not None
    marker = {"of": replayed.letter_id, "n": sent.n, "token": sent.token}
    return letter(replayed.message_id, at, options={"dramatiq_guard": {"replay": marker}}, **known)

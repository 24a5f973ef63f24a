"""The record of a message that died: everything an on-call person needs, and enough to send it again.

What is known at its death never changes; where it stands since (`Standing`) does.  A letter's id is the message's id
for the first death and ``message_id~n`` after its n-th replay, so that writing the same death twice, because the
settle barrier repeated itself or the broker redelivered, is no second letter.

This module must not know stores, brokers or telemetry.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha1
from os import getpid
from typing import TYPE_CHECKING, Any, Final, Self

from .evidence import ErrorRecord, ErrorSummary, compact_traceback, describe_error, summarize_error
from .fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .redact import Redaction

__all__ = [
    "DEAD",
    "DISCARDED",
    "RECORD_VERSION",
    "REPLAYED",
    "REPLAYING",
    "STATES",
    "Attempt",
    "ErrorRecord",
    "ErrorSummary",
    "Event",
    "Letter",
    "Replay",
    "Standing",
    "compact_traceback",
    "describe_error",
    "fingerprint",
    "letter_id_of",
    "replay_marker_of",
    "summarize_error",
]

RECORD_VERSION: Final = 1

DEAD: Final = "dead"
REPLAYING: Final = "replaying"
REPLAYED: Final = "replayed"
DISCARDED: Final = "discarded"
STATES: Final = (DEAD, REPLAYING, REPLAYED, DISCARDED)

#: The entry of the message options that the stack owns, and in it the mark of a replay.
_CARRIER: Final = "dramatiq_guard"
_REPLAY: Final = "replay"

_REPR_LIMIT: Final = 2_000
_RAW_LIMIT: Final = 64 * 1024
#: How much of the arguments a search looks through.
SEARCHED: Final = 16 * 1024


def replay_marker_of(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a replay wrote into the options of the message it sent; empty for all others.

    Parameters:
      options(Mapping[str, Any]): The options of a message.

    Returns:
      Mapping[str, Any]: ``of`` (the letter), ``n`` (the how manieth replay), ``token`` (which copy of it), and
        ``enqueued_at`` (when the message was first enqueued: its own timestamp is that of the replay).
    """
    carried = options.get(_CARRIER)
    marker = carried.get(_REPLAY) if isinstance(carried, dict) else None
    if isinstance(marker, dict) and isinstance(marker.get("of"), str) and isinstance(marker.get("n"), int):
        return marker
    return {}


def letter_id_of(message_id: str, options: Mapping[str, Any]) -> str:
    """The id of the letter that this message would become if it died now.

    Parameters:
      message_id(str): The message's id.
      options(Mapping[str, Any]): Its options.

    Returns:
      str: ``message_id``, or ``message_id~n`` in its n-th replay.
    """
    marker = replay_marker_of(options)
    return f"{message_id}~{marker['n']}" if marker else message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One failed attempt, as the history of a message tells it.

    Parameters:
      at(int): When it failed, in UNIX milliseconds.
      type(str): The qualified name of the error's class.
      message(str): The first 200 characters of its text.
      place(str): ``file:function:line`` in the user's code.
      verdict(str): What the error was taken for.
      rule(str): The rule that said so.
      delay(int | None): Milliseconds chosen until the next attempt; ``None`` if there was none.
      why(str): The reason for that, in words.
      host(str): Where it ran.
      pid(int): In which process.
    """

    at: int = 0
    type: str = ""
    message: str = ""
    place: str = ""
    verdict: str = ""
    rule: str = ""
    delay: int | None = None
    why: str = ""
    host: str = ""
    pid: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The attempt for message options and JSON; what is empty is left out."""
        return {name: value for name in _ATTEMPT_FIELDS if (value := getattr(self, name)) not in ("", None)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read an attempt; fields this version does not know are ignored."""
        return cls(**{name: data[name] for name in _ATTEMPT_FIELDS if name in data})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a person or a process did to a letter.

    Parameters:
      at(int): When, in UNIX milliseconds.
      what(str): ``replay``, ``replayed``, ``abandoned``, ``discarded``, ``restored``, ``died again``.
      by(str): Who.
      why(str): The reason given.
    """

    at: int
    what: str
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The latest replay of a letter, and what became of it.

    Parameters:
      n(int): The how manieth replay of this message it is, over all of its letters.
      token(str): Names the one copy that may run; a copy sent by a replay that died half-way carries an older one.
      owner(str): The process that replays.
      lease_until(int): From when on another may take over a replay that never finished, in UNIX milliseconds.
      enqueued_at(int | None): When the message was handed to the broker.
      delivered_at(int | None): When a worker first received it.
      outcome(str | None): ``succeeded`` or ``died``; ``None`` while unknown.
      outcome_at(int | None): When that was.
      died_as(str | None): The letter it became when it died again.
    """

    n: int
    token: str
    owner: str = ""
    lease_until: int = 0
    enqueued_at: int | None = None
    delivered_at: int | None = None
    outcome: str | None = None
    outcome_at: int | None = None
    died_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a letter stands since its death.

    Parameters:
      state(str): ``dead``, ``replaying``, ``replayed`` or ``discarded``.
      since(int): Since when, in UNIX milliseconds.
      by(str): Who brought it there; empty if nobody did.
      why(str): The reason given.
      replay(Replay | None): The latest replay.
      events(tuple[Event, ...]): All that was done to it.
    """

    state: str = DEAD
    since: int = 0
    by: str = ""
    why: str = ""
    replay: Replay | None = None
    events: tuple[Event, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a standing; fields this version does not know are ignored."""
        known = _known(cls, data)
        replay = known.get("replay")
        known["replay"] = Replay(**_known(Replay, replay)) if replay else None
        known["events"] = tuple(Event(**_known(Event, each)) for each in known.get("events") or ())
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that died.  Build it with `Letter.from_message`.

    Parameters:
      letter_id(str): ``message_id``, or ``message_id~n`` after its n-th replay.
      message_id(str): The message's id.
      actor(str): The actor's name.
      queue(str): The canonical queue.
      reason(str): The reason code: ``exhausted``, ``permanent``, ``unknown_actor``, …
      died_at(int): When it died, in UNIX milliseconds.
      message_timestamp(int): When it was first enqueued, in UNIX milliseconds.
      args(tuple): The positional arguments.
      kwargs(dict): The keyword arguments.
      options(dict): The message options, exactly.
      raw(str | None): What the broker held, where it could not be decoded; 64 KiB at most.
      error(ErrorRecord | None): What it died of.
      history(tuple[Attempt, ...]): The attempts: the first, the latest.
      attempts_total(int): How many there were.
      deliveries(int): How many times it was delivered.
      fingerprint(str): Which bug it is.
      trace_id(str): The trace it died in.
      span_id(str): The span it died in.
      code_version(str): The version of the user's code.
      redelivered(bool | None): Whether the broker said that it was delivered before.
      broker_id(str | None): The broker's own id of the copy that died (``redis_message_id``).
      host(str): Where it died.
      pid(int): In which process.
      replay_of(str | None): The letter of which this message was a replay.
      replay_n(int): The how manieth replay it was; 0 for none.
      redacted(tuple[str, ...]): The paths that were taken out of the payload.
      unencodable(bool): Whether the payload holds values that only their ``repr`` is left of.
      key(str): The idempotency key of the work; empty where its actor is not guarded, or had no key for it.
      remembered_until(int | None): Until when, at least, the key's record tells what became of the work, in UNIX
        milliseconds; ``None`` where no record does.
      record_version(int): The version of this record.
      standing(Standing): Where it stands since.
    """

    letter_id: str
    message_id: str
    actor: str
    queue: str
    reason: str
    died_at: int
    message_timestamp: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: ErrorRecord | None = None
    history: tuple[Attempt, ...] = ()
    attempts_total: int = 0
    deliveries: int = 1
    fingerprint: str = ""
    trace_id: str = ""
    span_id: str = ""
    code_version: str = ""
    redelivered: bool | None = None
    broker_id: str | None = None
    host: str = ""
    pid: int = 0
    replay_of: str | None = None
    replay_n: int = 0
    redacted: tuple[str, ...] = ()
    unencodable: bool = False
    key: str = ""
    remembered_until: int | None = None
    record_version: int = RECORD_VERSION
    standing: Standing = field(default_factory=Standing)

    @classmethod
    def from_message(
        cls,
        message: Mapping[str, Any],
        *,
        reason: str,
        died_at: int,
        exception: BaseException | None = None,
        redaction: Redaction | None = None,
        parameter_names: Sequence[str] = (),
        **known: Any,
    ) -> Self:
        """Write the letter of a message.  Never raises on account of what the message or the exception holds.

        Parameters:
          message(Mapping[str, Any]): The message as ``message.asdict()`` gives it.
          reason(str): The reason code.
          died_at(int): When it died, in UNIX milliseconds.
          exception(BaseException | None): What it died of; described and redacted here.
          redaction(Redaction | None): What to take out.
          parameter_names(Sequence[str]): The names of the actor's parameters, for redaction.
          **known: Any other field of the letter, e.g. ``history`` or ``trace_id``.

        Returns:
          Letter: The letter, dead.
        """
        options = message["options"]
        args, kwargs = tuple(message["args"]), dict(message["kwargs"])
        marker = replay_marker_of(options)
        broker_id = options.get("redis_message_id")
        shown: tuple[Any, Any, Any] = (args, kwargs, dict(options))
        if redaction is not None:
            redacted = redaction.payload(args, kwargs, options, parameter_names=parameter_names)
            shown = (redacted.args, redacted.kwargs, redacted.options)
            known["redacted"] = redacted.paths
        encodable = _is_encodable(shown)
        if not encodable:
            shown = tuple(as_json(each) for each in shown)
        if exception is not None and "error" not in known:
            known["error"] = describe_error(exception, redact=redaction.text if redaction else None)
        known.setdefault("fingerprint", fingerprint(exception, reason=reason, actor=message["actor_name"]))
        known.setdefault("host", socket.gethostname())
        known.setdefault("pid", getpid())
        enqueued_at = marker.get("enqueued_at", message["message_timestamp"])
        return cls(
            letter_id=letter_id_of(message["message_id"], options),
            message_id=message["message_id"],
            actor=message["actor_name"],
            queue=message["queue_name"].removesuffix(".DQ"),
            reason=reason,
            died_at=died_at,
            message_timestamp=enqueued_at if isinstance(enqueued_at, int) else died_at,
            args=tuple(shown[0]),
            kwargs=shown[1],
            options=shown[2],
            broker_id=broker_id if isinstance(broker_id, str) else None,
            replay_of=marker.get("of"),
            replay_n=marker.get("n", 0),
            unencodable=not encodable,
            standing=Standing(state=DEAD, since=died_at),
            **known,
        )

    @classmethod
    def from_raw(cls, raw: bytes, *, queue: str, died_at: int, broker_id: str | None = None, **known: Any) -> Self:
        """Write the letter of a message that cannot be decoded.

        Parameters:
          raw(bytes): What the broker held; 64 KiB of it are kept.
          queue(str): The queue it came from.
          died_at(int): When it was given up, in UNIX milliseconds.
          broker_id(str | None): The broker's own id of it, which becomes the letter's; else a hash of it does.
          **known: Any other field of the letter, e.g. ``error``.

        Returns:
          Letter: The letter, dead, with the reason ``undecodable``.
        """
        message_id = broker_id or sha1(raw, usedforsecurity=False).hexdigest()
        known.setdefault("fingerprint", fingerprint(None, reason="undecodable", actor=queue))
        known.setdefault("host", socket.gethostname())
        known.setdefault("pid", getpid())
        return cls(
            letter_id=message_id,
            message_id=message_id,
            actor="",
            queue=queue.removesuffix(".DQ"),
            reason="undecodable",
            died_at=died_at,
            message_timestamp=died_at,
            raw=raw[:_RAW_LIMIT].decode("utf-8", "backslashreplace"),
            broker_id=broker_id,
            standing=Standing(state=DEAD, since=died_at),
            **known,
        )

    @property
    def state(self) -> str:
        """``dead``, ``replaying``, ``replayed`` or ``discarded``."""
        return self.standing.state

    @property
    def error_type(self) -> str:
        """The qualified name of the error's class; empty where there was no error."""
        return self.error.type if self.error else ""

    @property
    def payload(self) -> dict[str, Any]:
        """The message, in the form that `dramatiq.Message` is made of."""
        return {
            "queue_name": self.queue,
            "actor_name": self.actor,
            "args": self.args,
            "kwargs": self.kwargs,
            "options": self.options,
            "message_id": self.message_id,
            "message_timestamp": self.message_timestamp,
        }

    @property
    def unreplayable(self) -> str | None:
        """Why this letter cannot be sent again from what it holds; ``None`` if it can."""
        if self.raw is not None:
            return "the message could not be decoded; only what the broker held was kept"
        if self.unencodable:
            return "its payload held values that cannot be encoded; only their repr was kept"
        if self.redacted:
            return f"its payload was redacted ({', '.join(self.redacted[:5])}); a replay would send the redaction"
        return None

    @property
    def replayable(self) -> bool:
        """Whether this letter can be sent again from what it holds."""
        return self.unreplayable is None

    @property
    def searchable(self) -> str:
        """The arguments as a text search looks through them: JSON in lower case, 16 KiB at most."""
        text = json.dumps([self.args, self.kwargs], ensure_ascii=False)[:SEARCHED].lower()
        return text.encode("utf-8", "replace").decode("utf-8")

    def as_dict(self) -> dict[str, Any]:
        """The whole letter as plain data, its standing included."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["error"] = asdict(self.error) if self.error else None
        data["history"] = [attempt.as_dict() for attempt in self.history]
        data["standing"] = asdict(self.standing)
        return data

    def to_json(self) -> str:
        """The whole letter as one line of JSON."""
        return _dumps(self.as_dict())

    def record(self) -> str:
        """What is known at its death, as JSON: all but the standing, which stores keep beside it."""
        data = self.as_dict()
        del data["standing"]
        return _dumps(data)

    @classmethod
    def from_json(cls, text: str | bytes, standing: Standing | None = None) -> Self:
        """Read a letter; fields this version does not know are ignored.

        Parameters:
          text(str | bytes): What `to_json` or `record` wrote.
          standing(Standing | None): Where the letter stands, if the store says.

        Returns:
          Letter: The letter.

        Raises:
          ValueError: The text is not JSON, or a field without which there is no letter is missing.
        """
        return cls.from_dict(json.loads(text), standing)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], standing: Standing | None = None) -> Self:
        """Read a letter from plain data; see `from_json`."""
        if not isinstance(data, dict):
            raise ValueError(f"not a letter but {type(data).__name__}: {data!r:.80}")  # noqa: TRY004 - bad data, not a bad call
        known = _known(cls, data)
        missing = [name for name in _REQUIRED if name not in known]
        if missing:
            raise ValueError(f"not a letter: {', '.join(missing)} missing from {data!r:.80}")
        error = known.get("error")
        if error:
            error = _known(ErrorRecord, error)
            error["causes"] = tuple((str(kind), str(text)) for kind, text in error.get("causes") or ())
            known["error"] = ErrorRecord(**error)
        known["args"] = tuple(known.get("args") or ())
        known["redacted"] = tuple(known.get("redacted") or ())
        known["history"] = tuple(Attempt.from_dict(each) for each in known.get("history") or ())
        known["standing"] = standing or Standing.from_dict(
            known.get("standing") or {"state": DEAD, "since": known["died_at"]}
        )
        return cls(**known)


_ATTEMPT_FIELDS: Final = tuple(each.name for each in fields(Attempt))
_REQUIRED: Final = ("letter_id", "message_id", "actor", "queue", "reason", "died_at", "message_timestamp")


def as_json(value: Any, depth: int = 0) -> Any:
    """Turn a value into what JSON can hold; what it cannot is left as ``{"$repr": …}``, bounded.

    Parameters:
      value(Any): Anything.
      depth(int): How deep it lies.

    Returns:
      Any: Plain data.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < 64:
        if isinstance(value, dict):
            return {
                key if isinstance(key, str) else _repr(key): as_json(each, depth + 1) for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [as_json(each, depth + 1) for each in value]
    return {"$repr": _repr(value)}


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as failure:  # noqa: BLE001 - the user's __repr__ may raise anything
        return f"<{type(value).__name__} whose __repr__ raised {type(failure).__name__}>"
    return text if len(text) <= _REPR_LIMIT else text[:_REPR_LIMIT] + "…"


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: data[each.name] for each in fields(cls) if each.name in data}

"""What one actor asked of the idempotency guard, checked when the actor is declared.

It must not know any store's insides, nor the middleware.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import MissingKey, SetupError
from ..policy.duration import milliseconds
from ..policy.keys import KEY, MESSAGE, Kind, NoKey, canonical, check_names, compile_key, fingerprinter, stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dramatiq import Actor

    from ..delivery import Delivery
    from ..policy.keys import Fingerprinter

__all__ = ["MODES", "OPTIONS", "Plan", "Settings", "plan_for"]

#: The actor options of the guard.
OPTIONS: Final = frozenset(
    {
        *("idempotency_key", "idempotent", "scope", "fingerprint", "on_missing_key", "on_busy", "on_crash"),
        *("on_store_error", "remember_failures", "retention", "lease", "max_result"),
    }
)
MODES: Final = ("lease", "atomic", "inbox")
_CHOICES: Final = {
    "on_missing_key": ("error", "message", "unguarded"),
    "on_busy": ("requeue", "wait", "skip", "fail"),
    "on_store_error": ("defer", "run"),
}


class Settings(Protocol):
    """What holds where an actor asks for nothing else: the middleware's arguments."""

    mode: str
    namespace: str
    lease: int
    retention: int | None
    store_wait: int
    max_result: int
    on_missing_key: str
    on_busy: str
    on_crash: Any
    on_store_error: str
    engine: str
    transactional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the messages of one actor are guarded.

    Parameters:
      actor(str): The actor.
      scope(str): What its keys are told apart from others' by; the actor's name unless said otherwise.
      namespace(str): The same, for all actors of a guard.
      mode(str): ``lease``, ``atomic`` or ``inbox``.
      source(Callable | None): Makes a key of a message; without one, its id is the key.
      fingerprint(Fingerprinter): Takes the fingerprint of a payload.
      strict(bool | None): Whether another payload under the same key is refused; ``None`` where the key is a business
        key, and not where it is the message's id.
      on_missing_key(str): ``error``, ``message`` or ``unguarded``.
      on_busy(str): ``requeue``, ``wait``, ``skip`` or ``fail``.
      on_crash(str | Callable): ``rerun``, ``park``, or a reconciliation.
      on_store_error(str): ``defer`` or ``run``.
      remember_failures(tuple[type[BaseException], ...]): The errors that are final answers.
      retention(int | None): How many milliseconds a key is remembered; ``None`` for as long as a copy may sleep.
      lease(int): For how many milliseconds a key is held without a sign of life.
      max_result(int): How many bytes of a result are kept at most.
      store_wait(int): For how many milliseconds a store that is out is asked again before the message is put off.
      engine(str): What kind of store it is, for telemetry.
    """

    actor: str
    scope: str
    namespace: str
    mode: str
    source: Callable[..., Any] | None
    fingerprint: Fingerprinter
    strict: bool | None
    on_missing_key: str
    on_busy: str
    on_crash: Any
    on_store_error: str
    remember_failures: tuple[type[BaseException], ...]
    retention: int | None
    lease: int
    max_result: int
    store_wait: int
    engine: str

    @property
    def parks(self) -> bool:
        """Whether a key whose run died goes to a person."""
        return bool(self.on_crash == "park")

    def key_of(self, delivery: Delivery) -> tuple[str, bool] | None:
        """The key under which a message is guarded, and whether it is a business key.

        Returns:
          tuple[str, bool] | None: ``None`` if it is not guarded at all.

        Raises:
          MissingKey: It has none.
        """
        message = delivery.message
        try:
            given = delivery.options.get("idempotency_key")
            if given is not None:
                return self._stored(KEY, given), True
            if self.source is None:
                return self._stored(MESSAGE, delivery.message_id), False
            return self._stored(KEY, self.source(message.args, message.kwargs, message)), True
        except NoKey as error:
            if self.on_missing_key == "message":
                return self._stored(MESSAGE, delivery.message_id), False
            if self.on_missing_key == "unguarded":
                return None
            raise MissingKey(
                f"message {delivery.message_id} of actor {self.actor!r} has no idempotency key: {error}. Send it with "
                "one, or declare the actor with on_missing_key='message' or 'unguarded'"
            ) from error
        except Exception as error:
            raise MissingKey(
                f"the idempotency key of message {delivery.message_id} of actor {self.actor!r} cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error

    def fingerprint_of(self, delivery: Delivery) -> bytes | None:
        """The fingerprint of a message's payload; ``None`` where it is not compared, or cannot be."""
        if self.strict is False:
            return None
        message = delivery.message
        return self.fingerprint(message.args, message.kwargs)

    def _stored(self, kind: Kind, value: Any) -> str:
        return stored_key(self.namespace, self.scope, kind, canonical(value))


def plan_for(actor: Actor[Any, Any], settings: Settings) -> Plan | None:
    """What an actor asked for.

    Parameters:
      actor(Actor): The actor, whose options are checked.
      settings(Settings): What holds where it asks for nothing else.

    Returns:
      Plan | None: ``None`` for an actor that is not guarded.

    Raises:
      SetupError: An option is of the wrong type, or does not go with the others; names the actor and the option.
    """
    options = actor.options
    asked = sorted(name for name in OPTIONS if options.get(name) is not None)
    key, idempotent = options.get("idempotency_key"), options.get("idempotent")
    if idempotent is False:
        return None
    if key is None and idempotent is None:
        if asked:
            raise SetupError(
                f"Actor {actor.actor_name!r}: {asked[0]} needs idempotency_key=… or idempotent=True beside it"
            )
        return None
    try:
        return _plan(actor, settings, options, key, idempotent)
    except SetupError:
        raise
    except (TypeError, ValueError) as error:
        raise SetupError(f"Actor {actor.actor_name!r}: {error}") from error


def _plan(actor: Actor[Any, Any], settings: Settings, options: Mapping[str, Any], key: Any, idempotent: Any) -> Plan:
    mode = settings.mode if idempotent in (None, True) else idempotent
    if mode not in MODES:
        raise ValueError(f"idempotent must be True, False or one of {', '.join(MODES)}, not {idempotent!r}")
    function = inspect.unwrap(actor.fn)
    if mode != "lease":
        if not settings.transactional:
            raise ValueError(
                f"idempotent={mode!r} commits with the rows of a database, so IdempotencyGuard needs a store on "
                "PostgreSQL: connect('postgresql://…').idempotency"
            )
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"idempotent={mode!r} is for sync actors; an async one is guarded by idempotent='lease'")
    signature = inspect.signature(function)
    compared, strict = _compared(options.get("fingerprint"), signature, actor.actor_name)
    chosen = {name: _choice(name, options.get(name), getattr(settings, name)) for name in _CHOICES}
    on_crash = settings.on_crash if options.get("on_crash") is None else options["on_crash"]
    check_on_crash(on_crash)
    if mode == "inbox" and options.get("on_crash") is not None:
        raise ValueError("on_crash has no meaning with idempotent='inbox': a run that dies is rolled back")
    scope = options.get("scope")
    if scope is not None and (not isinstance(scope, str) or not scope):
        raise TypeError(f"scope must be a name, not {scope!r}")
    lease, retention, max_result = options.get("lease"), options.get("retention"), options.get("max_result")
    return Plan(
        actor=actor.actor_name,
        scope=scope or actor.actor_name,
        namespace=settings.namespace,
        mode=mode,
        source=None if key is None else compile_key(key, signature, actor_name=actor.actor_name),
        fingerprint=fingerprinter(signature, compared),
        strict=strict,
        on_crash=on_crash,
        remember_failures=_failures(options.get("remember_failures")),
        retention=settings.retention if retention is None else milliseconds(retention, "retention"),
        lease=settings.lease if lease is None else checked_lease(lease),
        max_result=settings.max_result if max_result is None else checked_size(max_result),
        store_wait=settings.store_wait,
        engine=settings.engine,
        **chosen,
    )


def check_on_crash(value: Any) -> None:
    """Raise `ValueError` where this is nothing to be done about a run that died."""
    if value not in ("rerun", "park") and not callable(value):
        raise ValueError(
            f"on_crash must be 'rerun', 'park' or a callable (delivery) -> Done | NotDone | Unknown, not {value!r}"
        )


def checked_lease(value: Any) -> int:
    """A lease in milliseconds."""
    lease = milliseconds(value, "lease")
    if lease < SHORTEST_LEASE:
        raise ValueError(
            f"lease must be at least {SHORTEST_LEASE} ms, so that it can be renewed three times before it is over, "
            f"not {lease}"
        )
    return lease


def checked_size(value: Any) -> int:
    """A number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"max_result must be a number of bytes, not {value!r}")
    return value


def checked_choice(name: str, value: Any) -> str:
    """One of the words that an option may be."""
    if value not in _CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    return str(value)


def _choice(name: str, value: Any, default: str) -> str:
    return default if value is None else checked_choice(name, value)


def _compared(value: Any, signature: inspect.Signature, actor_name: str) -> tuple[tuple[str, ...] | None, bool | None]:
    if value is None or isinstance(value, bool):
        return None, value
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"fingerprint must be True, False or a list of parameter names, not {value!r}")
    names = tuple(value)
    if not names:
        raise ValueError("fingerprint names no parameter: fingerprint=False compares nothing")
    check_names(names, signature, actor_name=actor_name, option="the fingerprint")
    return names, True


def _failures(value: Any) -> tuple[type[BaseException], ...]:
    if value is None:
        return ()
    kinds = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise TypeError(f"remember_failures must be exception classes, not {value!r}")
    return kinds


#: A lease is renewed when a third of it is over, and its thread looks six times in it.
SHORTEST_LEASE: Final = 300

"""What a letter must not show: values under telling names, and whatever a user's function finds.

Redaction happens before a letter is written, so that no store, dump or backup ever holds the secret.  A letter whose
payload was redacted says which paths were, and cannot be replayed from the store: a replay must never send
``[redacted]``.  This module must not know what a letter is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["DEFAULT_KEYS", "REDACTED", "Redacted", "Redaction"]

REDACTED = "[redacted]"

#: Words that tell of a secret, wherever they stand among the words of a name: ``api_key`` is in ``stripeApiKey``.
DEFAULT_KEYS = frozenset(
    {
        "access_key",
        "api_key",
        "apikey",
        "auth_token",
        "authorization",
        "card_number",
        "cookie",
        "cookies",
        "credentials",
        "credit_card",
        "cvc",
        "cvv",
        "iban",
        "passphrase",
        "passwd",
        "password",
        "private_key",
        "pwd",
        "secret",
        "secret_key",
        "session_id",
        "session_key",
        "sessionid",
        "ssn",
        "token",
    }
)

#: A name that ends so speaks about the secret and is none: ``token_count``.
_ABOUT = frozenset({"count", "expires", "expiry", "length", "limit", "ttl", "type"})
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORDS = re.compile(r"[^\W\d_]+|\d+")
_DEPTH_LIMIT = 64
_PATHS_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Redacted:
    """A payload as it may be shown.

    Parameters:
      args(tuple): The positional arguments.
      kwargs(dict): The keyword arguments.
      options(dict): The message options.
      paths(tuple[str, ...]): What was taken out, e.g. ``kwargs.card.number`` or ``args[0]``.
      failed(str | None): The class of what the user's function raised, which took everything out.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    paths: tuple[str, ...] = ()
    failed: str | None = None


class Redaction:
    """Takes secrets out of payloads and texts.

    Parameters:
      keys(Iterable[str]): Names whose values are taken out, matched word by word without regard to case or style
        (``api_key`` matches ``apiKey`` and ``X-Api-Key``).  Empty for none.
      function(Callable[[str, Any], Any]): Called with the path and value of each leaf of the payload
        (``kwargs.note``, ``args[0]``), and as ``("error.message", text)`` with the text of each error; returns what
        may be shown, which is the value itself where it is harmless.

    Example:
      ``DeadLetter(store, redact=lambda path, value: "[iban]" if is_iban(value) else value)``

    Raises:
      SetupError: A key is not a string, or the function is not callable.
    """

    def __init__(self, keys: Iterable[str] = DEFAULT_KEYS, function: Callable[[str, Any], Any] | None = None) -> None:
        names = () if isinstance(keys, str) else tuple(keys)
        if isinstance(keys, str) or not all(isinstance(name, str) for name in names):
            raise SetupError(f"redact_keys must be a collection of names such as {{'password'}}, not {keys!r}")
        if function is not None and not callable(function):
            raise SetupError(f"redact must be a function of (path, value), not {function!r}")
        self._phrases = frozenset(f" {' '.join(_words(key))} " for key in names if _words(key))
        self._function = function
        self._known: dict[str, bool] = {}

    def payload(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        parameter_names: Sequence[str] = (),
    ) -> Redacted:
        """Redact what a message carries.  Never raises: if the user's function does, everything is taken out.

        Parameters:
          args(Sequence): The positional arguments.
          kwargs(Mapping): The keyword arguments.
          options(Mapping): The message options.
          parameter_names(Sequence[str]): The names of the actor's parameters, so that positional arguments have one.

        Returns:
          Redacted: What may be kept.
        """
        paths: list[str] = []
        try:
            return Redacted(
                args=tuple(
                    self._value(parameter_names[at] if at < len(parameter_names) else "", f"args[{at}]", arg, paths, 0)
                    for at, arg in enumerate(args)
                ),
                kwargs={key: self._value(key, f"kwargs.{key}", value, paths, 0) for key, value in kwargs.items()},
                options={key: self._value(key, f"options.{key}", value, paths, 0) for key, value in options.items()},
                paths=tuple(paths[:_PATHS_LIMIT]),
            )
        except Exception as failure:  # noqa: BLE001 - a letter that says little beats a letter that is lost
            note = f"[redaction failed: {type(failure).__name__}]"
            return Redacted((note,), {}, {}, ("args", "kwargs", "options"), type(failure).__name__)

    def text(self, text: str) -> str:
        """Redact the text of an error.  Never raises.

        Parameters:
          text(str): The text.

        Returns:
          str: What may be kept.
        """
        if self._function is None:
            return text
        try:
            return str(self._function("error.message", text))
        except Exception as failure:  # noqa: BLE001 - as above
            return f"[redaction failed: {type(failure).__name__}]"

    def _value(self, key: object, path: str, value: Any, paths: list[str], depth: int) -> Any:
        if isinstance(key, str) and key and value not in (None, "") and self._tells(key):
            paths.append(path)
            return REDACTED
        if depth > _DEPTH_LIMIT:
            paths.append(path)
            return "[too deep to redact]"
        if isinstance(value, dict):
            return {key: self._value(key, f"{path}.{key}", each, paths, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._value("", f"{path}[{at}]", each, paths, depth + 1) for at, each in enumerate(value)]
        if self._function is None:
            return value
        shown = self._function(path, value)
        if shown is not value and shown != value:
            paths.append(path)
        return shown

    def _tells(self, key: str) -> bool:
        known = self._known.get(key)
        if known is None:
            words = _words(key)
            name = f" {' '.join(words)} "
            known = bool(words) and words[-1] not in _ABOUT and any(phrase in name for phrase in self._phrases)
            if len(self._known) >= 10_000:
                self._known.clear()  # keys may be data
            self._known[key] = known
        return known


def _words(name: str) -> list[str]:
    return _WORDS.findall(_HUMPS.sub(" ", name).lower())

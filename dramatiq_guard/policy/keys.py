"""What a key is called in the stores, and towards third parties.

::

    namespace / scope / kind / value                shop/charge/key/["list",[["str","order:{}"],["int",17]]]

The names are kept for as long as records are, by old and new versions side by side: they never change.  This module
must not know where a key comes from.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from hashlib import sha256
from typing import Final, Literal
from urllib.parse import quote

from .canonical import NoKey, canonical
from .key_sources import KeyOf, MessageKey, check_names, compile_key
from .payload import Fingerprinter, fingerprint, fingerprinter

__all__ = [
    "KEY",
    "MESSAGE",
    "Fingerprinter",
    "KeyOf",
    "Kind",
    "MessageKey",
    "NoKey",
    "canonical",
    "check_names",
    "compile_key",
    "derived_key",
    "fingerprint",
    "fingerprinter",
    "stored_key",
]

#: A key of the business, given with the message or made by the actor's source, and one that is the message's id.
KEY: Final = "key"
MESSAGE: Final = "message"

Kind = Literal["key", "message"]

#: Bytes that a stored key has without being hashed; then at most 223, and stores take 255.
_LONGEST = 200

#: Begins what stands for something longer, or for something that looks like that.
_HASHED = "sha256:"

#: What may be in a name as it is: printable ASCII without the separator, the escape and the blank.
_SAFE = "!\"#$&'()*+,-.:;<=>?@[\\]^_`{|}~"
_PRINTABLE = re.compile(r"[ -~]*")


def stored_key(namespace: str, scope: str, kind: Kind, canonical_value: str) -> str:
    """Name a key for the stores: different keys have different names.

    Namespace and scope are percent-escaped where they are not printable ASCII, or have a ``/`` or a blank in them.  Of
    a name above 200 bytes the value is replaced by its SHA-256, ``sha256:`` and 64 digits; if that is not enough, then
    the scope, and at last the namespace as well.  Nothing is ever cut off.

    Example:
      >>> stored_key("shop", "charge", "key", canonical(17))
      'shop/charge/key/["int",17]'

    Parameters:
      namespace(str): Whose keys they are: the application, the tenant.
      scope(str): What the keys are about; usually the actor's name.
      kind(str): ``key`` for keys of the business, ``message`` for ids of messages: the two never meet.
      canonical_value(str): The key, as `canonical` spells it.

    Returns:
      str: At most 255 characters of printable ASCII.

    Raises:
      ValueError: There is no such kind.
    """
    if kind not in (KEY, MESSAGE):
        raise ValueError(f"a key is of the kind {KEY!r} or {MESSAGE!r}, not {kind!r}")
    parts = [_escaped(namespace), _escaped(scope), kind, canonical_value]
    if canonical_value.startswith(_HASHED) or not _PRINTABLE.fullmatch(canonical_value):
        parts[3] = _hashed(canonical_value)
    for place in (3, 1, 0):
        if sum(map(len, parts)) + 3 <= _LONGEST:
            break
        parts[place] = _hashed(parts[place])
    return "/".join(parts)


def derived_key(stored_key: str, step: str, generation: int = 0) -> str:
    """Make the key that is passed on to a third party with one step of the work.

    It is the same in every attempt, redelivery, takeover and replay, and another for each step.  A provider that has
    answered a key with a definite failure repeats that answer: another generation gives another key.

    Parameters:
      stored_key(str): The name of the work's key, as `stored_key` makes it.
      step(str): The step.
      generation(int): Which try at the step, as the user counts them.

    Returns:
      str: 36 characters, a UUID of version 8 (RFC 9562, made of SHA-256), since some take nothing but UUIDs.
    """
    digits = sha256(json.dumps(["dramatiq-guard", stored_key, step, generation]).encode("ascii")).hexdigest()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"


@lru_cache(1_024)  # a namespace and the scopes of its actors, asked for with each message
def _escaped(name: str) -> str:
    escaped = quote(name, safe=_SAFE, errors="surrogatepass")
    # A name that looks like a hash must not be taken for that of another.
    return escaped.replace(":", "%3A", 1) if escaped.startswith(_HASHED) else escaped


def _hashed(text: str) -> str:
    return f"{_HASHED}{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"

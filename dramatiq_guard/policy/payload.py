"""The fingerprint of a payload: whether two messages with one key ask for the same.

It is made of what travelled, as the encoder of the messages left it.  This module must not know keys.
"""

from __future__ import annotations

import inspect
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["fingerprint"]

#: 128 bits: two payloads of one key are compared, not all payloads of the world.
_BYTES = 16

_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode


def fingerprint(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: inspect.Signature | None = None,
    names: Collection[str] | None = None,
) -> bytes | None:
    """Take the fingerprint of a message's arguments.

    With the actor's signature it makes no difference whether an argument is passed by position or by name.  An
    argument that equals its default counts as left out: otherwise, after a deploy that adds a parameter, the copies
    still on their way would be refused as another payload.

    Parameters:
      args(Sequence[Any]), kwargs(Mapping[str, Any]): The arguments.
      signature(inspect.Signature | None): The actor's.
      names(Collection[str] | None): The parameters that count (or arguments that its ``**`` parameter takes); None for
        all.

    Returns:
      bytes | None: 16 bytes, kept in stores; None if the arguments cannot be written as JSON, or are not those of the
      actor, which will say so itself.

    Raises:
      ValueError: Names without a signature.
    """
    if signature is None:
        if names is not None:
            raise ValueError("the fingerprint of named parameters needs the signature that they are in")
        payload: list[Any] = [list(args), dict(kwargs)]
    else:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        payload = [{}, {}]
        for name, value in given.items():
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                payload[1] = {key: part for key, part in value.items() if names is None or key in names}
            elif (names is None or name in names) and not _equal(value, parameter.default):
                payload[0][name] = value
    try:
        return sha256(_encode(payload).encode("ascii")).digest()[:_BYTES]
    except (TypeError, ValueError, RecursionError):
        return None


def _equal(value: object, default: object) -> bool:
    """Whether they are one when written: 1 is neither True nor 1.0, and a tuple is a list."""
    if default is inspect.Parameter.empty:
        return False
    try:
        return _encode(default) == _encode(value)
    except (TypeError, ValueError, RecursionError):
        return False

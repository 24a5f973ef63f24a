"""The fingerprint of a payload: whether two messages with one key ask for the same.

It is made of what travelled, as the encoder of the messages left it.  This module must not know keys.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Fingerprinter", "fingerprint", "fingerprinter"]

#: Takes the fingerprint of a message's arguments and keyword arguments.
Fingerprinter = Callable[[Sequence[Any], Mapping[str, Any]], bytes | None]

_NAMED = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}

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
    if signature is not None:
        return fingerprinter(signature, names)(args, kwargs)
    if names is not None:
        raise ValueError("the fingerprint of named parameters needs the signature that they are in")
    return _digest([list(args), dict(kwargs)])


def fingerprinter(signature: inspect.Signature, names: Collection[str] | None = None) -> Fingerprinter:
    """Make what takes the fingerprints of one actor's messages, as `fingerprint` does.

    Parameters:
      signature(inspect.Signature): The actor's.
      names(Collection[str] | None): The parameters that count; None for all.

    Returns:
      Fingerprinter: Gives the fingerprint of arguments and keyword arguments.
    """
    parameters = signature.parameters
    in_order = tuple(parameters)
    simple = all(parameter.kind in _NAMED for parameter in parameters.values())

    def take(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
        if simple and not kwargs and len(args) == len(in_order):
            given = dict(zip(in_order, args, strict=True))  # what binding would find, in a tenth of the time
        else:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return None
        payload: list[dict[str, Any]] = [{}, {}]
        for name, value in given.items():
            parameter = parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                payload[1] = {key: part for key, part in value.items() if names is None or key in names}
            elif (names is None or name in names) and not _equal(value, parameter.default):
                payload[0][name] = value
        return _digest(payload)

    return take


def _digest(payload: object) -> bytes | None:
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

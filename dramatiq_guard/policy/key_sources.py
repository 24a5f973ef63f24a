"""Where the key of a message comes from: a function, names of parameters, a template, or the message itself.

A source is read once, when its actor is declared, so that whatever is wrong with it is said there; what remains to be
done for each message is a function call.  It must not know what is done with a key, nor whether its value makes a good
one: that is `canonical`'s to say.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

from .canonical import NoKey

__all__ = ["Bind", "KeyOf", "MessageKey", "binder", "check_names", "compile_key"]

#: Makes the value of a key of a message's arguments, its keyword arguments, and the message, which only a
#: `MessageKey` looks at.
KeyOf = Callable[[Sequence[Any], Mapping[str, Any], Any], Any]

#: Gives the arguments of a message by the names of the parameters, defaults filled in.
Bind = Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]

_NAMED = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
_ANY_MORE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@runtime_checkable
class MessageKey(Protocol):
    """A source that needs more of a message than its arguments, as `dramatiq_guard.keys` has some."""

    def key_of(self, parameters: inspect.Signature, actor_name: str) -> KeyOf:
        """Compile the source for an actor.

        Raises:
          ValueError: It is not for an actor with these parameters.
        """
        ...


def compile_key(spec: object, parameters: inspect.Signature, *, actor_name: str) -> KeyOf:
    """Read a source.

    However it is written, an argument that is left out counts as its default, and it makes no difference whether an
    argument is passed by position or by name.

    A function is called as the actor is: with all arguments by position, or by name if it could not be called
    otherwise.  Names give a tuple with as many values, also when it is only one.  A template gives its text and the
    values in it, so that 1 and ``"1"`` remain two keys; the names in it are not part of the key.

    Example:
      >>> key_of = compile_key("order:{order_id}", inspect.signature(charge), actor_name="charge")
      >>> key_of((17, 4900), {}, message)
      ('order:{}', 17)

    Parameters:
      spec: A function, a list or tuple of parameter names, a template such as ``"order:{order_id}"`` (plain fields
        only, braces doubled to be meant as such), or a `MessageKey`.
      parameters(inspect.Signature): The actor's.
      actor_name(str): Its name, for the errors.

    Returns:
      KeyOf: Makes the value of a message's key.  It raises what a function raises, TypeError if the arguments are not
      the actor's, and `NoKey` if an argument is not there.

    Raises:
      TypeError: The source is none of these.
      ValueError: It names a parameter that there is not; it is an async function, or one that cannot be called with
        the actor's arguments; the template has another field than a plain one, or none.
    """
    if isinstance(spec, MessageKey):
        return spec.key_of(parameters, actor_name)
    if isinstance(spec, str):
        return _of_template(spec, parameters, actor_name)
    if isinstance(spec, list | tuple):
        return _of_names(spec, parameters, actor_name)
    if callable(spec):
        return _of_function(spec, parameters, actor_name)
    raise TypeError(
        f"the key of actor {actor_name!r} must be a function, a list of parameter names or a template such as "
        f"'order:{{order_id}}', not {spec!r}"
    )


def check_names(names: Iterable[object], parameters: inspect.Signature, *, actor_name: str, option: str) -> None:
    """Make sure that an actor has the parameters that an option of it names.

    A name that it does not have passes if the actor takes any keyword argument: it may be one of these.

    Parameters:
      names(Iterable[object]): The names.
      parameters(inspect.Signature): The actor's.
      actor_name(str), option(str): Whose names they are, for the error.

    Raises:
      ValueError: There is no such parameter, or it is the ``**`` one.
    """
    rest = _keywords(parameters)
    for name in names:
        if name == rest:
            raise ValueError(
                f"{option} of actor {actor_name!r} names **{rest}, which is not one argument: name those in it that "
                "matter"
            )
        if not isinstance(name, str) or (rest is None and name not in parameters.parameters):
            there = ", ".join(parameters.parameters) or "none"
            raise ValueError(f"{option} of actor {actor_name!r} names {name!r}: its parameters are {there}")


def binder(parameters: inspect.Signature, *, actor_name: str) -> Bind:
    """Make the function that gives a message's arguments by name.

    Parameters:
      parameters(inspect.Signature): The actor's.
      actor_name(str): Its name, for the error.

    Returns:
      Bind: It raises TypeError if the arguments are not the actor's.
    """
    names = tuple(parameters.parameters)
    simple = all(parameter.kind in _NAMED for parameter in parameters.parameters.values())
    rest = _keywords(parameters)

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if simple and not kwargs and len(args) == len(names):
            return dict(zip(names, args, strict=True))
        arguments = _bound(parameters, actor_name, args, kwargs).arguments
        # What is called like a parameter does not get behind it.
        return arguments if rest is None else {**arguments[rest], **arguments}

    return bind


def _of_names(names: Sequence[object], parameters: inspect.Signature, actor_name: str) -> KeyOf:
    if not names:
        raise ValueError(f"the key of actor {actor_name!r} names no parameter: all its messages would be one")
    check_names(names, parameters, actor_name=actor_name, option="the key")
    bind = binder(parameters, actor_name=actor_name)

    def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], _: Any) -> tuple[Any, ...]:
        arguments = bind(args, kwargs)
        try:
            return tuple([arguments[name] for name in names])  # type: ignore[index]
        except KeyError as missing:
            raise NoKey(f"the key of actor {actor_name!r} needs the argument {missing}, which is not there") from None

    return key_of


def _of_template(template: str, parameters: inspect.Signature, actor_name: str) -> KeyOf:
    def refuse(why: str) -> NoReturn:
        raise ValueError(f"the key {template!r} of actor {actor_name!r} {why}")

    names: list[str] = []
    text = ""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        refuse(f"is no template ({error}): double the braces that are meant as such")
    for literal, field, form, conversion in pieces:
        text += literal.replace("{", "{{").replace("}", "}}")
        if field is None:
            continue
        if not field.isidentifier() or form or conversion:
            refuse("may only have plain {name} fields: write a function for anything more")
        names.append(field)
        text += "{}"
    if not names:
        hint = f"{{{template}}}" if template in parameters.parameters else "{name}"
        refuse(f"has no field, so all messages would be one: name a parameter in braces, {hint!r}")
    of_names = _of_names(names, parameters, actor_name)
    return lambda args, kwargs, message: (text, *of_names(args, kwargs, message))


def _of_function(function: Callable[..., Any], parameters: inspect.Signature, actor_name: str) -> KeyOf:
    asynchronous = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_async(part) for is_async in asynchronous for part in (function, type(function).__call__)):
        raise ValueError(
            f"the key of actor {actor_name!r} is an async function: a key is made of the message alone, so write a "
            "plain function that reads nothing else"
        )
    if _by_position(function, parameters, actor_name):
        count = sum(parameter.kind in _NAMED for parameter in parameters.parameters.values())
        simple = count == len(parameters.parameters)

        def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], _: Any) -> Any:
            if simple and not kwargs and len(args) == count:
                return function(*args)
            bound = _bound(parameters, actor_name, args, kwargs)
            return function(*bound.args, **bound.kwargs)

        return key_of

    rest = _keywords(parameters)
    bind = binder(parameters, actor_name=actor_name)
    return lambda args, kwargs, _: function(**{k: v for k, v in bind(args, kwargs).items() if k != rest})


def _by_position(function: Callable[..., Any], parameters: inspect.Signature, actor_name: str) -> bool:
    """Whether a function is called by position, not by name.

    Raises:
      ValueError: It can be called neither way.
    """
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # one of those written in C that do not say what they take
    known = parameters.parameters.values()
    args = [None for parameter in known if parameter.kind in _NAMED]
    kwargs = {parameter.name: None for parameter in known if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    kinds = {parameter.kind for parameter in known}
    # What an actor takes as *args or **kwargs may be all that the function asks for.
    bind = own.bind_partial if kinds & _ANY_MORE else own.bind
    if _takes(bind, args, kwargs):
        return True
    named = {parameter.name: None for parameter in known if parameter.kind in _NAMED} | kwargs
    # By name, what an actor's *args took would be lost.
    if inspect.Parameter.VAR_POSITIONAL not in kinds and _takes(bind, [], named):
        return False
    raise ValueError(
        f"the key function of actor {actor_name!r} takes {own}, but is called with the actor's arguments, {parameters}"
    )


def _takes(bind: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _bound(
    parameters: inspect.Signature, actor_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"the message's arguments are not those of actor {actor_name!r}, {parameters}: {error}"
        ) from None
    bound.apply_defaults()
    return bound


def _keywords(parameters: inspect.Signature) -> str | None:
    """The name of the parameter that takes all other keyword arguments."""
    kinds = parameters.parameters.items()
    return next((name for name, parameter in kinds if parameter.kind is inspect.Parameter.VAR_KEYWORD), None)

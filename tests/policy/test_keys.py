from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.policy.keys import NoKey, canonical, compile_key, derived_key, stored_key

AN_ID = UUID("6f0e8b1c-1d1c-4f6e-9a51-0d3a2b4c5d6e")
NAIVE = datetime(2026, 5, 1, 7, 30)  # noqa: DTZ001
IN_TOKYO = timezone(timedelta(hours=9))


class Color(enum.Enum):
    RED = 1


class Size(enum.IntEnum):
    L = 3


class Unit(enum.StrEnum):
    KG = "kg"


class Rate(float, enum.Enum):
    HALF = 0.5


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Pair(NamedTuple):
    a: int
    b: int


def charge(order_id: int, cents: int = 100, *, currency: str = "EUR") -> None: ...


def collect(*ids: int, dry: bool = False) -> None: ...


def notify(user_id: int, /, channel: str = "mail", **options: Any) -> None: ...


def nothing() -> None: ...


def key_of(spec: object, actor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compile_key(spec, inspect.signature(actor), actor_name=actor.__name__)(args, kwargs, None)


def refusal(spec: object, actor: Callable[..., Any] = charge, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        compile_key(spec, inspect.signature(actor), actor_name=actor.__name__)
    assert repr(actor.__name__) in str(caught.value)
    return str(caught.value)


# The spelling


@pytest.mark.parametrize(
    ("value", "spelt"),
    [
        (1, '["int",1]'),
        (-(2**70), '["int",-1180591620717411303424]'),
        ("1", '["str","1"]'),
        (True, '["bool",true]'),
        (False, '["bool",false]'),
        ("", '["str",""]'),
        ("größer\x7f\n", '["str","gr\\u00f6\\u00dfer\\u007f\\n"]'),
        (b"\x00\xff", '["bytes","00ff"]'),
        (AN_ID, f'["uuid","{AN_ID}"]'),
        (date(2026, 5, 1), '["date","2026-05-01"]'),
        (datetime(2026, 5, 1, 7, 30, tzinfo=UTC), '["datetime","2026-05-01T07:30:00+00:00"]'),
        (Decimal("19.90"), '["decimal","199E-1"]'),
        (Color.RED, '["enum","Color","RED"]'),
        (Right.READ | Right.WRITE, '["enum","Right","READ|WRITE"]'),
        (Right(0), '["enum","Right",0]'),
        ((), '["list",[]]'),
        ((7, ["a", (True,)]), '["list",[["int",7],["list",[["str","a"],["list",[["bool",true]]]]]]]'),
    ],
)
def test_each_type_has_its_spelling(value: object, spelt: str) -> None:
    """The forms are kept in stores: this table may grow, but no line of it may change."""
    assert canonical(value) == spelt


def test_values_that_look_alike_are_different_keys() -> None:
    """1, "1", True, b"1", Decimal 1 and (1,) share nothing."""
    alike: list[object] = [1, "1", True, b"1", Decimal(1), (1,), ((1,),), '["int",1]', ("int", 1)]
    assert len({canonical(value) for value in alike}) == len(alike)
    assert canonical(("a", "b,c")) != canonical(("a,b", "c"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (Pair(1, 2), [1, 2]),
        (Size.L, 3),
        (Unit.KG, "kg"),
        (Text("text"), "text"),
        (datetime(2026, 5, 1, 9, tzinfo=IN_TOKYO), datetime(2026, 5, 1, 0, tzinfo=UTC)),
    ],
)
def test_what_arrives_as_the_same_is_the_same_key(one: object, other: object) -> None:
    """Tuples travel as lists, an IntEnum as its number, all kinds of str as text; one moment is one in each zone."""
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("number", "spelt"),
    [
        ("1", "1E0"),
        ("1.0", "1E0"),
        ("1.000", "1E0"),
        ("100", "1E2"),
        ("1E+2", "1E2"),
        ("-0.50", "-5E-1"),
        ("0", "0E0"),
        ("007", "7E0"),
        ("0.0070", "7E-3"),
        ("-0.00", "0E0"),
        ("1E+999999", "1E999999"),
        ("12345678901234567890123456789012345678.90", "123456789012345678901234567890123456789E-1"),
    ],
)
def test_equal_decimals_are_one_key(number: str, spelt: str) -> None:
    """1.0 and 1.000 are the same amount; no digit is rounded away, whatever the thread's decimal context."""
    assert canonical(Decimal(number)) == f'["decimal","{spelt}"]'


@pytest.mark.parametrize("value", [None, (1, None), [["a", [None]]]])
def test_none_is_a_missing_key_also_inside_another(value: object) -> None:
    """An order without a customer must not share the key of all others without one."""
    with pytest.raises(NoKey, match="None is no key, nor part of one"):
        canonical(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (1.5, "of a float: write an int"),
        (float("nan"), "of a float: write an int"),
        (Rate.HALF, "Rate: write an int"),
        ({"id": 1}, "of a dict: write the values in it that matter"),
        ({1, 2}, "of a set: write a list in an order of your own"),
        (frozenset({1}), "of a frozenset: write a list"),
        (NAIVE, "of a naive datetime.datetime: write an aware datetime"),
        (bytearray(b"1"), "of a bytearray: write bytes"),
        (Decimal("NaN"), "of NaN: a Decimal in a key must be a finite number"),
        (Decimal("-Infinity"), "of -Infinity: a Decimal in a key must be a finite number"),
        (time(7, 30), "of a datetime.time: write what identifies it"),
        (object(), "of a object: write what identifies it"),
        (Color, "of a enum.EnumType: write what identifies it"),
        (("ok", [1.5]), "of a float: write an int"),
    ],
)
def test_what_makes_no_good_key_is_refused_by_its_type(value: object, says: str) -> None:
    """The error names the type, and what to write instead."""
    with pytest.raises(TypeError, match=re.escape(says)):
        canonical(value)


def test_a_class_that_is_only_called_uuid_is_refused() -> None:
    """Nobody knows what its text says of it."""
    with pytest.raises(TypeError, match="UUID: write what identifies it"):
        canonical(type("UUID", (), {})())


def test_a_list_that_contains_itself_is_refused() -> None:
    """It ends with a TypeError like any other value that makes no key."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="contains itself"):
        canonical(endless)


travelling = st.recursive(
    st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=10
)
values = st.recursive(
    st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.uuids()
    | st.dates()
    | st.datetimes(timezones=st.just(UTC))
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.sampled_from([Color.RED, Right.READ]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


def _typed(value: Any) -> Any:
    return [_typed(part) for part in value] if isinstance(value, list) else (type(value), value)


@given(values, values)
def test_two_values_have_one_spelling_exactly_if_they_are_one(one: Any, other: Any) -> None:
    """Equal in type and value, and only then."""
    assert (canonical(one) == canonical(other)) is (_typed(one) == _typed(other))


@given(values)
def test_a_spelling_is_json_in_printable_ascii(value: Any) -> None:
    """Any store and any terminal can take it."""
    spelt = canonical(value)
    assert re.fullmatch("[ -~]+", spelt)
    assert isinstance(json.loads(spelt), list)


@given(travelling)
def test_a_key_made_before_the_journey_is_the_one_made_after_it(value: Any) -> None:
    """What JSON does to a value does nothing to its key."""
    assert canonical(json.loads(json.dumps(value))) == canonical(value)


# Names of parameters


def test_names_give_the_values_of_the_parameters() -> None:
    """As many as there are names, in their order; one name gives a tuple too."""
    assert key_of(["cents", "order_id"], charge, 17, 500) == (500, 17)
    assert key_of(("order_id",), charge, 17, 500) == (17,)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((17,), {}),
        ((17, 100), {}),
        ((), {"order_id": 17}),
        ((17,), {"cents": 100, "currency": "EUR"}),
        ((), {"currency": "EUR", "cents": 100, "order_id": 17}),
    ],
)
@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (["order_id", "cents", "currency"], (17, 100, "EUR")),
        ("{order_id}:{cents}:{currency}", ("{}:{}:{}", 17, 100, "EUR")),
        (lambda order_id, cents, currency: (order_id, cents, currency), (17, 100, "EUR")),
        (lambda *args, **kwargs: (args, kwargs), ((17, 100), {"currency": "EUR"})),
    ],
)
def test_it_makes_no_difference_how_an_argument_is_passed(
    spec: object, value: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """By position, by name, or left out where it is the default: one key, whatever the source."""
    assert key_of(spec, charge, *args, **kwargs) == value


def test_arguments_of_a_plain_actor_need_no_binding() -> None:
    """All by position, to an actor without anything special: each source gives the same as otherwise."""

    def plain(a: int, b: int) -> None: ...

    for args, kwargs in [((1, 2), {}), ((1,), {"b": 2})]:
        assert key_of(["b", "a"], plain, *args, **kwargs) == (2, 1)
        assert key_of(lambda a, b: a - b, plain, *args, **kwargs) == -1


def test_a_wrong_name_is_refused_when_the_actor_is_declared() -> None:
    """The error has the actor, the name and the parameters there are."""
    assert refusal(["order_id", "amount"]) == (
        "the key of actor 'charge' names 'amount': its parameters are order_id, cents, currency"
    )
    assert refusal(["order_id", 3]).startswith("the key of actor 'charge' names 3:")
    assert refusal(["x"], nothing).endswith("its parameters are none")
    assert "names no parameter" in refusal([])


def test_all_positional_arguments_of_an_actor_can_be_named_together() -> None:
    """The parameter behind the star is the tuple of them."""
    assert key_of(["ids"], collect, 1, 2) == ((1, 2),)
    assert key_of(["ids", "dry"], collect) == ((), False)
    assert key_of("{ids}", collect, 1, dry=True) == ("{}", (1,))


def test_an_argument_that_an_actor_takes_as_any_keyword_can_be_named() -> None:
    """It cannot be known at declaration; where it is not there, the key is missing."""
    assert key_of(["user_id", "campaign"], notify, 1, campaign="may") == (1, "may")
    assert key_of("{campaign}", notify, 1, campaign="may") == ("{}", "may")
    with pytest.raises(NoKey, match="actor 'notify' needs the argument 'campaign', which is not there"):
        key_of(["user_id", "campaign"], notify, 1)


def test_a_keyword_called_like_a_parameter_does_not_get_behind_it() -> None:
    """A positional-only parameter leaves its name to the keywords; the key is the parameter's all the same."""
    assert key_of(["user_id"], notify, 1, user_id=2) == (1,)


def test_the_parameter_for_all_other_keywords_is_no_key() -> None:
    """It is a dict."""
    assert "names **options, which is not one argument" in refusal(["options"], notify)


@pytest.mark.parametrize("spec", [["order_id"], "{order_id}", lambda *args, **kwargs: 1])
def test_arguments_that_are_not_the_actors_have_no_key(spec: object) -> None:
    """The error says whose they should have been."""
    with pytest.raises(TypeError, match=r"not those of actor 'charge', .*: missing a required argument: 'order_id'"):
        key_of(spec, charge, cents=1)


# Templates


def test_a_template_keeps_the_types_of_its_values() -> None:
    """Order 1 and order "1" are two."""
    assert key_of("order:{order_id}", charge, 1) == ("order:{}", 1)
    assert canonical(key_of("order:{order_id}", charge, 1)) != canonical(key_of("order:{order_id}", charge, "1"))
    assert canonical(key_of("{order_id}{cents}", charge, "a", "bc")) != canonical(
        key_of("{order_id}{cents}", charge, "ab", "c")
    )


def test_the_names_in_a_template_are_not_part_of_the_key() -> None:
    """A parameter can be renamed, and two actors with one scope can call it differently."""

    def refund(order: int) -> None: ...

    assert key_of("order:{order}", refund, 17) == key_of("order:{order_id}", charge, 17)


def test_doubled_braces_are_braces() -> None:
    """They stay doubled in the key, where they cannot be taken for a field."""
    assert key_of("{{{order_id}}}{{}}", charge, 17) == ("{{{}}}{{}}", 17)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{order}", "names 'order': its parameters are order_id, cents, currency"),
        ("order:{}", "may only have plain {name} fields"),
        ("{0}", "may only have plain {name} fields"),
        ("{order_id.real}", "may only have plain {name} fields"),
        ("{order_id[0]}", "may only have plain {name} fields"),
        ("{order_id!r}", "may only have plain {name} fields"),
        ("{order_id:>8}", "may only have plain {name} fields"),
        ("{order_id", "is no template (expected '}' before end of string): double the braces"),
        ("order_id}", "is no template (Single '}' encountered in format string): double the braces"),
        ("order_id", "has no field, so all messages would be one: name a parameter in braces, '{order_id}'"),
        ("nightly", "name a parameter in braces, '{name}'"),
        ("", "has no field"),
    ],
)
def test_a_template_with_anything_but_plain_fields_is_refused(template: str, says: str) -> None:
    """When the actor is declared."""
    assert says in refusal(template)


# Functions


def test_a_function_is_called_as_the_actor_is() -> None:
    """By position, whatever it calls its parameters."""
    assert key_of(lambda order, *rest, **more: order, charge, 17, currency="USD") == 17
    assert key_of(lambda a, b, currency: (b, a), charge, 17) == (100, 17)
    assert key_of(lambda *ids, dry: ids, collect, 1, 2) == (1, 2)
    assert key_of(lambda user_id, channel, **options: options, notify, 1, a=2) == {"a": 2}
    assert key_of(lambda: "nightly", nothing) == "nightly"


def test_a_function_that_asks_by_name_is_called_by_name() -> None:
    """As is one that picks out a few parameters."""
    assert key_of(lambda *, order_id, **_: order_id, charge, 17) == 17
    assert key_of(lambda order_id, **rest: rest, charge, 17, 5) == {"cents": 5, "currency": "EUR"}

    def tagged(user_id: int, **tags: str) -> None: ...

    assert key_of(lambda *, user_id, **tags: (user_id, tags), tagged, 1, a="b") == (1, {"a": "b"})


def test_a_function_that_does_not_fit_is_refused_when_the_actor_is_declared() -> None:
    """The error shows both signatures."""
    assert refusal(lambda order_id: order_id).startswith("the key function of actor 'charge' takes (order_id), but")

    def tag(order_id: int, *tags: str) -> None: ...

    # By name, the tags would be lost.
    assert "takes (*, order_id), but" in refusal(lambda *, order_id: order_id, tag)


def test_a_function_may_ask_for_what_an_actor_takes_as_any_argument() -> None:
    """It cannot be known at declaration, so a message without it is refused then."""

    def anything(*args: Any, **kwargs: Any) -> None: ...

    assert key_of(lambda order_id, cents: order_id, anything, 17, 500) == 17
    assert key_of(lambda order_id, cents: order_id, anything, 17, cents=500) == 17
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cents'"):
        key_of(lambda order_id, cents: order_id, anything, 17)


def test_a_function_that_does_not_say_what_it_takes_is_called_by_position() -> None:
    """Some written in C do not."""

    class Silent:
        __signature__ = "none"

        def __call__(self, order_id: int, cents: int, currency: str) -> int:
            return order_id

    with pytest.raises(TypeError, match="unexpected object"):
        inspect.signature(Silent())
    assert key_of(Silent(), charge, 17) == 17


def test_a_class_and_an_object_can_be_the_function() -> None:
    """Whatever can be called."""

    def import_file(digest: str) -> None: ...

    assert key_of(UUID, import_file, str(AN_ID)) == AN_ID
    assert key_of(partial(pow, 2), import_file, 3) == 8


def test_what_a_function_raises_comes_out_of_it() -> None:
    """Whoever asks for the key decides what becomes of the message."""
    with pytest.raises(ZeroDivisionError):
        key_of(lambda order_id, *_, **__: 1 // order_id, charge, 0)


async def _async(*args: Any, **kwargs: Any) -> int:
    return 1


async def _stream(*args: Any, **kwargs: Any) -> Any:
    yield 1


class _AsyncObject:
    async def __call__(self, *args: Any, **kwargs: Any) -> int:
        return 1


@pytest.mark.parametrize("spec", [_async, _stream, partial(_async, 1), _AsyncObject()])
def test_an_async_function_is_refused(spec: object) -> None:
    """A key is made of the message, and there is nothing in it to wait for."""
    assert "is an async function: a key is made of the message alone" in refusal(spec)


@pytest.mark.parametrize("spec", [None, 17, {"order_id"}])
def test_anything_else_is_no_source(spec: object) -> None:
    """The error says what is."""
    assert "must be a function, a list of parameter names or a template" in refusal(spec, error=TypeError)


class _FromMessage:
    def key_of(self, parameters: inspect.Signature, actor_name: str) -> Any:
        return lambda args, kwargs, message: (actor_name, list(parameters.parameters), args, kwargs, message)


def test_a_source_that_needs_the_message_gets_it() -> None:
    """It is compiled with the actor's signature and name."""
    compiled = compile_key(_FromMessage(), inspect.signature(collect), actor_name="collect")
    assert compiled((1,), {"dry": True}, "message") == ("collect", ["ids", "dry"], (1,), {"dry": True}, "message")


# Names in the stores


def test_a_stored_key_can_be_read() -> None:
    """Namespace, scope, kind and value."""
    assert stored_key("shop", "charge", "key", canonical(17)) == 'shop/charge/key/["int",17]'
    assert stored_key("shop", "charge", "message", canonical("abc")) == 'shop/charge/message/["str","abc"]'


def test_keys_of_the_business_and_ids_of_messages_never_meet() -> None:
    """Also if one is equal to the other."""
    assert stored_key("a", "b", "key", canonical("x")) != stored_key("a", "b", "message", canonical("x"))


def test_there_is_no_other_kind() -> None:
    """A third would be spelt in some other way by the next version."""
    with pytest.raises(ValueError, match="of the kind 'key' or 'message', not 'custom'"):
        stored_key("a", "b", "custom", "[]")  # type: ignore[arg-type]


def test_namespaces_and_scopes_do_not_run_into_each_other() -> None:
    """The separator, the escape, blanks and everything that is not ASCII are percent-escaped."""
    assert stored_key("a/b", "c", "key", "[]") == "a%2Fb/c/key/[]"
    assert stored_key("a", "b/c", "key", "[]") == "a/b%2Fc/key/[]"
    assert stored_key("a%2Fb", "c d", "key", "[]") == "a%252Fb/c%20d/key/[]"
    assert stored_key("größe", "", "key", "[]") == "gr%C3%B6%C3%9Fe//key/[]"
    assert stored_key("\ud800", "x\n", "key", "[]") == "%ED%A0%80/x%0A/key/[]"
    assert stored_key("tenant:7", "jobs.charge<locals>", "key", "[]") == "tenant:7/jobs.charge<locals>/key/[]"


def test_a_long_value_is_hashed_never_cut() -> None:
    """Five kilobytes and a near twin are two keys."""
    long, twin = "x" * 5_000, "x" * 4_999 + "y"
    digest = "8e6b87bafbe68649be3e2d72d37b4fc6c769697fdfe5e48b068ab2fcb6414c9e"
    assert stored_key("shop", "charge", "key", canonical(long)) == f"shop/charge/key/sha256:{digest}"
    assert stored_key("shop", "charge", "key", canonical(long)) != stored_key("shop", "charge", "key", canonical(twin))


def test_two_hundred_bytes_are_kept_as_they_are() -> None:
    """One more is hashed."""
    exact = "x" * (200 - len('a/b/key/["str",""]'))
    assert stored_key("a", "b", "key", canonical(exact)) == f'a/b/key/["str","{exact}"]'
    assert "/key/sha256:" in stored_key("a", "b", "key", canonical(exact + "x"))


def test_long_scopes_and_namespaces_are_hashed_too() -> None:
    """First the scope, and the namespace only if that was not enough."""
    digest = "sha256:[0-9a-f]{64}"
    long = "n" * 300
    assert re.fullmatch(f"a/{digest}/key/{digest}", stored_key("a", long, "key", "[]"))
    assert re.fullmatch(f"{digest}/{digest}/message/{digest}", stored_key(long, long, "message", "[]"))
    assert stored_key("a", long, "key", "[]") != stored_key("a", long + "n", "key", "[]")
    assert stored_key(long, "a", "key", "[]") != stored_key(long + "n", "a", "key", "[]")


def test_what_looks_like_a_hash_is_not_taken_for_one() -> None:
    """Neither a name nor a value can be made to meet that of something longer."""
    long = "n" * 300
    hashed_scope = stored_key("a", long, "key", "[]").split("/")[1]
    assert stored_key("a", hashed_scope, "key", "[]").split("/")[1] == hashed_scope.replace(":", "%3A")
    assert stored_key("a", hashed_scope.replace(":", "%3A"), "key", "[]").split("/")[1].startswith("sha256%253A")
    hashed_value = stored_key("a", "b", "key", long).split("/")[3]
    assert stored_key("a", "b", "key", hashed_value) != stored_key("a", "b", "key", long)


def test_a_value_that_is_not_printable_is_hashed() -> None:
    """Stores are promised printable ASCII."""
    assert re.fullmatch("a/b/key/sha256:[0-9a-f]{64}", stored_key("a", "b", "key", "ä"))
    assert stored_key("a", "b", "key", "x\n") != stored_key("a", "b", "key", "x")


any_text = st.text(st.characters(), max_size=80) | st.text("/%:sha256", max_size=90) | st.text("n", max_size=400)
stored_parts = st.tuples(any_text, any_text, st.sampled_from(["key", "message"]), values | st.text("v", max_size=300))


@given(stored_parts, stored_parts)
def test_stored_keys_are_equal_only_if_all_parts_are(one: Any, other: Any) -> None:
    """And each of them is at most 255 characters of printable ASCII."""
    first, second = (stored_key(*parts[:3], canonical(parts[3])) for parts in (one, other))
    for stored in (first, second):
        assert re.fullmatch("[ -~]{1,255}", stored)
    same = one[:3] == other[:3] and canonical(one[3]) == canonical(other[3])
    assert (first == second) is same


# Keys for third parties


def test_a_derived_key_is_a_uuid_that_never_changes() -> None:
    """Of version 8, which is the one for hashes of one's own; the provider remembers it over our releases."""
    key = derived_key('shop/charge/key/["int",17]', "charge")
    assert key == "5b6784a2-e4fa-8a75-b7c2-f33f301ddd3d"
    assert len(key) == 36
    assert (UUID(key).version, UUID(key).variant) == (8, "specified in RFC 4122")


def test_each_step_generation_and_key_has_its_own() -> None:
    """Nothing runs into anything else."""
    keys = {
        derived_key(*parts)
        for parts in [("a", "b"), ("a", "b", 1), ("a", "b", 2), ("a", "b1"), ("ab", ""), ("", "ab"), ("a", "ü")]
    }
    assert len(keys) == 7
    assert derived_key("a", "b") == derived_key("a", "b", 0)


@given(
    st.tuples(st.text(), st.text(), st.integers(0, 9)),
    st.tuples(st.text(), st.text(), st.integers(0, 9)),
)
def test_derived_keys_are_equal_only_if_all_parts_are(one: Any, other: Any) -> None:
    """Each is a UUID in its usual form."""
    assert (derived_key(*one) == derived_key(*other)) is (one == other)
    assert str(UUID(derived_key(*one))) == derived_key(*one)

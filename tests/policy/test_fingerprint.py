from __future__ import annotations

import inspect
import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.policy.keys import fingerprint


def charge(order_id: int, amount: int = 100, *, currency: str = "EUR") -> None: ...


def collect(*ids: int, dry: bool = False, **options: Any) -> None: ...


CHARGE = inspect.signature(charge)
COLLECT = inspect.signature(collect)


def of_charge(*args: Any, names: Collection[str] | None = None, **kwargs: Any) -> bytes | None:
    return fingerprint(args, kwargs, CHARGE, names)


def of_collect(*args: Any, names: Collection[str] | None = None, **kwargs: Any) -> bytes | None:
    return fingerprint(args, kwargs, COLLECT, names)


def test_a_fingerprint_never_changes() -> None:
    """It is 128 bits, and is compared with those that stores keep from before the release."""
    assert fingerprint((1, "a", None), {"x": 1.5}) == bytes.fromhex("f501072bf498d538529c5cc204a58e3a")
    assert of_charge(17, currency="USD") == bytes.fromhex("512698cc4b43fbd01480dbd64250d667")


def test_it_makes_no_difference_how_an_argument_is_passed() -> None:
    """With the signature, position and name are one."""
    assert of_charge(17, 500) == of_charge(order_id=17, amount=500) == of_charge(17, amount=500)
    assert of_collect(1, 2, dry=True, a=1, b=2) == of_collect(1, 2, b=2, a=1, dry=True)


def test_without_the_signature_it_does() -> None:
    """Nothing says what the names are."""
    assert fingerprint((17,), {}) != fingerprint((), {"order_id": 17})


def test_each_argument_counts() -> None:
    """Another value, another type, another place: another payload."""
    payloads = [
        of_charge(17),
        of_charge("17"),
        of_charge(17.0),
        of_charge(17, 500),
        of_charge(17, currency="USD"),
        of_charge(17, None),
        of_collect(1, 2),
        of_collect(2, 1),
        of_collect(1, a=2),
        of_collect(1, dry=True),
        of_collect(1, a={"dry": True}),
    ]
    assert None not in payloads
    assert len(set(payloads)) == len(payloads)


def test_an_argument_that_equals_its_default_counts_as_left_out() -> None:
    """Equal as it is written: a truth value is no number."""
    assert of_charge(17) == of_charge(17, 100) == of_charge(17, 100, currency="EUR")
    assert of_collect() == of_collect(dry=False)
    assert of_collect() != of_collect(dry=0)


def test_a_deploy_that_adds_a_parameter_changes_no_fingerprint() -> None:
    """Else every copy still on its way would be refused as another payload."""

    def charge_with_tip(order_id: int, amount: int = 100, tip: int = 0, *, currency: str = "EUR") -> None: ...

    assert fingerprint((17, 500), {}, inspect.signature(charge_with_tip)) == of_charge(17, 500)


def test_a_default_that_is_not_json_equals_nothing() -> None:
    """It cannot have travelled."""
    missing = object()

    def find(order_id: int, hint: Any = missing) -> None: ...

    with_hint = fingerprint((1, "x"), {}, inspect.signature(find))
    without = fingerprint((1,), {}, inspect.signature(find))
    assert with_hint is not None
    assert without is not None
    assert with_hint != without


def test_a_default_tuple_is_the_list_that_travels() -> None:
    """JSON has only the one."""

    def collect_all(ids: Any = (1, 2)) -> None: ...

    signature = inspect.signature(collect_all)
    assert fingerprint(([1, 2],), {}, signature) == fingerprint((), {}, signature)


def test_with_names_nothing_else_counts() -> None:
    """Named are parameters, or what an actor takes as any keyword."""
    named = ["amount", "currency"]
    assert of_charge(17, 500, names=named) == of_charge(18, 500, names=named)
    assert of_charge(17, 500, names=named) != of_charge(17, 501, names=named)
    assert of_charge(17, 500, names=named) == of_charge(17, 500, currency="EUR", names=named)
    assert of_collect(1, a=1, b=2, names=["a"]) == of_collect(3, a=1, b=4, dry=True, names=["a"])
    assert of_collect(a=1, names=["a"]) != of_collect(a=2, names=["a"])


def test_names_need_a_signature() -> None:
    """Else nobody knows what they are called."""
    with pytest.raises(ValueError, match="needs the signature"):
        fingerprint((1,), {}, None, ["amount"])


def test_the_order_of_a_dict_does_not_count() -> None:
    """Neither of the keyword arguments nor inside of one."""
    assert fingerprint((), {"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint((), {"b": {"d": 3, "c": 2}, "a": 1})


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {(1, 2): 3}, {1: 2, "1": 3}])
def test_what_is_not_json_has_no_fingerprint(value: object) -> None:
    """Then it is compared with nothing."""
    assert fingerprint((value,), {}) is None
    assert of_charge(17, value) is None
    assert of_charge(17, value, names=["currency"]) == of_charge(17, names=["currency"])


def test_what_has_no_end_has_no_fingerprint() -> None:
    """Nor what is nested too deeply."""
    assert fingerprint((_endless(),), {}) is None
    assert fingerprint((_deep(),), {}) is None


def test_arguments_that_are_not_the_actors_have_no_fingerprint() -> None:
    """The actor will say so itself."""
    assert of_charge() is None
    assert of_charge(1, 2, 3) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
payloads = st.tuples(st.lists(json_values, max_size=3), st.dictionaries(st.text(), json_values, max_size=3))


@given(payloads)
def test_the_journey_does_not_change_a_fingerprint(payload: tuple[list[Any], dict[str, Any]]) -> None:
    """Made of what was sent or of what arrived, it is the same 16 bytes."""
    args, kwargs = payload
    made = fingerprint(args, kwargs)
    assert made is not None
    assert len(made) == 16
    args, kwargs = json.loads(json.dumps([args, kwargs]))
    assert fingerprint(tuple(args), kwargs) == made


@given(payloads, payloads)
def test_two_payloads_have_one_fingerprint_exactly_if_they_are_written_alike(one: Any, other: Any) -> None:
    """Keys sorted; nothing else is made equal."""
    alike = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint(*one) == fingerprint(*other)) is alike


@given(st.integers(), st.integers(), st.text(), st.sets(st.sampled_from(["order_id", "amount", "currency"])))
def test_any_way_to_pass_arguments_is_the_same(order_id: int, amount: int, currency: str, names: set[str]) -> None:
    """Also if only some of them count."""
    by_position = of_charge(order_id, amount, currency=currency, names=names)
    assert by_position == of_charge(currency=currency, amount=amount, order_id=order_id, names=names)

"""What the package offers is what its `__all__` says, and each of it explains itself."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import dramatiq_guard


def test_all_is_sorted() -> None:
    """A name is found where the alphabet puts it."""
    assert sorted(dramatiq_guard.__all__) == list(dramatiq_guard.__all__)


def test_all_is_exact() -> None:
    """Whatever can be reached without an underscore is offered, and nothing else is."""
    reachable = {
        name
        for name, value in vars(dramatiq_guard).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }

    assert {name for name in dramatiq_guard.__all__ if not name.startswith("_")} == reachable


@pytest.mark.parametrize("name", [name for name in dramatiq_guard.__all__ if not name.startswith("__")])
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    """So has every public method that is defined on it here."""
    public = getattr(dramatiq_guard, name)
    assert inspect.cleandoc(public.__doc__ or ""), f"{name} has no docstring"
    if inspect.isclass(public):
        for method, value in vars(public).items():
            if not method.startswith("_") and inspect.isfunction(value):
                assert inspect.getdoc(getattr(public, method)), f"{name}.{method} has no docstring"

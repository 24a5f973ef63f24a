"""docs/testing.md: its examples are run, and what it shows is what they print."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from dramatiq_guard.testing import assert_idempotent

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(example: str) -> None:
    """Run the tests of an example, as pytest would."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs/testing.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_there_are_two_examples() -> None:
    """One that passes, and one that fails."""
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(example: str) -> None:
    """Each is a file of its own."""
    run(example)


def test_the_report_is_the_one_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word."""
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)

    run(EXAMPLES[1])

    assert capsys.readouterr().out == shown


def test_all_arguments_are_named() -> None:
    """In the line that lists them, with their defaults."""
    for name, parameter in inspect.signature(assert_idempotent).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = "…" if parameter.default is parameter.empty else repr(parameter.default)
            assert f"{name}={default}" in PAGE

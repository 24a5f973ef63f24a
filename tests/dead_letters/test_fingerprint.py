"""One bug is one fingerprint, and two bugs are two."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import dramatiq_guard.policy.verdict
from dramatiq_guard.dead_letters.fingerprint import fingerprint, frame_name, own_place, type_name


def caught(function: Callable[..., Any], *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def compiled(source: str, name: str = "app.jobs", filename: str = "/srv/releases/1/app/jobs.py") -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def test_text_and_lines_make_no_difference() -> None:
    """The same error in the same functions is the same bug, whatever it says and however the file was edited."""
    before = compiled("def f(text):\n    raise ValueError(text)\n")["f"]
    after = compiled("\n\n# a comment\ndef f(text):\n    x = 1\n    raise ValueError(text)\n")["f"]

    assert fingerprint(caught(before, "order 1")) == fingerprint(caught(after, "order 2"))


def test_a_new_release_directory_makes_no_difference() -> None:
    """A deploy does not start every group anew."""
    source = "def f():\n    raise ValueError\n"

    assert fingerprint(caught(compiled(source)["f"])) == fingerprint(
        caught(compiled(source, filename="/srv/releases/2/app/jobs.py")["f"])
    )


def test_another_type_or_function_is_another_bug() -> None:
    """Type and frames both count."""
    space = compiled("def f(kind):\n    raise kind\ndef g(kind):\n    raise kind\ndef h(kind):\n    f(kind)\n")
    prints = {fingerprint(caught(space[name], kind)) for name in ("f", "g", "h") for kind in (ValueError, KeyError)}

    assert 6 == len(prints)


def test_the_depth_of_a_recursion_makes_no_difference() -> None:
    """A bug found three or thirty calls deep is one bug."""
    space = compiled(
        "def even(n):\n    odd(n - 1)\ndef odd(n):\n    if n < 0:\n        raise ValueError(n)\n    even(n - 1)\n"
    )

    assert fingerprint(caught(space["even"], 3)) == fingerprint(caught(space["even"], 31))


def test_frames_of_libraries_do_not_count() -> None:
    """An update of a library leaves groups as they are."""

    def parse() -> None:
        json.loads("{")

    error = caught(parse)
    own = [frame_name(frame).own for frame in frames_of(error)]

    assert own[:2] == [True, True]
    assert not any(own[2:])
    assert len(own) > 2


def frames_of(error: BaseException) -> list[types.FrameType]:
    found, step = [], error.__traceback__
    while step is not None:
        found.append(step.tb_frame)
        step = step.tb_next
    return found


def test_where_only_libraries_are_their_frames_count() -> None:
    """An error of a library alone still has a fingerprint that tells it from others."""
    source = "def f():\n    raise ValueError\ndef g():\n    raise ValueError\n"
    space = compiled(source, "httpx._client", "/venv/lib/python3.11/site-packages/httpx/_client.py")

    def clean(function: Callable[..., Any]) -> BaseException:
        error = caught(function)
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)

    assert fingerprint(clean(space["f"])) != fingerprint(clean(space["g"]))


def test_the_worker_and_the_stack_are_no_own_code() -> None:
    """Frames between the worker and the user's function are dropped."""
    for module in ("dramatiq.worker", "dramatiq_guard.seam"):
        space = compiled("import sys\ndef f():\n    return sys._getframe()\n", module, f"/src/{module}.py")

        assert not frame_name(space["f"]()).own
    assert dramatiq_guard.policy.verdict is not None


def test_a_group_is_told_by_what_it_holds() -> None:
    """Task groups raise one type for everything; their members tell them apart, in any order."""

    def fail(*members: Exception) -> None:
        raise ExceptionGroup("tasks", list(members))

    one = fingerprint(caught(fail, ValueError(1), KeyError(2)))

    assert one == fingerprint(caught(fail, KeyError(3), ValueError(4), ValueError(5)))
    assert one != fingerprint(caught(fail, OSError(3)))


def test_without_an_error_the_reason_and_the_actor_tell() -> None:
    """Messages that died of age are one group for each actor."""
    one = fingerprint(None, reason="expired", actor="a")

    assert one == fingerprint(None, reason="expired", actor="a")
    assert one != fingerprint(None, reason="expired", actor="b")
    assert one != fingerprint(None, reason="unknown_actor", actor="a")


def test_an_error_that_was_never_raised_has_one_too() -> None:
    """No traceback, no failure."""
    assert 16 == len(fingerprint(ValueError("x")))
    assert "" == own_place(None)


def test_the_place_is_the_last_of_the_users_own() -> None:
    """Where the user's code called into a library says more than where the library raised."""

    def parse() -> None:
        json.loads("{")

    file, function, line = own_place(caught(parse).__traceback__).rsplit(":", 2)

    assert file.endswith("test_fingerprint.py")
    assert "parse" == function
    assert line.isdigit()


def test_names_of_types() -> None:
    """Types of Python itself go without their module."""
    assert "ValueError" == type_name(ValueError)
    assert "json.decoder.JSONDecodeError" == type_name(json.JSONDecodeError)

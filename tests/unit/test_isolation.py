"""One message alone in its process, the others together."""

from __future__ import annotations

import threading

from dramatiq_guard.exits.isolation import Isolation
from tests.support.waiting import wait_until
from tests.unit.conftest import deliver


def in_thread(call):
    """Call something in a thread; its result is in the list when the thread has ended."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_ordinary_messages_run_together():
    """Nobody waits for anybody."""
    isolation = Isolation(lambda: False)
    assert isolation.enter(deliver("a"))
    assert isolation.enter(deliver("b"))


def test_a_suspect_waits_until_the_others_have_run_and_lets_nobody_in():
    """Then it runs, and after it the one that came meanwhile."""
    isolation = Isolation(lambda: False)
    before, after = deliver("before"), deliver("after")
    order: list[str] = []
    isolation.enter(before)

    def suspect():
        with isolation.alone(deliver("suspect")) as admitted:
            order.append("suspect")
            return admitted

    def late():
        entered = isolation.enter(after)
        order.append("after")
        return entered

    alone, admitted = in_thread(suspect)
    wait_until(lambda: not isolation._open.is_set(), describe="the wish to be alone")
    waiting, entered = in_thread(late)
    order.append("before")
    isolation.leave(before)
    alone.join(10)
    waiting.join(10)

    assert order == ["before", "suspect", "after"]
    assert (admitted, entered) == ([True], [True])


def test_two_suspects_run_one_after_the_other():
    """Each of them alone."""
    isolation = Isolation(lambda: False)
    with isolation.alone(deliver("one")) as admitted:
        assert admitted
        second, result = in_thread(lambda: isolation.alone(deliver("two")).__enter__())
        second.join(0.05)
        assert second.is_alive()
    second.join(10)
    assert result == [True]


def test_whoever_waits_gives_up_when_the_process_ends(virtual):
    """None of them runs: neither the newcomer, nor the suspect that waits for others or for another suspect."""
    ending: list[bool] = []
    isolation = Isolation(lambda: bool(ending))
    ordinary = deliver("ordinary")
    isolation.enter(ordinary)
    virtual.meanwhile = lambda: ending.append(True)

    with isolation.alone(deliver("suspect")) as admitted:
        assert not admitted
        with isolation.alone(deliver("another")) as another:
            assert not another
        assert not isolation.enter(deliver("newcomer"))

    ending.clear()
    assert isolation.enter(deliver("later")), "the isolation is over with the suspect"


def test_a_suspect_whose_function_raises_lets_the_others_in():
    """The wish to be alone ends with it."""
    isolation = Isolation(lambda: False)
    try:
        with isolation.alone(deliver("suspect")):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert isolation.enter(deliver("a"))

"""What every store of breakers does alike: one record a downstream, changed by one at a time."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.policy.breaker import Mode, State, Tally
from dramatiq_guard.stores.breakers import BreakerStore, changed, decoded, encoded
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.testing.private_server import free_port

floats = st.floats(1e-9, 2**53)
states = st.builds(
    State,
    mode=st.sampled_from(Mode),
    since=st.integers(0, 2**53),
    rate=floats,
    learned=st.builds(Tally, floats, floats, floats),
    streak=st.integers(0, 1_000),
)


def count(state: State, now: int) -> tuple[State, int]:
    """One more, and how many there are."""
    return replace(state, streak=state.streak + 1), state.streak + 1


def test_a_record_is_kept_as_it_was_changed(breakers: BreakerStore) -> None:
    """And the answer goes to whoever changed it."""
    state = State(mode=Mode.RECOVERING, since=17, rate=12.5, learned=Tally(1.25, 0.5, 3.0))

    assert breakers.update("payments", lambda *_: (state, "answer")) == "answer"
    assert breakers.read("payments") == state


def test_what_is_not_known_is_a_new_record(breakers: BreakerStore) -> None:
    """A change is given one; a reader is told that there is none."""
    assert breakers.read("payments") is None
    assert breakers.update("payments", lambda state, _: (state, state)) == State()


def test_a_change_is_told_the_time_of_the_server(breakers: BreakerStore) -> None:
    """It never goes back."""
    times = [breakers.update("payments", lambda state, now: (replace(state, at=now), now)) for _ in range(3)]

    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000


def test_many_at_once_lose_no_change(breakers: BreakerStore) -> None:
    """Whoever was too late begins again with what the others have written."""
    threads, rounds = 4, 10
    ready = threading.Barrier(threads)

    def work(_: int) -> None:
        ready.wait(10)
        for _ in range(rounds):
            breakers.update("payments", count)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))

    known = breakers.read("payments")
    assert known is not None
    assert known.streak == threads * rounds


def test_downstreams_do_not_meet(breakers: BreakerStore) -> None:
    """Whatever they are called; they are listed by name, and forgotten one by one."""
    names = ["payments", "a b", "ü", "x" * 300, "glob[*]?"]
    for at, name in enumerate(names):
        breakers.update(name, lambda state, _, at=at: (replace(state, streak=at), None))  # type: ignore[misc]

    assert breakers.names() == tuple(sorted(names))
    assert [known.streak for name in names if (known := breakers.read(name))] == [0, 1, 2, 3, 4]
    assert breakers.forget("a b")
    assert not breakers.forget("a b")
    assert breakers.read("a b") is None


def test_it_says_whether_it_is_there(breakers: BreakerStore) -> None:
    """And is a store of breakers."""
    breakers.ping()
    assert isinstance(breakers, BreakerStore)


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_server_that_is_out_is_said_to_be(scheme: str) -> None:
    """By the error that lets all messages go."""
    breakers = connect(f"{scheme}://127.0.0.1:{free_port()}/0").breakers

    with pytest.raises(StoreUnavailable):
        breakers.update("payments", count)


@given(state=states)
def test_a_record_is_written_and_read_without_loss(state: State) -> None:
    """In ASCII."""
    assert decoded(encoded(state)) == state
    assert encoded(state).isascii()


RUBBISH = ("", "{", "[]", "null", '{"v":1}', '{"v":1,"mode":"ajar"}', '{"v":1,"mode":"open","at":{}}')


@pytest.mark.parametrize("text", [*RUBBISH, '{"v":1,"mode":"open","trial":3}'])
def test_rubbish_counts_as_nothing_known(text: str) -> None:
    """A breaker learns anew within seconds."""
    assert decoded(text) == State()


def test_what_a_version_added_may_be_missing() -> None:
    """It has its default then; what is unknown is passed over."""
    assert decoded('{"v":1,"mode":"open","since":3,"novelty":1}') == State(mode=Mode.OPEN, since=3)


@pytest.mark.parametrize("mode", [Mode.FORCED_OPEN, Mode.FORCED_CLOSED])
def test_the_word_of_an_operator_outlives_a_version(mode: Mode) -> None:
    """What a later version learned is not understood; that somebody paused the downstream is."""
    text = json.dumps({"v": 99, "mode": mode.value, "something": ["else"]})

    assert decoded(text).mode is mode
    assert decoded(text.replace(mode.value, "recovering")) == State()


def test_who_is_always_too_late_says_so() -> None:
    """In place of going on for ever."""
    with pytest.raises(StoreUnavailable, match="meanwhile"):
        changed(lambda: ("{}", 1), lambda *_: (False, "{}", 1), count)

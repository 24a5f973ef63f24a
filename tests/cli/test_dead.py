"""``dead``: looking at letters, replaying them, laying them aside."""

from __future__ import annotations

import subprocess
import sys

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import clock
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.demo.queues import look
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.testing.valkey import PrivateValkey

HOUR = 3_600_000

APP = """
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq_guard import DeadLetter, JitterBackoff, connect, install

    broker = RedisBroker(url={url!r})
    install(broker, JitterBackoff(), DeadLetter(connect({url!r}).dead_letters))
    dramatiq.set_broker(broker)
"""


@pytest.fixture
def url():
    """A Valkey of one's own, by its URL."""
    with PrivateValkey() as server:
        yield server.url


@pytest.fixture
def store(url):
    """The letters in it."""
    stores = connect(url)
    yield stores.dead_letters
    stores.close()


def died(store, number, *, reason="permanent", actor="import_row", error=None, hours_ago=0, **known):
    """Write a letter; gives its id."""
    message = dramatiq.Message("default", actor, (f"row-{number}",), {}, {}, message_id=f"m{number}")
    at = clock.now() - hours_ago * HOUR
    error = error or ValueError("odd row")
    letter = Letter.from_message(message.asdict(), reason=reason, died_at=at, exception=error, **known)
    store.put(letter)
    return letter.letter_id


@pytest.fixture
def letters(store):
    """Four letters: two of one bug, one exhausted, one old."""
    return [
        died(store, 1),
        died(store, 2),
        died(store, 3, reason="exhausted", actor="charge", error=TimeoutError("no answer")),
        died(store, 4, hours_ago=48),
    ]


def listed(outcome):
    """The ids in a list that was printed as JSON."""
    return [letter["letter_id"] for letter in outcome.document["letters"]]


def test_letters_are_listed_latest_first(call, url, letters):
    """Each with its actor, its reason and the first line of its error."""
    outcome = call("dead", "list", "--store", url)

    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]][-1] == "m4"
    assert "charge" in outcome.out
    assert "TimeoutError: no answer" in outcome.out
    assert "2 d ago" in outcome.out


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (["--reason", "exhausted"], {"m3"}),
        (["--actor", "import_row"], {"m1", "m2", "m4"}),
        (["--older-than", "1d"], {"m4"}),
        (["--newer-than", "2h", "--reason", "permanent"], {"m1", "m2"}),
        (["--text", "row-2"], {"m2"}),
        (["--error-type", "TimeoutError"], {"m3"}),
        (["--queue", "elsewhere"], set()),
        (["--state", "discarded"], set()),
    ],
)
def test_filters_narrow_the_list(call, url, letters, filters, ids):
    """Every filter holds, and they hold together."""
    assert set(listed(call("dead", "list", "--store", url, "--json", *filters))) == ids


def test_a_long_list_goes_on_at_its_cursor(call, url, letters):
    """No letter is shown twice or left out between pages."""
    first = call("dead", "list", "--store", url, "--limit", "3", "--json")
    second = call("dead", "list", "--store", url, "--limit", "3", "--json", "--cursor", first.document["cursor"])

    assert sorted(listed(first) + listed(second)) == letters
    assert second.document["cursor"] is None


def test_groups_count_letters_by_bug(call, url, letters):
    """The same error in the same place is one line."""
    groups = call("dead", "list", "--groups", "--store", url, "--json").document["groups"]

    assert [group["count"] for group in groups] == [3, 1]
    assert "ValueError: odd row" in call("dead", "list", "--groups", "--store", url).out


def test_the_store_may_come_from_the_environment_or_the_application(call, url, letters, application, monkeypatch):
    """Whoever works with one store all day need not repeat it."""
    name = application(APP.format(url=url))

    assert len(listed(call("dead", "list", "--broker", f"{name}:broker", "--json"))) == 4
    monkeypatch.setenv("DRAMATIQ_GUARD_STORE", url)
    assert len(listed(call("dead", "list", "--json"))) == 4


def test_a_letter_is_shown_whole(call, url, letters):
    """What was asked for, what it died of, and where it stands."""
    outcome = call("dead", "show", "m3", "--store", url)

    assert outcome.code == 0
    for text in ("m3", "charge", "exhausted", '"row-3"', "TimeoutError: no answer"):
        assert text in outcome.out
    assert call("dead", "show", "m3", "--store", url, "--json").document["letter_id"] == "m3"


def test_a_letter_that_is_not_there_is_named(call, url):
    """Exit code 1: the call was right, the letter is missing."""
    outcome = call("dead", "show", "m9", "--store", url)

    assert outcome.code == 1
    assert "there is no dead letter 'm9'" in outcome.err


def test_a_dry_run_changes_nothing(call, url, store, letters, application):
    """It says what would be sent, by actor, and sends nothing."""
    name = application(APP.format(url=url))
    outcome = call("dead", "replay", f"{name}:broker", "--all", "--dry-run")

    assert outcome.code == 0
    assert "4 letters of 4 would be replayed" in outcome.out
    assert "1 × charge" in outcome.out
    assert store.depth() == 4


def test_a_replay_sends_what_was_chosen(call, url, store, letters, application):
    """The messages are back on their queue, and the letters know who replayed them and why."""
    name = application(APP.format(url=url))
    outcome = call("dead", "replay", f"{name}:broker", "--reason", "permanent", "--why", "fixed", "--by", "ada")

    assert (outcome.code, outcome.out.splitlines()[0]) == (0, "3 letters of 3 replayed.")
    with RedisBroker(url=url).client as client:
        assert look(client).waiting == {"row-1", "row-2", "row-4"}
    letter = store.get("m1")
    assert (letter.state, letter.standing.by, letter.standing.why) == ("replayed", "ada", "fixed")
    assert store.depth() == 1


def test_a_letter_is_not_replayed_twice(call, url, letters, application):
    """The second time it is refused with the reason, and the exit code is 1."""
    name = application(APP.format(url=url))
    call("dead", "replay", f"{name}:broker", "m1")
    outcome = call("dead", "replay", f"{name}:broker", "m1", "m9")

    assert outcome.code == 1
    assert "m1: it was replayed already" in outcome.out
    assert "m9: there is no such letter" in outcome.out


def test_a_letter_whose_key_is_forgotten_is_replayed_by_force_only(call, url, store, letters, application):
    """Nobody can tell whether its effect happened; how many there are is said, before and after."""
    died(store, 5, key="default/charge/message/m5", remembered_until=clock.now() - HOUR)
    name = application(APP.format(url=url))

    for dry in (["--dry-run"], []):
        outcome = call("dead", "replay", f"{name}:broker", "m1", "m5", *dry)
        assert outcome.code == 1
        assert "m5: the record of its key default/charge/message/m5 has expired" in outcome.out
        assert "\n1 letter refused because nobody can tell any more whether the effect happened" in outcome.out
        assert "--force" in outcome.out
    assert store.get("m5").state == "dead"
    outcome = call("dead", "replay", f"{name}:broker", "m5", "--force")
    assert (outcome.code, outcome.out.splitlines()[0]) == (0, "1 letter of 1 replayed.")
    assert "1 letter by force" in outcome.out


def test_a_letter_names_its_key(call, url, store):
    """And says for how long that will be remembered, or that it is not any more."""
    died(store, 5, key="default/charge/message/m5", remembered_until=clock.now() - HOUR)
    died(store, 6, key="default/charge/message/m6", remembered_until=clock.now() + HOUR)

    shown = call("dead", "show", "m5", "--store", url).out
    assert "default/charge/message/m5" in shown
    assert "which is over" in shown
    assert ", in 59 min" in call("dead", "show", "m6", "--store", url).out


def test_nothing_is_acted_on_by_accident(call, url, letters, application):
    """Without ids, filters or --all there is nothing to do; ids and filters do not go together."""
    name = application(APP.format(url=url))

    for arguments in (["replay", f"{name}:broker"], ["discard", "--store", url]):
        outcome = call("dead", *arguments)
        assert (outcome.code, "Say which letters" in outcome.err) == (2, True)
    outcome = call("dead", "discard", "m1", "--all", "--store", url)
    assert (outcome.code, "but not by both" in outcome.err) == (2, True)


def test_discarded_letters_can_be_restored(call, url, store, letters):
    """Laying aside is no deletion."""
    assert "1 letter would be discarded" in call("dead", "discard", "m1", "--dry-run", "--store", url).out
    assert store.depth() == 4

    assert "3 letters of 3 discarded" in call("dead", "discard", "--reason", "permanent", "--store", url).out
    assert store.depth() == 1

    assert "1 letter of 1 restored" in call("dead", "restore", "m1", "--store", url).out
    assert store.depth() == 2


def test_discarding_what_is_not_there_fails(call, url, letters):
    """A script sees that an id was wrong."""
    outcome = call("dead", "discard", "m1", "m9", "--store", url)

    assert (outcome.code, outcome.out) == (1, "1 letter of 2 discarded.\n")


@pytest.mark.parametrize(
    ("store_url", "code", "says"),
    [
        (None, 2, "Say where the letters are"),
        ("localhost", 2, "not a URL of a store"),
        ("mongodb://localhost", 2, "the scheme 'mongodb' is unknown"),
        ("redis://127.0.0.1:1", 1, "127.0.0.1:1"),
    ],
)
def test_a_store_that_cannot_be_opened_is_named_with_its_cure(call, store_url, code, says, monkeypatch):
    """A wrong URL is a wrong call; a server that is down is a failure."""
    monkeypatch.delenv("DRAMATIQ_GUARD_STORE", raising=False)
    outcome = call("dead", "list", *([] if store_url is None else ["--store", store_url]))

    assert outcome.code == code
    assert says in outcome.err


def test_an_age_that_is_none_is_refused(call, url):
    """The error says how ages are written."""
    outcome = call("dead", "list", "--store", url, "--newer-than", "yesterday")

    assert outcome.code == 2
    assert "'yesterday' is no age: write it like 90s, 30min, 2h or 7d" in outcome.err


def test_the_verbs_work_as_a_process(url, letters):
    """The same from a shell: standard output, standard error and the exit code."""
    command = [sys.executable, "-m", "dramatiq_guard", "dead", "show", "--store", url]
    good = subprocess.run([*command, "m1"], capture_output=True, text=True, timeout=60)
    bad = subprocess.run([*command, "m9"], capture_output=True, text=True, timeout=60)

    assert (good.returncode, good.stderr) == (0, "")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("Error: there is no dead letter 'm9'")

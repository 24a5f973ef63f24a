"""``keys``: looking at idempotency keys, and deciding what only a person can."""

from __future__ import annotations

import subprocess
import sys

import dramatiq
import pytest
import redis
from click.testing import CliRunner

from dramatiq_guard import clock
from dramatiq_guard.cli.root import cli
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.idempotency.values import decode, encode, failed
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import OMITTED, Finish
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until

LEASE = 60_000
DAY = 86_400_000

APP = """
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq_guard import DeadLetter, IdempotencyGuard, JitterBackoff, connect, install

    broker = RedisBroker(url={url!r})
    stores = connect({url!r})
    install(broker, JitterBackoff(), DeadLetter(stores.dead_letters), *{guards})
    dramatiq.set_broker(broker)
"""


def key(name):
    """A key as the guard would name it."""
    return f'default/charge/key/["str","{name}"]'


@pytest.fixture(scope="module")
def server():
    """A Valkey of one's own."""
    with PrivateValkey() as server:
        yield server


@pytest.fixture
def url(server):
    """Its URL; it is empty."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture
def stores(url):
    """All that is in it."""
    stores = connect(url)
    yield stores
    stores.close()


@pytest.fixture
def store(stores):
    """The keys in it."""
    return stores.idempotency


def claimed(store, name, *, lease=LEASE):
    """Claim a key; gives its fence."""
    return store.claim(key(name), owner=f"host:1:{name}", lease=lease, retention=DAY, fingerprint=b"\xab").fence


def over(store, name):
    """Claim a key, and wait until the lease is over: its run has died."""
    claimed(store, name, lease=1)
    wait_until(lambda: store.posture().now > store.get(key(name)).lease_until, describe="the lease to be over")


def parked(store, name):
    """A key of which nobody knows whether its effect happened."""
    store.park(key(name), claimed(store, name))


@pytest.fixture
def keys(store):
    """One key in each state, and one whose run has died."""
    parked(store, "parked")
    over(store, "died")
    claimed(store, "running")
    store.release(key("free"), claimed(store, "free"))
    fence = claimed(store, "done")
    store.step(key("done"), fence, "charge", encode("ch_1"))
    store.complete(key("done"), fence, Finish(encode({"id": "ch_1"})), retention=DAY)


def letter_of(stores, name, message_id, *, reason="outcome_unknown"):
    """Write the letter of a message with this key."""
    message = dramatiq.Message("default", "charge", (name,), {}, {}, message_id=message_id)
    known = {"key": key(name), "remembered_until": clock.now() + DAY}
    stores.dead_letters.put(Letter.from_message(message.asdict(), reason=reason, died_at=clock.now(), **known))


def listed(outcome):
    """The keys in a list that was printed as JSON, by their names."""
    return {each["key"].split('"')[3] for each in outcome.document["keys"]}


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ([], {"parked", "died"}),
        (["--state", "parked"], {"parked"}),
        (["--state", "held"], {"died", "running"}),
        (["--state", "done", "--state", "free"], {"done", "free"}),
        (["--key-prefix", "default/charge/"], {"parked", "died"}),
        (["--key-prefix", "default/refund/"], set()),
    ],
)
def test_without_a_state_those_are_listed_that_wait_for_somebody(call, url, keys, asked, names):
    """Parked keys, and those of runs that have died; all others by their states."""
    assert listed(call("keys", "list", "--store", url, "--json", *asked)) == names


def test_a_list_says_where_each_key_stands(call, url, keys):
    """A held key whose lease is over is told from one that is worked on."""
    outcome = call("keys", "list", "--store", url, "--state", "held")

    lines = {line.split('"')[3]: line for line in outcome.out.splitlines()[1:]}
    assert outcome.code == 0
    assert "held, lease over" in lines["died"]
    assert "lease over" not in lines["running"]


def test_a_list_of_nothing_says_so(call, url, store):
    """Which is the usual case."""
    assert call("keys", "list", "--store", url).out == "No key waits for anybody.\n"
    assert call("keys", "list", "--store", url, "--state", "done").out == "No such keys.\n"


def test_a_long_list_goes_on_at_its_cursor(call, url, store):
    """No key is left out between pages, whatever lies between those that are listed."""
    for number in range(30):
        parked(store, f"p{number}")
        claimed(store, f"r{number}")
    found, arguments, pages = [], [], 0
    while arguments is not None:
        document = call("keys", "list", "--store", url, "--limit", "10", "--json", *arguments).document
        found += [each["key"] for each in document["keys"]]
        arguments = ["--cursor", document["cursor"]] if document["cursor"] else None
        pages += 1

    assert {key(f"p{number}") for number in range(30)} == set(found)
    assert pages > 1
    assert "There are more: --cursor" in call("keys", "list", "--store", url, "--limit", "1").out
    outcome = call("keys", "list", "--store", url, "--cursor", "rubbish")
    assert (outcome.code, "cursor" in outcome.err) == (2, True)


def test_a_key_is_shown_whole(call, url, keys):
    """Its state and what that means, its steps and its result, decoded."""
    outcome = call("keys", "show", key("done"), "--store", url)

    assert outcome.code == 0
    for text in (key("done"), "duplicates are given the result", 'charge: "ch_1"', '{"id": "ch_1"}', "once", "ab"):
        assert text in outcome.out
    document = call("keys", "show", key("done"), "--store", url, "--json").document
    assert (document["steps"], document["result"], document["result_is"]) == (
        {"charge": "ch_1"},
        {"id": "ch_1"},
        "result",
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("parked", "nobody knows whether its effect happened"),
        ("died", "last heard of when its lease ran out"),
        ("running", "a run is at work; its lease is over in"),
        ("free", "it was given back undone"),
    ],
)
def test_what_a_state_means_is_said(call, url, keys, name, says):
    """And what can be done about it, where a person is waited for."""
    outcome = call("keys", "show", key(name), "--store", url)

    assert says in outcome.out
    assert ("keys resolve 'default/charge/key/[" in outcome.out) == (name in ("parked", "died"))


@pytest.mark.parametrize(
    ("finish", "says", "is_"),
    [
        (Finish(b"\x80\xffnot ours"), r"\x80\xffnot ours", "result"),
        (Finish(b"[1]"), "[1]", "result"),
        (Finish(None, OMITTED), "not kept", "omitted"),
        (failed(ValueError("no cover")), "no cover", "failure"),
        (Finish(encode("x" * 5_000)), "characters in all", "result"),
        (Finish(), "null", "result"),
    ],
)
def test_what_cannot_be_decoded_is_shown_as_it_is(call, url, store, finish, says, is_):
    """Another encoder wrote it, or it is no result at all; looking never fails."""
    fence = claimed(store, "odd")
    store.step(key("odd"), fence, "begun", b"?")
    store.step(key("odd"), fence, "odd", b"\xff?")
    store.complete(key("odd"), fence, finish, retention=DAY)

    outcome = call("keys", "show", key("odd"), "--store", url)
    assert (outcome.code, says in outcome.out.replace("\\\\", "\\")) == (0, True), outcome.out
    assert "begun: has begun, and no more is known" in outcome.out
    document = call("keys", "show", key("odd"), "--store", url, "--json").document
    assert document["result_is"] == is_
    assert document["steps"] == {"begun": {"begun": True}, "odd": {"undecodable": "\\xff?"}}


def test_a_parked_key_is_resolved_with_what_was_found(call, url, store, caplog):
    """Done, with the result that its duplicates are given from now on; and a line says who said so."""
    parked(store, "a")
    arguments = ["--done", "--result", '{"id": "ch_9"}', "--yes", "--by", "ada", "--why", "found at the gateway"]
    outcome = call("keys", "resolve", key("a"), "--store", url, *arguments)

    assert outcome.code == 0
    assert f"Key {key('a')} was parked, and is done now." in outcome.out
    assert decode(store.get(key("a")).result) == {"id": "ch_9"}
    (line,) = [each.getMessage() for each in caplog.records if each.name == "dramatiq_guard.audit"]
    assert line.endswith(f"ada resolved key {key('a')}: was parked, is done, because: found at the gateway")


def test_a_key_whose_effect_did_not_happen_is_given_back(call, url, stores, store):
    """What runs it is the replay of its letter, and the verb says which, to be copied."""
    parked(store, "a")
    letter_of(stores, "a", "m1")
    letter_of(stores, "b", "m2")
    letter_of(stores, "a", "m3", reason="key_reused")
    outcome = call("keys", "resolve", key("a"), "--store", url, "--retry", "--yes")

    assert outcome.code == 0
    assert f"Key {key('a')} was parked, and is free now." in outcome.out
    assert outcome.out.endswith("\n  dramatiq-guard dead replay MODULE:BROKER m1\n")
    assert store.get(key("a")).state == "free"


def test_a_key_whose_run_has_died_is_resolved_as_well(call, url, store):
    """And where no letter is found, the reason finds it."""
    over(store, "a")
    outcome = call("keys", "resolve", key("a"), "--store", url, "--retry", "--yes", "--json")

    assert outcome.code == 0
    assert outcome.document == {
        "key": key("a"),
        "was": "held",
        "is": "free",
        "letters": [],
        "replay": "dramatiq-guard dead replay MODULE:BROKER --reason outcome_unknown",
    }


def test_what_was_begun_and_declared_undone_is_shown_so(call, url, store):
    """The next run does it; a message that the broker still has comes by itself."""
    over(store, "a")
    again = store.claim(key("a"), owner="next", lease=LEASE, retention=DAY, fingerprint=b"\xab")
    store.step(key("a"), again.fence, "charge", b"?")
    store.step(key("a"), again.fence, "book", encode("b-1"))
    store.park(key("a"), again.fence)
    assert call("keys", "resolve", key("a"), "--store", url, "--retry", "--yes").code == 0

    outcome = call("keys", "show", key("a"), "--store", url)
    for text in ("charge: had begun, and did not happen", 'book: "b-1"', "resolved:", "to be run again"):
        assert text in outcome.out
    assert "~decided" not in outcome.out
    document = call("keys", "show", key("a"), "--store", url, "--json").document
    assert document["steps"] == {"charge": {"begun": True, "happened": False}, "book": "b-1"}
    assert document["resolved_at"] >= document["first_claim_at"]

    over(store, "b")
    outcome = call("keys", "resolve", key("b"), "--store", url, "--retry", "--yes")
    assert "Its message is delivered again by the broker; if it is dead already:" in outcome.out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("running", "is busy: a run is at work"),
        ("done", "is done already, and its result stands"),
        ("free", "is free already"),
        ("nobody", "is absent"),
    ],
)
def test_where_there_is_nothing_to_decide_that_is_said(call, url, store, keys, name, says):
    """Exit code 1, before anybody is asked; the record stays as it is."""
    before = store.get(key(name))
    for decision in ("--done", "--retry"):
        outcome = call("keys", "resolve", key(name), "--store", url, decision)
        assert (outcome.code, says in outcome.err) == (1, True), outcome.err
        assert "?" not in outcome.err
    assert store.get(key(name)) == before


def test_what_was_decided_meanwhile_is_not_decided_again(call, url, store, monkeypatch):
    """The store has the last word."""
    parked(store, "a")
    before = store.get(key("a"))
    store.resolve(key("a"), done=True)
    monkeypatch.setattr("dramatiq_guard.stores.redis.idempotency.RedisIdempotency.get", lambda *_: before)
    outcome = call("keys", "resolve", key("a"), "--store", url, "--retry", "--yes")

    assert (outcome.code, "is done already" in outcome.err) == (1, True)


@pytest.mark.parametrize("verb", [("resolve", "--retry"), ("forget",)])
@pytest.mark.parametrize("answer", ["n\n", "", "y\n"])
def test_a_person_is_asked_first(url, store, verb, answer):
    """A no changes nothing, nor does nobody."""
    parked(store, "a")
    outcome = CliRunner().invoke(cli, ["keys", *verb, key("a"), "--store", url], input=answer)

    assert outcome.exit_code == {"y\n": 0, "n\n": 1, "": 2}[answer]
    assert "nobody knows whether its effect happened" in outcome.stderr
    assert {"y\n": "", "n\n": "Nothing was changed", "": "give --yes"}[answer] in outcome.stderr
    record = store.get(key("a"))
    assert (record is not None and record.state == "parked") == (answer != "y\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Say what you found"),
        (["--done", "--retry"], "Say what you found"),
        (["--retry", "--result", "1"], "it goes with --done"),
        (["--done", "--result", "{so}"], "--result is no JSON"),
    ],
)
def test_a_wrong_call_is_told_apart(call, url, store, arguments, says):
    """Exit code 2; nothing is done."""
    parked(store, "a")
    outcome = call("keys", "resolve", key("a"), "--store", url, "--yes", *arguments)

    assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    assert store.get(key("a")).state == "parked"


def test_a_forgotten_key_is_free_for_anybody(call, url, store, keys, caplog):
    """The work may run again, and the verb says so before and after."""
    outcome = call("keys", "forget", key("done"), "--store", url, "--yes", "--by", "ada")

    assert (outcome.code, "runs it again" in outcome.out) == (0, True)
    assert store.get(key("done")) is None
    assert f"ada forgot key {key('done')}: was done" in caplog.text
    outcome = call("keys", "forget", key("done"), "--store", url, "--yes")
    assert (outcome.code, "is absent" in outcome.err) == (1, True)
    assert call("keys", "forget", key("free"), "--store", url, "--yes", "--json").document["was"] == "free"


def test_forgetting_the_key_of_a_run_is_warned_of(url, store, keys):
    """It would get company."""
    outcome = CliRunner().invoke(cli, ["keys", "forget", key("running"), "--store", url], input="n\n")

    assert "beside the run that is at work now" in outcome.stderr


def test_the_store_may_be_that_of_the_application(call, url, stores, store, application):
    """Then the command to go on with names the broker, too."""
    parked(store, "a")
    letter_of(stores, "a", "m1")
    name = application(APP.format(url=url, guards="[IdempotencyGuard(stores.idempotency)]"))

    assert listed(call("keys", "list", "--broker", f"{name}:broker", "--json")) == {"a"}
    assert "Dead letters that wait for it: m1" in call("keys", "show", key("a"), "--broker", f"{name}:broker").out
    outcome = call("keys", "resolve", key("a"), "--broker", f"{name}:broker", "--done", "--yes")
    assert outcome.out.endswith(f"\n  dramatiq-guard dead replay {name}:broker m1\n")


def test_a_store_that_nobody_names_is_asked_for(call, url, application, monkeypatch):
    """By the verb, or by a broker that guards nothing."""
    monkeypatch.delenv("DRAMATIQ_GUARD_STORE", raising=False)
    outcome = call("keys", "list")
    assert (outcome.code, "Say where the keys are" in outcome.err) == (2, True)

    name = application(APP.format(url=url, guards="[]"))
    outcome = call("keys", "list", "--broker", f"{name}:broker")
    assert (outcome.code, "has no IdempotencyGuard" in outcome.err) == (2, True)


def test_the_verbs_work_as_a_process(url, store):
    """The audit line goes to standard error where no logging is configured."""
    parked(store, "a")
    command = [sys.executable, "-m", "dramatiq_guard", "keys", "resolve", key("a"), "--store", url, "--done", "--yes"]
    good = subprocess.run([*command, "--by", "ada"], capture_output=True, text=True, timeout=60)
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (good.returncode, f"ada resolved key {key('a')}" in good.stderr) == (0, True)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith(f"Error: key {key('a')} is done already")

"""``schedule``: the timetable of an actor's retries."""

from __future__ import annotations

APP = """
    import dramatiq
    from dramatiq.brokers.stub import StubBroker
    from dramatiq_guard import JitterBackoff, install

    broker = StubBroker()
    install(broker, JitterBackoff(min_backoff=1_000, max_backoff=60_000, max_retries=4))
    dramatiq.set_broker(broker)

    @dramatiq.actor
    def charge(): ...

    @dramatiq.actor(max_retries=2, backoff=[60_000, 300_000], jitter="none", max_backoff=600_000)
    def report(): ...

    @dramatiq.actor(max_retries=None)
    def forever(): ...

    @dramatiq.actor(max_retries=0)
    def once(): ...

    @dramatiq.actor(retry_for=5_000)
    def soon(): ...
"""


def test_the_timetable_has_bounds_and_a_total(call, application):
    """Each retry is listed with its shortest and longest wait, and with how long it all takes."""
    outcome = call("schedule", f"{application(APP)}:broker", "charge", "--json")

    assert outcome.code == 0
    assert [row["low"] for row in outcome.document["retries"]] == [1_100, 2_200, 4_400, 8_800]
    assert [row["high"] for row in outcome.document["retries"]] == [1_200, 2_400, 4_800, 9_600]
    assert outcome.document["retries"][-1]["total_high"] == 18_000


def test_the_actors_own_options_hold(call, application):
    """What an actor says about its retries goes before what the middleware says."""
    outcome = call("schedule", f"{application(APP)}:broker", "report")

    assert outcome.code == 0
    assert "1 min" in outcome.out
    assert "2 retries over 6 min" in outcome.out


def test_endless_retries_are_shown_in_part(call, application):
    """An actor that is retried for ever has a timetable that ends somewhere."""
    outcome = call("schedule", f"{application(APP)}:broker", "forever")

    assert "The first 25 of an unlimited number of retries" in outcome.out


def test_an_actor_without_retries_has_no_timetable(call, application):
    """0 is a value."""
    assert "No retries" in call("schedule", f"{application(APP)}:broker", "once").out


def test_retry_for_ends_the_timetable(call, application):
    """No retry is listed that would come after the time is over."""
    outcome = call("schedule", f"{application(APP)}:broker", "soon", "--json")

    assert [row["retry"] for row in outcome.document["retries"]] == [1, 2]


def test_an_unknown_actor_is_named_with_those_that_exist(call, application):
    """A typing error is seen at once."""
    outcome = call("schedule", f"{application(APP)}:broker", "chrage")

    assert outcome.code == 2
    assert "no actor 'chrage'. Its actors: charge, forever, once, report, soon" in outcome.err


def test_a_broker_without_the_middleware_is_told_how_to_get_it(call, application):
    """On plain Dramatiq there is no timetable to print."""
    name = application("from dramatiq.brokers.stub import StubBroker\nbroker = StubBroker()\n\n")
    outcome = call("schedule", f"{name}:broker", "charge")

    assert outcome.code == 2
    assert "no actor 'charge'. Its actors: it has none" in outcome.err


def test_a_missing_module_is_named_with_the_directory(call, application):
    """Most often the command was started in the wrong directory."""
    application("")
    outcome = call("schedule", "no_such_app:broker", "charge")

    assert outcome.code == 2
    assert "There is no module 'no_such_app' here" in outcome.err


def test_a_module_that_raises_is_named_with_its_error(call, application):
    """The user's own error is passed on, without a traceback."""
    name = application("raise KeyError('DATABASE_URL')")
    outcome = call("schedule", f"{name}:broker", "charge")

    assert outcome.code == 2
    assert f"Importing {name!r} raised KeyError: 'DATABASE_URL'" in outcome.err


def test_what_a_module_lacks_is_named(call, application):
    """A module that is there but cannot import what it needs is not called missing."""
    name = application("import no_such_dependency")
    outcome = call("schedule", f"{name}:broker", "charge")

    assert outcome.code == 2
    assert "it needs 'no_such_dependency', which is not installed" in outcome.err


def test_what_is_no_broker_is_refused(call, application):
    """The name must lead to a broker."""
    name = application("broker = 3")
    outcome = call("schedule", f"{name}:broker", "charge")

    assert outcome.code == 2
    assert "is not a Broker. Name the broker as for the dramatiq command" in outcome.err

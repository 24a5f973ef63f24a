"""What a store costs does not grow with what it holds: counted in round trips and in what the servers look at."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import redis

from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import DeadLetterStore, Filter
from tests.support.proxy import FaultyProxy

from .letters import T0, letter

#: `nox -s growth` asks for a million.
LARGE = int(os.environ.get("DRAMATIQ_GUARD_TEST_LETTERS", "20000"))

USES: dict[str, Callable[[DeadLetterStore], Any]] = {
    "put": lambda store: store.put(letter("new", 10**9)),
    "put again": lambda store: store.put(letter("new", 10**9)),
    "get": lambda store: store.get("m7"),
    "first page": lambda store: store.page(),
    "page of a filter": lambda store: store.page(Filter(actor="a1", reason="exhausted")),
    "page far down": lambda store: store.page(cursor=f"{T0 + 500}:m500"),
    "page far down of a filter": lambda store: store.page(Filter(actor="a1"), cursor=f"{T0 + 500}:m500"),
    "groups": lambda store: store.groups(),
    "count": lambda store: store.count(Filter(queue="default")),
    "depth": lambda store: (store.depth(), store.oldest()),
    "replay": lambda store: store.begin_replay(["m1", "m2", "m3"], owner="o", now=T0),
    "discard": lambda store: store.discard(["m4", "m5"], now=T0),
    "nothing to purge": lambda store: store.purge(now=T0, max_count=10**9),
}


def fill_redis(client: redis.Redis, start: int, end: int) -> None:
    """Write letters the short way: all are alike but for their ids, times and cells."""
    store = connect(client).dead_letters
    cells = []
    for kind in range(20):
        store.put(letter(f"seed{kind}", kind, actor=f"a{kind % 10}", fingerprint=f"f{kind}"))
        cells.append(client.hget("{dramatiq-guard}:dead-letters:letter:seed" + str(kind), "cell").decode())
    base = "{dramatiq-guard}:dead-letters"
    sample = {k.decode(): v for k, v in client.hgetall(f"{base}:letter:seed0").items()}
    with client.pipeline(transaction=False) as pipeline:
        for at in range(start, end):
            cell = cells[at % 20]
            record = json.dumps({**json.loads(sample["record"]), "letter_id": f"m{at}", "died_at": T0 + at})
            own = {"record": record, "cell": cell, "died_at": T0 + at, "message_id": f"m{at}"}
            pipeline.hset(f"{base}:letter:m{at}", mapping={**sample, **own})
            pipeline.zadd(f"{base}:state:dead", {f"m{at}": T0 + at})
            pipeline.zadd(f"{base}:cell:{cell}:dead", {f"m{at}": T0 + at})
            if at % 2_000 == 0:
                pipeline.execute()
        pipeline.execute()


def fill_postgres(url: str, start: int, end: int) -> None:
    """Write letters in one statement: copies of twenty, of as many kinds."""
    store = connect(url).dead_letters
    for kind in range(20):
        store.put(letter(f"seed{kind}", kind, actor=f"a{kind % 10}", fingerprint=f"f{kind}"))
    store.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            """
            INSERT INTO dramatiq_guard.dead_letters
                (letter_id, message_id, cell, died_at, message_timestamp, replay_n, record, searched, state, since)
            SELECT 'm' || at, 'm' || at, cell, %(t0)s + at, message_timestamp, 0,
                replace(record, 'seed' || at %% 20, 'm' || at), searched, 'dead', %(t0)s + at
            FROM generate_series(%(start)s::bigint, %(end)s::bigint - 1) AS at
            JOIN dramatiq_guard.dead_letters ON letter_id = 'seed' || at %% 20
            """,
            {"t0": T0, "start": start, "end": end},
        )
        connection.execute("VACUUM ANALYZE dramatiq_guard.dead_letters")


def turns_of(proxy: FaultyProxy, store: DeadLetterStore, use: Callable[[DeadLetterStore], Any]) -> int:
    proxy.forget()
    use(store)
    return proxy.turns


@pytest.mark.timeout(900)
def test_round_trips_do_not_grow(redis_url: str, redis_client: redis.Redis) -> None:
    """On Redis each use is one round trip (two where it asks two things), at a thousand letters and at many."""
    found: dict[int, dict[str, int]] = {}
    with FaultyProxy(redis_url) as proxy:
        store = connect(proxy.url).dead_letters
        filled = 0
        for size in (1_000, LARGE):
            for use in USES.values():
                use(store)  # the server learns the scripts
            redis_client.flushdb()
            fill_redis(redis_client, 0, size)
            found[size] = {name: turns_of(proxy, store, use) for name, use in USES.items()}
            filled = size
        assert filled + 20 + 1 == sum(store.depth(state) for state in ("dead", "replaying", "discarded"))
        store.close()

    assert found[1_000] == found[LARGE]
    assert {name: 2 if name == "depth" else 1 for name in USES} == found[LARGE]


def test_a_page_of_redis_reads_no_more_than_it_shows(redis_url: str, redis_client: redis.Redis) -> None:
    """The commands that a page's script makes are as many at twenty times the letters."""

    def commands(use: Callable[[DeadLetterStore], Any]) -> int:
        redis_client.config_resetstat()
        use(store)
        stats = redis_client.info("commandstats")
        return sum(
            each["calls"] for name, each in stats.items() if name.split("_")[1] in {"hmget", "zrevrange", "zcount"}
        )

    store = connect(redis_url).dead_letters
    counts = []
    for start, end in ((0, 1_000), (1_000, LARGE)):
        fill_redis(redis_client, start, end)
        counts.append({name: commands(USES[name]) for name in ("first page", "page of a filter")})

    assert counts[0] == counts[1]
    store.close()


@pytest.mark.timeout(900)
def test_postgres_looks_at_no_more_rows(postgres_url: str) -> None:
    """The blocks that a use touches grow with the depth of an index and not with its size."""
    apply_schema(postgres_url)
    store = connect(postgres_url + "?application_name=counted").dead_letters
    touched: list[dict[str, int]] = []

    for start, end in ((0, 1_000), (1_000, LARGE)):
        fill_postgres(postgres_url, start, end)
        for use in USES.values():
            use(store)
        touched.append({name: _blocks(postgres_url, name) for name in EXPLAINED})
    store.close()

    for name in EXPLAINED:
        assert touched[1][name] <= touched[0][name] * 2 + 50, (name, touched)


EXPLAINED = ("first page", "page of a filter", "groups")


def _blocks(url: str, name: str) -> int:
    """Blocks that the statement of a use touches, as EXPLAIN counts them."""
    seen: list[tuple[str, Any]] = []
    store = connect(url).dead_letters
    connection = store._connection  # type: ignore[attr-defined]
    rows = connection.rows

    def watched(what: str, statement: str, parameters: Any) -> Any:
        seen.append((statement, parameters))
        return rows(what, statement, parameters)

    connection.rows = watched
    USES[name](store)
    (plan,) = rows("explaining", "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + seen[0][0], seen[0][1])[0]
    store.close()
    top = plan[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def test_letters_written_the_short_way_are_letters(redis_url: str, redis_client: redis.Redis) -> None:
    """What the other tests here count on."""
    fill_redis(redis_client, 0, 50)
    store = connect(redis_url).dead_letters
    page = store.page(Filter(actor="a1"), limit=100)

    assert [f"m{at}" for at in (41, 31, 21)] == [each.letter_id for each in page.letters][:3]
    assert all(isinstance(each, Letter) for each in page.letters)
    store.close()

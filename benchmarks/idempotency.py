"""What a guarded message costs: round trips, CPU time, latency, memory; against naive designs and another library.

    python benchmarks/idempotency.py --quick | --full [--json FILE] [--only PART] [--without-powertools]

The parts, each a table:

``trips``    round trips of the whole guard, a real worker in this process, counted by a proxy before its store
``cpu``      CPU time of a worker process per message, as a ratio to stock in the same round (as `overhead` measures it)
``growth``   latency of claim, completion and duplicate, and bytes per key, over the number of keys and result sizes
``designs``  round trips, CPU time and latency of one job's two words with the store, by designs one might think of

aws-lambda-powertools is measured where it is installed (the nox session ``bench_idempotency`` installs it), and missing
it ends the run, unless it is declined.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
import redis

from benchmarks import overhead
from benchmarks.idempotency_designs import designs
from dramatiq_guard import connect
from dramatiq_guard.stores.idempotency import Finish
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.idempotency.bench import Bench
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS = ("trips", "cpu", "growth", "designs")
LEASE, RETENTION = 30_000, 86_400_000
CPU_TITLES = {
    "stock": "stock",
    "stack": "stack",
    "message-id": "stack + key (message id), Redis",
    "key": "stack + key (business), Redis",
    "postgres-key": "stack + key (business), PostgreSQL",
}
TARGETS = {"key": 1.6, "message-id": 1.6}


def trips(urls: dict[str, str]) -> list[dict[str, Any]]:
    """Round trips of a fresh, a duplicate and a busy message."""
    rows = []
    for kind, url in urls.items():
        with (
            FaultyProxy(url) as proxy,
            contextlib.closing(connect(proxy.url)) as stores,
            contextlib.closing(Bench(store=stores.idempotency)) as bench,
        ):
            go, began = threading.Event(), threading.Event()

            @bench.actor(idempotency_key="order:{order_id}", on_busy="fail")
            def charge(order_id: int, began: Any = began, go: Any = go) -> None:
                if order_id == 2:
                    began.set()
                    go.wait(20)

            def counted(do: Callable[[], Any], proxy: FaultyProxy = proxy) -> int:
                proxy.forget()
                do()
                return proxy.turns

            bench.work(threads=2)
            bench.run(charge.message(0))
            row = {"store": kind}
            row["fresh"] = counted(lambda: bench.run(charge.message(1)))
            row["duplicate"] = counted(lambda: bench.run(charge.message(1)))
            bench.deliver(charge.message(2))
            began.wait(20)

            def one_more() -> None:
                bench.deliver(charge.message(2))
                wait_until(bench.letters, describe="the busy message's dead letter")

            row["busy"] = counted(one_more)
            go.set()
            bench.settle()
            rows.append(row)
    return rows


def cpu(postgres: str, messages: int, rounds: int) -> list[dict[str, Any]]:
    """CPU time of a worker process per message."""
    os.environ["OVERHEAD_POSTGRES"] = postgres
    scenario = overhead.Scenario("work", "a guarded message that succeeds", messages, 1)
    results = [
        overhead.Result(overhead.Case(scenario, setup, title, TARGETS.get(setup)))
        for setup, title in CPU_TITLES.items()
    ]
    with tempfile.TemporaryDirectory(prefix="idempotency-") as directory, PrivateValkey() as valkey:
        for _ in range(rounds):
            with psycopg.connect(postgres, autocommit=True) as connection:
                # Each worker is sent the same numbers.
                connection.execute("TRUNCATE dramatiq_guard.keys")
            for result in results:
                overhead.measure(result.case, result, valkey, Path(directory))
    stock, stack = results[0], results[1]
    return [
        {**each.summary(stock), "ratio_to_stack": round(statistics.median(each.ratios(stack)), 3)} for each in results
    ]


def _median_us(do: Callable[[int], Any], times: int, first: int = 0) -> float:
    taken = []
    for number in range(first, first + times):
        began = time.perf_counter_ns()
        do(number)
        taken.append(time.perf_counter_ns() - began)
    return round(statistics.median(taken) / 1000, 1)


def growth(urls: dict[str, str], counts: Sequence[int], sizes: Sequence[int], times: int) -> list[dict[str, Any]]:
    """Latency and memory per key, by how many keys there are and how long their results are."""
    rows = []
    for kind, url in urls.items():
        for count, size in [(count, 40) for count in counts] + [(10_000, size) for size in sizes if size != 40]:
            with contextlib.closing(connect(url)) as stores:
                store, result = stores.idempotency, Finish(os.urandom(size))
                fill = _fill_redis if kind == "redis" else _fill_postgres
                per_key = fill(url, store, result, count)
                fences: dict[int, int] = {}

                def claim(number: int, store: Any = store, fences: dict[int, int] = fences) -> Any:
                    claimed = store.claim(
                        f"shop/charge/key/new-{number}", owner=f"o{number}", lease=LEASE, retention=RETENTION
                    )
                    fences[number] = claimed.fence
                    return claimed

                def complete(
                    number: int, store: Any = store, fences: dict[int, int] = fences, result: Finish = result
                ) -> None:
                    store.complete(f"shop/charge/key/new-{number}", fences[number], result, retention=RETENTION)

                for number in range(-20, 0):
                    claim(number)
                    complete(number)
                rows.append(
                    {
                        "store": kind,
                        "keys": count,
                        "result_bytes": size,
                        "bytes_per_key": per_key,
                        "claim_us": _median_us(claim, times),
                        "complete_us": _median_us(complete, times),
                        "duplicate_us": _median_us(claim, times),
                    }
                )
    return rows


def _made(store: Any, result: Finish) -> str:
    key = f"shop/charge/key/{0:032x}"
    claimed = store.claim(key, owner="host:123:0123456789ab", lease=LEASE, retention=RETENTION, fingerprint=b"f" * 16)
    store.complete(key, claimed.fence, result, retention=RETENTION)
    return key


def _fill_redis(url: str, store: Any, result: Finish, count: int) -> int:
    """Copy one finished record under as many names; bytes per key, as the server counts its memory."""
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        client.flushall()
        name = f"dramatiq-guard:key:{_made(store, result)}"
        record: Any = client.dump(name)
        before: Any = client.info("memory")
        for first in range(0, count, 5_000):
            with client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + 5_000, count)):
                    pipeline.restore(f"dramatiq-guard:key:shop/charge/key/{number + 1:032x}", RETENTION, record)
                pipeline.execute()
        after: Any = client.info("memory")
        return round((after["used_memory"] - before["used_memory"]) / count)


def _fill_postgres(url: str, store: Any, result: Finish, count: int) -> int:
    """The same; bytes per key with its index, as they lie on disk."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE dramatiq_guard.keys")
        key = _made(store, result)
        columns = connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'dramatiq_guard' "
            "AND table_name = 'keys' AND column_name <> 'key' AND is_generated = 'NEVER'"
        ).fetchall()
        others = ", ".join(name for (name,) in columns)
        copying = (
            f"INSERT INTO dramatiq_guard.keys (key, {others}) SELECT 'shop/charge/key/' || lpad(to_hex(n), 32, '0'), "
            f"{others} FROM dramatiq_guard.keys, generate_series(1, %s::integer) AS n WHERE key = %s"
        )
        connection.execute(copying.encode(), (count, key))
        connection.execute("ANALYZE dramatiq_guard.keys")
        row: Any = connection.execute("SELECT pg_total_relation_size('dramatiq_guard.keys')").fetchone()
        return round(row[0] / (count + 1))


def compared(urls: dict[str, str], rounds: int, times: int, powertools: bool) -> list[dict[str, Any]]:
    """Each design's round trips, CPU time and latency; the rounds of all designs interleaved."""
    kinds = designs(powertools=powertools)
    rows: dict[str, dict[str, Any]] = {}
    for design in kinds:
        url = urls[design.kind]
        with FaultyProxy(url) as proxy, contextlib.closing(design.make(proxy.through(url))) as seen:
            seen.run("warm", "r")
            row: dict[str, Any] = {"store": design.kind, "design": design.title, "one_winner": design.one_winner}
            for word, do in _words(seen, f"{design.title}-counted").items():
                _warm(do)
                proxy.forget()
                do(0)
                row[f"{word}_trips"] = proxy.turns
        rows[design.title] = {**row, "us": {}, "cpu_us": {}}
    with contextlib.ExitStack() as stack:
        made = [(each, stack.enter_context(contextlib.closing(each.make(urls[each.kind])))) for each in kinds]
        for number in range(rounds):
            for design, there in made:
                row = rows[design.title]
                for word, do in _words(there, f"{design.title}-{number}").items():
                    _warm(do)
                    before = time.process_time_ns()
                    row["us"].setdefault(word, []).append(_median_us(do, times))
                    spent = (time.process_time_ns() - before) / times / 1000
                    row["cpu_us"].setdefault(word, []).append(spent)
    for row in rows.values():
        for what in ("us", "cpu_us"):
            for word, each in row.pop(what).items():
                row[f"{word}_{what}"] = round(min(each), 1)
    return list(rows.values())


def _warm(do: Callable[[int], Any]) -> None:
    # Drivers prepare a statement after its fifth time, with a round trip more.
    for number in range(-8, 0):
        do(number)


def _words(design: Any, prefix: str) -> dict[str, Callable[[int], Any]]:
    """What a fresh job, a duplicate and a busy one say; the duplicates are those of the fresh jobs before."""
    design.hold(f"{prefix}-held")
    return {
        "fresh": lambda number: design.run(f"{prefix}-{number}", "result"),
        "duplicate": lambda number: design.run(f"{prefix}-{number}", "result"),
        "busy": lambda _: design.run(f"{prefix}-held", "result"),
    }


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows for people."""
    cells = [list(columns), *[["" if row.get(c) is None else str(row[c]) for c in columns] for row in rows]]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    lines = [zip(line, widths, strict=True) for line in cells]
    return "\n".join("  " + "  ".join(_placed(*cell) for cell in line) for line in lines)


def _placed(cell: str, width: int) -> str:
    return cell.ljust(width) if cell[:1].isalpha() else cell.rjust(width)


COLUMNS: dict[str, tuple[str, ...]] = {
    "trips": ("store", "fresh", "duplicate", "busy"),
    "cpu": ("title", "ratio", "ratio_to_stack", "min_us", "median_us", "target"),
    "growth": ("store", "keys", "result_bytes", "bytes_per_key", "claim_us", "complete_us", "duplicate_us"),
    "designs": (
        *("design", "one_winner", "fresh_trips", "duplicate_trips", "busy_trips"),
        *("fresh_us", "duplicate_us", "busy_us", "fresh_cpu_us", "duplicate_cpu_us", "busy_cpu_us"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="idempotency", description="What a guarded message costs.")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true", help="about a minute; two short rounds")
    size.add_argument("--full", action="store_true", help="a million keys, more rounds: some fifteen minutes")
    size.add_argument("--smallest", action="store_true", help="seconds: shows that it works, says nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--only", action="append", default=[], choices=PARTS, help="one part; repeatable")
    parser.add_argument("--without-powertools", action="store_true", help="leave aws-lambda-powertools out")
    chosen = parser.parse_args(arguments)
    parts = chosen.only or PARTS
    powertools = not chosen.without_powertools
    if "designs" in parts and powertools and importlib.util.find_spec("aws_lambda_powertools") is None:
        raise SystemExit(
            "idempotency: aws-lambda-powertools is not installed: run nox -s bench_idempotency, or leave it out by "
            "--without-powertools"
        )
    messages, rounds, times = (50, 1, 5) if chosen.smallest else (600, 2, 200) if chosen.quick else (3000, 7, 500)
    counts = [100] if chosen.smallest else [1_000, 10_000, 100_000, *([1_000_000] if chosen.full else [])]
    sizes = [] if chosen.smallest else [4, 40, 200, 2048]
    found: dict[str, Any] = {}
    logging.disable()  # what becomes of the busy message is no news
    warnings.simplefilter("ignore")  # powertools misses its Lambda context
    with PrivateValkey() as valkey, PrivatePostgres() as postgres:
        urls = {"redis": valkey.url, "postgresql": postgres.url}
        apply_schema(postgres.url)
        work: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "trips": lambda: trips(urls),
            "cpu": lambda: cpu(postgres.url, messages, rounds),
            "growth": lambda: growth(urls, counts, sizes, times),
            "designs": lambda: compared(urls, rounds, times, powertools),
        }
        for part in PARTS:
            if part in parts:
                found[part] = work[part]()
                print(f"\n{part}\n{table(found[part], COLUMNS[part])}", flush=True)
    about = {name: version(name) for name in ("dramatiq", "redis", "psycopg")}
    about["python"] = platform.python_version()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"about": about, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

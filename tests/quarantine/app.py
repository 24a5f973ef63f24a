"""What a `dramatiq` process of these tests imports: innocent jobs, poison of every kind, and fatal errors.

All is set by the environment, so that one module serves every test:

=====================  ===============================================================================================
`QUARANTINE_BROKER`    ``redis``, ``rabbitmq`` or ``quorum``, which is RabbitMQ with quorum queues
`QUARANTINE_URL`       where it is
`QUARANTINE_NAME`      the queue, the namespace on Redis and the schema on PostgreSQL, so that many can run at once
`QUARANTINE_STORE`     the URL of the stores
`QUARANTINE_LEDGER`    the file that jobs write to
`QUARANTINE_STACK`     ``guard``, or ``stock`` for Dramatiq by itself
`QUARANTINE_OPTIONS`   options of `CrashOnFatal`, in JSON
`QUARANTINE_SOFT`      the soft deadline in milliseconds; the hard one is three seconds later
=====================  ===============================================================================================
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, default_middleware, raise_thread_exception

from dramatiq_guard import Classify, CrashOnFatal, DeadLetter, Fatal, GracefulShutdown, JitterBackoff, connect, install

NAME = os.environ["QUARANTINE_NAME"]
KIND = os.environ["QUARANTINE_BROKER"]
SOFT = int(os.environ.get("QUARANTINE_SOFT", "3000"))

_middleware: list[Any] = [*(kind() for kind in default_middleware if kind.__name__ != "Prometheus"), AsyncIO()]


class QuorumBroker(RabbitmqBroker):
    """Declares quorum queues, which Dramatiq has no option for."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        return {**super()._build_queue_arguments(queue_name), "x-queue-type": "quorum"}


class Unfit(Exception):
    """A class that the user names as fatal."""


broker: Any
if KIND == "redis":
    broker = RedisBroker(
        url=os.environ["QUARANTINE_URL"], namespace=NAME, heartbeat_timeout=2_000, middleware=_middleware
    )
else:
    cls = QuorumBroker if KIND == "quorum" else RabbitmqBroker
    broker = cls(url=os.environ["QUARANTINE_URL"], confirm_delivery=True, middleware=_middleware)

if os.environ.get("QUARANTINE_STACK", "guard") == "guard":
    stores = connect(os.environ["QUARANTINE_STORE"], prefix=NAME, schema=NAME)
    install(
        broker,
        Classify(fatal=[Unfit]),
        JitterBackoff(
            min_backoff=60_000, max_backoff=60_000, deliveries=stores.deliveries if KIND != "redis" else None
        ),
        DeadLetter(stores.dead_letters),
        CrashOnFatal(
            stores.deliveries,
            **{"heartbeat": 300, "max_crashes": 3, **json.loads(os.environ.get("QUARANTINE_OPTIONS", "{}"))},
        ),
        GracefulShutdown(soft_deadline=SOFT, hard_deadline=SOFT + 3_000),
    )
dramatiq.set_broker(broker)


def note(what: str, key: str) -> None:
    """Add a line to the ledger in one write, which survives whatever ends the process."""
    file = os.open(os.environ["QUARANTINE_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{what} {key} {os.getpid()}\n".encode())
    finally:
        os.close(file)


def in_steps(seconds: float) -> None:
    """Sleep so that an interrupt arrives soon."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)


@dramatiq.actor(queue_name=NAME)
def innocent(key: str, seconds: float) -> None:
    """Harms nobody."""
    note("began", key)
    in_steps(seconds)
    note("finished", key)


# -- what kills the process ------------------------------------------------------------------------------------------


def address_space() -> int:
    """How many bytes of it this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def exhaust_memory_in_c() -> None:
    """Run out of address space in C, which does not look whether it was given any: killed by SIGSEGV."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 64 * 2**20, resource.RLIM_INFINITY))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    while True:
        ctypes.memset(libc.malloc(ctypes.c_size_t(16 * 2**20)), 1, 1)


DEATHS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "out of memory": exhaust_memory_in_c,
    "abort": os.abort,
    "exit": lambda: os._exit(0),
}


@dramatiq.actor(queue_name=NAME)
def poison(key: str, kind: str, seconds: float) -> None:
    """Kills its process after a while."""
    note("began", key)
    in_steps(seconds)
    DEATHS[kind]()


# -- what makes it unfit ---------------------------------------------------------------------------------------------


def exhaust_memory() -> None:
    """Run out of address space in Python, which raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 64 * 2**20, resource.RLIM_INFINITY))
    try:
        bytearray(2**33)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def need_what_there_is_not() -> None:
    """Find the process unfit when there is no room left for a thread, which ending it takes."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space(), resource.RLIM_INFINITY))
    raise Fatal("nothing can be started any more")


def die_in_a_thread() -> None:
    """An error that nobody catches, in a thread that the actor has started."""
    thread = threading.Thread(target=lambda: 1 / 0, name="of-the-actor")
    thread.start()
    thread.join()


def kill_a_worker_thread() -> None:
    """Raise in a worker thread while it waits for work, which Dramatiq survives in no way."""
    threading.Thread(target=_kill_an_idle_one, daemon=True).start()


def _kill_an_idle_one() -> None:
    threads = [thread for thread in threading.enumerate() if type(thread).__name__ == "WorkerThread"]
    while all(thread.is_alive() for thread in threads):
        for thread in threads:
            frame: Any = sys._current_frames().get(thread.ident or 0)
            names = set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            if "process_message" not in names:
                raise_thread_exception(thread.ident, SystemExit)
                thread.join(1)
                break
        time.sleep(0.02)


def hold_the_interpreter() -> None:
    """Sleep in C without letting go of the interpreter's lock: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(60)


KEPT: list[bytes] = []

FAULTS = {
    "MemoryError": exhaust_memory,
    "SystemExit": lambda: sys.exit(3),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "Fatal": lambda: _raise(Fatal("the licence has expired")),
    "Unfit": lambda: _raise(Unfit("the card reader is gone")),
    "no room": need_what_there_is_not,
    "thread": die_in_a_thread,
    "worker thread": kill_a_worker_thread,
    "memory": lambda: KEPT.append(b"x" * (300 * 2**20)),
    "held": hold_the_interpreter,
}


def _raise(error: BaseException) -> None:
    raise error


@dramatiq.actor(queue_name=NAME)
def faulty(key: str, kind: str) -> None:
    """Meets a fatal error."""
    note("began", key)
    FAULTS[kind]()
    note("finished", key)


@dramatiq.actor(queue_name=NAME, time_limit=1_000)
def hanging(key: str, kind: str) -> None:
    """Runs on past its time limit, in C, where no interrupt arrives."""
    note("began", key)
    time.sleep(2.5)
    in_steps(1)


@dramatiq.actor(queue_name=NAME)
async def afaulty(key: str, kind: str) -> None:
    """Meets it in a coroutine."""
    note("began", key)
    await asyncio.sleep(0.01)
    if kind == "task":
        # Its error is nobody's: the loop's exception handler hears of it when the task is collected.
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    elif kind == "loop":
        asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(60)
    else:
        FAULTS[kind]()
    note("finished", key)

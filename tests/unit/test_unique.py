"""Ids that no other has, whoever seeds which generator and whoever forks."""

from __future__ import annotations

import os
import random

from dramatiq_guard import clock


def test_no_two_are_equal_whatever_the_application_seeds():
    """An application that seeds Python's generator in every job would have the same ids over and over."""
    ids = []
    for _ in range(100):
        random.seed(42)
        ids.append(clock.unique())

    assert len(set(ids)) == 100
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


def test_a_forked_process_has_its_own():
    """Workers that were forked from one master do not write over each other's messages."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, clock.unique().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()

    assert len(theirs) == 32
    assert theirs != clock.unique()

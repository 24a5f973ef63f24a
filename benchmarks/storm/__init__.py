"""Retry storms, with real workers: one command, ``python -m benchmarks.storm``.

The life of a run:

1. A private Valkey, the downstream in a process of its own on loopback, and real `dramatiq` worker processes are
   started; some requests warm them up, and show how much the workers can offer.
2. Jobs arrive at random, at a share of what the downstream can do, until well after its trouble is over.
3. When every job was served, or the run has taken long enough, the workers are told to stop.  What the downstream wrote
   down, and what lies in the queues and among the dead letters, is all that the figures are made of.

The scenarios, the model of the downstream, the figures and their names are those of `dramatiq_guard.simulation`, so
that a simulated and a real run can be held against each other, number by number.

`cases` says what is run, `app` is what the workers run, `downstream` is whom they call, `run` makes a run of them,
`table` shows what came of it, `results` reads it again, `simulated` has the same happen in the simulation.
"""

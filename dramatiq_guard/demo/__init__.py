"""The demo: real workers, a flaky downstream, and what became of every message.

It judges the stack from outside.  Two ledgers say what happened, and the stack writes neither: the producer's file
(what was sent) and the downstream's append-only file (what arrived, and how it was answered).  Read in this order:
`plan` (what is sent), `app` (the actors), `accounting` (the judgement), `run` (the course of it all).
"""

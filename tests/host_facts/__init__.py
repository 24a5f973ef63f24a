"""What stock Dramatiq really does, pinned: when upstream changes, these tests fail first and name the design choice that may go.

Only Dramatiq is under test here. Nothing in this folder may import ``dramatiq_guard``. Every docstring opens with the
fact's number (H1 …), or with the word *Private* where a name is pinned that Dramatiq does not promise to keep.
"""

"""What stock Dramatiq really does, pinned: when upstream changes, these tests fail first.

Each says which design choice leans on the fact and may have to go with it. Only Dramatiq is under test: nothing in this
folder may import ``dramatiq_guard``. Every docstring opens with the fact's number (H1 …, §2 for the broker's own dead
letters, H-table for the order of hooks), or with the word *Private* where a name is pinned that Dramatiq does not
promise to keep.
"""

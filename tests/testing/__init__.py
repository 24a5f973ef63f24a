"""The tests of what is offered to the tests of others, written as theirs are."""

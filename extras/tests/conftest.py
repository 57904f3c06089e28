"""The fixtures of tests/, for the tests of the extras."""

from conftest import exported, nothing_is_left, rng, shared, tokens, train  # noqa: F401  of tests/

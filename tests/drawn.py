"""Arrays that hypothesis draws, for the tests of the Python client. Where it is not installed, as
on a bare GPU host, those tests are skipped; the others of the same suites remain."""

import unittest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError:
    st = None

# What every element and every extent is small in.
SIDE = 5


def bounded(examples):
    """Settings: so many examples, the same ones each time, and no clock."""
    if st is None:
        return lambda test: test
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def drawn(*strategies):
    """A test of what strategies draw. They are functions, called only if hypothesis is there."""
    if st is None:
        return unittest.skip("hypothesis is not installed")
    return given(*(strategy() for strategy in strategies))


def one_of(values):
    return lambda: st.sampled_from(values)


def seeds():
    return st.integers(0, 1 << 30)


def shapes(least_rank, most_rank):
    def strategy():
        return st.lists(st.integers(1, SIDE), min_size=least_rank, max_size=most_rank).map(tuple)

    return strategy


def broadcast_pairs():
    """Two shapes of 1 to 3 axes that go together: extents of 1 and missing axes in either."""

    def pair(drawn_):
        full, ones, shorter = drawn_
        both = []
        for which in (0, 1):
            shape = [1 if one == which else extent for extent, one in zip(full, ones)]
            both.append(tuple(shape[min(shorter[which], len(shape) - 1) :]))
        return tuple(both)

    extents = st.lists(st.integers(0, SIDE), min_size=1, max_size=3)
    ones = st.tuples(*[st.integers(0, 3)] * 3)
    return st.tuples(extents, ones, st.tuples(st.integers(0, 1), st.integers(0, 1))).map(pair)

#!/usr/bin/env python3
"""Tests prepared operands over the wire. Strided operands that are used again cost no copy, change
no bit, never outlive their buffer, and take no memory that buffers need."""

import sys
import threading

import numpy as np

import outsider as o

RNG = np.random.default_rng(20261126)
SIDE = 512  # The side of a 1 MiB matrix; the elements in every other row and column take a quarter
            # of it.
ALL = SIDE * SIDE * 4
KEPT = ALL // 4


def matrix():
    return RNG.integers(-8, 9, (SIDE, SIDE)).astype(np.float32)


def every_other(name):
    return o.resident(name, o.view((SIDE // 2, SIDE // 2), (2 * SIDE, 2)))


def multiply(client, name, left, **more):
    """Returns the product left @ name[::2, ::2], and the statistics."""
    answer = client.call("Matmul", a=o.inline(left), b=every_other(name), **more)
    return o.to_numpy(answer.tensor), answer.stats


def eventually(condition, what):
    assert o.eventually(condition), what


def test_the_third_call_copies_nothing(server, client):
    x, left = matrix(), RNG.integers(-8, 9, (3, SIDE // 2)).astype(np.float32)
    client.put("x", x)
    answers = [multiply(client, "x", left) for _ in range(4)]
    assert [stats.prepared_bytes for _, stats in answers] == [0, 0, KEPT, KEPT]
    for product, _ in answers:
        assert np.array_equal(product, left @ x[::2, ::2])
    assert client.device().prepared_bytes == KEPT
    assert client.device().buffer_used_bytes == ALL
    client.call("DeleteBuffer", name="x")
    eventually(lambda: client.device().prepared_bytes == 0, "it goes with its buffer")
    assert client.device().buffer_used_bytes == 0


def test_many_callers_and_buffers_that_change(server, client):
    """Every result is computed from contents that the buffer had while the call ran, namely those
    of the version in the response."""
    contents, lock, errors = {}, threading.Lock(), []
    stop, ready = threading.Event(), [0] * 6  # How often each reader has found it ready.

    def write():
        client = server.client()
        rng = np.random.default_rng(1)
        for _ in range(20):
            name = f"m{rng.integers(3)}"
            value = int(rng.integers(1, 1000))
            with lock:  # No one reads a version before it is in contents.
                buffer = client.put(name, np.full((SIDE, SIDE), value, np.float32), replace=True)
                contents[buffer.version] = value
            enough = [times + 1 for times in ready]
            if not o.eventually(lambda: errors or all(np.greater_equal(ready, enough))):
                errors.append(f"nothing was found ready: {ready}")
            if errors:
                break
        stop.set()

    def read(seed):
        client = server.client()
        rng = np.random.default_rng(seed)
        left = np.ones((1, SIDE // 2), np.float32)
        while not stop.is_set():
            outcome = client.attempt("Matmul", a=o.inline(left),
                                     b=every_other(f"m{rng.integers(3)}"))
            if not outcome.ok:
                if outcome.reason not in ("BUFFER_NOT_FOUND", "BUFFER_NOT_READY"):
                    errors.append(outcome)
                continue
            stats = outcome.answer.stats
            with lock:
                value = contents[stats.operand_versions[1]]
            if not (o.to_numpy(outcome.answer.tensor) == value * (SIDE // 2)).all():
                errors.append((value, o.to_numpy(outcome.answer.tensor)))
            ready[seed] += stats.prepared_bytes > 0

    o.in_threads(7, lambda i: read(i) if i < 6 else write())
    assert not errors, errors[:3]
    for name in client.names():
        client.call("DeleteBuffer", name=name)
    eventually(lambda: client.device().prepared_bytes == client.device().buffer_used_bytes == 0,
               "all is gone")


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), "--memory-limit", "64Mi", "--workers", "4"))

#!/usr/bin/env python3
"""Tests TopK over the wire: bits of special values, refusals, results in buffers, and programs.
tests/top_k_test.cc and tests/fuzz_model_test.py compare with models."""

import sys

import numpy as np

import outsider as o
import random_requests as r
from outsider import eventually, scratch, step

RNG = np.random.default_rng(20261125)


def expected_of(array, k, smallest=False):
    """Returns values and indices of rows in NumPy's order: NaN above all numbers, and ties by
    index."""
    indices = r.top_indices(array, k, smallest)
    return np.take_along_axis(array, indices, axis=-1), indices


def test_bits_of_zeros_and_nans_are_kept(server, client):
    bits = np.array([0x80000000, 0, 0xFFC00001, 0x7F800001, 0x7FC12345, 0x3F800000], np.uint32)
    x = o.inline(bits.view(np.float32))
    for smallest, order in ((False, [2, 3, 4, 5, 0, 1]), (True, [0, 1, 5, 2, 3, 4])):
        answer = client.call("TopK", x=x, k=6, smallest=smallest)
        assert list(o.to_numpy(answer.indices)) == order
        assert answer.values.data == bits[order].tobytes()


def test_refusals(server, client):
    x = o.inline(np.zeros((3, 10), np.float32))
    for reason, fields in (
            ("BAD_K", dict(x=x)),
            ("BAD_AXES", dict(x=x, k=1, axis=-(2**31))),
            ("BAD_OPERAND", dict(k=1)),
            ("BAD_OPERAND", dict(x=o.compute.Operand(tensor=o.tensor([1.0]), output=1), k=1)),
            ("BAD_RESULT", dict(x=x, k=1, values=scratch())),
            ("BAD_RESULT", dict(x=x, k=1, values=o.into("one"), indices=o.into("one"))),
            ("BAD_RESULT", dict(x=x, k=1, indices=scratch()))):
        outcome = client.attempt("TopK", **fields)
        assert outcome.reason == reason, (reason, fields, outcome)
    assert client.attempt("TopK", x=x, k=11).metadata["limit"] == "10"
    # Without rows there is nothing to find, and nothing to refuse.
    answer = client.call("TopK", x=o.inline(np.zeros((0, 10), np.float32)), k=3)
    assert list(answer.values.shape) == [0, 3] and answer.indices.data == b""
    # A call that fails at its second array does not leave the first array behind.
    client.put("taken", np.ones(1, np.float32))
    outcome = client.attempt("TopK", x=x, k=1, values=o.into("new"), indices=o.into("taken"))
    assert outcome.reason == "BUFFER_EXISTS" and client.names() == ["taken"], outcome
    # Values and indices count together.
    rows = o.inline(np.zeros(4096, np.float32), o.view([100, 4096], [0, 1]))
    outcome = client.attempt("TopK", x=rows, k=4096)
    assert outcome.reason == "RESULT_TOO_LARGE", outcome
    assert outcome.metadata["size"] == str(100 * 4096 * (4 + 8)), outcome
    assert "do not fit in one response" in outcome.text, outcome


def program(client, *steps):
    answer = client.call("Execute", steps=steps, stats=True)
    return [o.Outcome.of_step(result) for result in answer.results]


def top_k(x, k, **more):
    return o.compute.Step(top_k=o.compute.TopKRequest(x=x, k=k, **more))


def test_programs_use_values_and_indices(server, client):
    """Finds nearest neighbours: computes products, selects the best products of each query, and
    computes with both results."""
    queries = RNG.integers(-4, 5, (8, 16)).astype(np.float32)
    base = RNG.integers(-4, 5, (500, 16)).astype(np.float32)
    client.put("base", base)
    product = dict(a=o.inline(queries), b=o.resident("base"), transpose_b=True, result=scratch())
    outcomes = program(
        client,
        o.compute.Step(matmul=product),
        top_k(step(0), 5, values=scratch()),
        o.compute.Step(reduce=dict(x=step(1, output=1), op="REDUCE_OP_MAX", axes=[1])),
        o.compute.Step(reduce=dict(x=step(1), op="REDUCE_OP_SUM", axes=[1])),
        top_k(step(1, o.view([8, 2], [5, 1]), 1), 1, smallest=True),
        o.compute.Step(reduce=dict(x=step(1, output=2), op="REDUCE_OP_SUM")),
        o.compute.Step(reduce=dict(x=step(0, output=1), op="REDUCE_OP_SUM")),
        top_k(step(1), 2, values=o.into("best"), indices=o.into("where")),
        top_k(step(0), 501))
    values, indices = expected_of(queries @ base.T, 5)
    assert np.array_equal(o.to_numpy(outcomes[1].answer.indices), indices)
    assert not outcomes[1].answer.HasField("values")
    assert np.array_equal(o.to_numpy(outcomes[2].answer.tensor), indices.max(axis=1))
    assert np.array_equal(o.to_numpy(outcomes[3].answer.tensor), values.sum(axis=1))
    smallest, answer = expected_of(indices[:, :2], 1, smallest=True), outcomes[4].answer
    for got, want in zip((answer.values, answer.indices), smallest):
        assert np.array_equal(o.to_numpy(got), want), got
    for outcome in outcomes[5:7]:
        assert outcome.reason == "BAD_OPERAND", outcome
        assert outcome.metadata["field"] == "output", outcome
    assert client.download("best") == np.ascontiguousarray(values[:, :2]).tobytes()
    assert client.download("where") == np.tile(np.arange(2), (8, 1)).tobytes()
    assert outcomes[8].reason == "BAD_K", outcomes[8]
    assert eventually(client.is_idle)


def test_a_step_names_both_of_its_arrays_or_none(server, client):
    """An earlier step has already taken the name of the indices."""
    x = o.inline(np.arange(8, dtype=np.float32))
    client.put("values", np.full(3, 7, np.float32))
    add = o.compute.AddRequest(a=x, b=x, result=o.into("indices", replace=True))
    second = top_k(x, 2, values=o.into("values", replace=True), indices=o.into("indices"))
    outcomes = program(client, o.compute.Step(add=add), second)
    assert outcomes[0].ok and outcomes[1].reason == "BUFFER_EXISTS", outcomes
    assert client.download("values") == np.full(3, 7, np.float32).tobytes()
    assert client.download("indices") == (2 * np.arange(8, dtype=np.float32)).tobytes()


def test_a_step_that_fails_at_its_second_array_leaves_room(server, client):
    """Before it fails, the step takes a name and most of the response. Later steps can use
    both."""
    array = RNG.standard_normal((1000, 700)).astype(np.float32)
    client.put("x", array)
    taken, bad = o.into("x"), o.into("no spaces")
    x = o.resident("x")
    for values, k in ((o.into("v"), 4), (None, 600), (scratch(), 4)):
        for indices in (taken, bad):
            first, second = program(client, top_k(x, k, values=values, indices=indices),
                                    top_k(x, k, values=values, indices=o.into("i", replace=True)))
            assert first.reason in ("BUFFER_EXISTS", "BAD_NAME"), first
            assert second.ok, second
            assert client.download("i") == expected_of(array, k)[1].tobytes()
            if values is not None and values.HasField("buffer"):
                client.call("DeleteBuffer", name="v")


if __name__ == "__main__":
    sys.exit(o.run_tests(globals()))

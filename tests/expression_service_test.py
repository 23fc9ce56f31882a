#!/usr/bin/env python3
"""Tests expressions as inputs of Reduce and epilogues of Matmul over the wire, and arrays of truth
values. tests/map_stage_test.cc compares the bits with those of a Map and the operation."""

import math
import sys

import numpy as np

import outsider as o
from outsider import expression, node, operand
from random_requests import BOOL

RNG = np.random.default_rng(20261125)
SUM, MAX, MEAN, ANY = 1, 4, 7, 13
SCRATCH_LIMIT = 128 * o.MI


def reduction(x, op, nodes, others=(), **more):
    """Returns the fields of a ReduceRequest."""
    return {"x": x, "op": op, "expression": expression(*nodes), "with": others, **more}


def product(a, b, nodes, others=(), **more):
    """Returns the fields of a MatmulRequest."""
    return {"a": a, "b": b, "expression": expression(*nodes), "with": others, **more}


def reduce_step(*arguments, **more):
    return o.compute.Step(reduce=reduction(*arguments, **more))


def stored(client, name, shape):
    """Puts random f64 elements, and returns them."""
    array = RNG.normal(0, 2, shape)
    client.put(name, array)
    return array


def number(response):
    return getattr(response.value, response.value.WhichOneof("value"))


def expect_refused(outcome, reason, **metadata):
    assert not outcome.ok and outcome.reason == reason, (reason, outcome)
    for key, value in metadata.items():
        assert outcome.metadata[key] == value, (key, value, outcome)


def test_steps_of_a_program_are_operands(server, client):
    a = stored(client, "a", (50, 20))
    scratch = o.compute.Result(scratch=True)
    step = o.compute.Operand(step=0)
    deviations = [operand(0), operand(1), node("SUBTRACT", 0, 1), node("MULTIPLY", 2, 2)]
    steps = [
        o.compute.Step(reduce=dict(x=o.resident("a"), op=MEAN, axes=[0], result=scratch)),
        reduce_step(o.resident("a"), MEAN, deviations, [step], axes=[0]),
        reduce_step(o.resident("a"), SUM, deviations, [step]),
        o.compute.Step(matmul=product(
            o.resident("a"), o.resident("a"), [operand(0), operand(1), node("ADD", 0, 1)], [step],
            transpose_a=True)),
        reduce_step(o.resident("a"), SUM, deviations, [o.compute.Operand(step=9)]),
        reduce_step(o.resident("a"), SUM, [operand(1)]),
        # Adjacent steps that share a launch, next to a step that does not.
        *[o.compute.Step(reduce=dict(x=o.resident("a"), op=SUM))] * 2,
        reduce_step(o.resident("a"), SUM, [operand(0), node("NEGATE", 0)]),
        o.compute.Step(reduce=dict(x=o.resident("a"), op=SUM))]
    results = client.call("Execute", steps=steps).results
    assert np.allclose(o.to_numpy(results[1].reduce.tensor), a.var(axis=0))
    assert math.isclose(number(results[2].reduce), ((a - a.mean(axis=0)) ** 2).sum())
    assert np.allclose(o.to_numpy(results[3].matmul.tensor), a.T @ a + a.mean(axis=0))
    assert results[4].error.reason == "BAD_OPERAND"
    assert results[4].error.metadata["operand"] == "with[0]"
    assert results[5].error.reason == "BAD_EXPRESSION" and results[5].error.metadata["node"] == "0"
    sums = [number(results[i].reduce) for i in (6, 7, 8, 9)]
    assert sums[0] == sums[1] == sums[3] == -sums[2], sums


def test_no_array_is_made(server, client):
    """An expression that exceeds the scratch memory is folded in pieces."""
    n = 20 * o.MI
    client.put("a", np.ones(n // 64, np.float32))
    x = o.resident("a", o.view([128, n // 64], [0, 1]))
    assert 2 * n * 4 > SCRATCH_LIMIT
    nodes = [operand(0), operand(1), node("ADD", 0, 1)]
    got = client.call("Reduce", **reduction(x, SUM, nodes, [x]))
    assert number(got) == 4 * n
    got = client.call("Reduce", **reduction(x, SUM, nodes, [x], axes=[1]))
    assert (o.to_numpy(got.tensor) == n / 32).all()
    whole = [s.name for s in client.strategies("reduce")
             if s.name in ("cpu_parallel", "single_pass")]
    outcome = client.attempt("Reduce", **reduction(x, SUM, nodes, [x], strategy=whole[0]))
    expect_refused(outcome, "SCRATCH_EXHAUSTED")


def test_errors_name_the_operand_and_the_node(server, client):
    for name, shape in dict(a=(4, 3), bad=2, deep=(2, 4, 4)).items():
        stored(client, name, shape)
    a, add = o.resident("a"), [operand(0), operand(1), node("ADD", 0, 1)]

    def both(nodes, others, reason, **metadata):
        for operation, request in (("Reduce", reduction(a, SUM, nodes, others)),
                                   ("Reduce", reduction(a, SUM, nodes, others, axes=[0])),
                                   ("Matmul", product(a, a, nodes, others, transpose_b=True))):
            expect_refused(client.attempt(operation, **request), reason, **metadata)

    both(add, [o.resident("bad")], "BAD_SHAPE", operand="with[0]")
    both(add, [o.resident("none")], "BUFFER_NOT_FOUND", operand="with[0]")
    both(add, [o.compute.Operand()], "BAD_OPERAND", operand="with[0]")
    both(add, [], "BAD_EXPRESSION", node="1")
    both([], [a], "BAD_EXPRESSION", field="expression.nodes", limit="64")
    both(add, [o.inline(np.float32(1))] * 8, "BAD_EXPRESSION", field="with", limit="7")
    both([operand(0)] * 65, [], "BAD_EXPRESSION", field="expression.nodes", limit="64")
    for rpc, fields in (("Reduce", dict(x=a, op=SUM)),
                        ("Matmul", dict(a=a, b=a, transpose_b=True))):
        outcome = client.attempt(rpc, **{"with": [a]}, **fields)  # It has no expression.
        expect_refused(outcome, "BAD_EXPRESSION", field="expression.nodes", limit="64")
    both([operand(0), node("NOT", 0)], [], "BAD_EXPRESSION", node="1")
    request = product(a, a, add, [o.resident("deep")], transpose_b=True)
    expect_refused(client.attempt("Matmul", **request), "BAD_SHAPE", operand="with[0]")
    request = reduction(a, MAX, [operand(0), node("EQUAL", 0, 0)])
    expect_refused(client.attempt("Reduce", **request), "BAD_DTYPE")
    request = reduction(a, SUM, add, [o.resident("deep", o.view([1, 4, 1]))], axes=[3])
    expect_refused(client.attempt("Reduce", **request), "BAD_AXES")


def test_other_bytes_are_refused(server, client):
    bad = bytes([0, 1, 1, 0, 0, 2, 255])
    spec = o.buffers.BufferSpec(dtype=BOOL, shape=[7])
    outcome = client.try_upload([dict(name="b", spec=spec, data=bad)])
    expect_refused(outcome, "BAD_BOOL", offset="5", value="2")
    outcome = client.try_upload([dict(name="b", spec=spec, data=bad[:4]), dict(data=bad[4:])])
    expect_refused(outcome, "BAD_BOOL", offset="5", value="2")
    assert client.names() == []
    tensor = o.compute.Tensor(dtype=BOOL, shape=[7], data=bad)
    operand_of = o.compute.Operand(tensor=tensor)
    outcome = client.attempt("Reduce", x=operand_of, op=ANY)
    expect_refused(outcome, "BAD_BOOL", operand="x", offset="5")
    steps = [o.compute.Step(reduce=o.compute.ReduceRequest(x=operand_of, op=ANY))]
    assert client.call("Execute", steps=steps).results[0].error.reason == "BAD_BOOL"
    # Uploading a range of a draft leaves the bytes outside it unchanged.
    client.call("CreateBuffer", name="d", spec=spec)
    outcome = client.try_upload([dict(name="d", data=bad[:2]), dict(data=bad[4:])])
    expect_refused(outcome, "BAD_BOOL", offset="3", value="2")
    client.call("DeleteBuffer", name="d")


if __name__ == "__main__":
    flags = ("--memory-limit", "512Mi", "--scratch-limit", str(SCRATCH_LIMIT))
    sys.exit(o.run_tests(globals(), *flags))

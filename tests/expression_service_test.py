#!/usr/bin/env python3
"""Tests expressions as inputs of Reduce and epilogues of Matmul over the wire. The bits are the
same as with a Map into a buffer followed by the operation. Also tests arrays with one-byte
elements."""

import math
import sys

import numpy as np

import outsider as o
import random_requests as r
from outsider import NUMPY_TYPES as NUMPY
from outsider import expression, node, operand
from random_requests import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8
from random_requests import DTYPES as NUMBERS

RNG = np.random.default_rng(20261125)
OPS = range(1, 15)
(SUM, PRODUCT, MIN, MAX, ARGMIN, ARGMAX, MEAN, NORM_L1, NORM_L2, SUM_SQUARES, VARIANCE, ALL,
 ANY, STD) = OPS
SCRATCH_LIMIT = 128 * o.MI


def reduction(x, op, nodes, others=(), **more):
    """Returns the fields of a ReduceRequest."""
    return {"x": x, "op": op, "expression": expression(*nodes), "with": others, **more}


def product(a, b, nodes, others=(), **more):
    """Returns the fields of a MatmulRequest."""
    return {"a": a, "b": b, "expression": expression(*nodes), "with": others, **more}


def reduce_step(*arguments, **more):
    return o.compute.Step(reduce=reduction(*arguments, **more))


def stored(client, name, dtype, shape):
    """Puts random elements of the type, and returns them."""
    if dtype in (I32, I64):
        array = RNG.integers(-40, 40, shape).astype(NUMPY[dtype])
    elif dtype == BF16:
        array = (RNG.normal(0, 2, shape).astype("f4").view("u4") >> 16).astype("u2")
    else:
        array = RNG.normal(0, 2, shape).astype(NUMPY[dtype])
    client.put(name, array, replace=True)
    return array


def number(response):
    return getattr(response.value, response.value.WhichOneof("value"))


def expect_refused(outcome, reason, **metadata):
    assert not outcome.ok and outcome.reason == reason, (reason, outcome)
    for key, value in metadata.items():
        assert outcome.metadata[key] == value, (key, value, outcome)


def test_every_strategy_has_the_bits_of_map_and_reduce(server, client):
    rows = client.strategies("reduce")
    assert len(rows) > 2
    weighted = [operand(0), operand(1), node("SUBTRACT", 0, 1), node("MULTIPLY", 2, 0)]
    x = o.resident("mapped")
    for dtype in NUMBERS:
        stored(client, "a", dtype, (37, 211))
        stored(client, "b", dtype, 211)
        operands = [o.resident("a"), o.resident("b")]
        client.call("Map", operands=operands, expression=expression(*weighted),
                    result=o.into("mapped", replace=True))
        for row in rows:
            if not row.deterministic or dtype not in row.dtypes:
                continue
            for op in OPS:
                context = (row.name, dtype, op)
                want = client.call("Reduce", x=x, op=op, strategy=row.name)
                got = client.call("Reduce", **reduction(
                    operands[0], op, weighted, operands[1:], strategy=row.name))
                same = np.array_equal(number(got), number(want), equal_nan=True)
                assert same and got.index == want.index, context
                assert got.value.WhichOneof("value") == want.value.WhichOneof("value"), context
                assert got.stats.strategy == row.name and got.stats.roundoff == want.stats.roundoff


def test_steps_of_a_program_are_operands(server, client):
    a = stored(client, "a", F64, (50, 20))
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
    # Along the outermost axis, some columns are folded at a time, unless there is only one.
    for table in (x, o.resident("a", o.view([128, 1, n // 64], [0, 7, 1]))):
        got = client.call("Reduce", **reduction(table, SUM, nodes, [table], axes=[0]))
        assert (o.to_numpy(got.tensor) == 256).all()
    column = o.resident("a", o.view([2 * n, 1], [0, 1]))
    outcome = client.attempt("Reduce", **reduction(column, SUM, nodes, [column], axes=[0]))
    expect_refused(outcome, "SCRATCH_EXHAUSTED")


def test_matmul_has_the_bits_of_matmul_and_map(server, client):
    nodes = [operand(0), operand(1), node("ADD", 0, 1), node("CAST", 2, dtype=F16)]
    positive = [operand(0), operand(1), node("GREATER", 0, 1)]
    for dtype, out in ((F32, F32), (F64, F64), (F16, F32), (BF16, BF16), (I32, I64)):
        for m, n, k in ((1, 1, 1), (70, 33, 9), (130, 65, 128), (4, 3, 0)):
            stored(client, "a", dtype, (m, k))
            stored(client, "b", dtype, (n, k))
            stored(client, "bias", out, n)
            a, b, how = o.resident("a"), o.resident("b"), dict(transpose_b=True, out_dtype=out)
            client.call("Matmul", a=a, b=b, **how, result=o.into("c", replace=True))
            for each, kind in ((nodes, F16), (positive, BOOL)):
                want = client.call("Map", operands=[o.resident("c"), o.resident("bias")],
                                   expression=expression(*each)).tensor
                request = product(a, b, each, [o.resident("bias")], **how)
                got = client.call("Matmul", **request).tensor
                assert got.dtype == kind and got == want, (dtype, m, n, k)


def test_errors_name_the_operand_and_the_node(server, client):
    stored(client, "a", F32, (4, 3))
    stored(client, "bad", F32, 2)
    stored(client, "deep", F32, (2, 4, 4))
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
        outcome = client.attempt(rpc, **{"with": [a]}, **fields)  # Without an expression.
        expect_refused(outcome, "BAD_EXPRESSION", field="expression.nodes", limit="64")
    both([operand(0), node("NOT", 0)], [], "BAD_EXPRESSION", node="1")
    request = product(a, a, add, [o.resident("deep")], transpose_b=True)
    expect_refused(client.attempt("Matmul", **request), "BAD_SHAPE", operand="with[0]")
    request = reduction(a, MAX, [operand(0), node("EQUAL", 0, 0)])
    expect_refused(client.attempt("Reduce", **request), "BAD_DTYPE")
    request = reduction(a, SUM, add, [o.resident("deep", o.view([1, 4, 1]))], axes=[3])
    expect_refused(client.attempt("Reduce", **request), "BAD_AXES")


def test_elements_of_a_byte(server, client):
    """One-byte elements are uploaded, downloaded and folded. Operations that do not support them
    refuse them."""
    for dtype, kind in ((U8, "i4"), (I8, "i4"), (BOOL, "i8")):
        limits = (0, 2) if dtype == BOOL else (-128 if dtype == I8 else 0, 128)
        x = RNG.integers(*limits, (3, o.MI)).astype(NUMPY[dtype])
        client.put("x", x, replace=True)
        assert client.download("x") == x.tobytes(), dtype
        buffer = client.call("GetBuffer", name="x").buffer
        assert buffer.dtype == dtype and buffer.size_bytes == x.size
        turned = o.resident("x", o.view([o.MI // 16, 3], [1, o.MI]))
        op, fold = (SUM, np.sum) if dtype == BOOL else (MAX, np.max)
        got = o.to_numpy(client.call("Reduce", x=turned, op=op, axes=[1]).tensor)
        assert got.dtype == kind and np.array_equal(got, fold(x[:, : o.MI // 16], axis=0)), dtype
        whole = o.resident("x")
        refused = [("Matmul", dict(a=whole, b=whole, transpose_b=True)),
                   ("Dot", dict(a=whole, b=whole)),
                   ("Add", dict(a=whole, b=whole)), ("TopK", dict(x=whole, k=1)),
                   ("WindowSum", dict(x=o.resident("x", o.view([9], [1])), radius=1))]
        if dtype == BOOL:
            refused += [("Scan", dict(x=whole, op=MAX))]
            of_numbers = set(OPS) - {SUM, MEAN, ALL, ANY}
            refused += [("Reduce", dict(x=whole, op=op, axes=axes))
                        for op in of_numbers for axes in ([], [0])]
        for rpc, fields in refused:
            expect_refused(client.attempt(rpc, **fields), "BAD_DTYPE")
        steps = [o.compute.Step(dot=dict(a=whole, b=whole))] * 3
        for result in client.call("Execute", steps=steps).results:
            assert result.error.reason == "BAD_DTYPE", result


def test_copies_cast(server, client):
    a = np.array([0, -0.0, 1, 0.9, -0.9, np.nan, np.inf, -np.inf, -5, 127.5, 128, 254.9, 255.5, 300,
                  -128.9, -129, 1e-300, 3e9, -1e19])
    client.put("a", a)
    for dtype in (I32, I64, BOOL, U8, I8):
        want = r.cast(a, F64, dtype)
        client.call("CopyBuffer", source="a", name="b", dtype=dtype, replace=True)
        assert client.download("b") == want.tobytes(), dtype
        backwards = dict(source="b", view=o.view([len(a)], [-1], len(a) - 1))
        for target in (F32, F64, I32, I64, BOOL, U8, I8):
            client.call("CopyBuffer", **backwards, name="c", replace=True, dtype=target)
            back = r.cast(want[::-1], dtype, target)
            assert client.download("c") == back.tobytes(), (dtype, target)


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

#!/usr/bin/env python3
"""Expressions on the way into Reduce and out of Matmul, and arrays of truth values, as an outsider
sees them: against NumPy, and bit by bit against Map into a buffer and the operation on that.

usage: expression_service_test.py --server build/bin/tessera-server [--device cuda:0] [test ...]
"""

import math
import sys

import numpy as np

import outsider as o

RNG = np.random.default_rng(20261125)
F32, F64, F16, BF16, I32, I64, BOOL, U8, I8 = range(1, 10)
NUMBERS = (F32, F64, F16, BF16, I32, I64)
NUMPY = {F32: "f4", F64: "f8", F16: "f2", BF16: "u2", I32: "i4", I64: "i8", BOOL: "?", U8: "u1",
         I8: "i1"}
OPS = range(1, 15)
(SUM, PRODUCT, MIN, MAX, ARGMIN, ARGMAX, MEAN, NORM_L1, NORM_L2, SUM_SQUARES, VARIANCE, ALL,
 ANY, STD) = OPS
SCRATCH_LIMIT = 128 * o.MI


# --- Requests -------------------------------------------------------------------------------------


def operand(i):
    return dict(operand=i)


def node(op, *args, dtype=0):
    return dict(op="MAP_OP_" + op, args=args, dtype=dtype)


def expression(*nodes):
    return o.compute.Expression(nodes=[o.compute.Expression.Node(**n) for n in nodes])


def reduction(x, op, nodes, others=(), **more):
    """The fields of a ReduceRequest."""
    return {"x": x, "op": op, "expression": expression(*nodes), "with": others, **more}


def product(a, b, nodes, others=(), **more):
    """The fields of a MatmulRequest."""
    return {"a": a, "b": b, "expression": expression(*nodes), "with": others, **more}


def reduce_step(*arguments, **more):
    return o.compute.Step(reduce=o.compute.ReduceRequest(**reduction(*arguments, **more)))


# (a - b) * a, (a - b)^2 * c and a > b
WEIGHTED = [operand(0), operand(1), node("SUBTRACT", 0, 1), node("MULTIPLY", 2, 0)]
SQUARED = [operand(0), operand(1), operand(2), node("SUBTRACT", 0, 1), node("MULTIPLY", 3, 3),
           node("MULTIPLY", 4, 2)]
GREATER = [operand(0), operand(1), node("GREATER", 0, 1)]


def bytes_of(dtype, shape):
    limits = np.iinfo(NUMPY[dtype])
    return RNG.integers(limits.min, limits.max + 1, shape).astype(NUMPY[dtype])


def stored(client, name, dtype, shape):
    """Puts random elements of the type; returns the operand."""
    if dtype in (I32, I64):
        array = RNG.integers(-40, 40, shape).astype(NUMPY[dtype])
    elif dtype in (U8, I8):
        array = bytes_of(dtype, shape)
    elif dtype == BOOL:
        array = RNG.integers(0, 2, shape) == 1
    elif dtype == BF16:
        array = (RNG.normal(0, 2, shape).astype("f4").view("u4") >> 16).astype("u2")
    else:
        array = RNG.normal(0, 2, shape).astype(NUMPY[dtype])
    client.put(name, array, replace=True)
    return array


def number(response):
    return getattr(response.value, response.value.WhichOneof("value"))


def same(a, b):
    return a == b or (a != a and b != b)


def expect_refused(outcome, reason, **metadata):
    assert not outcome.ok and outcome.reason == reason, (reason, outcome)
    for key, value in metadata.items():
        assert outcome.metadata[key] == value, (key, value, outcome)


def strategies(client, operation):
    kind = "cuda" if o.Program.device.startswith("cuda") else "cpu"
    listed = client.call("ListStrategies", operation=operation, backend=kind).strategies
    return [s for s in listed if s.available]


# --- Reduce ---------------------------------------------------------------------------------------


def mapped(client, operands, nodes):
    client.call("Map", operands=operands, expression=expression(*nodes),
                result=o.into("mapped", replace=True))
    return o.resident("mapped")


def test_sums_against_numpy(server, client):
    a, b = stored(client, "a", F64, (70, 900)), stored(client, "b", F64, 900)
    w = stored(client, "w", F64, (70, 1))

    def reduce(op, nodes, others, **more):
        others = [o.resident(name) for name in others]
        return client.call("Reduce", **reduction(o.resident("a"), op, nodes, others, **more))

    want = (a - b) * a
    assert math.isclose(number(reduce(SUM, WEIGHTED, ["b"])), want.sum(), rel_tol=1e-11)
    assert math.isclose(number(reduce(SUM, SQUARED, ["b", "w"])), ((a - b) ** 2 * w).sum(),
                        rel_tol=1e-11)
    assert number(reduce(SUM, GREATER, ["b"])) == int((a > b).sum())
    assert number(reduce(MEAN, GREATER, ["b"])) == (a > b).mean()
    assert number(reduce(ANY, GREATER, ["b"])) == 1 and number(reduce(ALL, GREATER, ["b"])) == 0
    found = reduce(ARGMAX, WEIGHTED, ["b"])
    assert found.index == int(want.argmax()) and number(found) == want.max()
    for axes in ([0], [1], [-1], [0, 1]):
        got = o.to_numpy(reduce(SUM, WEIGHTED, ["b"], axes=axes).tensor)
        assert np.allclose(got, want.sum(axis=tuple(axes)), rtol=1e-11, atol=1e-9), axes
        counts = o.to_numpy(reduce(SUM, GREATER, ["b"], axes=axes, keep_dims=True).tensor)
        assert counts.dtype == np.int64
        assert np.array_equal(counts, (a > b).sum(axis=tuple(axes), keepdims=True)), axes


def test_every_strategy_has_the_bits_of_map_and_reduce(server, client):
    rows = strategies(client, "reduce")
    assert len(rows) > 2
    for dtype in NUMBERS:
        stored(client, "a", dtype, (37, 211))
        stored(client, "b", dtype, 211)
        operands = [o.resident("a"), o.resident("b")]
        x = mapped(client, operands, WEIGHTED)
        for row in rows:
            if not row.deterministic or dtype not in row.dtypes:
                continue
            for op in OPS:
                context = (row.name, dtype, op)
                want = client.call("Reduce", x=x, op=op, strategy=row.name)
                got = client.call("Reduce", **reduction(
                    operands[0], op, WEIGHTED, operands[1:], strategy=row.name))
                assert same(number(got), number(want)) and got.index == want.index, context
                assert got.value.WhichOneof("value") == want.value.WhichOneof("value"), context
                assert got.stats.strategy == row.name and got.stats.roundoff == want.stats.roundoff


def random_views(client, dtypes):
    """Buffers of the types and views of them whose shapes are broadcast together."""
    rank = int(RNG.integers(1, 5))
    shape = [int(n) for n in RNG.integers(1, 9, rank)]
    operands, arrays = [], []
    for i, dtype in enumerate(dtypes):
        own = [n if RNG.random() < 0.7 else 1 for n in shape]
        own = own[int(RNG.integers(0, rank)):] if i and RNG.random() < 0.4 else own
        base = stored(client, f"v{i}", dtype, int(np.prod([n + 2 for n in own])))
        strides, offset, step = [], 0, 1
        for n in reversed(own):
            if RNG.random() < 0.3:
                strides.append(-step)
                offset += step * (n - 1)
            elif RNG.random() < 0.2:
                strides.append(0)
            else:
                strides.append(step)
            step *= n + 2
        strides.reverse()
        operands.append(o.resident(f"v{i}", o.view(own, strides, offset)))
        size = base.dtype.itemsize
        arrays.append(np.lib.stride_tricks.as_strided(
            base[offset:], own, [s * size for s in strides]))
    return operands, arrays


def test_random_expressions_views_and_axes(server, client):
    """Bit by bit what Map and Reduce give; exactly NumPy's where that is exact."""
    ops = ["ADD", "SUBTRACT", "MULTIPLY", "MAXIMUM", "LESS", "EQUAL", "WHERE"]
    for trial in range(120):
        count = int(RNG.integers(1, 5))
        dtypes = [int(d) for d in RNG.choice(NUMBERS + (BOOL, U8, I8), count)]
        operands, arrays = random_views(client, dtypes)
        nodes = [operand(i) for i in range(count)]
        for _ in range(int(RNG.integers(1, 7))):
            op = ops[int(RNG.integers(len(ops)))]
            args = [int(RNG.integers(len(nodes))) for _ in range(3 if op == "WHERE" else 2)]
            if op == "WHERE":
                nodes.append(node("NOT_EQUAL", args[0], args[0]))
                args[0] = len(nodes) - 1
            nodes.append(node(op, *args))
        outcome = client.attempt("Map", operands=operands, expression=expression(*nodes),
                                 result=o.into("mapped", replace=True))
        rank = len(np.broadcast_shapes(*(a.shape for a in arrays)))
        axes = sorted(int(i) for i in RNG.choice(rank, int(RNG.integers(0, rank + 1)), False))
        for op in RNG.choice(OPS, 4, replace=False):
            got = client.attempt("Reduce", **reduction(
                operands[0], int(op), nodes, operands[1:], axes=axes, keep_dims=bool(trial % 2)))
            if not outcome.ok:
                expect_refused(got, outcome.reason)
                continue
            want = client.attempt("Reduce", x=o.resident("mapped"), op=int(op), axes=axes,
                                  keep_dims=bool(trial % 2))
            assert got.reason == want.reason, (got, want)
            if not want.ok:
                continue
            a, b = got.answer, want.answer
            assert a.tensor == b.tensor and a.index == b.index, (nodes, dtypes, axes, op)
            assert axes or same(number(a), number(b)), (nodes, dtypes, op)


def test_special_values(server, client):
    a = np.array([np.inf, 1, np.nan, -0.0, 5e-324, -np.inf, 3], np.float64)
    client.put("a", a, replace=True)
    finite = [operand(0), node("SUBTRACT", 0, 0), node("EQUAL", 1, 1)]
    got = client.call("Reduce", **reduction(o.resident("a"), SUM, finite, []))
    assert number(got) == np.isfinite(a).sum()
    masked = finite + [dict(real=0.0), node("WHERE", 2, 0, 3)]
    got = client.call("Reduce", **reduction(o.resident("a"), SUM, masked, []))
    assert number(got) == np.where(np.isfinite(a), a, 0).sum()
    got = client.call("Reduce", **reduction(o.resident("a"), MAX, [operand(0)], []))
    assert math.isnan(number(got))


def test_masked_mean_is_one_program(server, client):
    a, keep = stored(client, "a", F64, 5000), stored(client, "keep", BOOL, 5000)
    picked = [operand(0), operand(1), dict(real=0.0), node("WHERE", 1, 0, 2)]
    steps = [
        reduce_step(o.resident("a"), SUM, picked, [o.resident("keep")]),
        o.compute.Step(reduce=o.compute.ReduceRequest(x=o.resident("keep"), op=SUM)),
        o.compute.Step(map=o.compute.MapRequest(
            operands=[o.compute.Operand(step=0), o.compute.Operand(step=1)],
            expression=expression(operand(0), operand(1), node("DIVIDE", 0, 1)))),
    ]
    results = client.call("Execute", steps=steps).results
    assert math.isclose(o.to_numpy(results[2].map.tensor), a[keep].mean(), rel_tol=1e-12)


def test_steps_of_a_program_are_operands(server, client):
    a = stored(client, "a", F64, (50, 20))
    scratch = o.compute.Result(scratch=True)
    step = o.compute.Operand(step=0)
    deviations = [operand(0), operand(1), node("SUBTRACT", 0, 1), node("MULTIPLY", 2, 2)]
    steps = [
        o.compute.Step(reduce=o.compute.ReduceRequest(x=o.resident("a"), op=MEAN, axes=[0],
                                                      result=scratch)),
        reduce_step(o.resident("a"), MEAN, deviations, [step], axes=[0]),
        reduce_step(o.resident("a"), SUM, deviations, [step]),
        o.compute.Step(matmul=o.compute.MatmulRequest(**product(
            o.resident("a"), o.resident("a"), [operand(0), operand(1), node("ADD", 0, 1)], [step],
            transpose_a=True))),
        reduce_step(o.resident("a"), SUM, deviations, [o.compute.Operand(step=9)]),
        reduce_step(o.resident("a"), SUM, [operand(1)]),
        # Neighbours that share a launch, beside one that does not.
        *(o.compute.Step(reduce=o.compute.ReduceRequest(x=o.resident("a"), op=SUM))
          for _ in range(2)),
        reduce_step(o.resident("a"), SUM, [operand(0), node("NEGATE", 0)]),
        o.compute.Step(reduce=o.compute.ReduceRequest(x=o.resident("a"), op=SUM)),
    ]
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
    """What would take more scratch memory than there is, is folded in pieces."""
    n = 20 * o.MI
    client.put("a", np.ones(n // 64, np.float32))
    x = o.resident("a", o.view([128, n // 64], [0, 1]))
    assert 2 * n * 4 > SCRATCH_LIMIT
    nodes = [operand(0), operand(1), node("ADD", 0, 1)]
    got = client.call("Reduce", **reduction(x, SUM, nodes, [x]))
    assert number(got) == 4 * n
    got = client.call("Reduce", **reduction(x, SUM, nodes, [x], axes=[1]))
    assert (o.to_numpy(got.tensor) == n / 32).all()
    whole = [s.name for s in strategies(client, "reduce")
             if s.name in ("cpu_parallel", "single_pass")]
    outcome = client.attempt("Reduce", **reduction(x, SUM, nodes, [x], strategy=whole[0]))
    expect_refused(outcome, "SCRATCH_EXHAUSTED")
    # Along the outermost axis some columns at a time, but for a single one.
    got = client.call("Reduce", **reduction(x, SUM, nodes, [x], axes=[0]))
    assert (o.to_numpy(got.tensor) == 256).all()
    apart = o.resident("a", o.view([128, 1, n // 64], [0, 7, 1]))
    got = client.call("Reduce", **reduction(apart, SUM, nodes, [apart], axes=[0]))
    assert (o.to_numpy(got.tensor) == 256).all()
    column = o.resident("a", o.view([2 * n, 1], [0, 1]))
    outcome = client.attempt("Reduce", **reduction(column, SUM, nodes, [column], axes=[0]))
    expect_refused(outcome, "SCRATCH_EXHAUSTED")


# --- Matmul ---------------------------------------------------------------------------------------


def test_matmul_against_numpy(server, client):
    a, b = stored(client, "a", F64, (33, 47)), stored(client, "b", F64, (47, 21))
    bias, residual = stored(client, "bias", F64, 21), stored(client, "residual", F64, (33, 21))
    column = stored(client, "column", F64, (33, 1))
    nodes = [operand(0), operand(1), operand(2), operand(3), node("ADD", 0, 1), node("TANH", 4),
             node("MULTIPLY", 5, 3), node("ADD", 6, 2)]
    request = product(o.resident("a"), o.resident("b"), nodes,
                      [o.resident(name) for name in ("bias", "residual", "column")])
    got = o.to_numpy(client.call("Matmul", **request).tensor)
    assert np.allclose(got, np.tanh(a @ b + bias) * column + residual, rtol=1e-10)
    buffer = client.call("Matmul", **request, result=o.into("c")).buffer
    assert list(buffer.shape) == [33, 21]
    assert client.download("c") == got.tobytes()


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


# --- Errors ---------------------------------------------------------------------------------------


def test_errors_name_the_operand_and_the_node(server, client):
    stored(client, "a", F32, (4, 3))
    stored(client, "bad", F32, 2)
    stored(client, "deep", F32, (2, 4, 4))
    a, add = o.resident("a"), [operand(0), operand(1), node("ADD", 0, 1)]

    def both(nodes, others, reason, **metadata):
        for operation, request in (
            ("Reduce", reduction(a, SUM, nodes, others)),
            ("Reduce", reduction(a, SUM, nodes, others, axes=[0])),
            ("Matmul", product(a, a, nodes, others, transpose_b=True)),
        ):
            expect_refused(client.attempt(operation, **request), reason, **metadata)

    both(add, [o.resident("bad")], "BAD_SHAPE", operand="with[0]")
    both(add, [o.resident("none")], "BUFFER_NOT_FOUND", operand="with[0]")
    both(add, [o.compute.Operand()], "BAD_OPERAND", operand="with[0]")
    both(add, [], "BAD_EXPRESSION", node="1")
    both([], [a], "BAD_EXPRESSION", field="expression.nodes", limit="64")
    both(add, [o.inline(np.float32(1))] * 8, "BAD_EXPRESSION", field="with", limit="7")
    both([operand(0)] * 65, [], "BAD_EXPRESSION", field="expression.nodes", limit="64")
    for rpc, fields in (("Reduce", dict(x=a, op=SUM)), ("Matmul", dict(a=a, b=a, transpose_b=True))):
        outcome = client.attempt(rpc, **{"with": [a]}, **fields)  # without an expression
        expect_refused(outcome, "BAD_EXPRESSION", field="expression.nodes", limit="64")
    both([operand(0), node("NOT", 0)], [], "BAD_EXPRESSION", node="1")
    request = product(a, a, add, [o.resident("deep")], transpose_b=True)
    expect_refused(client.attempt("Matmul", **request), "BAD_SHAPE", operand="with[0]")
    request = reduction(a, MAX, [operand(0), node("EQUAL", 0, 0)])
    expect_refused(client.attempt("Reduce", **request), "BAD_DTYPE")
    request = reduction(a, SUM, add, [o.resident("deep", o.view([1, 4, 1]))], axes=[3])
    expect_refused(client.attempt("Reduce", **request), "BAD_AXES")


# --- Integers of a byte ---------------------------------------------------------------------------


def test_bytes_go_both_ways(server, client):
    for dtype in (U8, I8):
        for shape in ((), (1,), (7, 13), (0, 4), (3 * o.MI,)):
            x = bytes_of(dtype, shape)
            client.put("x", x, replace=True)
            assert client.download("x") == x.tobytes(), shape
            buffer = client.call("GetBuffer", name="x").buffer
            assert buffer.dtype == dtype and buffer.size_bytes == x.size
        x = bytes_of(dtype, (40, 30))
        client.put("x", x, replace=True)
        turned = o.resident("x", o.view([30, 40], [1, 30]))
        folds = ((SUM, np.sum, "i8"), (MEAN, np.mean, "f8"), (MIN, np.min, "i4"), (MAX, np.max, "i4"),
                 (ARGMIN, np.argmin, "i8"), (ARGMAX, np.argmax, "i8"), (ALL, np.all, "i4"))
        for operand_of, want in ((o.resident("x"), x), (turned, x.T)):
            for op, fold, kind in folds:
                got = o.to_numpy(client.call("Reduce", x=operand_of, op=op, axes=[1]).tensor)
                assert got.dtype == kind and np.array_equal(got, fold(want, axis=1)), (dtype, op)
        got = client.call("Reduce", x=o.resident("x"), op=SUM)
        assert got.value.integer == x.sum(dtype=int)
        # A picture's bytes as numbers from 0 to 1, and back.
        scaled = [operand(0), dict(real=1 / 255, dtype=F32), node("MULTIPLY", 0, 1)]
        tensor = client.call("Map", operands=[turned], expression=expression(*scaled)).tensor
        assert np.array_equal(o.to_numpy(tensor), x.T * np.float32(1 / 255))
        halved = [operand(0), dict(integer=2), node("FLOOR_DIVIDE", 0, 1),
                  node("CAST", 2, dtype=dtype)]
        tensor = client.call("Map", operands=[turned], expression=expression(*halved)).tensor
        assert tensor.dtype == dtype and np.array_equal(o.to_numpy(tensor), x.T // 2)
        for rpc, fields in (("Matmul", dict(a=o.resident("x"), b=turned)),
                            ("Dot", dict(a=o.resident("x"), b=o.resident("x"))),
                            ("Add", dict(a=o.resident("x"), b=o.resident("x"))),
                            ("WindowSum", dict(x=o.resident("x", o.view([9], [1])), radius=1)),
                            ("TopK", dict(x=o.resident("x"), k=1))):
            expect_refused(client.attempt(rpc, **fields), "BAD_DTYPE")


def test_copies_cast_bytes(server, client):
    a = np.array([0, -0.0, 1, 0.9, -0.9, np.nan, np.inf, -np.inf, -5, 127.5, 128, 254.9, 255.5, 300,
                  -128.9, -129, 1e-300])
    client.put("a", a, replace=True)
    for dtype in (U8, I8):
        limits = np.iinfo(NUMPY[dtype])
        want = np.clip(np.trunc(np.nan_to_num(a, posinf=1e9, neginf=-1e9)), limits.min,
                       limits.max).astype(NUMPY[dtype])
        client.call("CopyBuffer", source="a", name="b", dtype=dtype, replace=True)
        assert client.download("b") == want.tobytes()
        backwards = dict(source="b", view=o.view([len(a)], [-1], len(a) - 1))
        for target in (F32, F64, F16, I32, I64, BOOL, U8, I8):
            client.call("CopyBuffer", **backwards, name="c", replace=True, dtype=target)
            back = want[::-1].astype(int)
            if target in (U8, I8):
                ends = np.iinfo(NUMPY[target])
                back = np.clip(back, ends.min, ends.max)
            assert client.download("c") == back.astype(NUMPY[target]).tobytes(), (dtype, target)


# --- Truth values ---------------------------------------------------------------------------------


def test_truth_values_go_both_ways(server, client):
    for shape in ((), (1,), (7, 13), (0, 4), (3 * o.MI,)):
        bits = RNG.integers(0, 2, shape) == 1
        client.put("b", bits, replace=True)
        assert client.download("b") == bits.tobytes(), shape
        buffer = client.call("GetBuffer", name="b").buffer
        assert buffer.dtype == BOOL and buffer.size_bytes == bits.size
        for op, want in ((SUM, bits.sum()), (ALL, bits.all()), (ANY, bits.any())):
            got = client.call("Reduce", x=o.resident("b"), op=op)
            assert got.value.integer == want, (shape, op)
        if bits.size:
            assert number(client.call("Reduce", x=o.resident("b"), op=MEAN)) == bits.mean()
    bits = RNG.integers(0, 2, (40, 30)) == 1
    client.put("b", bits, replace=True)
    turned = o.resident("b", o.view([30, 40], [1, 30]))
    for operands, want in (([o.resident("b")], bits), ([turned], bits.T)):
        for op, fold in ((SUM, np.sum), (MEAN, np.mean), (ALL, np.all), (ANY, np.any)):
            got = o.to_numpy(client.call("Reduce", x=operands[0], op=op, axes=[1]).tensor)
            assert np.array_equal(got, fold(want, axis=1)), op
        tensor = client.call("Map", operands=operands,
                             expression=expression(operand(0), node("NOT", 0))).tensor
        assert np.array_equal(o.to_numpy(tensor), ~want) and tensor.dtype == BOOL
    for op in (PRODUCT, MIN, MAX, ARGMIN, ARGMAX, NORM_L1, NORM_L2, SUM_SQUARES, VARIANCE, STD):
        for axes in ([], [0]):
            expect_refused(client.attempt("Reduce", x=o.resident("b"), op=op, axes=axes),
                           "BAD_DTYPE")
    expect_refused(client.attempt("Matmul", a=o.resident("b"), b=turned), "BAD_DTYPE")
    for rpc in ("Dot", "Add"):
        outcome = client.attempt(rpc, a=o.resident("b"), b=o.resident("b"))
        expect_refused(outcome, "BAD_DTYPE", dtype="bool")
    steps = [o.compute.Step(dot=o.compute.DotRequest(a=o.resident("b"), b=o.resident("b")))] * 3
    for result in client.call("Execute", steps=steps).results:
        assert result.error.reason == "BAD_DTYPE", result


def test_copies_cast_truth_values(server, client):
    a = np.array([0.0, -0.0, 1, 0.3, np.nan, np.inf, -5, 1e-300])
    client.put("a", a, replace=True)
    client.call("CopyBuffer", source="a", name="b", dtype=BOOL)
    assert client.download("b") == (a != 0).tobytes()
    backwards = dict(source="b", view=o.view([8], [-1], 7))
    for dtype in NUMBERS:
        client.call("CopyBuffer", **backwards, name="c", replace=True, dtype=dtype)
        want = (a != 0)[::-1].astype("f4" if dtype == BF16 else NUMPY[dtype])
        if dtype == BF16:
            want = (want.view("u4") >> 16).astype("u2")
        assert client.download("c") == want.tobytes(), dtype
    client.call("CopyBuffer", **backwards, name="d")
    assert client.download("d") == (a != 0)[::-1].tobytes()


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
    # A range of a draft: what was there before stays.
    client.call("CreateBuffer", name="d", spec=spec)
    outcome = client.try_upload([dict(name="d", data=bad[:2]), dict(data=bad[4:])])
    expect_refused(outcome, "BAD_BOOL", offset="3", value="2")
    client.call("DeleteBuffer", name="d")


FLAGS = ("--memory-limit", "512Mi", "--scratch-limit", str(SCRATCH_LIMIT))


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), *FLAGS))

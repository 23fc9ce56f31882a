#!/usr/bin/env python3
"""Tests Map over the wire: operations in every type with every strategy, casts, results that
replace operands, and requests that are refused. tests/map_test.cc covers the functions whose last
bits a model does not know, and long expressions."""

import itertools
import operator
import statistics
import sys

import numpy as np

import outsider as o
import random_requests as r
from outsider import expression, node, operand
from random_requests import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8
from random_requests import DTYPES as NUMBERS

RNG = np.random.default_rng(20261124)
BYTES = (U8, I8)
INTEGERS = (*r.INTEGERS, *BYTES)


# --- The model ------------------------------------------------------------------------------------

def integer_power(a, b):
    result = np.zeros_like(a)
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist())):
        if y >= 0:
            power = pow(x, y, 1 << 64)
            result[i] = power - (1 << 64) if power >> 63 else power
        else:
            result[i] = {1: 1, -1: 1 if y % 2 == 0 else -1}.get(x, 0)
    return result


def minimum(a, b):
    return np.where((a <= b) | (a != a), a, b)


def maximum(a, b):
    return np.where((a >= b) | (a != a), a, b)


# What operations compute from f64 or i64 numbers, before the results are rounded to their type.
COMPARISONS = r.COMPARISONS | {"LESS_EQUAL": np.less_equal, "GREATER_EQUAL": np.greater_equal}
OF_NUMBERS = {**r.BINARY, **COMPARISONS, **r.UNARY, "MINIMUM": minimum, "MAXIMUM": maximum,
              "SIGN": np.sign, "CLIP": lambda a, b, c: minimum(maximum(a, b), c)}
OF_FLOATS = {"FLOOR": np.floor, "CEIL": np.ceil, "TRUNC": np.trunc, "ROUND": np.rint}
OF_INTEGERS = {"FLOOR_DIVIDE": np.floor_divide, "REMAINDER": np.remainder, "POWER": integer_power,
               "RANDOM_BITS": r.random_bits, "AND": np.bitwise_and, "OR": np.bitwise_or,
               "XOR": np.bitwise_xor, "NOT": np.invert}
ARGUMENTS = {"CLIP": 3, "RANDOM_BITS": 3, "NOT": 1}  # Others have 2 unless listed below.
ARGUMENTS |= dict.fromkeys((*r.UNARY, *OF_FLOATS, "SIGN"), 1)
SPECIAL = (0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 3.75, 5e-324, 1e-45, -6e-8, 6e4, -3e38, 1e308,
           np.inf, -np.inf, np.nan)


def type_of_result(op, dtype):
    if op in COMPARISONS:
        return BOOL
    if op in ("DIVIDE", "SQRT") and dtype in INTEGERS:
        return F64
    if op == "RANDOM_BITS":
        return I64
    return I32 if dtype in BYTES else dtype


def elements(dtype):
    """Returns special and random elements of a type."""
    if dtype == BOOL:
        return np.array([False, True])
    if dtype not in INTEGERS:
        return r.narrow(np.concatenate([SPECIAL, RNG.normal(0, 3, 60)]), dtype)
    ends = np.iinfo(o.NUMPY_TYPES[dtype])
    some = ends.min, ends.min + 1, ends.max - 1, ends.max
    return r.narrow(np.concatenate([some, RNG.integers(-9, 50, 60)]), dtype)


def real(x, dtype=0):
    return dict(real=x, dtype=dtype)


def integer(x, dtype=0):
    return dict(integer=x, dtype=dtype)


def tensors(*arrays):
    return [o.inline(array) for array in arrays]


def strategies(client):
    return [one.name for one in client.strategies("map")]


def expect(client, arrays, nodes, dtype, want):
    """Checks the result of every strategy."""
    for row in strategies(client):
        tensor = client.call("Map", operands=tensors(*arrays), expression=expression(*nodes),
                             strategy=row).tensor
        assert tensor.dtype == dtype, (row, nodes, tensor.dtype)
        got, right = (r.wide(array, dtype) for array in (o.to_numpy(tensor), want))
        equal = got == right
        if got.dtype.kind == "f":  # Signs of zeros matter.
            equal = equal & (np.signbit(got) == np.signbit(right)) | np.isnan(got) & np.isnan(right)
        at = np.flatnonzero(~equal)[:5]
        assert not len(at), (at, got[at], right[at], dtype, row, nodes)


def test_every_operation_in_every_type(server, client):
    assert {"fused", "one_node"} <= set(strategies(client))
    for dtype in NUMBERS + BYTES:
        rest = OF_INTEGERS if dtype in INTEGERS else OF_FLOATS
        for op, function in (OF_NUMBERS | rest).items():
            some, count = elements(dtype), ARGUMENTS.get(op, 2)
            a, b = np.repeat(some, len(some)), np.tile(some, len(some))
            arrays = [a, b, RNG.permutation(a)][:count]
            with np.errstate(all="ignore"):
                want = np.asarray(function(*(r.wide(array, dtype) for array in arrays)))
            kind = type_of_result(op, dtype)
            nodes = [*map(operand, range(count)), node(op, *range(count))]
            expect(client, arrays, nodes, kind, r.narrow(want, kind))


def test_fma_rounds_once(server, client):
    """The product does not fit the type, and only its rounding error is left."""
    for dtype, bits in ((F32, 12), (F64, 27)):
        x = np.full(100, 1 + 2.0**-bits, o.NUMPY_TYPES[dtype])
        nodes = [operand(0), operand(0), operand(1), node("NEGATE", 2), node("FMA", 0, 1, 3)]
        expect(client, [x, x * x], nodes, dtype, np.full(100, 2.0 ** (-2 * bits)))


def test_integers_and_constants_are_compared_by_value(server, client):
    # Python compares integers and floats exactly.
    comparisons = {"EQUAL": operator.eq, "NOT_EQUAL": operator.ne, "LESS": operator.lt,
                   "LESS_EQUAL": operator.le, "GREATER": operator.gt, "GREATER_EQUAL": operator.ge}
    constants = (2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2.0**63, 2.0**64, -(2.0**64), 2.0**53,
                 -(2.0**63), 2.0**62 + 2.0**10)
    for dtype in INTEGERS:
        ends = np.iinfo(o.NUMPY_TYPES[dtype])
        near = [int(c) + i for c in constants for i in (-1, 0, 1)]
        near = [value for value in near if ends.min <= value <= ends.max]
        x = np.array([ends.min, 0, ends.max - 1, ends.max, *near], o.NUMPY_TYPES[dtype])
        for (op, compare), c in itertools.product(comparisons.items(), constants):
            nodes = [operand(0), real(c) if isinstance(c, float) else integer(c)]
            for args in ((0, 1), (1, 0)):
                want = [compare(*((int(v), c)[arg] for arg in args)) for v in x]
                expect(client, [x], [*nodes, node(op, *args)], BOOL, np.array(want))


def test_quantiles(server, client):
    """tests/map_test.cc covers the tails, and the ends of the range."""
    inside = np.linspace(0, 1, 400)[1:-1]
    for dtype, epsilon in ((F32, 2.0**-23), (F64, 2.0**-52), (F16, 2.0**-10), (BF16, 2.0**-7)):
        p = r.narrow(inside, dtype)
        want = np.array([statistics.NormalDist().inv_cdf(one) for one in r.wide(p, dtype)])
        for row in strategies(client):
            tensor = client.call("Map", operands=tensors(p), strategy=row,
                                 expression=expression(operand(0), node("NDTRI", 0))).tensor
            assert tensor.dtype == dtype, row
            apart = np.abs(r.wide(o.to_numpy(tensor), dtype) - want)
            assert (apart <= 20 * epsilon * np.abs(want)).all(), (dtype, row, apart)


def test_coordinates(server, client):
    """Tests coordinates with operands of all layouts, folded along each axis, scanned, sorted, and
    in the epilogue of a product."""
    nodes = [operand(0), dict(coordinate=0), dict(coordinate=-1), integer(1000),
             node("FMA", 1, 3, 2), node("ADD", 4, 0)]
    a = RNG.integers(0, 99, (70, 130))
    want = np.arange(70)[:, None] * 1000 + np.arange(130) + a
    client.put("x", a, replace=True)
    client.put("y", np.ascontiguousarray(a.T), replace=True)

    def check(right, rpc, result="tensor", **fields):
        got = o.to_numpy(getattr(client.call(rpc, expression=expression(*nodes), **fields), result))
        assert np.array_equal(got, right), (rpc, fields)

    for x in (o.resident("x"), o.resident("y", o.view([70, 130], [1, 70]))):
        for row in strategies(client):
            check(want, "Map", operands=[x], strategy=row)
        for axis in (0, 1):
            check(want.sum(axis), "Reduce", x=x, op="REDUCE_OP_SUM", axes=[axis])
            check(want.cumsum(axis), "Scan", x=x, op="REDUCE_OP_SUM", axis=axis)
            check(np.flip(np.sort(want, axis), axis), "Sort", "values", x=x, axis=axis,
                  values=dict(inline=True), indices=dict(none=True), descending=True)
        for op, value in (("SUM", want.sum()), ("MAX", want.max())):
            got = client.call("Reduce", x=x, op="REDUCE_OP_" + op, expression=expression(*nodes))
            assert got.value.integer == value, (op, got, value)
    b = RNG.integers(0, 9, (30, 20)).astype(np.float32)
    client.put("b", b, replace=True)
    x = o.resident("b")
    check(np.arange(30)[:, None] * 1000 + np.arange(30) + (b @ b.T).astype(np.float64), "Matmul",
          a=x, b=x, transpose_b=True)
    for axis, shape in ((0, ()), (2, (3, 3)), (-3, (3, 3))):
        x = tensors(np.zeros(shape, np.int64))
        message = expression(operand(0), dict(coordinate=axis), node("ADD", 0, 1))
        for outcome in (client.attempt("Map", operands=x, expression=message),
                        client.attempt("Reduce", x=x[0], op="REDUCE_OP_SUM", expression=message)):
            assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "BAD_AXES"), outcome


def test_casts(server, client):
    for source, target in itertools.product(NUMBERS + BYTES + (BOOL,), repeat=2):
        x = elements(source)
        expect(client, [x], [operand(0), node("CAST", 0, dtype=target)], target,
               r.cast(x, source, target))


def test_a_result_that_replaces_its_own_operands(server, client):
    """Every element is computed from what the arrays held before. The expression is x minus x
    backwards, so an array that is written while it is being read would lose half of x."""
    n = 300001
    x, y = RNG.integers(-999, 999, (2, n)).astype(np.float32)
    backwards = o.view([n], [-1], n - 1)
    difference = expression(operand(0), operand(1), operand(2), node("SUBTRACT", 0, 1),
                            node("MULTIPLY", 3, 2))
    for row in strategies(client):
        for name in ("x", "y"):
            client.put("x", x, replace=True)
            client.put("y", y, replace=True)
            operands = [o.resident("x"), o.resident("x", backwards), o.resident("y")]
            want = (x - x[::-1]) * y
            before = {b: client.call("GetBuffer", name=b).buffer.version for b in ("x", "y")}
            stats = client.call("Map", operands=operands, expression=difference, strategy=row,
                                result=o.into(name, replace=True)).stats
            assert list(stats.operand_versions) == [before["x"], before["x"], before["y"]], row
            assert np.array_equal(np.frombuffer(client.download(name), np.float32), want), row
            other, kept = ("y", y) if name == "x" else ("x", x)
            assert client.download(other) == kept.tobytes(), (row, other)


# --- Refusals -------------------------------------------------------------------------------------

def test_bad_expressions_say_which_node(server, client):
    x = tensors(np.ones(3, np.float32), np.ones(3, np.int32))
    a, b = operand(0), operand(1)
    cases = [(1, [a, {}]),
             (0, [operand(2)]),
             (1, [a, dict(op=99)]),
             (1, [a, dict(op=258)]),  # Its low byte is a valid operation.
             (1, [a, dict(op=0)]),
             (1, [a, node("ADD", 0)]),
             (1, [a, node("ADD", 0, 0, 0)]),
             (1, [a, node("SQRT", *([0] * 100000))]),
             (1, [a, node("ADD", 0, 1)]),
             (1, [a, node("ADD", 0, 2**32 - 1)]),
             (1, [a, node("NOT", 0)]),
             (2, [a, b, node("WHERE", 0, 0, 1)]),
             (1, [a, node("CAST", 0)]),
             (1, [a, node("CAST", 0, dtype=55)]),
             (2, [a, node("EQUAL", 0, 0), node("ADD", 1, 1)]),
             (1, [a, real(1.5, I32), node("ADD", 0, 1)]),
             (1, [a, integer(2**31, I32), node("ADD", 0, 1)]),
             (2, [b, integer(2**31), node("ADD", 0, 1)]),
             (1, [a, integer(1, BOOL), node("ADD", 0, 1)]),
             (1, [a, integer(-1, U8), node("ADD", 0, 1)]),
             (1, [a, integer(128, I8), node("ADD", 0, 1)]),
             (1, [a, real(1.5, U8), node("ADD", 0, 1)]),
             (1, [a, dict(boolean=True, dtype=F32), node("ADD", 0, 1)]),
             (0, [dict(real=1.0, dtype=-1), a])]
    for row in strategies(client) + [""]:
        for place, nodes in cases:
            outcome = client.attempt("Map", operands=x, expression=expression(*nodes), strategy=row)
            assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "BAD_EXPRESSION"), (
                nodes[:3], outcome)
            assert outcome.metadata["node"] == str(place), (nodes[:3], outcome)


def test_counts_and_shapes(server, client):
    """tests/expression_service_test.py covers the limits of nodes."""
    x = tensors(np.ones(3, np.float32))
    chain = [operand(0)] + [node("ADD", i, i) for i in range(63)]
    assert client.attempt("Map", operands=x, expression=expression(*chain)).ok
    for operands, nodes, field, limit in (
            (x, chain + [node("ADD", 63, 0)], "expression.nodes", "64"),
            ([], [operand(0)], "operands", "8"), (x * 9, [operand(0)], "operands", "8")):
        step = o.compute.Step(map=dict(operands=operands, expression=expression(*nodes)))
        for outcome in (client.attempt("Map", operands=operands, expression=expression(*nodes)),
                        o.Outcome.of_step(client.call("Execute", steps=[step]).results[0])):
            o.check_refusal(outcome, "INVALID_ARGUMENT", "BAD_EXPRESSION", field=field, limit=limit)
    scan = lambda nodes: client.attempt("Scan", x=x[0], op="REDUCE_OP_ANY",
                                        expression=expression(*nodes), result=dict(inline=True))
    assert scan(chain[:-1]).ok
    o.check_refusal(scan(chain), "INVALID_ARGUMENT", "BAD_EXPRESSION", field="expression.nodes",
                    limit="63")
    eight = [np.full(3, i) for i in range(8)]
    nodes = [operand(i) for i in range(8)] + [node("ADD", 0, 1)]
    nodes += [node("ADD", 7 + i, i + 1) for i in range(1, 7)]
    expect(client, eight, nodes, I64, np.full(3, 28))


def test_millions_of_nodes_take_no_memory(server, client):
    """Each empty node takes two bytes of the request."""
    path = "/tessera.v1.ComputeService/"
    raw = lambda rpc: client.channel.unary_unary(path + rpc)
    nodes = b"\x0a\x00" * (1 << 20)
    length = lambda n: bytes((n >> 7 * i & 127) | (128 if n >> 7 * (i + 1) else 0)
                             for i in range(5) if i == 0 or n >> 7 * i)
    within = lambda tag, data: bytes([tag]) + length(len(data)) + data
    for body in (within(0x12, nodes), nodes):  # Nodes of an expression, then operands.
        before = server.peak_rss()
        # The expression is field 9 of a ReduceRequest and field 10 of a MatmulRequest. The next
        # field has the expression's other operands.
        staged = body if body is not nodes else None
        requests = [("Map", body), ("Execute", within(0x0A, within(0x32, body)))]
        for rpc, step, field in (("Reduce", 0x12, 0x4A), ("Matmul", 0x1A, 0x52)):
            part = within(field, nodes) if staged else bytes([field + 8, 0]) * (1 << 20)
            requests += [(rpc, part), ("Execute", within(0x0A, within(step, part)))]
        for rpc, request in requests:
            outcome = o.outcome_of(lambda: raw(rpc)(request, timeout=30))
            assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "BAD_EXPRESSION"), outcome
            assert {"field", "limit"} <= set(outcome.metadata), outcome
        assert server.peak_rss() - before < 32 * o.MI, server.peak_rss() - before
    # These lengths are wrong.
    for request in (b"\x12\xff\xff\xff\xff\x0f", b"\x12\x05\x0a\x00", b"\x12\x02\x0a\x7f"):
        assert not o.outcome_of(lambda: raw("Map")(request, timeout=30)).ok
        assert not o.outcome_of(lambda: raw("Execute")(within(0x0A, within(0x32, request)),
                                                       timeout=30)).ok


def test_results_larger_than_everything(server, client):
    """A few bytes that are broadcast to a huge shape are refused before any memory is allocated."""
    one = np.ones(1, np.float32)
    stretched = lambda *shape: o.inline(one, o.view(shape, [0] * len(shape)))
    add = expression(operand(0), operand(1), node("ADD", 0, 1))
    too_much = ("OPERATION_TOO_LONG", "RESULT_TOO_LARGE", "QUOTA_EXCEEDED", "SCRATCH_EXHAUSTED",
                "HOST_MEMORY_EXHAUSTED", "GPU_MEMORY_EXHAUSTED")
    for n, reasons in ((1 << 32, ("BAD_SHAPE",)), (1 << 20, too_much)):
        for row in strategies(client) + [""]:
            for where in (None, o.into("huge")):
                outcome = client.attempt("Map", operands=[stretched(n, 1), stretched(1, n)],
                                         expression=add, strategy=row, result=where)
                assert outcome.reason in reasons, outcome
    assert client.names() == []


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), "--memory-limit", "512Mi", "--scratch-limit", "128Mi"))

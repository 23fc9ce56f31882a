#!/usr/bin/env python3
"""Tests Map over the wire: every operation in every type against a NumPy model, with every
strategy; casts, random expressions, results that replace operands, and requests that are refused.
"""

import fractions
import functools
import itertools
import math
import operator
import sys

import numpy as np

import outsider as o
from outsider import expression, node, operand
from random_requests import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8
from random_requests import DTYPES as NUMBERS

RNG = np.random.default_rng(20261124)
NAMES = {F32: "f32", F64: "f64", F16: "f16", BF16: "bf16", I32: "i32", I64: "i64", BOOL: "bool",
         U8: "u8", I8: "i8"}
# The types in which the model computes values of a type.
VALUES = {F32: "f4", F64: "f8", F16: "f4", BF16: "f4", I32: "i4", I64: "i8", BOOL: "?", U8: "i4",
          I8: "i4"}
ELEMENTS = {**VALUES, F16: "f2", U8: "u1", I8: "i1"}
BYTES = (U8, I8)
INTEGERS = (I32, I64, *BYTES)


# --- The model ------------------------------------------------------------------------------------

def round_to(dtype, values):
    """Rounds F32 values to 16 bits. The results are F32 values."""
    if dtype == F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == BF16:
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        up = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return np.where(np.isnan(values), values, up.astype(np.uint32).view(np.float32))
    return values


def promote(a, b):
    if a == b or b == BOOL:
        return a
    if a == BOOL:
        return b
    if a in BYTES:
        return I32 if b in BYTES else b
    if b in BYTES:
        return a
    if {a, b} <= set(INTEGERS):
        return I64
    if a in INTEGERS or b in INTEGERS or F64 in (a, b):
        return F64
    return F32


def cast(values, source, target):
    """Casts as CopyBuffer does."""
    if target == BOOL:
        return values != 0
    if target in INTEGERS:
        if source == BOOL or source in INTEGERS:
            limits = np.iinfo(ELEMENTS[target])
            return np.clip(values.astype(np.int64), limits.min, limits.max).astype(VALUES[target])
        exact = np.trunc(values.astype(np.longdouble))
        limits = np.iinfo(ELEMENTS[target])
        low, high = np.longdouble(limits.min), np.longdouble(limits.max)
        exact = np.where(np.isnan(exact), 0, np.clip(exact, low, high))
        # Goes through Python integers, because no NumPy cast is exact at the ends of the range.
        return np.array([int(x) for x in exact.ravel()], VALUES[target]).reshape(values.shape)
    if target == F16:
        return values.astype(np.float16).astype(np.float32)
    if target == BF16:
        # All values that the tests cast in this way are F32 values.
        single = values.astype(np.float32)
        assert np.array_equal(single.astype(values.dtype), values,
                              equal_nan=values.dtype.kind == "f")
        return round_to(BF16, single)
    return values.astype(VALUES[target])


def integer_power(a, b):
    result = np.zeros_like(a)
    bits = 8 * a.dtype.itemsize
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist())):
        if y >= 0:
            power = pow(x, y, 1 << bits)
            result[i] = power - (1 << bits) if power >> (bits - 1) else power
        else:
            result[i] = {1: 1, -1: 1 if y % 2 == 0 else -1}.get(x, 0)
    return result


def exactly(function):
    """Computes the function in extended precision, rounded to the type of the values."""
    return lambda *x: function(*(v.astype(np.longdouble) for v in x)).astype(x[0].dtype)


def sign(a):
    return np.where(np.isnan(a), a, np.sign(a)) if a.dtype.kind == "f" else np.sign(a)


def minimum(a, b):
    return np.where((a <= b) | (a != a), a, b)


def maximum(a, b):
    return np.where((a >= b) | (a != a), a, b)


def rounding(function):
    return lambda a: a if a.dtype.kind == "i" else function(a)


def floor_divide(a, b):
    """Returns the floor of the exact quotient, rounded once. For 0, infinity and NaN, returns
    NumPy's result."""
    result = np.asarray(np.floor_divide(a, b))
    if a.dtype.kind == "i":
        return result
    a, b, result = *np.broadcast_arrays(a, b), result.copy()
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)):
        floor = int(fractions.Fraction(float(a.flat[i])) // fractions.Fraction(float(b.flat[i])))
        try:
            result.flat[i] = float(floor) if floor else math.copysign(0, a.flat[i]
                                                                      * np.sign(b.flat[i]))
        except OverflowError:
            result.flat[i] = math.inf if floor > 0 else -math.inf
    return result


MODEL = {  # Name: (arguments, rule, function).
    "ADD": (2, "numbers", np.add),
    "SUBTRACT": (2, "numbers", np.subtract),
    "MULTIPLY": (2, "numbers", np.multiply),
    "DIVIDE": (2, "reals", np.divide),
    "FLOOR_DIVIDE": (2, "numbers", floor_divide),
    "REMAINDER": (2, "numbers", np.remainder),
    "POWER": (2, "numbers", None),
    "MINIMUM": (2, "numbers", minimum),
    "MAXIMUM": (2, "numbers", maximum),
    "FMA": (3, "numbers", None),  # See test_fma_rounds_once.
    "CLIP": (3, "numbers", lambda a, b, c: minimum(maximum(a, b), c)),
    "NEGATE": (1, "numbers", np.negative),
    "ABS": (1, "numbers", np.abs),
    "SIGN": (1, "numbers", sign),
    "FLOOR": (1, "numbers", rounding(np.floor)),
    "CEIL": (1, "numbers", rounding(np.ceil)),
    "TRUNC": (1, "numbers", rounding(np.trunc)),
    "ROUND": (1, "numbers", rounding(np.rint)),
    "SQRT": (1, "reals", np.sqrt),
    "EXP": (1, "reals", exactly(np.exp)),
    "LOG": (1, "reals", exactly(np.log)),
    "TANH": (1, "reals", exactly(np.tanh)),
    "EQUAL": (2, "comparison", np.equal),
    "NOT_EQUAL": (2, "comparison", np.not_equal),
    "LESS": (2, "comparison", np.less),
    "LESS_EQUAL": (2, "comparison", np.less_equal),
    "GREATER": (2, "comparison", np.greater),
    "GREATER_EQUAL": (2, "comparison", np.greater_equal),
    "AND": (2, "logic", np.logical_and),
    "OR": (2, "logic", np.logical_or),
    "XOR": (2, "logic", np.logical_xor),
    "NOT": (1, "logic", np.logical_not)}
FUNCTIONS = ("EXP", "LOG", "TANH", "POWER")


def apply(op, types, values):
    """Returns the type and the values of an operation on values of these types."""
    _, rule, function = MODEL[op]
    # One-byte integers and bool affect the common type only if there are no other types.
    small = [t for t in types if t in BYTES or t == BOOL]
    common = functools.reduce(promote, [t for t in types if t not in small] or small)
    common = I32 if common in BYTES else common
    if rule == "reals" and common in INTEGERS:
        common = F64
    values = [v.astype(VALUES[common]) for v in values]
    if op == "POWER":
        function = integer_power if common in INTEGERS else exactly(np.power)
    with np.errstate(all="ignore"):
        result = function(*values)
    if rule in ("comparison", "logic"):
        return BOOL, result
    return common, round_to(common, result)


def stored(dtype, values):
    """Returns values as elements. For bf16, these are their bits."""
    if dtype == BF16:
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(ELEMENTS[dtype])


def loaded(dtype, elements):
    if dtype == BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(VALUES[dtype])


def ulps(dtype, got, want):
    """Returns the largest distance in units in the last place of the type."""
    bits, least = {F32: (24, -149), F64: (53, -1074), F16: (11, -24), BF16: (8, -133)}[dtype]
    got, want = got.astype(np.longdouble).ravel(), want.astype(np.longdouble).ravel()
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), (got, want)
    got, want = got[finite], want[finite]
    assert np.isfinite(got).all()
    if not len(want):
        return 0
    _, exponent = np.frexp(want)
    unit = np.ldexp(np.longdouble(1), np.maximum(exponent - bits, least))
    return float((np.abs(got - want) / unit).max())


# --- Requests -------------------------------------------------------------------------------------

def real(x, dtype=0):
    return dict(real=x, dtype=dtype)


def integer(x, dtype=0):
    return dict(integer=x, dtype=dtype)


def tensors(*pairs):
    """Makes operands from pairs (dtype, elements)."""
    result = []
    for dtype, elements in pairs:
        message = o.tensor(elements)
        message.dtype = dtype
        result.append(o.compute.Operand(tensor=message))
    return result


def strategies(client):
    return [one.name for one in client.strategies("map")]


def answer(client, operands, nodes, **more):
    tensor = client.call("Map", operands=operands, expression=expression(*nodes), **more).tensor
    return tensor.dtype, loaded(tensor.dtype, o.to_numpy(tensor))


def expect(got, want, context):
    assert got.dtype == want.dtype and got.shape == want.shape, (context, got, want)
    equal = got == want
    if got.dtype.kind == "f":  # Signs of zeros matter.
        equal &= np.signbit(got) == np.signbit(want)
        equal |= np.isnan(got) & np.isnan(want)
    at = np.flatnonzero(~equal)[:5]
    assert not len(at), (at, got.ravel()[at], want.ravel()[at], got.dtype, context)


def specials(dtype):
    if dtype == BOOL:
        return [False, True]
    if dtype in INTEGERS:
        limits = np.iinfo(ELEMENTS[dtype])
        some = [0, 1, -1, 2, -2, 3, -7, 10, limits.max, limits.min, limits.max - 1, limits.min + 1]
        return [x for x in some if x >= limits.min]
    tiny, large = {F32: (1e-45, 3e38), F64: (5e-324, 1e308), F16: (6e-8, 6e4), BF16: (1e-40, 3e38)}[
        dtype]
    return [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, -0.5, 3.75, tiny, -tiny, large, -large]  + [
        np.inf, -np.inf, np.nan]


def pairs_of(dtype, count=3):
    """Returns vectors that pair all special and random values of the type with each other."""
    some = np.array(specials(dtype), VALUES[dtype])
    if dtype == BOOL:
        random = RNG.integers(0, 2, 60) == 1
    elif dtype in INTEGERS:
        random = RNG.integers(0 if dtype == U8 else -50, 50, 60).astype(VALUES[dtype])
    else:
        random = RNG.normal(0, 3, 60).astype(VALUES[dtype])
    with np.errstate(all="ignore"):
        values = round_to(dtype, np.concatenate([some, random]))
    a = np.repeat(values, len(values))
    b = np.tile(values, len(values))
    return [a, b, RNG.permutation(a)][:count]


# --- Results --------------------------------------------------------------------------------------

def test_every_operation_in_every_type(server, client):
    rows = strategies(client)
    assert "fused" in rows and "one_node" in rows
    for op, (count, rule, _) in MODEL.items():
        if rule == "logic" or op == "FMA":
            continue
        for dtype in NUMBERS + BYTES:
            values = pairs_of(dtype, count)
            kind, want = apply(op, [dtype] * count, values)
            nodes = [operand(i) for i in range(count)] + [node(op, *range(count))]
            operands = tensors(*((dtype, stored(dtype, v)) for v in values))
            for row in rows:
                context = (op, NAMES[dtype], row)
                got_kind, got = answer(client, operands, nodes, strategy=row)
                assert got_kind == kind, context
                if op in FUNCTIONS and kind not in INTEGERS:
                    with np.errstate(all="ignore"):
                        apart = ulps(kind, got, want)
                    assert apart <= 2, (context, apart)
                else:
                    expect(got, want, context)


def test_fma_rounds_once(server, client):
    """The product does not fit the type, and only its rounding error is left."""
    for dtype, bits in ((F32, 12), (F64, 27)):
        one, rest = np.array(1 + 2.0**-bits, VALUES[dtype]), 2.0 ** (-2 * bits)
        x = np.full(100, one)
        product = np.full(100, one * one)
        nodes = [operand(0), operand(0), operand(1), node("NEGATE", 2), node("FMA", 0, 1, 3)]
        for row in strategies(client):
            _, got = answer(client, tensors((dtype, x), (dtype, product)), nodes, strategy=row)
            assert (got == rest).all(), (dtype, row, got[0])
    inputs = [operand(0), operand(1), operand(2)]
    for dtype in NUMBERS:
        a, b, c = (RNG.integers(-9, 10, 500).astype(VALUES[dtype]) for _ in range(3))
        operands = tensors(*((dtype, stored(dtype, v)) for v in (a, b, c)))
        got = answer(client, operands, [*inputs, node("FMA", 0, 1, 2)])[1]
        expect(got, a * b + c, NAMES[dtype])
    # A separate product and sum round twice.
    a, b, c = (RNG.normal(0, 1, 5000).astype(np.float32) for _ in range(3))
    nodes = [*inputs, node("MULTIPLY", 0, 1), node("ADD", 3, 2)]
    for row in strategies(client):
        got = answer(client, tensors((F32, a), (F32, b), (F32, c)), nodes, strategy=row)[1]
        expect(got, a * b + c, row)


def test_integers_and_constants_are_compared_by_value(server, client):
    # Python compares integers and floats exactly.
    comparisons = {"EQUAL": operator.eq, "NOT_EQUAL": operator.ne, "LESS": operator.lt,
                   "LESS_EQUAL": operator.le, "GREATER": operator.gt, "GREATER_EQUAL": operator.ge}
    constants = (2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2.0**63, 2.0**64, -(2.0**64))
    for dtype in INTEGERS:
        limits = np.iinfo(ELEMENTS[dtype])
        x = np.array([limits.min, 0, limits.max - 1, limits.max], ELEMENTS[dtype])
        for (op, compare), c in itertools.product(comparisons.items(), constants):
            nodes = [operand(0), real(c) if isinstance(c, float) else integer(c)]
            for row in strategies(client):
                for args in ((0, 1), (1, 0)):
                    want = [compare(*((int(v), c)[arg] for arg in args)) for v in x]
                    got = answer(client, tensors((dtype, x)), [*nodes, node(op, *args)],
                                 strategy=row)[1]
                    expect(got, np.array(want), (NAMES[dtype], op, c, args, row))


def test_casts(server, client):
    for source in NUMBERS + BYTES:
        values = pairs_of(source, 1)[0]
        if source in (F64, I64):  # The bf16 model needs F32 values.
            with np.errstate(all="ignore"):
                values = values.astype(np.float32).astype(VALUES[source])
        for target in NUMBERS + BYTES + (BOOL,):
            with np.errstate(all="ignore"):
                if target == BF16 and source in INTEGERS:
                    values = np.clip(values, -(2**24), 2**24)
                want = cast(values, source, target)
            nodes = [operand(0), node("CAST", 0, dtype=target)]
            if target == BOOL:
                nodes.append(node("CAST", 1, dtype=source))
                want = round_to(source, want.astype(VALUES[source]))
            for row in strategies(client):
                _, got = answer(client, tensors((source, stored(source, values))), nodes,
                                strategy=row)
                expect(got, want, (NAMES[source], NAMES[target], row))


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
            expect(np.frombuffer(client.download(name), np.float32), want, (row, name))
            other, kept = ("y", y) if name == "x" else ("x", x)
            expect(np.frombuffer(client.download(other), np.float32), kept, (row, other))


def random_nodes(operands, count):
    """Returns a list of nodes, with their types and values in the model."""
    nodes, values = [], []
    for i, (dtype, elements) in enumerate(operands):
        nodes.append(operand(i))
        values.append((dtype, elements))
    ops = [op for op in MODEL if op not in FUNCTIONS and op != "FMA"]
    while len(nodes) < count:
        op = ops[RNG.integers(len(ops))]
        arguments, rule, _ = MODEL[op]
        args = [int(RNG.integers(len(nodes))) for _ in range(arguments)]
        types = [values[a][0] for a in args]
        if rule == "logic" and set(types) != {BOOL}:
            continue
        if rule in ("numbers", "reals") and set(types) == {BOOL}:
            continue
        nodes.append(node(op, *args))
        values.append(apply(op, types, [values[a][1] for a in args]))
    return nodes, values


def test_random_expressions(server, client):
    for _ in range(120):
        operands = []
        for dtype in RNG.choice(NUMBERS + BYTES + (BOOL,), RNG.integers(1, 9)):
            dtype = int(dtype)
            operands.append((dtype, RNG.permutation(pairs_of(dtype, 1)[0])[:700]))
        nodes, values = random_nodes(operands, int(RNG.integers(9, 63)))
        inputs = tensors(*((dtype, stored(dtype, v)) for dtype, v in operands))
        for row in ("", *strategies(client)):
            fields = dict(operands=inputs, expression=expression(*nodes), strategy=row)
            outcome = client.attempt("Map", **fields)
            assert outcome.ok, (outcome, row, nodes)
            tensor = outcome.answer.tensor
            assert tensor.dtype == values[-1][0]
            expect(loaded(tensor.dtype, o.to_numpy(tensor)), values[-1][1], (row, nodes))


# --- Refusals -------------------------------------------------------------------------------------

def test_bad_expressions_say_which_node(server, client):
    x = tensors((F32, np.ones(3, np.float32)), (I32, np.ones(3, np.int32)))
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


def test_numbers_that_the_server_does_not_know_are_reported(server, client):
    x = tensors((F32, np.ones(3, np.float32)))
    for number in (99, 258, 2**31 - 1, -5):
        wrong = dict(op=number, args=[0])
        plain = client.attempt("Map", operands=x, expression=expression(operand(0), wrong))
        step = o.compute.Step(map=o.compute.MapRequest(
            operands=x, expression=expression(operand(0), wrong)))
        in_step = client.call("Execute", steps=[step]).results[0].error
        reduced = client.attempt("Reduce", op="REDUCE_OP_SUM", x=x[0],
                                 expression=expression(operand(0), wrong))
        for text in (plain.text, in_step.message, reduced.text):
            assert f"node 1: there is no operation {number}" in text, text
    outcome = client.attempt("Map", operands=x,
                             expression=expression(operand(0), node("CAST", 0, dtype=55)))
    assert "node 1: there is no element type 55" in outcome.text, outcome


def test_counts_and_shapes(server, client):
    x = tensors((F32, np.ones(3, np.float32)))
    chain = [operand(0)] + [node("ADD", i, i) for i in range(63)]
    assert client.attempt("Map", operands=x, expression=expression(*chain)).ok
    for operands, nodes, field, limit in (
            (x, chain + [node("ADD", 63, 0)], "expression.nodes", "64"),
            (x, [], "expression.nodes", "64"), ([], [operand(0)], "operands", "8"),
            (x * 9, [operand(0)], "operands", "8")):
        step = o.compute.Step(map=o.compute.MapRequest(
            operands=operands, expression=expression(*nodes)))
        for outcome in (client.attempt("Map", operands=operands, expression=expression(*nodes)),
                        o.Outcome.of_step(client.call("Execute", steps=[step]).results[0])):
            assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "BAD_EXPRESSION"), outcome
            assert (outcome.metadata["field"], outcome.metadata["limit"]) == (field, limit), outcome
    eight = tensors(*((I64, np.full(3, i)) for i in range(8)))
    nodes = [operand(i) for i in range(8)] + [node("ADD", 0, 1)]
    nodes += [node("ADD", 7 + i, i + 1) for i in range(1, 7)]
    assert (answer(client, eight, nodes)[1] == 28).all()
    clash = tensors((F32, np.ones((2, 3), np.float32)), (F32, np.ones(2, np.float32)))
    outcome = client.attempt("Map", operands=clash,
                             expression=expression(operand(0), operand(1), node("ADD", 0, 1)))
    assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "BAD_SHAPE"), outcome
    assert outcome.metadata["operand"] == "operands[1]", outcome


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
        # The expression is field 9 of a ReduceRequest and field 10 of a MatmulRequest. The field
        # after it has the expression's other operands.
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

#!/usr/bin/env python3
"""Dot and Reduce of parts of arrays as an outsider sees them, on a server of several devices: the bits
of the whole from parts on any of them, rows, and what is refused.

usage: parts_test.py --server build/bin/tessera-server [--device cuda:0,cpu] [test ...]
"""

import struct
import sys

import numpy as np

import outsider as o

RNG = np.random.default_rng(20261128)
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "ARGMIN", "ARGMAX", "MEAN", "NORM_L1", "NORM_L2",
       "SUM_SQUARES", "VARIANCE", "STD", "ALL", "ANY")  # fmt: skip
CHUNK = 4096  # of f32, in arrays of 8193 to 2**20 elements


def devices(client):
    return [device.name for device in client.info().devices]


def put(client, name, array, **spec):
    client.put(name, array, replace=True, **spec)
    return o.resident(name)


def part(first, elements):
    return o.compute.Part(first=first, elements=elements)


def reduce(op, x, **more):
    return dict(op=f"REDUCE_OP_{op}", x=x, **more)


def bits(answer):
    value = answer.value
    number = value.integer if value.WhichOneof("value") == "integer" else struct.pack("<d", value.real)
    return number, getattr(answer, "index", 0)


def finish(client, op, n, values, dtype=1, **more):
    return client.call(
        "Reduce", op=f"REDUCE_OP_{op}", part=part(0, n), dtype=dtype, values=values, **more
    )


def test_bits_of_the_whole(server, client):
    names = devices(client)
    for n in (0, 5, 8193, 70001, 300000):
        x, y = (RNG.standard_normal(n).astype(np.float32) for _ in "xy")
        whole, other = put(client, "x", x), put(client, "y", y)
        cuts = [0, *sorted(RNG.integers(0, n // CHUNK + 1, 3) * CHUNK), n] if n > 8192 else [0, n]
        parts = []
        for i, (first, end) in enumerate(zip(cuts, cuts[1:])):
            device = names[i % len(names)]
            parts.append((put(client, f"x{i}", x[first:end], device=device),
                          put(client, f"y{i}", y[first:end], device=device), part(first, n)))  # fmt: skip
        for strategy in ("", "fixed_tree", "compensated"):
            for op in OPS:
                if n == 0 and op in ("MIN", "MAX", "ARGMIN", "ARGMAX", "MEAN", "VARIANCE", "STD"):
                    continue
                answers = [
                    client.call("Reduce", **reduce(op, a, part=where), strategy=strategy)
                    for a, _, where in parts
                ]
                assert not any(answer.HasField("value") for answer in answers)
                values = b"".join(answer.values for answer in answers)
                expected = client.call("Reduce", **reduce(op, whole), strategy=strategy)
                got = finish(client, op, n, values, strategy=strategy)
                assert bits(got) == bits(expected), (n, op, strategy)
                assert got.stats.strategy == strategy or strategy == ""
            answers = [
                client.call("Dot", a=a, b=b, part=where, strategy=strategy) for a, b, where in parts
            ]
            values = b"".join(answer.values for answer in answers)
            expected = client.call("Dot", a=whole, b=other, strategy=strategy)
            got = finish(client, "SUM", n, values, strategy=strategy)
            assert bits(got)[0] == bits(expected)[0], (n, strategy)


def test_divided_and_inline_operands(server, client):
    n = 300000
    x = RNG.standard_normal(n).astype(np.float32)
    expected = client.call("Reduce", **reduce("SUM", put(client, "x", x)))
    cut = 30 * CHUNK
    first = client.call(
        "Reduce", **reduce("SUM", put(client, "a", x[:cut], placement=["all"]), part=part(0, n))
    )
    second = client.call("Reduce", **reduce("SUM", o.inline(x[cut:]), part=part(cut, n)))
    assert bits(finish(client, "SUM", n, first.values + second.values)) == bits(expected)


def test_rows(server, client):
    x = RNG.standard_normal((50, 3, 700)).astype(np.float32)
    whole = put(client, "x", x)
    for axes in ([1], [2], [-1, 1]):
        for op in ("SUM", "VARIANCE", "ARGMAX") if len(axes) == 1 else ("SUM",):
            expected = client.call("Reduce", **reduce(op, whole, axes=axes)).tensor.data
            got = b""
            for first, end in ((0, 1), (1, 20), (20, 20), (20, 50)):
                rows = put(client, "rows", x[first:end])
                where = part(first * 2100, x.size)
                got += client.call("Reduce", **reduce(op, rows, axes=axes, part=where)).tensor.data
            assert got == expected, (op, axes)
    where = part(2100, x.size)
    client.call("Reduce", **reduce("SUM", put(client, "r", x[1:3]), axes=[2], part=where,
                                   result=o.into("sums", replace=True)))  # fmt: skip
    sums = client.call("Reduce", **reduce("SUM", whole, axes=[2])).tensor.data
    assert client.download("sums") == sums[12:36]


def refused(outcome, **metadata):
    assert outcome.code == "INVALID_ARGUMENT" and outcome.reason == "BAD_PART", outcome
    for key, value in metadata.items():
        assert outcome.metadata.get(key) == str(value), (key, outcome)


def test_refusals(server, client):
    n = 20000
    x = put(client, "x", np.ones(CHUNK, np.float32))
    some = put(client, "some", np.ones((4, 1000), np.float32))

    def attempt(where=None, method="Reduce", **fields):
        where = part(0, n) if where is None else where
        fields = {**(reduce("SUM", x) if method == "Reduce" else dict(a=x, b=x)), **fields}
        return client.attempt(method, part=where, **fields)

    assert attempt().ok and attempt(part(CHUNK, n)).ok and attempt(method="Dot").ok
    for first, elements in ((1, n), (-CHUNK, n), (0, CHUNK - 1), (CHUNK * 4, n), (0, -1),
                            (2**62, 2**63 - 1), (-(2**63), 2**63 - 1), (0, 2**63 - 1)):  # fmt: skip
        for method in ("Reduce", "Dot"):
            refused(attempt(part(first, elements), method), first=first, elements=elements)
    refused(attempt(part(1, n)), chunk=CHUNK)
    refused(attempt(strategy="cpu_parallel"), strategy="cpu_parallel")
    assert attempt(strategy="none_such").reason == "UNKNOWN_STRATEGY"
    node = o.compute.Expression.Node(operand=0)
    refused(attempt(expression=o.compute.Expression(nodes=[node])), field="expression")
    refused(attempt(part(0, 8000), x=some, axes=[0]), first=0, elements=8000)
    refused(attempt(part(0, 8000), x=some, axes=[0, 1]))
    refused(attempt(part(500, 8000), x=some, axes=[1]), row=1000)
    refused(attempt(part(0, 8001), x=some, axes=[1]), row=1000)
    assert attempt(part(4000, 8000), x=some, axes=[1]).ok
    assert attempt(x=o.inline(np.ones(8, np.uint8)), where=part(0, 8)).reason == "BAD_DTYPE"
    assert attempt(part(0, 0), x=o.inline(np.ones(0, np.float32)), op="REDUCE_OP_MAX").reason == (
        "EMPTY_INPUT"
    )
    assert attempt(result=o.into("new")).reason == "BAD_AXES"

    values = b"".join(
        client.call("Reduce", **reduce("SUM", o.inline(np.ones(size, np.float32)), part=where)).values
        for size, where in ((4 * CHUNK, part(0, n)), (n - 4 * CHUNK, part(4 * CHUNK, n)))
    )
    good = dict(op="REDUCE_OP_SUM", part=part(0, n), dtype=1, values=values)
    assert client.call("Reduce", **good).value.real == n
    for more, metadata in (
        (dict(values=values[:-1]), dict(expected=40, given=39)),
        (dict(values=b""), dict(expected=40, given=0)), (dict(x=x), dict(field="x")),
        (dict(axes=[0]), dict(field="axes")), (dict(part=part(CHUNK, n)), dict(field="part.first")),
        (dict(part=part(0, -1)), dict(elements=-1)), (dict(part=None), dict(field="values")),
        (dict(part=None, values=b""), dict(field="dtype")),
        (dict(strategy="cpu_parallel"), dict(strategy="cpu_parallel")),
    ):
        refused(client.attempt("Reduce", **{**good, **more}), **metadata)
    assert client.attempt("Reduce", **{**good, "dtype": 0}).reason == "BAD_DTYPE"
    assert client.attempt("Reduce", **{**good, "dtype": 8}).reason == "BAD_DTYPE"
    assert client.attempt("Reduce", **{**good, "op": 0}).reason == "BAD_OPERATION"


def test_programs_take_none(server, client):
    x = put(client, "x", np.ones(CHUNK, np.float32))
    steps = [
        o.compute.Step(reduce=o.compute.ReduceRequest(**reduce("SUM", x, part=part(0, CHUNK)))),
        o.compute.Step(dot=o.compute.DotRequest(a=x, b=x, part=part(0, CHUNK))),
        o.compute.Step(reduce=o.compute.ReduceRequest(
            op="REDUCE_OP_SUM", part=part(0, CHUNK), dtype=1, values=bytes(8))),
        o.compute.Step(reduce=o.compute.ReduceRequest(op="REDUCE_OP_SUM", dtype=1)),
        o.compute.Step(reduce=o.compute.ReduceRequest(**reduce("SUM", x))),
        o.compute.Step(reduce=o.compute.ReduceRequest(**reduce("SUM", x))),
    ]  # fmt: skip
    results = [o.Outcome.of_step(one) for one in client.call("Execute", steps=steps).results]
    for outcome in results[:4]:
        refused(outcome)
    assert all(outcome.ok for outcome in results[4:])


def test_whatever_bytes_come(server, client):
    """They give a number, and no harm."""
    for op in OPS:
        for dtype in range(1, 7):
            size = 24 * 3
            for _ in range(3):
                fields = dict(op=f"REDUCE_OP_{op}", dtype=dtype, part=part(0, 20000))
                wrong = client.attempt("Reduce", values=RNG.bytes(1), **fields)
                refused(wrong, given=1)
                size = int(wrong.metadata["expected"])
                assert client.attempt("Reduce", values=RNG.bytes(size), **fields).ok
    assert server.alive()


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), device="cpu:0,cpu:1,cpu:2"))

#!/usr/bin/env python3
"""Talks to a running server with nothing of this project but its .proto files; NumPy is the judge.

The client is the distribution's grpcio with its default options. What passes here, a client in any
other language can do too.

usage: python_client_test.py --server build/bin/tessera-server [name of a test ...]
"""

import sys

import grpc
import numpy as np

import outsider as o
from outsider import inline, into, resident, view

CHUNK = 1 << 20
FLOATS = (np.float32, np.float64)
RNG = np.random.default_rng(7)


def check_close(actual, expected, terms, dtype, what):
    """Within the rounding of a long accumulation, relative to the sum of the |terms|."""
    tolerance = (1e-4 if dtype == np.float32 else 1e-12) * np.asarray(terms) + 1e-300
    error = np.abs(np.asarray(actual, np.float64) - expected)
    assert np.all(error <= tolerance), f"{what}: {actual} is not {expected}"


def test_every_type_comes_back_bit_for_bit(server, client):
    for dtype in ("f4", "f8", "f2", "u2", "i4", "i8", "u1", "i1"):
        for shape in ((), (0,), (3, 5, 7), (1 << 19,), (0, 4)):
            data = RNG.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            spec = o.spec_of(np.frombuffer(data, dtype).reshape(shape), replace=True)
            rest = [dict(data=data[i : i + 777777]) for i in range(0, len(data), 777777)]
            made = client.upload([dict(name="x", spec=spec), *rest])
            assert made.received_bytes == len(data)
            assert tuple(made.buffer.shape) == shape
            assert made.buffer.size_bytes == made.buffer.committed_bytes == len(data)
            assert made.buffer.state == o.buffers.Buffer.STATE_READY
            for offset, limit in ((0, 0), (len(data) // 3, 0), (len(data) // 3, len(data) // 2)):
                back = b""
                request = o.buffers.DownloadRequest(name="x", offset=offset, limit=limit)
                for message in client.b.Download(request, timeout=o.CALL_TIMEOUT_S):
                    assert message.offset == offset + len(back)
                    assert len(message.data) <= CHUNK
                    back += message.data
                end = offset + limit if limit else len(data)
                assert back == data[offset:end], (dtype, shape, offset, limit)


# ReduceOp: the NumPy function and the terms whose rounding adds up.
REDUCTIONS = {
    "SUM": (np.sum, lambda x, **k: np.abs(x).sum(**k)),
    "PRODUCT": (np.prod, lambda x, **k: np.abs(np.prod(x, **k))),
    "MIN": (np.min, lambda x, **k: 0),
    "MAX": (np.max, lambda x, **k: 0),
    "MEAN": (np.mean, lambda x, **k: np.abs(x).mean(**k)),
    "NORM_L1": (lambda x, **k: np.abs(x).sum(**k), lambda x, **k: np.abs(x).sum(**k)),
    "NORM_L2": (lambda x, **k: np.sqrt((x * x).sum(**k)), lambda x, **k: np.sqrt((x * x).sum(**k))),
    "SUM_SQUARES": (lambda x, **k: (x * x).sum(**k), lambda x, **k: (x * x).sum(**k)),
    "VARIANCE": (np.var, np.var),
    "STD": (np.std, np.std),
}


def test_reductions(server, client):
    for dtype in FLOATS:
        # Close to 1, so that a product of many stays in range.
        x = (1 + 1e-2 * RNG.standard_normal((5, 33, 70))).astype(dtype)
        client.put("x", x, replace=True)
        wide = x.astype(np.float64)
        for op, (reference, terms) in REDUCTIONS.items():
            found = client.call("Reduce", x=resident("x"), op=f"REDUCE_OP_{op}").value.real
            check_close(found, reference(wide), terms(wide), dtype, op)
            for axes, keep in (((0,), True), ((-1,), False), ((0, 2), True), ((-3, 1, 2), False)):
                found = o.to_numpy(client.call(
                    "Reduce", x=resident("x"), op=f"REDUCE_OP_{op}", axes=axes, keep_dims=keep
                ).tensor)
                how = dict(axis=axes, keepdims=keep)
                expected = reference(wide, **how)
                assert (found.shape, found.dtype) == (expected.shape, dtype), (op, how)
                # The result itself is rounded to the operand's type.
                bound = terms(wide, **how) + np.finfo(dtype).eps / 1e-12 * np.abs(expected)
                check_close(found, expected, bound, dtype, (op, how))
        for op, reference in (("ARGMIN", np.argmin), ("ARGMAX", np.argmax)):
            answer = client.call("Reduce", x=resident("x"), op=f"REDUCE_OP_{op}")
            assert answer.index == reference(x)
            assert answer.value.real == wide.flat[answer.index]
            for axis in range(3):
                answer = client.call("Reduce", x=resident("x"), op=f"REDUCE_OP_{op}", axes=[axis])
                np.testing.assert_array_equal(o.to_numpy(answer.tensor), reference(x, axis))


def test_products_sums_and_windows(server, client):
    for dtype in FLOATS:
        for turn_a, turn_b in ((False, False), (False, True), (True, False), (True, True)):
            a = RNG.standard_normal((33, 65) if turn_a else (65, 33)).astype(dtype)
            b = RNG.standard_normal((31, 33) if turn_b else (33, 31)).astype(dtype)
            answer = client.call(
                "Matmul", a=inline(a), b=inline(b), transpose_a=turn_a, transpose_b=turn_b
            )
            x, y = (a.T if turn_a else a).astype("f8"), (b.T if turn_b else b).astype("f8")
            what = f"product, transposed: {turn_a}, {turn_b}"
            check_close(o.to_numpy(answer.tensor), x @ y, np.abs(x) @ np.abs(y), dtype, what)
        a, b = (RNG.standard_normal((65, 33)).astype(dtype) for _ in range(2))
        answer = client.call("Add", a=inline(a), b=inline(b))
        np.testing.assert_array_equal(o.to_numpy(answer.tensor), a + b)
        answer = client.call("Dot", a=inline(a), b=inline(b), timing=True)
        terms = a.astype(np.float64) * b
        check_close(answer.value.real, terms.sum(), np.abs(terms).sum(), dtype, "dot")
        assert answer.stats.kernel_us > 0
        assert answer.stats.bytes >= a.nbytes + b.nbytes
        row = a[0].astype(np.float64)
        answer = client.call("WindowSum", x=inline(a[0]), radius=2)
        sums, terms = (np.convolve(one, np.ones(5))[2:-2] for one in (row, np.abs(row)))
        check_close(o.to_numpy(answer.tensor), sums, terms, dtype, "window sum")


def test_results_stay_resident_and_chain(server, client):
    """Squared distances between two sets of points; not one of them comes back."""
    points = RNG.standard_normal((300, 16)).astype(np.float32)
    queries = RNG.standard_normal((40, 16)).astype(np.float32)
    client.put("points", points)
    client.put("queries", -2 * queries)
    client.call(
        "Reduce", x=resident("points"), op="REDUCE_OP_SUM_SQUARES", axes=[1], result=into("norms")
    )
    client.call(
        "Matmul", a=resident("queries"), b=resident("points"), transpose_b=True,
        result=into("distances"),
    )
    answer = client.call(
        "Add", a=resident("distances"), b=resident("norms", view((40, 300), (0, 1))),
        result=into("distances", replace=True),
    )
    assert not answer.HasField("tensor")
    assert tuple(answer.buffer.shape) == (40, 300)
    answer = client.call("Reduce", x=resident("distances"), op="REDUCE_OP_ARGMIN", axes=[1])
    distances = ((queries[:, None, :].astype(np.float64) - points[None]) ** 2).sum(-1)
    np.testing.assert_array_equal(o.to_numpy(answer.tensor), distances.argmin(1))
    stored = np.frombuffer(client.download("distances"), "<f4").reshape(40, 300)
    offsets = (queries.astype(np.float64) ** 2).sum(1)[:, None]
    np.testing.assert_allclose(stored + offsets, distances, rtol=1e-4, atol=1e-4)


def test_errors_carry_code_reason_and_figures(server, client):
    three, four = np.zeros(3, np.float32), np.zeros(4, np.float32)
    client.put("x", three)
    client.create("open", three)
    x, none = resident("x"), resident("none")
    short = o.compute.Operand(tensor=o.compute.Tensor(dtype=1, shape=[3], data=b"1234"))
    huge = o.buffers.BufferSpec(dtype=1, shape=[1 << 50])
    for code, reason, figures, rpc, fields in (
        ("INVALID_ARGUMENT", "BAD_SHAPE", {}, "Dot", dict(a=x, b=inline(four))),
        ("INVALID_ARGUMENT", "BAD_DTYPE", {}, "Dot", dict(a=x, b=inline(three.astype("f8")))),
        ("INVALID_ARGUMENT", "UNKNOWN_STRATEGY", {}, "Dot", dict(a=x, b=x, strategy="guess")),
        ("INVALID_ARGUMENT", "BAD_OPERAND", {}, "Dot", dict(a=x, b=short)),
        ("INVALID_ARGUMENT", "BAD_VIEW", {}, "Dot", dict(a=resident("x", view([2], (), 2)), b=x)),
        ("INVALID_ARGUMENT", "BAD_AXES", {}, "Reduce", dict(x=x, op="REDUCE_OP_SUM", axes=[1])),
        ("INVALID_ARGUMENT", "BAD_RADIUS", {"value": "-1"}, "WindowSum", dict(x=x, radius=-1)),
        ("INVALID_ARGUMENT", "BAD_NAME", {}, "CreateBuffer",
         dict(name="white space", spec=o.spec_of(three))),
        ("NOT_FOUND", "BUFFER_NOT_FOUND", {"name": "none"}, "Dot", dict(a=none, b=x)),
        ("ALREADY_EXISTS", "BUFFER_EXISTS", {}, "CreateBuffer",
         dict(name="x", spec=o.spec_of(three))),
        ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", {"requested": str(1 << 52)}, "CreateBuffer",
         dict(name="huge", spec=huge)),
        ("FAILED_PRECONDITION", "BUFFER_NOT_READY", {}, "Dot", dict(a=resident("open"), b=x)),
    ):
        try:
            client.call(rpc, **fields)
            raise AssertionError(f"{reason} is no error")
        except grpc.RpcError as error:
            outcome = o.Outcome(error=error)
            trailers = dict(error.trailing_metadata())
        assert (outcome.code, outcome.reason, outcome.domain) == (code, reason, "tessera"), outcome
        assert figures.items() <= outcome.metadata.items(), outcome
        status = o.status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert (status.code, status.message) == (grpc.StatusCode[code].value[0], outcome.text)
    # And the server answers the next call.
    assert client.dot_of_ones() == 1


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), device="auto"))

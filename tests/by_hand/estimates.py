#!/usr/bin/env python3
"""Compares the CPU device's estimates, on which refusals are based, with the time that operations
take. Covers every operation, type and layout, with usual operands and with the slowest ones.

usage: estimates.py --server build/bin/tessera-server [--worst 30] [--only TEXT] [--warm-up]

First, one server refuses each operation as too long, and reports its estimate, before anything has
been measured or, with --warm-up, after the strategies have been measured on small problems. Then
another server runs the operation three times, and its fastest run is compared. Both servers have
one thread, whose CPU time is counted, so other programs hardly affect the result.
The script prints the cases with the highest and the lowest ratio of time to estimate, and exits
with 1 if an operation took more than three times its estimate."""

import argparse
import itertools
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import outsider as o  # noqa: E402

MOST = 3  # The maximum ratio of time to estimate.
SIDE = 2048  # The side of resident arrays.
F32, F64, F16, BF16, I32, I64, BOOL, U8, I8 = range(1, 10)
NUMPY = {F32: "f4", F64: "f8", F16: "f2", I32: "i4", I64: "i8", U8: "u1", I8: "i1"}
# Pairs of operands, by their unusual property.
REALS = {
    "usual": (1.5, 1.0009), "far apart": (1e308, 3e-308), "subnormal": (5e-320, 0.999),
    "quotient": (1e308, 3.7), "power": (0.5, 1060.5), "negative": (-740.3, 2), "nan": (np.nan, 1)}
SINGLES = {"usual": (1.5, 1.0009), "far apart": (3e38, 1e-44), "subnormal": (1e-40, 0.999),
           "power": (0.5, 140.5), "negative": (-100.5, 2), "nan": (np.nan, 1)}
WHOLE = {"usual": (123456789, 77), "power": (3, 2**31 - 1)}
# The shape and strides of views of SIDE x SIDE elements.
LAYOUTS = {
    "rows": ([SIDE, SIDE], [SIDE, 1]), "transposed": ([SIDE, SIDE], [1, SIDE]),
    "transposed, repeated": ([2, SIDE, SIDE], [0, 1, SIDE]),
    "one element": ([SIDE, SIDE], [0, 0]), "backwards": ([SIDE * SIDE], [-1]),
    "every line": ([SIDE * SIDE // 16], [16]), "every page": ([SIDE, SIDE // 16], [1, SIDE * 16])}


def seconds_of(pid, call):
    """Returns the processor time that all threads of a process use for a call."""

    def spent():
        tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    before = spent()
    call()
    return (spent() - before) / 1e9


def values_of(dtype):
    if dtype == F64:
        return REALS
    if dtype in (F32, F16):
        return SINGLES
    return {name: pair for name, pair in WHOLE.items() if dtype in (I32, I64) or name == "usual"}


def maps():
    """Yields a chain of each operation as (name, method, fields)."""
    node = o.compute.Expression.Node
    for op in (*range(1, 35), 36):
        name = o.compute.MapOp.Name(op).removeprefix("MAP_OP_")
        if name in ("AND", "OR", "XOR", "NOT", "WHERE"):
            continue
        for dtype, numpy in NUMPY.items():
            for kind, pair in values_of(dtype).items():
                with np.errstate(all="ignore"):
                    one, two = (np.array([x]).astype(numpy) for x in pair)
                arguments = 3 if name in ("FMA", "CLIP") else 1 if 12 <= op <= 22 or op >= 34 else 2
                # Each node reads the operands themselves, so that all nodes compute the same.
                args = [[0, 1, 1][:arguments]] * 24
                nodes = [node(operand=0), node(operand=1)]
                nodes += [node(op=op, args=a, dtype=F16 if name == "CAST" else 0) for a in args]
                # The result depends on all nodes, so that none can be left out.
                last = 2
                for i in range(3, len(args) + 2):
                    nodes.append(node(op="MAP_OP_MAXIMUM" if not 23 <= op <= 28 else "MAP_OP_OR",
                                      args=[last, i]))
                    last = len(nodes) - 1
                window = o.view([1 << 16], [0])
                yield f"map {name} {numpy} {kind}", "Map", dict(
                    operands=[o.inline(one, window), o.inline(two, window)],
                    expression=o.compute.Expression(nodes=nodes),
                    result=o.into("out", replace=True))


def folds():
    negative = o.expression(o.operand(0), o.node("NEGATE", 0))
    for dtype, numpy in NUMPY.items():
        for layout, (shape, strides) in LAYOUTS.items():
            offset = SIDE * SIDE - 1 if strides[0] < 0 else 0
            x = o.resident(numpy, o.view(shape, strides, offset))
            for op in range(1, len(o.compute.ReduceOp.values())):
                name = o.compute.ReduceOp.Name(op)[10:]
                yield f"reduce {name} {numpy} {layout}", "Reduce", dict(x=x, op=op)
            yield (f"reduce SUM of -x {numpy} {layout}", "Reduce",
                   dict(x=x, op=1, expression=negative))
            yield f"map -x {numpy} {layout}", "Map", dict(
                operands=[x], expression=negative, result=o.into("out", replace=True))
            for axis, op in itertools.product(range(len(shape)), (1, 8, 11)):
                name = o.compute.ReduceOp.Name(op)[10:]
                yield f"axes {name} {numpy} {layout} {axis}", "Reduce", dict(
                    x=x, op=op, axes=[axis], result=o.into("out", replace=True))
            if dtype not in (U8, I8):
                yield f"dot {numpy} {layout}", "Dot", dict(a=x, b=x)
                yield f"top_k {numpy} {layout}", "TopK", dict(
                    x=x, k=10, values=o.into("values", replace=True),
                    indices=o.into("at", replace=True))
            if dtype not in (U8, I8, I64) and layout in ("rows", "transposed"):
                small = o.resident(numpy, o.view([512, 512],
                                                 [s if s == 1 else SIDE for s in strides]))
                yield f"matmul {numpy} {layout}", "Matmul", dict(
                    a=small, b=small, result=o.into("out", replace=True))
    tiny = o.resident("subnormal")
    yield "matmul f4 subnormal", "Matmul", dict(a=tiny, b=tiny, result=o.into("out", replace=True))
    yield "dot f4 subnormal", "Dot", dict(a=tiny, b=tiny)


def arrays():
    """Yields the arrays of orders() as (name, array)."""
    rng = np.random.default_rng(2)
    n = SIDE * SIDE
    for numpy in ("f4", "f8"):
        rise = np.arange(n).astype(numpy)
        yield f"rising_{numpy}", rise
        # Each element is better than most of the previous 1000, so that TopK examines most of them.
        yield f"noisy_{numpy}", rise + 2000 * rng.random(n).astype(numpy)
        yield f"random_{numpy}", n * rng.random(n).astype(numpy)
        # The first guess of a histogram's bin is wrong for all of them.
        yield f"curved_{numpy}", (n * np.sort(rng.random(n)) ** 4).astype(numpy)
    yield "edges", n * (np.arange(n + 1) / n) ** 4
    yield "few_edges", n * (np.arange(1001) / 1000) ** 4
    yield "permutation", rng.permutation(n)
    yield "order", np.arange(n)
    yield "few", rng.integers(0, 1000, n)
    yield "mask", rng.random(n) < 0.5
    yield "ones", np.ones(n, bool)


def scans():
    n = SIDE * SIDE
    shapes = [(1, n), (n // 3, 3), (n // 4, 4), (n // 16, 16), (n // 17, 17), (n // 100, 100),
              (n // 600, 600), (n // 5000, 5000), (64, n // 64), (3, n // 3), (16, n // 16),
              (n // 3, 3), (n // 16, 16), (n // 100, 100), (n // 5000, 5000)]
    for numpy in ("f4", "f8", "i4", "f2"):
        for shape in (*shapes, (n // 16, 4, 4), (n // 300, 100, 3), (2, SIDE, SIDE // 2)):
            dense = [int(np.prod(shape[i + 1:])) for i in range(len(shape))]
            for axis in range(len(shape)):
                yield f"scan {numpy} {list(shape)} {axis}", "Scan", dict(
                    x=o.resident(numpy, o.view(shape, dense)), op=1, axis=axis,
                    result=o.into("out", replace=True))
        for axis in (0, 1):
            for op in (1, 2, 3):
                yield f"scan {op} {numpy} one element {axis}", "Scan", dict(
                    x=o.resident(numpy, o.view([SIDE, SIDE], [0, 0])), op=op, axis=axis,
                    result=o.into("out", replace=True))


def orders():
    """Yields operations whose time depends on the order of their operands."""
    n = SIDE * SIDE
    both = dict(values=o.into("values", replace=True), indices=o.into("at", replace=True))
    out = dict(result=o.into("out", replace=True))
    for numpy in ("f4", "f8"):
        for kind in ("random", "noisy", "rising", "curved"):
            x = o.resident(f"{kind}_{numpy}")
            for edges in ("edges", "few_edges"):
                yield f"histogram {numpy} {kind} {edges}", "Histogram", dict(
                    x=x, edges=o.resident(edges), **out)
            for bins in (100, 1 << 16, n):
                yield f"histogram {numpy} {kind} even {bins}", "Histogram", dict(
                    x=x, even=o.compute.EvenBins(count=bins, low=0, high=n), **out)
            for k in (1, 10, 100, 1000, 4096):
                for rows in (1, 64):
                    yield f"top_k {numpy} {kind} {k} of {rows} rows", "TopK", dict(
                        x=o.resident(f"{kind}_{numpy}", o.view([rows, n // rows],
                                                               [n // rows, 1])), k=k, **both)
            yield f"sort {numpy} {kind}", "Sort", dict(x=x, **both)
            for of in ("curved", "rising"):
                yield f"search {numpy} {kind} {of}", "SearchSorted", dict(
                    x=o.resident(f"{of}_{numpy}"), keys=x, **out)
        for order in ("permutation", "order", "few"):
            at = o.resident(order)
            yield f"take {numpy} {order}", "Take", dict(
                x=o.resident(f"rising_{numpy}"), indices=at, **out)
            yield f"take {numpy} {order} along", "Take", dict(
                x=o.resident(f"rising_{numpy}"), indices=at, along=True, axis=0, **out)
            for inner in (1, 4, 64):
                rows = n // inner
                yield f"sum_by_label {numpy} {order} {inner}", "SumByLabel", dict(
                    x=o.resident(f"rising_{numpy}", o.view([rows, inner], [inner, 1])),
                    labels=o.resident(order, o.view([rows], [1])), length=n, **out)
            rows = o.resident(order, o.view([n // 16], [1]))
            yield f"take {numpy} {order} rows", "Take", dict(
                x=o.resident(f"rising_{numpy}", o.view([n, 16], [0, 1])), indices=rows, axis=0,
                **out)
            yield f"take {numpy} {order} columns", "Take", dict(
                x=o.resident(f"rising_{numpy}", o.view([16, n // 16], [n // 16, 1])), axis=1,
                indices=o.resident("few"), mode=2, **out)
        for mask in ("mask", "ones"):
            yield f"select {numpy} {mask}", "Select", dict(
                x=o.resident(f"rising_{numpy}"), mask=o.resident(mask), **both)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--worst", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--warm-up", action="store_true")
    args = parser.parse_args()
    o.Program.path, o.Program.device, o.Program.warm_up = args.server, "cpu", args.warm_up
    o.make_stubs()
    with tempfile.TemporaryDirectory() as folder:
        servers = [o.Server(folder, "--max-operation-seconds", value, OMP_NUM_THREADS="1")
                   for value in ("0.000001", "3600")]
        strict, free = (server.client() for server in servers)
        rng = np.random.default_rng(1)
        for numpy in NUMPY.values():
            array = (100 * rng.random((SIDE, SIDE))).astype(numpy)
            for client in (strict, free):
                client.put(numpy, array)
        for name, array in arrays():
            for client in (strict, free):
                client.put(name, array)
        for client in (strict, free):
            client.put("subnormal", np.full((512, 512), 1e-20, "f4"))
        found = []
        for name, method, fields in (*maps(), *folds(), *scans(), *orders()):
            if not name.startswith(tuple(args.only.split(","))):
                continue
            refused = strict.attempt(method, **fields)
            if refused.reason != "OPERATION_TOO_LONG":
                if refused.reason not in (None, "BAD_DTYPE"):
                    print(name, refused)
                continue  # A short or unsupported call gets no estimate.
            estimate = float(refused.metadata["estimate_seconds"])
            if estimate == 0:  # The call was stopped before it was estimated.
                estimate = float(strict.attempt(method, **fields).metadata["estimate_seconds"])
            took = min(seconds_of(servers[1].pid, lambda: free.call(method, timeout=600, **fields))
                       for _ in range(3))
            found.append((took / estimate, name, took, estimate))
        for server in servers:
            server.stop()
    found.sort()
    for ratio, name, took, estimate in (*found[-args.worst :], *found[: args.worst // 3]):
        print(f"{ratio:8.2f} {name:<44} {took * 1e3:9.2f} ms, estimate {estimate * 1e3:9.2f} ms")
    return 1 if found and found[-1][0] > MOST else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compares the CPU device's estimates, on which refusals are based, with the time that operations
take. Covers every operation, type and layout, with usual operands and with the slowest ones.

usage: estimates.py --server build/bin/tessera-server [--worst 30] [--only TEXT]

First, one server refuses each operation as too long, and reports its estimate, before anything has
been measured. Then another server runs the operation three times, and its fastest run is compared.
Both servers have one thread, whose CPU time is counted, so other programs hardly affect the result.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--worst", type=int, default=30)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    o.Program.path, o.Program.device, o.Program.warm_up = args.server, "cpu", False
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
        for client in (strict, free):
            client.put("subnormal", np.full((512, 512), 1e-20, "f4"))
        found = []
        for name, method, fields in (*maps(), *folds()):
            if args.only not in name:
                continue
            refused = strict.attempt(method, **fields)
            if refused.reason != "OPERATION_TOO_LONG":
                continue  # A short or unsupported call gets no estimate.
            estimate = float(refused.metadata["estimate_seconds"])
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

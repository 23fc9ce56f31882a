#!/usr/bin/env python3
"""Times Tessera and other libraries on the same GPU, in interleaved rounds.

usage: library_peers.py map ADDRESS
       library_peers.py search ADDRESS --cli BIN/tessera
       library_peers.py top_k BIN/strategy_bench
       library_peers.py bytes BIN/strategy_bench
       library_peers.py products bf16:8192 f32:8192...
       Each command takes --rounds N and --json FILE.

ADDRESS is a server on the same GPU. A result is the median of the rounds after a warm-up round,
whose results are checked. A device time is the time between an event before the first kernel of a
call and an event after the last one, on an idle device unless stated otherwise.

map: times expressions through the service, in CuPy's fused kernels and in torch.compile's kernels.
All of them read the same operands from GPU memory and leave their results there. At 2^28 elements
of f32, each library holds five arrays of 1 GiB. Short arrays are in caches, so their times are
mostly launch times. The time of a round is the median of its calls.

search: times exact searches for nearest neighbours, from the call until the indices and squared
distances have arrived: through the service, with PyTorch and CuPy in this process, and by `tessera
search`, which computes |x|^2 in each call. The server's --scratch-limit must be large enough for
the scores, which need queries x vectors x 4 bytes. PyTorch and CuPy compute |x|^2 - 2 q x from a
stored |x|^2 (in f32 even for bf16 operands), and select the k smallest values of each row. The
command then prints the device times of the product, the expression and TopK as separate steps, and
of the strategies that a search uses.

top_k: times the strategy `threshold`, with strategy_bench, and torch.topk (sorted). The f32
operands are not in any cache, and the device is held until the host has enqueued all kernels.

bytes: times `tensor_i8`, with strategy_bench, and torch._int_mm, in the same way. b^T means that b
is stored as [n, k].

products: times PyTorch on all GPUs of this host, with one process per GPU, for comparison with
tests/by_hand/many_gpus.py. `one` is torch.mm on the first GPU. In the other two cases, every GPU
holds a part of both matrices, needs the whole of one, and keeps a part of the result: `gathered` is
NCCL's all-gather and then torch.mm, and `overlapped` is torch.ops.symm_mem.fused_all_gather_matmul.
A round begins on all GPUs at the same time and takes as long as the slowest GPU. f32 is computed in
f32, not in TF32.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))


def interleaved(options, ways, check=lambda name: None, **row):
    """Calls the functions of `ways`, which return times, in interleaved rounds. Prints the medians,
    and returns a row with the times of each function."""
    times = {name: [] for name in ways}
    for turn in range(-1, options.rounds):
        for name, way in ways.items():
            took = way()
            if turn < 0:
                check(name)
            else:
                times[name].append(took)
    median = {name: statistics.median(each) for name, each in times.items()}
    first = next(iter(median.values()))
    for name, took in median.items():
        print(*row.values(), f"{name} {took:.2f}, {took / first:.2f} x", flush=True)
    return {**row, "median": median, "rounds": times}


def events_around(events, synchronize, work, before=lambda: None):
    """Records two events around work, waits for them, and returns them."""
    begin, end = events
    synchronize()
    before()
    begin.record()
    work()
    end.record()
    synchronize()
    return begin, end


def torch_us(work, before=lambda: None):
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin, end = events_around(events, torch.cuda.synchronize, work, before)
    return 1000 * begin.elapsed_time(end)


def cupy_us(work):
    import cupy

    events = [cupy.cuda.Event() for _ in range(2)]
    begin, end = events_around(events, cupy.cuda.Device().synchronize, work)
    return 1000 * cupy.cuda.get_elapsed_time(begin, end)


# --- map ------------------------------------------------------------------------------------------

EXPONENTS = (8, 10, 12, 14, 16, 28)  # the numbers of elements are these powers of two
CALLS = 20  # calls in a round
# Each entry has the number of operands, and the expression in terms of the functions of a module m.
EXPRESSIONS = {
    "2a+1": (1, lambda m, a: 2 * a + 1),
    "(a-b)^2": (2, lambda m, a, b: (a - b) * (a - b)),
    "ab+c": (3, lambda m, a, b, c: a * b + c),
    "ab+cd": (4, lambda m, a, b, c, d: a * b + c * d),
    "where": (4, lambda m, a, b, c, d: m.where(a < b, c, d)),
    "gelu": (1, lambda m, a: 0.5 * a * (1 + m.tanh(0.79788456 * (a + 0.044715 * (a * a * a))))),
}
FACTORS = (1.0, -0.5, 0.25, 2.0)  # operand i is the same random array times factor i


def fused(module, function, count):
    """Returns a single CuPy kernel for a function of `count` operands."""
    names = ", ".join("abcd"[:count])  # fuse counts the lambda's parameters
    named = eval(f"lambda {names}: f(m, {names})", {"f": function, "m": module})
    return module.fuse(kernel_name="map_peers")(named)


def compiled(module, function, _):
    module._dynamo.reset()  # otherwise, torch compiles a function only for a few shapes
    return module.compile(lambda *operands: function(module, *operands), dynamic=False)


def map_rows(options):
    import cupy
    import tessera as ts
    import torch

    rows = []
    for elements in (1 << exponent for exponent in EXPONENTS):
        base = np.random.default_rng(1).standard_normal(elements, np.float32)
        with ts.connect(options.address) as t:
            rows += maps(options, base, t, cupy, torch)
            for array in t.list("map_peers/"):
                array.delete()
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return rows


def maps(options, base, t, cupy, torch):
    out, rows = {}, []
    some = [base[:1000] * np.float32(factor) for factor in FACTORS]
    x = t.put(base, "map_peers/base", replace=True)
    ours = [(x * factor).save(f"map_peers/{i}", replace=True) for i, factor in enumerate(FACTORS)]
    peers = {
        "cupy": (cupy, fused, cupy_us, [cupy.asarray(base) * factor for factor in FACTORS]),
        "torch": (torch, compiled, torch_us,
                  [torch.from_numpy(base).cuda() * factor for factor in FACTORS]),
    }
    host = {"tessera": lambda array: array.numpy(), "cupy": cupy.asnumpy,
            "torch": lambda array: array.cpu().numpy()}
    for expression, (count, function) in EXPRESSIONS.items():
        # NumPy's functions dispatch to the operands.
        wanted = function(np, *ours[:count]).with_(timing=True)

        def call():
            out["tessera"] = wanted.save("map_peers/out", replace=True)
            return wanted.stats[0].kernel_us

        def peer_call(name):
            module, make, us, operands = peers[name]
            kernel = make(module, function, count)

            def work():
                out[name] = kernel(*operands[:count])

            return lambda: us(work)

        def check(name):
            want = function(np, *some[:count])
            if not np.allclose(host[name](out[name][:1000]), want, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"{name} gives a different result for {expression}")

        calls = {"tessera": call, **{name: peer_call(name) for name in peers}}
        ways = {name: lambda one=one: statistics.median(one() for _ in range(CALLS))
                for name, one in calls.items()}
        row = interleaved(options, ways, check, expression=expression, elements=len(base))
        rate = 4 * len(base) * (count + 1) / row["median"]["tessera"] / 1e3
        print(f"    {rate:.0f} GB/s of operands and result")
        rows.append(row)
    return rows


# --- search ---------------------------------------------------------------------------------------

VECTORS, QUERIES, DIMENSIONS, K = 1 << 20, 1024, 128, 10


def torch_search(vectors, queries, dtype):
    import torch

    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, q = (torch.from_numpy(array).cuda().to(kind) for array in (vectors, queries))
    norms = (x.float() ** 2).sum(1)

    def search():
        if dtype == "f32":
            scores = torch.addmm(norms, q, x.T, alpha=-2)
        else:
            scores = torch.mm(q, x.T, out_dtype=torch.float32)
            torch.sub(norms, scores, alpha=2, out=scores)
        return [a.cpu().numpy() for a in torch.topk(scores, K, dim=1, largest=False, sorted=True)]

    return search


def cupy_search(vectors, queries):
    import cupy as xp

    x, q = xp.asarray(vectors), xp.asarray(queries)
    norms = (x**2).sum(1)

    def search():
        scores = norms - 2 * (q @ x.T)
        some = xp.argpartition(scores, K - 1, axis=1)[:, :K]
        values = xp.take_along_axis(scores, some, 1)
        order = xp.argsort(values, axis=1)
        return [xp.asnumpy(xp.take_along_axis(a, order, 1)) for a in (values, some)]

    return search


def search_rows(options):
    import tessera as ts

    with ts.connect(options.address) as t, tempfile.TemporaryDirectory() as folder:
        return [searches(options, ts, t, pathlib.Path(folder), dtype) for dtype in ("f32", "bf16")]


def searches(options, ts, t, folder, dtype):
    random = np.random.default_rng(1)
    vectors, queries = (random.standard_normal((rows, DIMENSIONS), np.float32)
                        for rows in (VECTORS, QUERIES))
    if dtype == "bf16":  # round the values to bf16
        for array in (vectors, queries):
            bits = array.view(np.uint32)
            bits += 0x7FFF + (bits >> 16 & 1)
            bits &= 0xFFFF0000
    x, q = (t.put(array, f"search/{name}", dtype=dtype, replace=True)
            for name, array in (("vectors", vectors), ("queries", queries)))
    norms = ts.sum_squares(x.astype("f4"), axis=1).save()

    def best(step=lambda array: array):
        """Returns lazy arrays of the distances, without |q|^2, and of the indices. step is applied
        to the product and to the expression."""
        product = step(ts.matmul(q, x.T, dtype="f32"))
        return step(norms - 2 * product).topk(K, largest=False)

    def by_cli():
        command = [options.cli, "--server", options.address, "--json", "search", "search/vectors",
                   "--queries", "search/queries", "--k", str(K), "-o", folder / "i.npy",
                   "--distances-output", folder / "d.npy"]
        made = subprocess.run(command, check=True, capture_output=True)
        # The time from the first call to the last response.
        return json.loads(made.stdout)["wall_us"] / 1e3

    found = {}  # the results of the last searches

    def milliseconds(name, search):
        begin = time.perf_counter()
        found[name] = search()
        return (time.perf_counter() - begin) * 1e3

    def check(name):
        """Checks that the distances are those of the vectors at the indices, in order."""
        if name == "tessera cli":
            distances, indices = np.load(folder / "d.npy"), np.load(folder / "i.npy")
        else:
            distances, indices = found[name]
            distances = distances + (queries.astype("f8") ** 2).sum(1, keepdims=True)
        some = np.arange(0, QUERIES, QUERIES // 16)
        apart = vectors[indices[some]].astype("f8") - queries[some, None].astype("f8")
        if not np.allclose(distances[some], (apart**2).sum(2), rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{name} gives different distances")

    searchers = {"tessera": lambda: t.compute(*best()),
                 "torch": torch_search(vectors, queries, dtype)}
    if dtype == "f32":
        searchers["cupy"] = cupy_search(vectors, queries)
    ways = {name: functools.partial(milliseconds, name, f) for name, f in searchers.items()}
    row = interleaved(options, {**ways, "tessera cli": by_cli}, check, dtype=dtype)
    for step in (lambda array: array.with_(timing=True), lambda array: array):
        stats = []
        for _ in range(options.rounds + 1):
            values = best(step)[0].with_(timing=True)
            values.numpy()
            stats.append(values.stats)
        steps = {each[0].strategy: statistics.median(s.kernel_us for s in each)
                 for each in zip(*stats[1:]) if each[0].kernel_us}
        row.setdefault("device_us", []).append(steps)
        print(f"{dtype} device us: {steps}")
    for array in (x, q):
        array.delete()
    return row


# --- top_k ----------------------------------------------------------------------------------------

SHAPES = ("1024x1048576", "8x16777216", "64x4096")
HOLD_CYCLES = 400_000  # in device clocks; longer than the host takes to enqueue one call
CACHES = 256 << 20  # bytes: more than three times the largest L2


def top_k_rows(options):
    return [interleaved(options,
                        {"threshold": functools.partial(by_bench, options.bench,
                                                        f"top_k_{k}/threshold/f32/{shape}"),
                         "torch": functools.partial(top_k_by_torch, shape, k)}, shape=shape, k=k)
            for shape in SHAPES for k in (10, 100)]


def by_bench(bench, name):
    with tempfile.NamedTemporaryFile() as file:
        pattern = name.replace("^", r"\^")
        subprocess.run([bench, "--filter", f"^{pattern}$", "--json", file.name], check=True,
                       stdout=subprocess.DEVNULL)
        return json.load(file)["rows"][0]["us"]


def top_k_by_torch(shape, k):
    import torch

    rows, n = map(int, shape.split("x"))
    return by_torch(4 * rows * n, lambda: torch.randn(rows, n, device="cuda"),
                    lambda x: torch.topk(x, k, dim=1, sorted=True))


def by_torch(size, make, work):
    """Returns the median device time of work(operands), for as many operands of `size` bytes as
    fill the caches."""
    import torch

    operands = [make() for _ in range(1 + CACHES // size)]
    times = [
        torch_us(lambda: work(operands[call % len(operands)]),
                 before=lambda: torch.cuda._sleep(HOLD_CYCLES))
        for call in range(CALLS + 3)
    ]
    operands.clear()
    torch.cuda.empty_cache()  # leaves the device's memory to the benchmark
    return statistics.median(times[3:])


# --- bytes ----------------------------------------------------------------------------------------

BYTE_SHAPES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 11008, 4096),
               (128, 14336, 4096))


def bytes_rows(options):
    rows = []
    for shape in BYTE_SHAPES:
        m, n, k = shape
        for stored in (" b^T", ""):
            size = (str(m) if m == n == k else f"{m}x{n}x{k}") + stored
            ways = {"tensor_i8": functools.partial(by_bench, options.bench,
                                                   f"matmul_bytes/tensor_i8/i8/{size}"),
                    "torch": functools.partial(bytes_by_torch, shape, stored != "")}
            rows.append(interleaved(options, ways, size=size))
    return rows


def bytes_by_torch(shape, transposed):
    import torch

    def make():
        m, n, k = shape
        a, b = (torch.randint(-60, 60, extents, dtype=torch.int8, device="cuda")
                for extents in ((m, k), (n, k) if transposed else (k, n)))
        return a, b.t() if transposed else b

    m, n, k = shape
    return by_torch(m * k + n * k, make, lambda operands: torch._int_mm(*operands))


# --- products -------------------------------------------------------------------------------------


def products_rows(options):
    import torch

    gpus = torch.cuda.device_count()
    # NVLink multicast is not used: data moves by copies only.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "rows.json")
        port = 20000 + os.getpid() % 20000
        torch.multiprocessing.spawn(products_of_gpu, (gpus, options, port, out), nprocs=gpus)
        return json.loads(out.read_text())


def products_of_gpu(rank, world, options, port, out):
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=world, device_id=torch.device("cuda", rank))
    group = dist.group.WORLD.group_name
    symmetric_memory.enable_symm_mem_for_group(group)
    generator = torch.Generator("cuda").manual_seed(rank)
    rows = []
    for product in options.products:
        name, side = product.split(":")
        n = int(side)
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}[name]

        def random(height, width):
            some = torch.rand(height, width, device="cuda", generator=generator)
            return some.sub_(0.5).to(dtype)

        part, columns = random(n // world, n), random(n, n // world)
        gathered, right = torch.empty(n, n, dtype=dtype, device="cuda"), random(n, n)
        product_of = {}

        def one():
            if rank == 0:
                torch.mm(gathered, right)

        def gather():
            dist.all_gather_into_tensor(gathered, part)
            product_of["gathered"] = torch.mm(gathered, columns)

        def overlap():
            _, (found,) = torch.ops.symm_mem.fused_all_gather_matmul(part, [columns], 0, group)
            product_of["overlapped"] = found

        def slowest_us(work):
            us = torch.tensor([torch_us(work, before=dist.barrier)], device="cuda")
            dist.all_reduce(us, op=dist.ReduceOp.MAX)
            return us.item()

        ways = {way: functools.partial(slowest_us, work) for way, work in
                (("one", one), ("gathered", gather), ("overlapped", overlap))}
        rows.append(interleaved(options, ways, dtype=name, side=n))
        found, want = (product_of[way].double() for way in ("overlapped", "gathered"))
        worst = (found - want).abs().max() / want.abs().max()
        assert worst < {"bf16": 2e-2, "f32": 1e-4, "f64": 1e-10}[name], worst
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, run in (("map", map_rows), ("search", search_rows), ("top_k", top_k_rows),
                      ("bytes", bytes_rows), ("products", products_rows)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument("--json", type=pathlib.Path)
        if name == "products":
            command.add_argument("products", nargs="+", metavar="TYPE:SIDE")
        else:
            command.add_argument("bench" if name in ("top_k", "bytes") else "address")
        if name == "search":
            command.add_argument("--cli", required=True)
    options = parser.parse_args()
    rows = options.run(options)
    if options.json:
        document = {"date": datetime.date.today().isoformat(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times exact nearest-neighbour searches through the service, and with PyTorch and CuPy in this
process.

usage: search_peers.py ADDRESS [--vectors 1048576] [--queries 1024] [--dimensions 128] [--k 10]
                       [--dtypes f32,bf16] [--peers torch,cupy] [--rounds 5] [--block 256]
                       [--cli BIN/tessera] [--json FILE]

ADDRESS is a server on the same GPU. Its --scratch-limit must be large enough for the scores, which
take queries x vectors x 4 bytes. Vectors and queries are normally distributed random values in GPU
memory. A search ends when the indices and squared distances have arrived in this process. All
variants compare every query with every vector: they compute |x|^2 - 2 q x with one product, where
|x|^2 is computed in advance, and then select the k smallest values of each row. For bf16 operands,
the scores are f32. The variants are interleaved.
  tessera      one Execute for every --block queries (without --block, for all queries): Matmul with
               the expression in it, and TopK
  tessera cli  `tessera search` (needs --cli): several calls, each of which computes |x|^2
  torch        addmm (for bf16, mm into f32 and sub), then topk
  cupy         q @ x.T and an expression, then argpartition, and argsort of its result
  numpy        the same with NumPy, for machines without a GPU
A result is the median of the rounds. A round runs each variant once, and all variants must give the
same distances.

Then the script prints the device times of the product, the expression and TopK as separate steps,
from their statistics. If one strategy replaces all three, it prints the time of that strategy too.
A product that itself keeps the k best of each row can be faster by a factor of at most (product +
TopK) / product. Such a product would not write the scores either. To estimate that saving, the
product is also timed with bf16 results, which are half as many bytes, and the time that this saves
is subtracted a second time.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))
import tessera as ts  # noqa: E402


class Tessera:
    def __init__(self, options, dtype, vectors, queries):
        self.options = options
        self.t = ts.connect(options.address)
        self.vectors = self.t.put(vectors, "search/vectors", dtype=dtype, replace=True)
        self.queries = self.t.put(queries, "search/queries", dtype=dtype, replace=True)
        squares = self.vectors.astype("f4")
        self.norms = ts.sum_squares(squares, axis=1).save()
        self.own = (queries.astype("f8") ** 2).sum(1, keepdims=True)

    def product(self, dtype="f32", rows=slice(None)):
        return ts.matmul(self.queries[rows], self.vectors.T, dtype=dtype)

    def search(self):
        step = self.options.block or self.options.queries
        parts = []
        for begin in range(0, self.options.queries, step):
            scores = self.norms - 2 * self.product(rows=slice(begin, begin + step))
            parts.append(self.t.compute(*scores.topk(self.options.k, largest=False)))
        return tuple(np.concatenate(part) for part in zip(*parts))

    def plan(self):
        return (self.norms - 2 * self.product()).topk(self.options.k, largest=False)[1].explain()

    def device_us(self, dtype):
        """Returns the microseconds of the product, the expression and TopK as separate steps, the
        names of their strategies, and the milliseconds of the call."""
        found, calls = [], []
        for _ in range(self.options.rounds + 1):
            scores = (self.norms - 2 * self.product(dtype).with_(timing=True)).with_(timing=True)
            best = scores.topk(self.options.k, largest=False)[0].with_(timing=True)
            begin = time.perf_counter()
            best.numpy()
            calls.append((time.perf_counter() - begin) * 1e3)
            found.append(best.stats)
        found = found[1:]
        times = [statistics.median(stats[i].kernel_us for stats in found) for i in (0, 1, 2)]
        return times, [stats.strategy for stats in found[0]], statistics.median(calls[1:])


    def whole_us(self):
        """Times only the last step, so that one strategy may replace all steps. Returns the
        microseconds and the name of that strategy."""
        found = []
        for _ in range(self.options.rounds + 1):
            scores = self.norms - 2 * self.product()
            best = scores.topk(self.options.k, largest=False)[0].with_(timing=True)
            best.numpy()
            found.append(best.stats[-1])
        return statistics.median(stats.kernel_us for stats in found[1:]), found[-1].strategy


class Cli:
    """Uses the time that the command line reports, from the first call to the last response."""

    def __init__(self, options):
        self.options = options
        self.folder = tempfile.TemporaryDirectory()
        self.seconds = None

    def search(self):
        folder = pathlib.Path(self.folder.name)
        made = subprocess.run(
            [
                *(self.options.cli, "--server", self.options.address, "--json", "search"),
                *("search/vectors", "--queries", "search/queries", "--k", str(self.options.k)),
                *("-o", folder / "indices.npy", "--distances-output", folder / "distances.npy"),
            ],
            check=True,
            capture_output=True,
        )
        self.seconds = json.loads(made.stdout)["wall_us"] / 1e6
        return np.load(folder / "distances.npy"), np.load(folder / "indices.npy")


class Torch:
    def __init__(self, options, dtype, vectors, queries):
        import torch

        self.torch, self.k = torch, options.k
        kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.vectors = torch.from_numpy(vectors).cuda().to(kind)
        self.queries = torch.from_numpy(queries).cuda().to(kind)
        self.norms = (self.vectors.float() ** 2).sum(1)

    def search(self):
        torch = self.torch
        if self.vectors.dtype == torch.float32:
            scores = torch.addmm(self.norms, self.queries, self.vectors.T, alpha=-2)
        else:
            scores = torch.mm(self.queries, self.vectors.T, out_dtype=torch.float32)
            torch.sub(self.norms, scores, alpha=2, out=scores)
        values, indices = torch.topk(scores, self.k, dim=1, largest=False, sorted=True)
        return values.cpu().numpy(), indices.cpu().numpy()


class Arrays:
    """Searches with `module`, which is CuPy or NumPy."""

    def __init__(self, module, options, dtype, vectors, queries):
        if dtype != "f32":
            raise NotImplementedError(f"{module.__name__} does not multiply {dtype}")
        self.module, self.k = module, options.k
        self.vectors, self.queries = module.asarray(vectors), module.asarray(queries)
        self.norms = (self.vectors**2).sum(1)

    def search(self):
        xp = self.module
        scores = self.norms - 2 * (self.queries @ self.vectors.T)
        some = xp.argpartition(scores, self.k - 1, axis=1)[:, : self.k]
        values = xp.take_along_axis(scores, some, 1)
        order = xp.argsort(values, axis=1)
        found = xp.take_along_axis(values, order, 1), xp.take_along_axis(some, order, 1)
        return found if xp is np else tuple(xp.asnumpy(array) for array in found)


def searchers(options, dtype, vectors, queries):
    tessera = Tessera(options, dtype, vectors, queries)
    found = {"tessera": tessera}
    if options.cli:
        found["tessera cli"] = Cli(options)
    for name in options.peers:
        try:
            if name == "torch":
                found[name] = Torch(options, dtype, vectors, queries)
            else:
                found[name] = Arrays(__import__(name), options, dtype, vectors, queries)
        except NotImplementedError as reason:
            print(f"  {reason}")
    return tessera, found


def check(name, distances, indices, vectors, queries, tolerance):
    """Checks that the distances are those of the vectors at the indices, in order."""
    some = np.arange(0, len(queries), max(1, len(queries) // 16))
    apart = vectors[indices[some]].astype("f8") - queries[some, None].astype("f8")
    want = (apart**2).sum(2)
    if not np.allclose(distances[some], want, rtol=tolerance, atol=tolerance):
        raise SystemExit(f"search_peers.py: {name}: {distances[some][0]}, not {want[0]}")


def measure(options, dtype):
    random = np.random.default_rng(1)
    vectors = random.standard_normal((options.vectors, options.dimensions), np.float32)
    queries = random.standard_normal((options.queries, options.dimensions), np.float32)
    if dtype == "bf16":  # round the values to bf16
        for array in (vectors, queries):
            bits = array.view(np.uint32)
            bits += 0x7FFF + (bits >> 16 & 1)
            bits &= 0xFFFF0000
    tessera, ways = searchers(options, dtype, vectors, queries)
    print(tessera.plan())
    times = {name: [] for name in ways}
    for turn in range(-1, options.rounds):  # the first turn is a warm-up, and its result is checked
        for name, way in ways.items():
            begin = time.perf_counter()
            distances, indices = way.search()
            seconds = time.perf_counter() - begin
            if name == "tessera cli":
                seconds = way.seconds
            if turn < 0:
                if name != "tessera cli":
                    distances = distances + tessera.own
                check(name, distances, indices, vectors, queries, 1e-3)
            else:
                times[name].append(seconds * 1e3)
    result = {name: statistics.median(found) for name, found in times.items()}
    for name, ms in result.items():
        print(f"{dtype:>5} {name:<12} {ms:10.2f} ms {ms / result['tessera']:8.2f} x", flush=True)
    row = {"dtype": dtype, "ms": result, "rounds_ms": times}
    (product, expression, top_k), strategies, call = tessera.device_us("f32")
    row.update(product_us=product, expression_us=expression, top_k_us=top_k, strategies=strategies)
    row.update(steps_ms=call, bound=(product + top_k) / product)
    print(
        f"{dtype:>5} device: {strategies[0]} {product:.0f} us, {strategies[1]} {expression:.0f} us,"
        f" {strategies[2]} {top_k:.0f} us, in a call of {call:.2f} ms;"
        f" (product + TopK) / product = {row['bound']:.2f}"
    )
    whole, name = tessera.whole_us()
    row.update(whole_us=whole, whole_strategy=name)
    if name not in strategies:
        steps = product + expression + top_k
        print(f"      all together: {name} {whole:.0f} us;"
              f" the steps over that = {steps / whole:.2f}")
    if dtype == "bf16":
        (half, _, _), names, _ = tessera.device_us("bf16")
        left = 2 * half - product
        row.update(product_bf16_us=half, without_writing_us=left)
        print(
            f"      {names[0]} into bf16 {half:.0f} us: without writing about {left:.0f} us;"
            f" (product + TopK) over that = {(product + top_k) / left:.2f}"
        )
    for array in (tessera.vectors, tessera.queries):
        array.delete()
    tessera.t.close()
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address")
    for name, value in (("vectors", 1 << 20), ("queries", 1024), ("dimensions", 128), ("k", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["f32", "bf16"])
    parser.add_argument("--peers", default=["torch", "cupy"],
                        type=lambda text: [name for name in text.split(",") if name])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int)
    parser.add_argument("--cli", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    print(
        f"{options.queries} queries, {options.vectors} vectors of {options.dimensions},"
        f" k = {options.k}"
    )
    rows = [measure(options, dtype) for dtype in options.dtypes]
    if options.json:
        shape = {name: getattr(options, name) for name in ("vectors", "queries", "dimensions", "k")}
        document = {"date": datetime.date.today().isoformat(), **shape, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

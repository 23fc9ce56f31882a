#!/usr/bin/env python3
"""Times exact nearest-neighbour searches through the service, and with PyTorch and CuPy in this
process.

usage: search_peers.py ADDRESS --cli BIN/tessera [--rounds 5] [--json FILE]

ADDRESS is a server on the same GPU. Its --scratch-limit must be large enough for the scores, which
take queries x vectors x 4 bytes. Vectors and queries are normally distributed random values in GPU
memory. A search ends when the indices and squared distances have arrived in this process. All
variants compare every query with every vector: they compute |x|^2 - 2 q x with one product, where
|x|^2 is computed in advance, and then select the k smallest values of each row. For bf16 operands,
the scores are f32. The variants are interleaved.
  tessera      one Execute: Matmul with the expression in it, and TopK
  tessera cli  `tessera search`: several calls, each of which computes |x|^2
  torch        addmm (for bf16, mm into f32 and sub), then topk
  cupy         for f32: q @ x.T and an expression, then argpartition, and argsort of its result
A result is the median of the rounds. A round runs each variant once, and all variants must give the
same distances.

Then the script prints the device times of the product, the expression and TopK as separate steps,
from their statistics. If one strategy replaces all three, it prints the time of that strategy too.
"""

import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np

import rounds
import tessera as ts

SHAPE = {"vectors": 1 << 20, "queries": 1024, "dimensions": 128, "k": 10}
K = SHAPE["k"]


class Tessera:
    def __init__(self, options, dtype, vectors, queries):
        self.rounds = options.rounds
        self.t = ts.connect(options.address)
        self.vectors = self.t.put(vectors, "search/vectors", dtype=dtype, replace=True)
        self.queries = self.t.put(queries, "search/queries", dtype=dtype, replace=True)
        squares = self.vectors.astype("f4")
        self.norms = ts.sum_squares(squares, axis=1).save()

    def best(self, step=lambda array: array):
        """Returns the distances, without |q|^2, and indices, before they are computed. step is
        applied to the product and to the expression."""
        product = step(ts.matmul(self.queries, self.vectors.T, dtype="f32"))
        return step(self.norms - 2 * product).topk(K, largest=False)

    def search(self):
        return self.t.compute(*self.best())

    def stats(self, step=lambda array: array):
        """Returns the statistics of the steps of some calls. The last step is timed."""
        found = []
        for _ in range(self.rounds + 1):
            best = self.best(step)[0].with_(timing=True)
            best.numpy()
            found.append(best.stats)
        return found[1:]


class Cli:
    """Uses the time that the command line reports, from the first call to the last response."""

    def __init__(self, options):
        self.options = options
        self.folder = tempfile.TemporaryDirectory()

    def search(self):
        folder = pathlib.Path(self.folder.name)
        made = subprocess.run(
            [
                *(self.options.cli, "--server", self.options.address, "--json", "search"),
                *("search/vectors", "--queries", "search/queries", "--k", str(K)),
                *("-o", folder / "indices.npy", "--distances-output", folder / "distances.npy"),
            ],
            check=True,
            capture_output=True,
        )
        self.ms = json.loads(made.stdout)["wall_us"] / 1e3
        return np.load(folder / "distances.npy"), np.load(folder / "indices.npy")


class Torch:
    def __init__(self, dtype, vectors, queries):
        import torch

        self.torch = torch
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
        values, indices = torch.topk(scores, K, dim=1, largest=False, sorted=True)
        return values.cpu().numpy(), indices.cpu().numpy()


class Cupy:
    def __init__(self, vectors, queries):
        import cupy

        self.module = cupy
        self.vectors, self.queries = cupy.asarray(vectors), cupy.asarray(queries)
        self.norms = (self.vectors**2).sum(1)

    def search(self):
        xp = self.module
        scores = self.norms - 2 * (self.queries @ self.vectors.T)
        some = xp.argpartition(scores, K - 1, axis=1)[:, :K]
        values = xp.take_along_axis(scores, some, 1)
        order = xp.argsort(values, axis=1)
        return (xp.asnumpy(xp.take_along_axis(values, order, 1)),
                xp.asnumpy(xp.take_along_axis(some, order, 1)))


def measure(options, dtype):
    random = np.random.default_rng(1)
    vectors, queries = (
        random.standard_normal((SHAPE[name], SHAPE["dimensions"]), np.float32)
        for name in ("vectors", "queries")
    )
    if dtype == "bf16":  # round the values to bf16
        for array in (vectors, queries):
            bits = array.view(np.uint32)
            bits += 0x7FFF + (bits >> 16 & 1)
            bits &= 0xFFFF0000
    tessera = Tessera(options, dtype, vectors, queries)
    ways = {"tessera": tessera, "tessera cli": Cli(options)}
    ways["torch"] = Torch(dtype, vectors, queries)
    if dtype == "f32":
        ways["cupy"] = Cupy(vectors, queries)
    print(tessera.best()[1].explain())
    found = {}  # the results of the last searches

    def milliseconds(name):
        begin = time.perf_counter()
        found[name] = ways[name].search()
        ms = (time.perf_counter() - begin) * 1e3
        return ways[name].ms if name == "tessera cli" else ms

    def check(name):
        """Checks that the distances are those of the vectors at the indices, in order."""
        distances, indices = found[name]
        if name != "tessera cli":
            distances = distances + (queries.astype("f8") ** 2).sum(1, keepdims=True)
        some = np.arange(0, len(queries), max(1, len(queries) // 16))
        apart = vectors[indices[some]].astype("f8") - queries[some, None].astype("f8")
        want = (apart**2).sum(2)
        if not np.allclose(distances[some], want, rtol=1e-3, atol=1e-3):
            raise SystemExit(f"search_peers.py: {name}: {distances[some][0]}, not {want[0]}")

    calls = {name: functools.partial(milliseconds, name) for name in ways}
    times = rounds.interleaved(calls, options.rounds, check)
    result = {name: statistics.median(each) for name, each in times.items()}
    for name, ms in result.items():
        print(f"{dtype:>5} {name:<12} {ms:10.2f} ms {ms / result['tessera']:8.2f} x", flush=True)
    timed = tessera.stats(lambda array: array.with_(timing=True))
    steps = [statistics.median(stats[i].kernel_us for stats in timed) for i in range(3)]
    names = [stats.strategy for stats in timed[0]]
    print(f"{dtype:>5} device: " + ", ".join(f"{n} {us:.0f} us" for n, us in zip(names, steps)))
    together = [stats[-1] for stats in tessera.stats()]
    whole, name = statistics.median(stats.kernel_us for stats in together), together[-1].strategy
    if name not in names:
        print(f"      all together: {name} {whole:.0f} us;"
              f" the steps over that = {sum(steps) / whole:.2f}")
    for array in (tessera.vectors, tessera.queries):
        array.delete()
    tessera.t.close()
    row = {"dtype": dtype, "ms": result, "rounds_ms": times}
    row |= dict(zip(("product_us", "expression_us", "top_k_us"), steps))
    return row | {"strategies": names, "whole_us": whole, "whole_strategy": name}


def main():
    parser = rounds.parser(__doc__)
    parser.add_argument("address")
    parser.add_argument("--json")
    parser.add_argument("--cli", required=True)
    options = parser.parse_args()
    print(", ".join(f"{number} {name}" for name, number in SHAPE.items()))
    rows = [measure(options, dtype) for dtype in ("f32", "bf16")]
    document = {"date": datetime.date.today().isoformat(), **SHAPE, "rows": rows}
    rounds.write(options.json, document)


if __name__ == "__main__":
    main()

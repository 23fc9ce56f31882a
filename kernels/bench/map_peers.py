#!/usr/bin/env python3
"""Times expressions through the service, with CuPy's fused kernels and with torch.compile, in
interleaved rounds.

usage: map_peers.py ADDRESS [--exponents 8,10,12,14,16,28] [--expressions NAME,...]
                    [--peers cupy,torch] [--rounds 5] [--calls 20] [--json FILE]
       map_peers.py --render FILE

ADDRESS is a server on the same GPU. At 2^28 elements of f32, the server and each peer hold five
arrays of 1 GiB. All variants read the same operands from GPU memory and leave their results there.
The first elements of each result are compared with NumPy's. Times are device times on an idle
device, from an event before the first kernel of a call to an event after the last one. Short arrays
are in caches, so their times are mostly launch times. A result is the median of the rounds, and a
round is the median of its calls. --peers numpy allows a trial without a GPU.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))


def square(x):
    return x * x


# Each entry has the number of operands, and the expression in terms of the functions of a module m.
EXPRESSIONS = {
    "2a+1": (1, lambda m, a: 2 * a + 1),
    "(a-b)^2": (2, lambda m, a, b: square(a - b)),
    "ab+c": (3, lambda m, a, b, c: a * b + c),
    "ab+cd": (4, lambda m, a, b, c, d: a * b + c * d),
    "where": (4, lambda m, a, b, c, d: m.where(a < b, c, d)),
    "gelu": (1, lambda m, a: 0.5 * a * (1 + m.tanh(0.79788456 * (a + 0.044715 * (a * a * a))))),
}
FACTORS = (1.0, -0.5, 0.25, 2.0)  # operand i is the same random array times factor i


class Tessera:
    def __init__(self, address, base):
        import tessera

        self.t = tessera.connect(address)
        x = self.t.put(base, "map_peers/base", replace=True)
        self.operands = [
            (x * factor).save(f"map_peers/{i}", replace=True) for i, factor in enumerate(FACTORS)
        ]
        x.delete()

    def make(self, function, count):
        # NumPy's functions dispatch to the operands.
        expression = function(np, *self.operands[:count]).with_(timing=True)

        def call():
            self.out = expression.save("map_peers/out", replace=True)
            (stats,) = expression.stats
            return stats.kernel_us

        return call

    def result(self, count):
        return self.out[:count].numpy()

    def close(self):
        for array in self.t.list("map_peers/"):
            array.delete()
        self.t.close()


class Torch:
    def __init__(self, _, base):
        import torch

        self.module = torch
        x = torch.from_numpy(base).cuda()
        self.operands = [x * factor for factor in FACTORS]

    def make(self, function, count):
        torch = self.module
        torch._dynamo.reset()  # without this, it compiles a function only for a few shapes
        compiled = torch.compile(lambda *operands: function(torch, *operands), dynamic=False)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def call():
            torch.cuda.synchronize()
            begin.record()
            self.out = compiled(*self.operands[:count])
            end.record()
            torch.cuda.synchronize()
            return 1000 * begin.elapsed_time(end)

        return call

    def result(self, count):
        return self.out[:count].cpu().numpy()

    def close(self):
        self.operands = self.out = None
        self.module.cuda.empty_cache()


class Cupy:
    def __init__(self, _, base):
        import cupy

        self.module = cupy
        x = cupy.asarray(base)
        self.operands = [x * factor for factor in FACTORS]

    def make(self, function, count):
        cupy = self.module
        names = ", ".join("abcd"[:count])  # fuse counts the lambda's parameters
        named = eval(f"lambda {names}: f(m, {names})", {"f": function, "m": cupy})
        fused = cupy.fuse(kernel_name="map_peers")(named)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()

        def call():
            cupy.cuda.Device().synchronize()
            begin.record()
            self.out = fused(*self.operands[:count])
            end.record()
            end.synchronize()
            return 1000 * cupy.cuda.get_elapsed_time(begin, end)

        return call

    def result(self, count):
        return self.module.asnumpy(self.out[:count])

    def close(self):
        self.operands = self.out = None
        self.module.get_default_memory_pool().free_all_blocks()


class Numpy:
    def __init__(self, _, base):
        self.operands = [base * np.float32(factor) for factor in FACTORS]

    def make(self, function, count):
        def call():
            begin = time.perf_counter()
            self.out = function(np, *self.operands[:count])
            return 1e6 * (time.perf_counter() - begin)

        return call

    def result(self, count):
        return self.out[:count]

    def close(self):
        pass


WAYS = {"tessera": Tessera, "torch": Torch, "cupy": Cupy, "numpy": Numpy}


def measure(options, elements):
    """Returns the result rows of all expressions on arrays of `elements` elements."""
    base = np.random.default_rng(1).standard_normal(elements, np.float32)
    some = [base[:1000] * np.float32(factor) for factor in FACTORS]
    ways = {name: WAYS[name](options.address, base) for name in ["tessera", *options.peers]}
    rows = []
    for expression in options.expressions:
        count, function = EXPRESSIONS[expression]
        calls = {name: way.make(function, count) for name, way in ways.items()}
        times = {name: [] for name in ways}
        for turn in range(-1, options.rounds):  # the first round is a warm-up with a check
            for name, call in calls.items():
                found = statistics.median(call() for _ in range(options.calls))
                if turn >= 0:
                    times[name].append(found)
                    continue
                want = function(np, *some[:count])
                if not np.allclose(ways[name].result(1000), want, rtol=1e-4, atol=1e-5):
                    raise SystemExit(f"map_peers.py: {name} gives another result for {expression}")
        for name, found in times.items():
            rows.append(
                {
                    "expression": expression,
                    "operands": count,
                    "elements": elements,
                    "who": name,
                    "us": round(statistics.median(found), 3),
                    "us_min": round(min(found), 3),
                    "us_max": round(max(found), 3),
                }
            )
            print(f"{expression:>8} {elements:>10} {name:<8} {rows[-1]['us']:10.1f} us", flush=True)
    for way in ways.values():
        way.close()
    return rows


def about(options):
    """Returns the names of the device and of the peers' versions, and the date."""
    import tessera

    with tessera.connect(options.address) as t:
        device = t.info().devices[0]
    words = [getattr(device, "model", "") or device.name]
    for name in options.peers:
        words.append(f"{name} {__import__(name).__version__}")
    return ", ".join([*words, datetime.date.today().isoformat()])


def render(document):
    """Returns a table with a line for each expression and size. It has the times in microseconds,
    Tessera's rate in GB/s of operands and result, and the ratio of each peer's time to ours."""
    who = list(dict.fromkeys(row["who"] for row in document["rows"]))
    peers = [name for name in who if name != "tessera"]
    found = {}
    for row in document["rows"]:
        key = row["expression"], row["elements"], row["operands"]
        found.setdefault(key, {})[row["who"]] = row["us"]
    head = ["expression", "f32", "Tessera, us", "GB/s"]
    for name in peers:
        head += [f"{name}, us", "over ours"]
    lines = [head, ["---"] * len(head)]
    for (expression, elements, operands), us in found.items():
        ours = us["tessera"]
        rate = 4 * elements * (operands + 1) / ours / 1e3
        line = [expression, f"2^{elements.bit_length() - 1}", f"{ours:.1f}", f"{rate:.0f}"]
        for name in peers:
            line += [f"{us[name]:.1f}", f"{us[name] / ours:.2f}"] if name in us else ["-", "-"]
        lines.append(line)
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    runs = f"medians of {document['rounds']} interleaved rounds of {document['calls']} calls each"
    return f"{table}\n\n{document['about']}; {runs}.\n"


def main():
    def words(text):
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?")
    parser.add_argument("--exponents", type=words, default=["8", "10", "12", "14", "16", "28"])
    parser.add_argument("--expressions", type=words, default=list(EXPRESSIONS))
    parser.add_argument("--peers", type=words, default=["cupy", "torch"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--render", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))), end="")
        return
    if not options.address:
        parser.error("ADDRESS or --render FILE")
    rows = []
    for exponent in options.exponents:
        rows += measure(options, 1 << int(exponent))
    document = {"about": about(options), "rounds": options.rounds, "calls": options.calls}
    document["rows"] = rows
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n" + render(document), end="")


if __name__ == "__main__":
    main()

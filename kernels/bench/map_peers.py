#!/usr/bin/env python3
"""Times expressions through the service, with CuPy's fused kernels and with torch.compile, in
interleaved rounds.

usage: map_peers.py ADDRESS [--rounds 5] [--json FILE]

ADDRESS is a server on the same GPU. At 2^28 elements of f32, the server and each peer hold five
arrays of 1 GiB. All variants read the same operands from GPU memory and leave their results there.
The first elements of each result are compared with NumPy's. Times are device times on an idle
device, from an event before the first kernel of a call to an event after the last one. Short arrays
are in caches, so their times are mostly launch times. A result is the median of the rounds, and a
round is the median of its calls.
"""

import datetime
import statistics

import numpy as np

import pages
import rounds

EXPONENTS = (8, 10, 12, 14, 16, 28)  # of the numbers of elements, which are powers of two
CALLS = 20  # of a round


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

        def work():
            self.out = compiled(*self.operands[:count])

        return lambda: rounds.torch_us(work)

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


WAYS = {"tessera": Tessera, "cupy": Cupy, "torch": Torch}


def measure(options, elements):
    """Returns the result rows of all expressions on arrays of `elements` elements."""
    base = np.random.default_rng(1).standard_normal(elements, np.float32)
    some = [base[:1000] * np.float32(factor) for factor in FACTORS]
    ways = {name: make(options.address, base) for name, make in WAYS.items()}
    rows = []
    for expression, (count, function) in EXPRESSIONS.items():
        def check(name):
            want = function(np, *some[:count])
            if not np.allclose(ways[name].result(1000), want, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"map_peers.py: {name} gives another result for {expression}")

        def round_of(way):
            call = way.make(function, count)
            return lambda: statistics.median(call() for _ in range(CALLS))

        calls = {name: round_of(way) for name, way in ways.items()}
        for name, found in rounds.interleaved(calls, options.rounds, check).items():
            row = {"expression": expression, "operands": count, "elements": elements, "who": name}
            for field, of in (("us", statistics.median), ("us_min", min), ("us_max", max)):
                row[field] = round(of(found), 3)
            rows.append(row)
            print(f"{expression:>8} {elements:>10} {name:<8} {row['us']:10.1f} us", flush=True)
    for way in ways.values():
        way.close()
    return rows


def about(options):
    """Returns the names of the device and of the peers' versions, and the date."""
    import tessera

    with tessera.connect(options.address) as t:
        device = t.info().devices[0]
    words = [getattr(device, "model", "") or device.name]
    words += [f"{name} {__import__(name).__version__}" for name in WAYS if name != "tessera"]
    return ", ".join([*words, datetime.date.today().isoformat()])


def render(document):
    """Returns a table with a line for each expression and size. It has the times in microseconds,
    Tessera's rate in GB/s of operands and result, and the ratio of each peer's time to ours."""
    found = {}
    for row in document["rows"]:
        key = row["expression"], row["elements"], row["operands"]
        found.setdefault(key, {})[row["who"]] = row["us"]
    lines = []
    for (expression, elements, operands), us in found.items():
        ours = us.pop("tessera")
        rate = 4 * elements * (operands + 1) / ours / 1e3
        line = {"expression": expression, "f32": pages.power_text(elements)}
        line |= {"Tessera, us": f"{ours:.1f}", "GB/s": f"{rate:.0f}"}
        for name, theirs in us.items():
            line |= {f"{name}, us": f"{theirs:.1f}", f"{name} over ours": f"{theirs / ours:.2f}"}
        lines.append(line)
    runs = f"medians of {document['rounds']} interleaved rounds of {document['calls']} calls each"
    return pages.table(lines, f"{document['about']}; {runs}.")


def main():
    parser = rounds.parser(__doc__)
    parser.add_argument("address")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [row for exponent in EXPONENTS for row in measure(options, 1 << exponent)]
    document = {"about": about(options), "rounds": options.rounds, "calls": CALLS, "rows": rows}
    rounds.write(options.json, document)
    print("\n" + render(document), end="")


if __name__ == "__main__":
    main()

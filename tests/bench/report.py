#!/usr/bin/python3
"""Turns runs of strategy_bench into the committed figures, tables and plots.

  report.py collect RAW.json... --out docs/measured/h200.json --caption "NVIDIA H200, driver 580, 2026-11-21"
      Medians and spread of every benchmark of Google Benchmark's JSON (repetitions, not aggregates).
  report.py render
      A plot for each operation beside docs/measured/FILE.json, and the tables of kernels/README.md between
      <!-- measured: FILE OPERATION WHAT --> and <!-- end -->. WHAT is an element type: times against sizes; "types": the
      rates of every type at the largest size; "variants": the times of OPERATION_* at the largest size they share; "shapes-"
      and a type: the times of products that are not square; "errors": the largest errors that were seen; "choices": what an
      empty strategy stands for, and what that costs; or "targets": how TARGETS[OPERATION] were met.
  report.py check --bench STRATEGY_BENCH
      Exits 1 when that would change a file, when a row that the program lists has not been measured for one of its types,
      or when a row has been measured that it does not list.
"""

import argparse
import html
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
COURSE = ROOT / "kernels" / "README.md"
LIBRARY = {"dot": "cublas", "reduce": "library", "matmul": "cublas"}
# The vendor's other calls, which stand in an operation's tables.
PEERS = {"matmul": {"cublaslt": "cublasLt, best of several", "cublaslt_tf32": "cublasLt in TF32"}}
# Rows that round their operands to fewer bits than they have.
ROUNDING = {("tensor_tf32", "f32"), ("tensor_bf16", "f32"), ("cublaslt_tf32", "f32")}
OPERATIONS = ["dot", "reduce_axes", "reduce", "matmul", "add", "window_sum"]
PLOTTED = ["dot", "reduce", "matmul", "add", "window_sum_8"]
DTYPES = ["f32", "f64", "f16", "bf16", "i32", "i64"]
def powers(*exponents):
    return [2**e for e in exponents]


def best_library(dtype, size):
    """The vendor's calls for a product, of which the fastest counts."""
    return f"matmul/cublas/{dtype}/{size}", f"peer/cublaslt/{dtype}/{size}"


# Products of a large matrix and so many vectors.
SKINNY = (("1x8192x8192", 1), ("16x8192x8192", 16), ("8192x1x8192", 1), ("8192x16x8192", 16))

# (what, ours, how it is compared, the peer or peers, the aim); times are medians, the peer ran in the same process.
TARGETS = {
    "reduce": [
        *((f"Reduce SUM, 2^{n.bit_length() - 1}{how}", f"{lone}reduce/fixed_tree/f32/{n}", "time", f"{lone}peer/cub_sum/f32/{n}", goal)
          for lone, how in (("lone_", ", idle device"), ("", ""))
          for goal, sizes in ((1.0, powers(8, 10, 12)), (0.65, powers(14, 16, 18, 20)), (0.8, powers(22))) for n in sizes),
        *((f"Reduce SUM, 2^{n.bit_length() - 1}", f"reduce/fixed_tree/f32/{n}", "speed", f"peer/cub_sum/f32/{n}", 1.0)
          for n in powers(28, 30)),
        ("Reduce SUM, 2^30", f"reduce/fixed_tree/f32/{2**30}", "rate", None, 4350),
        *((f"Dot, 2^{n.bit_length() - 1}{how}", f"{lone}dot/fixed_tree/f32/{n}", "time", f"{lone}dot/cublas/f32/{n}", goal)
          for lone, how in (("lone_", ", idle device"), ("", ""))
          for goal, sizes in ((0.6, powers(10, 12, 14, 16, 18, 20)), (0.8, powers(22))) for n in sizes),
        *((f"Dot, 2^{n.bit_length() - 1}", f"dot/fixed_tree/f32/{n}", "speed", f"dot/cublas/f32/{n}", 1.02)
          for n in powers(26, 28)),
        *((f"`fixed_tree` beside `single_pass`, {o}, 2^28", f"{o}/fixed_tree/f32/{2**28}", "speed",
           f"{o}/single_pass/f32/{2**28}", 0.98) for o in ("dot", "reduce")),
        *((f"`compensated` beside `fixed_tree`, {o} {d}, 2^{n.bit_length() - 1}", f"{o}/compensated/{d}/{n}", "speed",
           f"{o}/fixed_tree/{d}/{n}", 0.95) for o, d, n in (("dot", "f32", 2**26), ("dot", "f32", 2**28), ("reduce", "f32", 2**26),
                                                            ("reduce", "f32", 2**28), ("dot", "f64", 2**27), ("reduce", "f64", 2**27))),
        ("ARGMAX beside MAX, 2^28", f"reduce_argmax/fixed_tree/f32/{2**28}", "speed", f"reduce_max/fixed_tree/f32/{2**28}", 0.95),
        ("ARGMAX beside CUB's, 2^28", f"reduce_argmax/fixed_tree/f32/{2**28}", "speed", f"peer/cub_argmax/f32/{2**28}", 1.5),
        ("MAX beside CUB's, 2^28", f"reduce_max/fixed_tree/f32/{2**28}", "speed", f"peer/cub_max/f32/{2**28}", 1.0),
        *((f"Reduce SUM, {d}, beside f32 of as many bytes", f"reduce/fixed_tree/{d}/{n}", "ceiling", None, 0.9)
          for d, n in (("f64", 2**27), ("f16", 2**28), ("bf16", 2**28), ("i32", 2**28), ("i64", 2**27))),
        *((f"misaligned beside aligned, {o}, 2^28", f"{o}_misaligned/fixed_tree/f32/{2**28}", "speed", f"{o}/fixed_tree/f32/{2**28}", 0.97)
          for o in ("dot", "reduce")),
        ("rows of 8192 x 8192", "reduce_axes/axis/f32/8192_rows", "ceiling", None, 0.9),
        ("columns of 8192 x 8192", "reduce_axes/axis/f32/8192_columns", "ceiling", None, 0.9),
        ("1,000 sums of 4,096 in one launch", "batch/reduce_sum/f32/1000x4096", "us", None, 12),
    ],
    "matmul": [
        *((f"f32 without tensor cores, {n}", f"matmul/warp_tiled_tma/f32/{n}", "speed", best_library("f32", n), 0.97) for n in (4096, 8192)),
        *((f"{d}, {n.replace('x', ' x ')}", f"matmul/tensor_{d}/{d}/{n}", "speed", best_library(d, n), 1.0)
          for d in ("bf16", "f16") for n in ("2048", "4096", "8192", "4096x14336x4096")),
        *((f"TF32, {n}", f"matmul/tensor_tf32/f32/{n}", "speed", (f"peer/cublaslt_tf32/f32/{n}",), 0.97) for n in (4096, 8192)),
        *((f"`tensor_f32x3`, {n}", f"matmul/tensor_f32x3/f32/{n}", "speed", best_library("f32", n), 2.0) for n in (4096, 8192)),
        *((f"f64, {n}", f"matmul/tensor_f64/f64/{n}", "speed", best_library("f64", n), 0.95) for n in (4096, 8192)),
        *((f"skinny, {d}, {n.replace('x', ' x ')}", f"matmul/{'skinny' if (d, few) == ('f32', 1) else 'skinny_tma'}/{d}/{n}", kind,
           best_library(d, n) if kind == "speed" else None, aim)
          for kind, aim in (("ceiling", 0.9), ("speed", 1.0)) for d in ("f32", "f16", "bf16") for n, few in SKINNY),
        *((f"ragged, `{row}`, {d}, {n.replace('x', ' x ')}", f"matmul/{row}/{d}/{n}", "speed", best_library(d, n), 0.9)
          for row, d, n in (("warp_tiled_tma", "f32", "4093x4099x4111"), ("tensor_f32x3", "f32", "4093x4099x4111"),
                            ("tensor_bf16", "bf16", "4093x4099x4111"), ("outer_product", "f32", "4096x4096x1"),
                            ("outer_product", "f16", "4096x4096x1"), ("outer_product", "bf16", "4096x4096x1"))),
    ],
}
COLORS = [
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
    "#1b4f72", "#b03a2e", "#117a65", "#7d6608", "#6c3483", "#515a5a", "#0e6251", "#784212",
]


def collect(options):
    times = {}
    rates = {}
    errors = {}
    chosen = set()
    context = {}
    for path in options.raw:
        raw = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        context = raw["context"]
        for run in raw["benchmarks"]:
            if run.get("run_type") == "aggregate" or run.get("error_occurred"):
                continue
            name = run["name"].split("/manual_time")[0]
            times.setdefault(name, []).append(run["real_time"])
            unit = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[run["time_unit"]]
            times[name][-1] *= unit
            rates.setdefault(name, []).append((run.get("bytes_per_second", 0.0), run.get("flops_per_second", 0.0)))
            if "error" in run:
                errors[name] = max(errors.get(name, 0.0), run["error"])
            if "chosen" in run:
                chosen.add(name)
    rows = []
    for name, measured in sorted(times.items()):
        operation, strategy, dtype, size = name.split("/")
        row = {
            "operation": operation,
            "strategy": strategy,
            "dtype": dtype,
            "size": size,
            "us": round(statistics.median(measured), 3),
            "us_min": round(min(measured), 3),
            "us_max": round(max(measured), 3),
            "runs": len(measured),
        }
        bytes_rate = statistics.median(rate[0] for rate in rates[name])
        flops_rate = statistics.median(rate[1] for rate in rates[name])
        if bytes_rate:
            row["gb_per_s"] = float(f"{bytes_rate / 1e9:.5g}")
        if flops_rate:
            row["gflop_per_s"] = float(f"{flops_rate / 1e9:.5g}")
        if name in errors:
            row["error"] = float(f"{errors[name]:.3g}")
        if name in chosen:
            row["chosen"] = True
        rows.append(row)
    document = {
        "caption": options.caption,
        "device": context.get("tessera_device", ""),
        "model": context.get("tessera_model", ""),
        "rows": rows,
    }
    out = pathlib.Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({key: document[key] for key in ("caption", "device", "model")}, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    out.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    print(f"{out}: {len(rows)} rows")


def short(size):
    """2^20 for powers of two that are element counts, the rest as it is."""
    if size.isdigit():
        number = int(size)
        if number >= 1024 and number & (number - 1) == 0:
            return f"2^{number.bit_length() - 1}"
    return size.replace("_", " ")


def percent(value):
    return f"{100 * value:.3g} %" if value < 10 else f"{100 * value:.0f} %"


def microseconds(value):
    for limit, divisor, unit in ((1000, 1, ""), (1e6, 1e3, " ms"), (math.inf, 1e6, " s")):
        if value < limit:
            return f"{value / divisor:.1f}" if divisor == 1 else f"{value / divisor:.3g}{unit}"
    return "-"


class Rate:
    """What an operation's rate is measured in: bytes of memory, or arithmetic on matrices."""

    def __init__(self, document, operation):
        self.matmul = operation == "matmul"
        thousands = self.matmul and document["device"] != "cpu"
        self.unit = "TFLOP/s" if thousands else "GFLOP/s" if self.matmul else "GB/s"
        self.divisor = 1000 if thousands else 1

    def of(self, row):
        return row.get("gflop_per_s" if self.matmul else "gb_per_s", 0.0)

    def text(self, rate):
        rate /= self.divisor
        return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def ceilings(document):
    found = {}
    for row in document["rows"]:
        if row["operation"] == "ceiling":
            found[(row["strategy"], row["dtype"])] = row.get("gb_per_s") or row.get("gflop_per_s")
    return found


def pick_sizes(operation, sizes):
    """Columns for a page: of the many sizes of a vector a few, of products the squares."""
    if operation == "matmul":
        return [s for s in sizes if s.isdigit()]
    wanted = [s for s in sizes if s.isdigit() and int(s) in (2**10, 2**16, 2**20, 2**24, 2**28, 2**30)]
    return wanted or sizes


def size_key(size):
    digits = re.match(r"\d+", size)
    return (not size.isdigit(), int(digits.group()) if digits else 0, size)


def rows_of(document, operation, dtype=None):
    """An operation's rows, and those of the vendor's other calls for it."""
    wanted = PEERS.get(operation, {})
    return [r for r in document["rows"] if (r["operation"] == operation or (r["operation"] == "peer" and r["strategy"] in wanted))
            and dtype in (None, r["dtype"])]


def label(operation, strategy):
    return PEERS.get(operation, {}).get(strategy) or f"`{strategy}`"


def markdown(head, lines):
    rows = ["| " + " | ".join(cells) + " |" for cells in [head] + lines]
    return "\n".join([rows[0], "|---" * len(head) + "|"] + rows[1:])


def note(document, rows):
    runs = sorted({row["runs"] for row in rows})
    return f"{document['caption']}. Medians of {runs[-1]} interleaved runs, device time, caches cold."


def table(document, operation, dtype):
    """Times against sizes; rate, share of the ceiling and of the library at the largest."""
    rows = rows_of(document, operation, dtype)
    if not rows:
        return "(not measured)\n"
    cell = {(r["strategy"], r["size"]): r for r in rows}
    sizes = pick_sizes(operation, sorted({r["size"] for r in rows}, key=size_key))
    squares = [s for s in sizes if s.isdigit()]
    largest = squares[-1] if squares else sizes[-1]
    order = sorted({r["strategy"] for r in rows if r["size"] in sizes},
                   key=lambda s: (-cell[(s, largest)]["us"] if (s, largest) in cell else -math.inf, s))
    rate = Rate(document, operation)
    limits = ceilings(document)
    ceiling = limits.get(("fma", dtype)) if rate.matmul else limits.get(("read", "f32"))
    library = LIBRARY.get(operation) if (LIBRARY.get(operation), largest) in cell else None
    head = ["strategy"] + [f"us at {short(s)}" for s in sizes] + [f"{rate.unit} at {short(largest)}"]
    if ceiling:
        head.append("of the ceiling")
    if library:
        head.append(f"of `{library}`")
    lines = []
    for strategy in order:
        cells = [label(operation, strategy)]
        for size in sizes:
            row = cell.get((strategy, size))
            cells.append(microseconds(row["us"]) if row else "-")
        last = cell.get((strategy, largest))
        if last is None:
            cells += ["-"] * (len(head) - len(cells))
        else:
            cells.append(rate.text(rate.of(last)))
            if ceiling:
                cells.append(percent(rate.of(last) / ceiling))
            if library:
                cells.append(percent(cell[(library, largest)]["us"] / last["us"]))
        lines.append(cells)
    end = note(document, rows)
    if ceiling:
        what = "multiply-adds in registers" if rate.matmul else "a loop that only reads"
        end += f" Ceiling: {what}, {rate.text(ceiling)} {rate.unit} in the same run."
    return markdown(head, lines) + "\n\n" + end + "\n"


def types_table(document, operation):
    """The rate of each type at the largest size that it was measured at."""
    rows = [r for r in rows_of(document, operation) if r["size"].isdigit()]
    if not rows:
        return "(not measured)\n"
    rate = Rate(document, operation)
    size_of = {}
    for dtype in DTYPES:
        sizes = {r["size"] for r in rows if r["dtype"] == dtype}
        # One side for all types of products; for f32 vectors, which go further, that of i32.
        for other in {r["dtype"] for r in rows} if rate.matmul else {"i32"} if dtype == "f32" else ():
            sizes &= {r["size"] for r in rows if r["dtype"] == other}
        if sizes:
            size_of[dtype] = max(sizes, key=size_key)
    cell = {(r["strategy"], r["dtype"]): r for r in rows if r["size"] == size_of.get(r["dtype"])}
    order = sorted({s for s, _ in cell}, key=lambda s: (rate.of(cell.get((s, "f32"), {})), s))
    head = ["strategy"] + [f"{d}, {short(size_of[d])}" for d in size_of]
    lines = [
        [label(operation, s)] + [rate.text(rate.of(cell[(s, d)])) if (s, d) in cell else "-" for d in size_of] for s in order
    ]
    return markdown(head, lines) + f"\n\n{rate.unit}. {note(document, list(cell.values()))}\n"


def variants_table(document, operation):
    """Times of OPERATION_* in f32 at the largest size that all of them were measured at."""
    names = sorted({r["operation"] for r in document["rows"] if r["operation"].startswith(operation + "_")
                    and r["operation"] != "reduce_axes"}, key=lambda n: ([int(p) if p.isdigit() else 0 for p in n.split("_")], n))
    if not names:
        return "(not measured)\n"
    if any(r["operation"] == operation for r in document["rows"]):
        names.insert(0, operation)
    rows = [r for r in document["rows"] if r["operation"] in names and r["dtype"] == "f32"]
    shared = set.intersection(*({r["size"] for r in rows if r["operation"] == n} for n in names))
    largest = max(shared, key=size_key)
    cell = {(r["strategy"], r["operation"]): r for r in rows if r["size"] == largest}
    order = sorted({s for s, _ in cell}, key=lambda s: (-cell[(s, names[0])]["us"] if (s, names[0]) in cell else 0, s))
    head = ["strategy"] + [n[len(operation):].lstrip("_") or "sum" for n in names]
    lines = [[f"`{s}`"] + [microseconds(cell[(s, n)]["us"]) if (s, n) in cell else "-" for n in names] for s in order]
    return markdown(head, lines) + f"\n\nus at {short(largest)} f32. {note(document, list(cell.values()))}\n"


def plot(document, operation, dtype):
    """Rate against size, both logarithmic, one line a strategy."""
    rows = [r for r in rows_of(document, operation, dtype) if r["size"].isdigit()]
    matmul = operation == "matmul"
    field = "gflop_per_s" if matmul else "gb_per_s"
    series = {}
    for row in rows:
        series.setdefault(row["strategy"], []).append((int(row["size"]), row[field]))
    series = {name: sorted(points) for name, points in series.items() if len(points) > 1}
    if not series:
        return None
    width, height, left, right, top, bottom = 950, 520, 70, 240, 40, 56
    xs = [math.log2(x) for points in series.values() for x, _ in points]
    ys = [math.log10(y) for points in series.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = math.floor(min(ys)), math.ceil(max(ys))

    def px(x):
        return left + (math.log2(x) - x_low) / (x_high - x_low) * (width - left - right)

    def py(y):
        return height - bottom - (math.log10(y) - y_low) / (y_high - y_low) * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="18" font-size="15" fill="#222">{html.escape(operation.replace("_8", ", radius 8"))} {dtype}: '
        f'{"GFLOP/s against side" if matmul else "GB/s against elements"}</text>',
        f'<text x="{left}" y="33" font-size="10" fill="#666">{html.escape(document["caption"])}</text>',
    ]
    for decade in range(y_low, y_high + 1):
        y = py(10.0**decade)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{10.0**decade:g}</text>')
    for size in sorted({x for points in series.values() for x, _ in points}):
        x = px(size)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="#eee"/>')
        tick = str(size) if matmul else f"2^{size.bit_length() - 1}"
        out.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#444">{tick}</text>')
    limits = ceilings(document)
    ceiling = limits.get(("fma", dtype)) if matmul else limits.get(("read", "f32"))
    if ceiling and math.log10(ceiling) <= y_high:
        y = py(ceiling)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="5 4"/>')
        out.append(f'<text x="{left + 6}" y="{y - 5:.1f}" fill="#666">ceiling {ceiling:.0f}</text>')
    ranked = sorted(series, key=lambda name: -series[name][-1][1])
    for index, name in enumerate(ranked):
        color = COLORS[index % len(COLORS)]
        dash = ' stroke-dasharray="2 3"' if name == LIBRARY.get(operation) else ""
        points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in series[name])
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        y = top + 14 + index * 18
        out.append(f'<line x1="{width - right + 14}" x2="{width - right + 38}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="3"{dash}/>')
        out.append(f'<text x="{width - right + 44}" y="{y + 4}" fill="#222">{html.escape(label(operation, name).strip("`"))}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def shapes_table(document, operation, dtype):
    """Times of the products that are not square."""
    rows = [r for r in rows_of(document, operation, dtype) if not r["size"].isdigit()]
    if not rows:
        return "(not measured)\n"
    sizes = sorted({r["size"] for r in rows}, key=lambda s: [int(d) for d in s.split("x")])
    cell = {(r["strategy"], r["size"]): r for r in rows}
    order = sorted({r["strategy"] for r in rows}, key=lambda s: (-max(cell[(s, z)]["us"] for z in sizes if (s, z) in cell), s))
    lines = [[label(operation, s)] + [microseconds(cell[(s, z)]["us"]) if (s, z) in cell else "-" for z in sizes] for s in order]
    return markdown(["us, M x N x K"] + [z.replace("x", " x ") for z in sizes], lines) + f"\n\n{dtype}. {note(document, rows)}\n"


def errors_table(document, operation):
    """The largest error of each row at the largest side that all types were measured at."""
    rows = [r for r in rows_of(document, operation) if "error" in r and r["size"].isdigit()]
    if not rows:
        return "(not measured)\n"
    dtypes = [d for d in DTYPES if any(r["dtype"] == d and r["error"] > 0 for r in rows)]
    side = max(set.intersection(*({int(r["size"]) for r in rows if r["dtype"] == d} for d in dtypes)))
    cell = {(r["strategy"], r["dtype"]): r for r in rows if int(r["size"]) == side}
    order = sorted({s for s, d in cell if d in dtypes}, key=lambda s: ([-cell[(s, d)]["error"] if (s, d) in cell else 0.0 for d in dtypes], s))
    lines = [[label(operation, s)] + [f"{cell[(s, d)]['error']:.1e}" if (s, d) in cell else "-" for d in dtypes] for s in order]
    return markdown(["strategy"] + dtypes, lines) + (
        f"\n\nThe largest error of 64 elements of a product of {side} x {side} matrices of normal values, relative to the sum of its terms'"
        f" sizes, with what rounding the result to the type costs. {document['caption']}.\n")


def choices_table(document, operation):
    """What an empty strategy stands for, and what it costs beside the fastest that rounds no operand and the vendor's best."""
    rows = [r for r in rows_of(document, operation) if (r["strategy"], r["dtype"]) not in ROUNDING]
    lines = []
    by_problem = {}
    for row in rows:
        by_problem.setdefault((DTYPES.index(row["dtype"]), row["size"]), []).append(row)
    for (dtype, size), here in sorted(by_problem.items(), key=lambda item: (item[0][0], size_key(item[0][1]))):
        chosen = next((r for r in here if r.get("chosen")), None)
        if chosen is None:
            continue
        ours = [r for r in here if r["operation"] == operation]
        fastest = min(ours, key=lambda r: r["us"])
        vendor = min((r for r in here if r["operation"] == "peer" or r["strategy"] == LIBRARY[operation]), key=lambda r: r["us"], default=None)
        lines.append([DTYPES[dtype], size.replace("x", " x "), f"`{chosen['strategy']}`", microseconds(chosen["us"]),
                      "the same" if fastest is chosen else f"`{fastest['strategy']}`, {microseconds(fastest['us'])}",
                      f"{label(operation, vendor['strategy'])}, {microseconds(vendor['us'])}" if vendor else "-",
                      f"{vendor['us'] / chosen['us']:.2f}" if vendor else "-"])
    head = ["type", "M x N x K", "chosen", "us", "the fastest row, us", "the vendor's best, us", "times as fast"]
    return markdown(head, lines) + f"\n\n{note(document, rows)}\n"


def targets_table(document, operation):
    """What was aimed at, and what was measured."""
    cell = {"/".join((r["operation"], r["strategy"], r["dtype"], r["size"])): r for r in document["rows"]}
    limits = ceilings(document)
    lines = []
    for text, ours, how, against, goal in TARGETS[operation]:
        mine = cell.get(ours)
        peers = [cell[name] for name in ([against] if isinstance(against, str) else against or []) if name in cell]
        peer = min(peers, key=lambda r: r["us"], default=None)
        if mine is None or (how in ("speed", "time") and peer is None):
            lines.append([text, "-", "-", "not measured"])
            continue
        if how == "speed":  # how many times as fast as the peer
            value, want, met = peer["us"] / mine["us"], f">= {goal:.2f} x", peer["us"] / mine["us"] >= goal
            got = f"{value:.3f} x ({microseconds(mine['us'])} us, {microseconds(peer['us'])} us)".replace("ms us", "ms")
        elif how == "time":  # the share of the peer's time
            value, want, met = mine["us"] / peer["us"], f"<= {goal:.2f} x the time", mine["us"] / peer["us"] <= goal
            got = f"{value:.3f} x ({microseconds(mine['us'])} us, {microseconds(peer['us'])} us)".replace("ms us", "ms")
        elif how == "ceiling":
            value = mine["gb_per_s"] / limits[("read", "f32")]
            want, got, met = f">= {100 * goal:.0f} % of the read ceiling", f"{100 * value:.1f} %", value >= goal
        elif how == "rate":
            want, got, met = f">= {goal} GB/s", f"{mine['gb_per_s']:.0f} GB/s", mine["gb_per_s"] >= goal
        else:
            want, got, met = f"<= {goal} us", f"{mine['us']:.1f} us", mine["us"] <= goal
        lines.append([text, want, got, "reached" if met else "**missed**"])
    return markdown(["what", "aim", "measured", ""], lines) + f"\n\n{note(document, document['rows'])}\n"


def make_outputs():
    """Path: text of every file that is made of the measured figures."""
    outputs = {}

    def replace(match):
        name, operation, what = match.groups()
        document = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
        if what == "types":
            made = types_table(document, operation)
        elif what == "errors":
            made = errors_table(document, operation)
        elif what == "choices":
            made = choices_table(document, operation)
        elif what == "targets":
            made = targets_table(document, operation)
        elif what.startswith("shapes-"):
            made = shapes_table(document, operation, what[len("shapes-") :])
        elif what == "variants":
            made = variants_table(document, operation)
        else:
            made = table(document, operation, what)
        return f"{match.group(0).split('-->')[0]}-->\n{made}<!-- end -->"

    text = COURSE.read_text(encoding="utf-8")
    outputs[COURSE] = re.sub(r"<!-- measured: (\S+) (\S+) (\S+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)
    for source in sorted(MEASURED.glob("*.json")):
        document = json.loads(source.read_text(encoding="utf-8"))
        for operation in PLOTTED:
            drawing = plot(document, operation, "f32")
            if drawing:
                outputs[MEASURED / f"{source.stem}_{operation}.svg"] = drawing
    return outputs


def stale(outputs):
    return [path for path, text in outputs.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def render(_options):
    outputs = make_outputs()
    for path in stale(outputs):
        path.write_text(outputs[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def check(options):
    complaints = [f"{path.relative_to(ROOT)} is stale: tests/bench/report.py render" for path in stale(make_outputs())]
    listed = subprocess.run([options.bench, "--rows"], check=True, capture_output=True, text=True).stdout.split()
    for backend, name in (("cpu", "cpu"), ("cuda", "h200")):
        rows = {row.split("/", 1)[1] for row in listed if row.startswith(backend + "/")}
        if not rows:
            print(f"the build has no {backend} rows: {name}.json is not compared with them")
            continue
        document = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
        measured = set()
        for row in document["rows"]:
            # reduce_max is measured on the rows of reduce.
            operation = next((o for o in OPERATIONS if row["operation"] == o), None) or next(
                (o for o in OPERATIONS if row["operation"].startswith(o + "_")), None)
            if operation:
                measured.add(f"{operation}/{row['strategy']}/{row['dtype']}")
        complaints += [f"{name}.json lacks {row}: ./dev bench, then tests/bench/report.py" for row in sorted(rows - measured)]
        complaints += [f"{name}.json has {row}, which is no row" for row in sorted(measured - rows)]
    for complaint in complaints:
        print(complaint)
    sys.exit(1 if complaints else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("raw", nargs="+")
    collecting.add_argument("--out", required=True)
    collecting.add_argument("--caption", required=True)
    collecting.set_defaults(run=collect)
    commands.add_parser("render").set_defaults(run=render)
    checking = commands.add_parser("check")
    checking.add_argument("--bench", required=True)
    checking.set_defaults(run=check)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

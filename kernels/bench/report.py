#!/usr/bin/python3
"""Converts runs of the benchmarks to the committed measurements, tables and plots.

  report.py collect RUN.json... --out docs/measured/h200.json --caption "NVIDIA H200, driver 580"
      Joins files that strategy_bench or tests/by_hand/many_gpus.py wrote with --json. If several
      runs of strategy_bench have a row of the same name, the last row is used. A run may also be
      the output of an earlier collect. For rows of several GPUs, the median is used.
  report.py render [--check]
      Fills in the tables and draws the plots that PAGES request, from docs/measured/FILE.json. If
      --check is given, the command writes nothing, names the files that it would change, and exits
      with code 1 if there are any.

A page requests a table with one of these comments, and the table ends with <!-- end -->:

<!-- measured: FILE OPERATION WHAT -->, from runs of strategy_bench. WHAT is
  f32, ...       the times at all sizes, for that element type
  types          the rates of every type at the largest size
  rates          the times and rates of OPERATION and OPERATION_* at all sizes, by type
  variants       the times of OPERATION_* at the largest size that they all share
  shapes-f32     the times of products that are not square
  errors         the largest errors that occurred
  choices        which strategy a request gets if it names none, and how long that one takes
  targets        whether the aims of docs/measured/targets.json were met
  dates          the machine and the dates of the measurements; OPERATION is `all`
<!-- regret: FILE -->, from strategy_bench --regret: how the defaults performed.
<!-- ladder: FILE OPERATION DTYPE SIZE -->: the page has its own table with a line per strategy. The
  last cell of a line is filled in with the rate of the strategy in the line's first link, or
  "unmeasured". Parentheses in that cell are kept. They name another type or size whose rate is
  shown, for example (bf16) or (1 x 8192 x 8192).
<!-- scaling: FILE WHAT -->, from runs on several GPUs. WHAT is `arrays` or `products`.
<!-- service: FILE OPERATION LOAD -->, from service_bench --json. LOAD is
  closed         closed loops: rates, their ratios to the bare server's rates, and latencies
  open           open loops, at a rate and at a fraction of the closed loops' rate: latencies
  rest           the first call after a rest
  brief          only the servers of this project, with a line for each operation, size and load;
                 FILE and OPERATION may be lists, separated by commas
<!-- lessons: FILE WHAT -->, from kernels/bench/lessons.py: rates and hardware counters. WHAT is
  `sum` or `product`.
<!-- peers: FILE WHAT -->, from client/python/peers.py. WHAT is `full`, with plots, or `brief`, with
  only the largest arrays.

A plot is drawn for each ![...](NAME.svg) on these pages. PLOTS lists the possible forms of NAME.
"""

import argparse
import collections
import functools
import json
import math
import pathlib
import re
import statistics
import sys

import pages
from pages import power_text, rate_text, time_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
PAGES = [ROOT / "docs" / "scaling.md", ROOT / "docs" / "performance.md", *MEASURED.glob("*.md")]
PAGES += [ROOT / "kernels" / "lessons" / "README.md", *ROOT.glob("kernels/cuda/*/README.md")]

DTYPES = ["f32", "f64", "f16", "bf16", "i32", "i64", "i8"]  # the order of columns
LIBRARY = {"dot": "cublas", "reduce": "library", "matmul": "cublas"}
# Another call of the vendor that appears in the tables of products.
TF32 = "cublaslt_tf32"
VENDORS = {"cublas", "cublas_lt"}
# Strategies that round their operands to fewer bits than they have.
ROUNDING = {("tensor_tf32", "f32"), ("tensor_bf16", "f32"), (TF32, "f32")}


@functools.cache
def read(name):
    return json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def grouped(rows, *keys):
    """Returns {value of the first key: {value of the second key: ... row}}."""
    found = {}
    for row in rows:
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(row[key], {})
        inner[row[keys[-1]]] = row
    return found


def pivot(rows, key, cells):
    """Returns the lines of a table. Rows with the same key(row) = {head: text} share a line, which
    also has their cells(row) = {head: text}. A key may have heads whose text is None, to give the
    order of the columns; if several cells have the same head, the last one is used."""
    lines = {}
    for row in rows:
        begin = key(row)
        lines.setdefault(tuple(begin.values()), begin).update(cells(row))
    return list(lines.values())


# --- raw runs to measurements ---------------------------------------------------------------------


def collect(options):
    runs = [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in options.runs]
    head = {"caption": options.caption}
    if isinstance(runs[0], list):
        lists = gpus_lists([row for run in runs for row in run])
    else:
        head |= {key: runs[-1][key] for key in ("device", "model")}
        rows = {name_of(row): row for run in runs for row in run["rows"]}
        lists = {"rows": [row for _, row in sorted(rows.items())]}
    text = json.dumps(head, indent=1)[:-2]
    for name, rows in lists.items():
        text += f',\n "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]"
    pathlib.Path(options.out).write_text(text + "\n}\n", encoding="utf-8")


def name_of(row):
    return "/".join(row[key] for key in ("operation", "strategy", "dtype", "size"))


def gpus_lists(rows):
    """Returns {"arrays": rows, "products": rows} from runs on several GPUs."""
    lists = {}
    for name, keys in (("arrays", ("what", "elements", "devices")),
                       ("products", ("dtype", "side", "devices"))):
        found = collections.defaultdict(list)
        for row in rows:
            if keys[1] in row and row["worked"] == row["devices"]:
                found[tuple(row[key] for key in keys)].append(row)
        lists[name] = []
        for key, same in sorted(found.items()):
            row = dict(zip(keys, key)) | {"us": round(statistics.median(r["us"] for r in same), 2)}
            if times := [r["times"] for r in same if r["times"] is not None]:
                row["times"] = round(statistics.median(times), 3)
            lists[name].append(row)
    return lists


# --- strategies -----------------------------------------------------------------------------------


class Figures:
    """The runs of strategy_bench in docs/measured/NAME.json."""

    def __init__(self, name):
        document = read(name)
        self.by_name = {name_of(row): row for row in document["rows"]}
        self.rows = [r | {"operation": "matmul"} if r["strategy"] == TF32 else r
                     for r in document["rows"]]
        self.caption, self.cpu = document["caption"], document["device"] == "cpu"
        # The page shows the dates of all operations in one place.
        self.machine = f"{self.caption.partition(', 20')[0]} ([dates](README.md#dates))"

    def of(self, operation, dtype=None):
        return [r for r in self.rows if r["operation"] == operation and dtype in (None, r["dtype"])]

    def variants(self, operation):
        """Returns the rows of OPERATION and OPERATION_*."""
        return [r for r in self.rows if f"{r['operation']}_".startswith(f"{operation}_")]

    def ceilings(self):
        """Returns {what the device does: the rate}, for example of read/f32."""
        found = {f"{r['strategy']}/{r['dtype']}": r for r in self.of("ceiling")}
        return {name: r.get("gb_per_s") or r["gflop_per_s"] for name, r in found.items()}

    def ceiling(self, operation, dtype):
        """Returns the device's ceiling in the unit of the operation's rates; None if unknown."""
        return self.ceilings().get(f"fma/{dtype}" if operation == "matmul" else "read/f32")

    def unit(self, operation):
        """Returns the unit of an operation's rates, and its ratio to the unit in the JSON."""
        if operation != "matmul":
            return "GB/s", 1
        return ("GFLOP/s", 1) if self.cpu else ("TFLOP/s", 1000)

    def rate(self, operation, row):
        return rate_text(row.get(rate_field(operation), 0.0) / self.unit(operation)[1])

    def note(self, rows):
        runs = max(row["runs"] for row in rows)
        what = f"Medians of {runs} interleaved runs" if runs > 1 else "One run"
        return f"{self.machine}. {what}, device time, caches cold."


def rate_field(operation):
    return "gflop_per_s" if operation == "matmul" else "gb_per_s"


def size_text(size):
    """Returns powers of two of at least 1024 in the form 2^20, products in the form M x N x K, and
    other sizes unchanged."""
    if size.isdigit():
        number = int(size)
        return power_text(number) if number >= 1024 and number & (number - 1) == 0 else size
    return re.sub(r"(?<=\d)x(?=\d)", " x ", size).replace("_", " ")


def size_name(text):
    """Returns the JSON's name for a size that is written in the format of size_text."""
    text = re.sub(r"2\^(\d+)", lambda power: str(2 ** int(power[1])), text)
    return text.replace(" x ", "x").replace(" ", "_")


def size_key(size):
    """Returns a sort key: numbers first, then shapes by their first extent."""
    return not size.isdigit(), int(re.match(r"\d+", size)[0]), size


def percent(value):
    return f"{100 * value:.3g} %" if value < 10 else f"{100 * value:.0f} %"


def label(strategy):
    return "cublasLt in TF32" if strategy == TF32 else f"`{strategy}`"


def us_text(row):
    return time_text(row["us"])


def grid(rows, key, heads, order, show, note, corner="strategy"):
    """Returns a table with a line for each strategy and a column for each entry of heads =
    {value of the rows' key: head}. order({value: row}): a sort key of the line. show(row): the text
    of a cell."""
    found = grouped(rows, "strategy", key)
    lines = [
        {corner: label(strategy)} | {h: k in cells and show(cells[k]) for k, h in heads.items()}
        for strategy, cells in sorted(found.items(), key=lambda item: (order(item[1]), item[0]))
    ]
    return pages.table(lines, note)


def sizes_table(data, operation, dtype):
    """Returns a table of times by size. For the largest size, the table also shows the rate, as a
    number and as percentages of the ceiling and of the library's rate."""
    rows = data.of(operation, dtype)
    sizes = sorted({r["size"] for r in rows}, key=size_key)
    wanted = {str(2**e) for e in (10, 16, 20, 24, 28, 30)}  # a few of the many sizes of vectors
    if operation == "matmul":
        sizes = [s for s in sizes if s.isdigit()]
    else:
        sizes = [s for s in sizes if s in wanted] or sizes
    largest, ceiling = sizes[-1], data.ceiling(operation, dtype)
    found = grouped((r for r in rows if r["size"] in sizes), "strategy", "size")
    library = found.get(LIBRARY.get(operation), {}).get(largest)
    unit, divisor = data.unit(operation)

    def slowest_first(item):
        return -item[1][largest]["us"] if largest in item[1] else -math.inf, item[0]

    lines = []
    for strategy, cells in sorted(found.items(), key=slowest_first):
        line = {"strategy": label(strategy)}
        line |= {f"us at {size_text(s)}": s in cells and us_text(cells[s]) for s in sizes}
        if last := cells.get(largest):
            line[f"{unit} at {size_text(largest)}"] = data.rate(operation, last)
            line["of the ceiling"] = ceiling and percent(last[rate_field(operation)] / ceiling)
            line[f"of `{LIBRARY.get(operation)}`"] = library and percent(library["us"] / last["us"])
        lines.append(line)
    note = data.note(rows)
    if ceiling:
        what = "multiply-adds in registers" if operation == "matmul" else "a loop that only reads"
        note += f" Ceiling: {what}, {rate_text(ceiling / divisor)} {unit} in the same run."
    return pages.table(lines, note)


def types_table(data, operation, _):
    """Returns the rate of each type at the largest size at which it was measured."""
    rows = [r for r in data.of(operation) if r["size"].isdigit()]
    sizes = {d: set(found) for d, found in grouped(rows, "dtype", "size").items()}
    # Products of all types are shown for the same side. Vectors of f32, which are measured at
    # larger sizes than the other types, are shown at the largest size that was also measured with
    # i32.
    shared = set.intersection(*(sizes.values() if operation == "matmul" else [sizes["i32"]]))
    for dtype in sizes if operation == "matmul" else ["f32"]:
        sizes[dtype] &= shared
    size_of = {d: max(sizes[d], key=size_key) for d in DTYPES if d in sizes}
    rows = [r for r in rows if r["size"] == size_of[r["dtype"]]]
    return grid(
        rows, "dtype", {d: f"{d}, {size_text(size)}" for d, size in size_of.items()},
        lambda cells: cells.get("f32", {}).get(rate_field(operation), 0.0),
        lambda row: data.rate(operation, row),
        f"{data.unit(operation)[0]}. {data.note(rows)}",
    )  # fmt: skip


def variant(operation, row):
    return row["operation"][len(operation) + 1 :]


def rates_table(data, operation, _):
    """Returns times and rates of OPERATION and OPERATION_* by variant, strategy and size."""
    rows = data.variants(operation)
    rows.sort(key=lambda r: (variant(operation, r), size_key(r["size"]), r["strategy"]))
    lines = pivot(
        rows,
        lambda r: {"": variant(operation, r) or "-", "size": size_text(r["size"]),
                   "strategy": label(r["strategy"]), **dict.fromkeys(DTYPES)},
        lambda r: {r["dtype"]: f"{us_text(r)}, {data.rate(operation, r)}"},
    )  # fmt: skip
    note = f"us, and {data.unit(operation)[0]} of operands and result. {data.note(rows)}"
    return pages.table(lines, note)


def variants_table(data, operation, _):
    """Returns times of OPERATION and OPERATION_* in f32 at the largest size that they all share."""
    rows = [r for r in data.variants(operation) if r["dtype"] == "f32"]
    sizes = grouped((r for r in rows if r["operation"] != "reduce_axes"), "operation", "size")
    names = sorted(sizes, key=lambda n: ([int(p) if p.isdigit() else 0 for p in n.split("_")], n))
    largest = max(set.intersection(*map(set, sizes.values())), key=size_key)
    rows = [r for r in rows if r["size"] == largest]
    return grid(
        rows, "operation", {n: n[len(operation) + 1 :] or "sum" for n in names},
        lambda cells: -cells[names[0]]["us"], us_text,
        f"us at {size_text(largest)} f32. {data.note(rows)}",
    )  # fmt: skip


def shapes_table(data, operation, dtype):
    """Returns times of the products that are not square."""
    rows = [r for r in data.of(operation, dtype) if not r["size"].isdigit()]
    sizes = sorted({r["size"] for r in rows}, key=lambda s: [int(d) for d in s.split("x")])
    return grid(
        rows, "size", {s: size_text(s) for s in sizes},
        lambda cells: -max(row["us"] for row in cells.values()), us_text,
        f"{dtype}. {data.note(rows)}", "us, M x N x K",
    )  # fmt: skip


def errors_table(data, operation, _):
    """Returns the largest error of each strategy at the largest side measured for all types."""
    rows = [r for r in data.of(operation) if "error" in r and r["size"].isdigit()]
    sides = grouped(rows, "dtype", "size")
    inexact = [d for d in DTYPES if any(r["error"] > 0 for r in rows if r["dtype"] == d)]
    side = max(set.intersection(*(set(sides[d]) for d in inexact)), key=int)
    return grid(
        [r for r in rows if r["size"] == side and r["dtype"] in inexact],
        "dtype", {d: d for d in inexact},
        lambda cells: [-cells[d]["error"] if d in cells else 0.0 for d in inexact],
        lambda row: f"{row['error']:.1e}",
        f"The largest error of 64 elements of a product of {side} x {side} matrices of normal "
        "values, relative to the sum of the absolute values of its terms. Rounding the result to "
        f"the type is included. {data.machine}.",
    )  # fmt: skip


def choices_table(data, operation, _):
    """Returns the strategies that requests get if they name none, compared with the fastest
    strategy that rounds no operand and with the vendor's best."""
    rows = [r for r in data.of(operation) if (r["strategy"], r["dtype"]) not in ROUNDING]
    rows.sort(key=lambda r: (DTYPES.index(r["dtype"]), size_key(r["size"]), r["us"]))
    problems, lines = grouped(rows, "dtype", "size", "strategy"), []

    def named(row):
        return f"{label(row['strategy'])}, {us_text(row)}"

    for chosen in (r for r in rows if r.get("chosen")):
        dtype, size = chosen["dtype"], chosen["size"]
        here = list(problems[dtype][size].values())
        vendor = next((r for r in here if r["strategy"] in VENDORS), None)
        lines.append({
            "type": dtype,
            "M x N x K": size if size.isdigit() else size_text(size),
            "chosen": label(chosen["strategy"]),
            "us": us_text(chosen),
            "the fastest strategy, us": "the same" if here[0] is chosen else named(here[0]),
            "the vendor's best, us": vendor and named(vendor),
            "times as fast": vendor and f"{vendor['us'] / chosen['us']:.2f}",
        })  # fmt: skip
    return pages.table(lines, data.note(rows))


def targets_table(data, operation, _):
    """Returns the aims, and what was measured."""
    copy, read_only = data.ceilings()["copy/f32"], data.ceilings()["read/f32"]
    measured, lines = [], []  # measured: the rows that are compared

    def judged(target):
        """Returns the aim, what was measured, and whether the aim is reached."""
        ours = data.by_name[size_name(target["ours"])]
        measured.append(ours)
        us, rate = ours["us"], ours.get("gb_per_s", math.nan)
        peers = [data.by_name[size_name(name)]["us"] for name in target.get("peers", [])]
        peer = min(peers, default=math.nan)
        both = ", ".join(time_text(t) + (" us" if t < 1000 else "") for t in (us, peer))
        for key, figure, aim_text, text in (
            ("copy_ceiling_at_least", rate / copy, "{:.0%} of the copy rate", "{:.1%}"),
            ("read_ceiling_at_least", rate / read_only, "{:.0%} of the read ceiling", "{:.1%}"),
            ("gb_per_s_at_least", rate, "{} GB/s", "{:.0f} GB/s"),
            ("us_at_most", us, "{} us", "{:.1f} us"),
            ("time_at_most", us / peer, "{:.2f} x the time", f"{{:.3f}} x ({both})"),
            ("speed_at_least", peer / us, "{:.2f} x", f"{{:.3f}} x ({both})"),
        ):
            if key in target:
                aim, most = target[key], key.endswith("most")
                aim_text = ("<= " if most else ">= ") + aim_text.format(aim).replace("%", " %")
                met = figure <= aim if most else figure >= aim
                return aim_text, text.format(figure).replace("%", " %"), met
        raise SystemExit(f"targets.json states no aim in {target}")

    for target in read("targets")[operation]:
        line = {"what": target["what"], "aim": None, "measured": None, "": "unmeasured"}
        try:
            line["aim"], line["measured"], met = judged(target)
            line[""] = "reached" if met else "**missed**"
        except KeyError:
            pass
        lines.append(line)
    return pages.table(lines, data.note(measured))


def ladder(name, operation, dtype, size, table):
    """Returns a page's own table with the last cell of each strategy's line filled in."""
    data = Figures(name)

    def fill(match):
        line, strategy, extra = match.groups()
        what = {"dtype": dtype, "size": size_name(size)}
        for word in extra.strip("()").split(", ") if extra else []:
            what["dtype" if word in DTYPES else "size"] = size_name(word)
        name = f"{strategy}/{what['dtype']}/{what['size']}"
        names = (f"{operation}{kind}/{name}" for kind in ("", "_stack", "_bytes"))
        row = next((data.by_name[n] for n in names if n in data.by_name), None)
        # Products that are not square are limited by memory.
        of = operation if what["size"].isdigit() else "memory"
        unit = data.unit(of)[0]
        if what["dtype"] == "i8":
            unit = unit.replace("FLOP", "OP")
        rate = f"{data.rate(of, row)} {unit}" if row else "unmeasured"
        return f"{line}| {rate}{' ' + extra if extra else ''} |"

    return re.sub(r"(?m)^(\| \[`(\w+)`\].*)\|[^|]*?(\([^()|]*\))? \|$", fill, table)


def strategies_plot(name, operation):
    """Plots the rates of an operation on f32 against the size, with a line for each strategy."""
    data, field, matmul = Figures(name), rate_field(operation), operation == "matmul"
    rows = [r for r in data.of(operation, "f32") if r["size"].isdigit()]
    lines = pages.lines((r["strategy"], int(r["size"]), r[field]) for r in rows)
    lines = [line for line in lines if len(line.points) > 1]
    for line in lines:
        line.dashed = line.name == LIBRARY.get(operation)
        line.name = label(line.name).strip("`")
    lines.sort(key=lambda line: -line.points[-1][1])
    title = f"{operation.replace('_8', ', radius 8')} f32: "
    title += "GFLOP/s against side" if matmul else "GB/s against elements"
    ceiling = data.ceiling(operation, "f32")
    return pages.plot(title, data.caption, lines, str if matmul else power_text, ceiling)


# --- random problems ------------------------------------------------------------------------------


def regret_run(name):
    """Returns a note on the run, and its random problems by operation: the default's time, the
    vendor's time or None, and the best strategy's time."""
    run, problems = read(name), collections.defaultdict(list)
    for row in run["rows"]:
        operation = row["operation"] if row["operation"] == "matmul" else "sums and dots"
        if row["operation"].startswith("batch"):
            operation = "batches"
        chosen = next(t["us"] for t in row["times"] if t.get("chosen"))
        vendor = min((t["us"] for t in row["times"] if t.get("vendor")), default=None)
        best = min(t["us"] for t in row["times"] if not t.get("call"))
        problems[operation].append((chosen, vendor, best))
    rounds = run.get("rounds", 7)
    note = f"{run['model']}, {run['date']}, seed {run['seed']}."
    note += f" Medians of {rounds} rounds, idle device."
    return note, problems


def regret_table(name):
    """Returns how the defaults performed on random problems."""
    (note, problems), lines = regret_run(name), []
    for operation, found in sorted(problems.items()):
        bands = collections.defaultdict(list)
        for chosen, vendor, best in found:
            band = "-" if vendor is None else "below 30 us" if vendor < 30 else "30 us and more"
            bands[band].append((chosen / (vendor or math.inf), chosen / best - 1))
        for band, here in sorted(bands.items()):
            ratios, regret = zip(*here)
            known = band != "-"
            lines.append({
                "operation": operation,
                "the vendor's time": band,
                "problems": str(len(here)),
                "our time / the vendor's (geometric mean)":
                    known and f"{statistics.geometric_mean(ratios):.3f}",
                "at worst": known and f"{max(ratios):.2f}",
                "above 1.05": known and str(sum(ratio > 1.05 for ratio in ratios)),
                "above our own best, on average": f"{100 * statistics.mean(regret):.1f} %",
            })  # fmt: skip
    return pages.table(lines, note)


def regret_plot(name):
    """Plots the ratio of the default's time to the vendor's for the n-th worst problem, by
    operation."""
    (note, problems), ratios = regret_run(name), {}
    for operation, found in sorted(problems.items()):
        ratios[operation] = sorted((c / v for c, v, _ in found if v is not None), reverse=True)
    lines = pages.lines(
        (operation, 2**i, found[2**i - 1])
        for operation, found in sorted(ratios.items(), key=lambda item: -len(item[1]))
        for i in range(len(found).bit_length())
    )
    title = "defaults on random problems: ratio to the vendor's time for the n-th worst problem"
    return pages.plot(title, note, lines)


# --- several GPUs ---------------------------------------------------------------------------------

COUNTS = "none one two three four five six seven eight".split()


def scaling_table(name, what):
    data = read(name)
    rows = sorted(data[what], key=lambda r: -r["us"])  # The fastest comes last and gives the rate.
    rows.sort(key=lambda r: (r.get("elements"), r.get("dtype"), r.get("side"), r.get("what")))
    counts = sorted({row["devices"] for row in rows})

    def cells(row):
        if what == "arrays":
            rate = f"{4 * row['elements'] / row['us'] / 1e6:.3g} TB/s"
        else:
            rate = f"{2 * row['side'] ** 3 / row['us'] / 1e6:.0f} TFLOP/s"
        times = f", {row['times']:.2f}" if row["devices"] > 1 and "times" in row else ""
        time = f"{float('%.3g' % (row['us'] / 1000)):g} ms"
        return {COUNTS[row["devices"]]: time + times, "at most": rate}

    corner = {"arrays": "", "products": "product, side"}[what]
    heads = dict.fromkeys(COUNTS[count] for count in counts)
    lines = pivot(rows, lambda r: {corner: scaling_label(r), **heads}, cells)
    return pages.table(lines, f"{data['caption']}.", missing="")


def scaling_label(row):
    """Returns the name of a line of a table or plot."""
    if "what" in row:
        return f"{row['what']}, {power_text(row['elements'])}"
    return f"{row['dtype']}, {row['side']}"


def scaling_plot(name, what):
    """Plots the speedup over one GPU, and the ideal speedup. For arrays, it shows the largest array
    that one GPU holds."""
    data = read(name)
    if what == "arrays":
        title, rows = "Arrays of f32: times as fast as one GPU", data[what]
        largest = max(row["elements"] for row in rows if row["devices"] == 1)
        rows = [row for row in rows if row["elements"] == largest]
    else:
        title = "Products: times as fast as one GPU"
        rows = sorted(data[what], key=lambda row: (row["dtype"], row["side"], row["devices"]))
    points = [(scaling_label(r), r["devices"], r["times"]) for r in rows if "times" in r]
    lines = [line for line in pages.lines(points) if len(line.points) > 1]
    counts = sorted({count for line in lines for count, _ in line.points})
    ideal = pages.Line("as many GPUs", [(count, count) for count in counts], dashed=True)
    return pages.plot(title, data["caption"], [*lines, ideal])


# --- the lessons ----------------------------------------------------------------------------------

# The strategy that uses the idea of a lesson, or None: its operation, its name, and the type and
# size at which it is compared with the lesson.
COUNTERPARTS = {
    "sum_1_atomics": ("reduce", "atomic", "f32", str(2**26)),
    "sum_2_tree": ("dot", "tree_interleaved", "f32", str(2**26)),
    "sum_3_sequential": ("dot", "tree_sequential", "f32", str(2**26)),
    "sum_4_coarsened": ("dot", "coarsened", "f32", str(2**26)),
    "sum_5_shuffles": ("dot", "warp_shuffle", "f32", str(2**26)),
    "sum_6_vectors": ("reduce", "single_pass", "f32", str(2**26)),
    "sum_7_one_launch": ("dot", "single_pass", "f32", str(2**26)),
    "sum_8_fixed_order": ("dot", "fixed_tree", "f32", str(2**26)),
    "product_1_naive": ("matmul", "naive", "f32", "4096"),
    "product_2_tiles": None,  # no strategy has tiles without registers for several results
    "product_3_registers": ("matmul", "shared_tiled", "f32", "4096"),
    "product_4_double_buffer": ("matmul", "double_buffered", "f32", "4096"),
    "product_5_tensor_cores": ("matmul", "tensor_mma", "bf16", "4096"),
    "hopper_product": ("matmul", "tensor_bf16", "bf16", "4096"),
}
# The peak for bf16 is from NVIDIA's data sheet of the H200.
TENSOR_PEAK = 989e12


def lessons_of(name, what):
    """Returns the rows of the sums or of the products, in the order of the course. Each row also
    has `flops`, the operations per second; `intensity`, the operations per byte of traffic;
    `limit`, the most operations per second at that intensity; and `counterpart`, a row of the
    strategy."""
    figures, sums = Figures("h200"), what == "sum"
    rows = [dict(row) for row in read(name)["rows"] if row["lesson"].startswith("sum_") == sums]
    for row in rows:
        other = COUNTERPARTS[row["lesson"]]
        row["counterpart"] = other and figures.by_name["/".join(other)]
        work = 2**26 if sums else 2 * 4096**3
        row["flops"] = row["rate"] / (4 if sums else 1)
        row["intensity"] = work / row["dram_bytes"]
        bf16 = other and other[2] == "bf16"
        peak = TENSOR_PEAK if bf16 else 1e9 * figures.ceilings()["fma/f32"]
        row["limit"] = min(peak, row["intensity"] * 1e9 * figures.ceilings()["read/f32"])
    return sorted(rows, key=lambda row: list(COUNTERPARTS).index(row["lesson"]))


def lesson_rate(flops, what):
    return f"{4e-9 * flops:.0f} GB/s" if what == "sum" else f"{rate_text(flops / 1e12)} TFLOP/s"


def share(value):
    return "< 1 %" if value < 0.01 else f"{100 * value:.0f} %"


def millions(count):
    return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.2g} M"


def lessons_table(name, what):
    lines = []
    for row in lessons_of(name, what):
        other = row["counterpart"]
        lines.append({
            "lesson": f"`{row['lesson']}`",
            "rate": lesson_rate(row["flops"], what),
            "of the limit": share(row["flops"] / row["limit"]),
            "strategy": other and f"`{other['strategy']}` of {other['operation'].title()}",
            "its rate": other and lesson_rate(1e9 * other["gflop_per_s"], what),
            "bytes moved": f"{row['dram_bytes'] / 1e6:.0f} MB",
            "instructions": millions(row["instructions"]),
            "threads per instruction": f"{row['threads']:.1f}",
            "sectors per load": f"{row['sectors']:.1f}" if row["sectors"] else "",
            "bank conflicts": millions(row["conflicts"]),
            "registers": f"{row['registers']:.0f}",
            "occupancy": share(row["occupancy"] / 100),
            "SM": share(row["sm"] / 100),
            "L2": share(row["l2"] / 100),
            "memory": share(row["dram"] / 100),
        })  # fmt: skip
    return pages.table(lines, f"{read(name)['caption']}. Rates are medians of five runs.")


def lessons_plot(name, what):
    """Plots the lessons and the corresponding strategies below the limits of the GPU."""
    figures, points = Figures("h200"), []
    for index, row in enumerate(lessons_of(name, what)):
        points.append(pages.Point(row["lesson"], row["intensity"], row["flops"], index))
        if (other := row["counterpart"]) is None:
            continue
        title = f"{other['strategy']} of {other['operation'].title()}"
        flops = 1e9 * other["gflop_per_s"]
        points.append(pages.Point(title, row["intensity"], flops, index, hollow=True))
    peaks = {"f32 units": 1e9 * figures.ceilings()["fma/f32"]}
    if what == "product":
        peaks["tensor cores, bf16"] = TENSOR_PEAK
    title = f"The {what}s below the limits of the GPU: GFLOP/s"
    bandwidth = 1e9 * figures.ceilings()["read/f32"]
    return pages.roofline(title, read(name)["caption"], bandwidth, peaks, points)


# --- the service ----------------------------------------------------------------------------------


def machine_text(run):
    """Returns the host, the devices and the peer of a run of service_bench or peers.py."""
    machine = run["machine"]
    parts = [machine["cpu"].replace("(R)", "")]
    if "cores" in machine:
        parts[0] += f", {machine['cores']} cores"
    for target in run.get("targets", []):
        for device in target.get("devices", []):
            if target.get("version") and device["name"] != "cpu":
                parts.append(device["model"])
    parts += machine.get("devices", [])
    parts += [f"driver {v}" for v in re.findall(r"\d+\.\d+[.\d]*", machine.get("driver", ""))]
    if "peer" in run:
        parts += [run["peer"], f"grpcio {run['grpcio']}"]
    return ", ".join(dict.fromkeys(parts))


def service_rows(run, operation, *kinds):
    beside = run["options"]["beside"].partition(":")[0]
    rows = [row for row in run["rows"] if row["operation"] == operation]
    return [row | {"beside": beside} for row in rows if row["load"]["kind"] in kinds]


def scale(row, beside=False):
    """Returns the divisor for the row's rates, and the unit of the quotient. beside: for the rates
    of the concurrent callers."""
    transfers = row["beside"] in ("upload", "download") if beside else row["size_unit"] == "MiB"
    return (1e9, "GB/s") if transfers else (1e3, "thousand calls/s")


def size_of(row):
    size, unit = row["size"], row["size_unit"]
    return {"": "", "side": f"{size} x {size}"}.get(unit, f"{size} {unit}")


def load_of(row):
    kind, value = row["load"]["kind"], row["load"]["value"]
    found = {"closed": "", "rate": f"{value:g}/s", "load": f"{100 * value:g} %"}
    return found.get(kind, f"{value:g} s")


def figure(name, text=time_text):
    """Returns a function that returns the text of a row's median, or None if the row has none."""
    return lambda row: text(row["median"][name]) if name in row["median"] else None


def rate_of(name, beside=False):
    return lambda row: figure(name, lambda rate: rate_text(rate / scale(row, beside)[0]))(row)


def of_bare(row):
    name = "per_second" if row["load"]["kind"] == "closed" else "p50_us"
    return f"{row['of_bare'][name]:.2f}" if name in row["of_bare"] else None


# The columns of the service's tables: {head: the text for a row}. A column is left out of a table
# if none of its rows has such a figure.
COLUMNS = {
    "size": size_of,
    "load": load_of,
    "rest": load_of,
    "callers": lambda row: str(row["callers"]),
    "server": lambda row: row["target"],
    "{unit}": rate_of("per_second"),
    "of bare": of_bare,
    "p50 us": figure("p50_us"),
    "median us": figure("p50_us"),
    "p90": figure("p90_us"),
    "p99": figure("p99_us"),
    "p99.9": figure("p999_us"),
    "max": figure("max_us"),
    "late": figure("late_us"),
    "concurrent {beside}s, {beside_unit}": rate_of("beside_per_second", beside=True),
    "refused": figure("refused", "{:.0f}".format),
    "largest": lambda row: time_text(max(found["max_us"] for found in row["rounds"])),
}
BESIDE = ["concurrent {beside}s, {beside_unit}", "refused"]
TAIL = ["p90", "p99", "p99.9", "max", "late", *BESIDE]
# For each LOAD, the kinds of load of its rows, and its columns.
LAYOUTS = {
    "closed": (["closed"], ["size", "callers", "server", "{unit}", "of bare", "p50 us", *TAIL]),
    "open": (
        ["rate", "load"],
        ["size", "load", "callers", "server", "{unit}", "p50 us", "of bare", *TAIL],
    ),
    "rest": (["rest"], ["size", "rest", "server", "median us", "of bare", "largest"]),
}


def cells_of(row, names):
    """Returns {head: text} of the columns."""
    words = {"unit": scale(row)[1], "beside": row["beside"], "beside_unit": scale(row, True)[1]}
    return {name.format(**words): COLUMNS[name](row) for name in names}


def service_table(name, operation, load):
    if load == "brief":
        return brief_table(name.split(","), operation.split(","))
    run, (kinds, names) = read(name), LAYOUTS[load]
    options = run["options"]
    note = f"{machine_text(run)}, {run['date']}. Medians of {options['rounds']} rounds"
    if not options["rest"]:
        note += f" of {options['seconds']:g} s"
    if options["beside"]:
        note += ", with {1} concurrent callers of {0}".format(*options["beside"].split(":"))
    note += f"; seed {options['seed']}."
    if load == "open":
        note += "  Late: the p99 delay until a call that is due starts; latencies include it."
    return pages.table([cells_of(r, names) for r in service_rows(run, operation, *kinds)], note)


def latency_text(us):
    return f"{us:.0f} us" if us < 1000 else time_text(us)


def brief_cells(row, bare):
    """Returns the columns of one server in a brief table: {head: text}."""
    kind = row["load"]["kind"]
    socket = "" if row["target"] == "tessera" else ", unix socket"
    names = {"rest": [], "closed": ["{unit}", "of bare"]}.get(kind, ["{unit}"])
    cells = {head + socket: text for head, text in cells_of(row, names).items()}
    heads = {"p50": "median"} if kind == "rest" else {"p50": "p50", "p99": "p99"}
    for quantile, head in heads.items() if row["size_unit"] != "MiB" else ():
        latency = figure(f"{quantile}_us", latency_text)
        cells[head + socket] = latency(row)
        if kind != "closed":
            cells["bare" if kind == "rest" else f"bare {head}"] = latency(bare)
    return cells | cells_of(row, BESIDE)


def brief_table(names, operations):
    """Returns a table with a line for each operation, size and load, and columns for this
    project's servers."""
    runs, rows, bare = [read(name) for name in names], [], {}
    for run, operation in ((run, operation) for operation in operations for run in runs):
        kinds = ["load", "rest"], ["closed"]
        here = service_rows(run, operation, *kinds[0]) or service_rows(run, operation, *kinds[1])
        rows += [row for row in here if row["target"].startswith("tessera")]
        bare |= {(operation, load_of(row)): row for row in here if row["target"] == "bare gRPC"}

    def key(row):
        load = "rest" if row["load"]["kind"] == "rest" else "load"
        return {"operation": f"`{row['operation']}`"} | cells_of(row, ["size", load, "callers"])

    lines = pivot(rows, key, lambda r: brief_cells(r, bare.get((r["operation"], load_of(r)))))
    # Leaves out an operation's only size and columns that are constant: the page states them.
    sizes = {(line["operation"], line["size"]) for line in lines}
    same = {head for head in key(rows[0]) if len({line[head] for line in lines}) == 1}
    same |= {"size"} if len(sizes) == len({operation for operation, _ in sizes}) else set()
    lines = [{h: text for h, text in line.items() if h not in same} for line in lines]

    def each(texts):
        return " and ".join(dict.fromkeys(map(str, texts)))

    rounds = each(run["options"]["rounds"] for run in runs)
    medians = "One round" if rounds == "1" else f"Medians of {rounds} rounds"
    hosts, dates = each(map(machine_text, runs)), each(sorted(run["date"] for run in runs))
    return pages.table(lines, f"{hosts}, {dates}. {medians}.")


def service_plot(name, operation, what):
    """Plots the rates of closed loops, or p50 and, dashed, p99, against the number of callers, for
    the first size that was measured."""
    run = read(name)
    rows = service_rows(run, operation, "closed")
    rows = [row for row in rows if row["size"] == rows[0]["size"]]
    targets = [target["name"] for target in run["targets"]]
    rows.sort(key=lambda row: targets.index(row["target"]))
    divisor, unit = scale(rows[0])
    shown = {"": ("per_second", divisor)}
    if what == "latency":
        shown, unit = {" p50": ("p50_us", 1), " p99": ("p99_us", 1)}, "latency in us"
    lines = pages.lines(
        (row["target"] + suffix, row["callers"], row["median"][field] / divide_by)
        for row in rows
        for suffix, (field, divide_by) in shown.items()
        if field in row["median"]
    )
    for line in lines:
        line.dashed = line.name.endswith(" p99")
        line.color = targets.index(re.sub(" p[59][09]$", "", line.name))
    subject = ", ".join(filter(None, [operation, size_of(rows[0])]))
    caption = f"{machine_text(run)}, {run['date']}"
    return pages.plot(f"{subject}: {unit} against callers", caption, lines)


# --- the Python client ----------------------------------------------------------------------------


def peers_table(name, what):
    """Returns a table with a line for each expression and number of elements, and a column for
    each server."""
    run = read(name)
    order = [row["expression"] for row in run["rows"]]
    largest = max(row["elements"] for row in run["rows"])
    rows = [row for row in run["rows"] if what == "full" or row["elements"] == largest]
    lines = pivot(
        sorted(rows, key=lambda row: order.index(row["expression"])),
        lambda row: {"expression": f"`{row['expression']}`", "elements": str(row["elements"])},
        lambda row: {row["server"]: us_text(row)},
    )
    note = f"us unless stated otherwise. {machine_text(run)}, {run['date']}. "
    text = pages.table(lines, f"{note}Medians of {run['rounds']} rounds.")
    for expression in ("dot", "gelu", "matmul") if what == "full" else ():
        text += f"\n![Times of {expression} against elements]({name}_{expression}_us.svg)\n"
    return text


def peers_plot(name, expression):
    """Plots times against the number of elements, with a line for each server."""
    run = read(name)
    rows = [row for row in run["rows"] if row["expression"] == expression]
    lines = pages.lines((row["server"], row["elements"], row["us"]) for row in rows)
    caption = f"{machine_text(run)}, {run['date']}"
    return pages.plot(f"{expression}: us against elements", caption, lines)


# --- pages ----------------------------------------------------------------------------------------

MEASURED_TABLES = {
    "dates": lambda data, *_: pages.fill(f"{data.caption}."),
    "rates": rates_table,
    "types": types_table,
    "variants": variants_table,
    "shapes": shapes_table,
    "errors": errors_table,
    "choices": choices_table,
    "targets": targets_table,
}


def measured_table(name, operation, what):
    kind, _, dtype = what.partition("-")
    return MEASURED_TABLES.get(kind, sizes_table)(Figures(name), operation, dtype or kind)


TABLES = {
    "measured": measured_table,
    "regret": regret_table,
    "scaling": scaling_table,
    "service": service_table,
    "peers": peers_table,
    "lessons": lessons_table,
}
# The forms of the names of plots. The first one that matches is used.
PLOTS = {
    r"(scaling_[a-z0-9]+)_(\w+)": scaling_plot,
    r"(service_\w+)_([a-z]+)_(rate|latency)": service_plot,
    r"(peers_\w+)_([a-z]+)_us": peers_plot,
    r"(\w+_regret)": regret_plot,
    r"(lessons_[a-z0-9]+)_(\w+)": lessons_plot,
    r"([a-z0-9]+)_(\w+)": strategies_plot,
}


def rendered(page):
    """Returns the text of a page with all its tables regenerated."""

    def filled(match):
        begin, kind, words, old, end = match.groups()
        if kind == "ladder":
            return begin + ladder(*words.split(" ", 3), old) + end
        return f"{begin}\n{TABLES[kind](*words.split())}{end}"

    kinds = "|".join([*TABLES, "ladder"])
    marker = rf"(?s)(<!-- ({kinds}): ([^\n]+?) -->)(.*?)(<!-- end -->)"
    return re.sub(marker, filled, page.read_text(encoding="utf-8"))


def render(options):
    outputs = {page: rendered(page) for page in PAGES}
    text = "".join(outputs.values())
    for name in re.findall(r"!\[.*?\]\((?:[./\w]*measured/)?(\w+)\.svg\)", text):
        draw, words = next((d, m) for p, d in PLOTS.items() if (m := re.fullmatch(p, name)))
        outputs[MEASURED / f"{name}.svg"] = draw(*words.groups())
    stale = [p for p, t in outputs.items() if not p.exists() or p.read_text(encoding="utf-8") != t]
    for path in stale:
        if not options.check:
            path.write_text(outputs[path], encoding="utf-8")
        state = "is stale; run kernels/bench/report.py render" if options.check else "written"
        print(f"{path.relative_to(ROOT)} {state}")
    sys.exit(1 if stale and options.check else 0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("runs", nargs="+")
    collecting.add_argument("--out", required=True)
    collecting.add_argument("--caption", required=True)
    collecting.set_defaults(run=collect)
    rendering = commands.add_parser("render")
    rendering.add_argument("--check", action="store_true")
    rendering.set_defaults(run=render)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

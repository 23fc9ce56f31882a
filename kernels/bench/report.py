#!/usr/bin/python3
"""Converts runs of strategy_bench to the committed measurements, tables and plots.

  report.py collect RAW.json... --out docs/measured/h200.json --caption "NVIDIA H200, driver 580"
      Writes the median and spread of every benchmark in Google Benchmark's JSON. It reads the
      repetitions, not the aggregates.
  report.py render [--check]
      Fills in the tables that PAGES request, from docs/measured/FILE.json. With --check it writes
      nothing, names the files that it would change, and exits with code 1 if there are any.

A page requests a table between <!-- measured: FILE OPERATION WHAT --> and <!-- end -->. WHAT is
  f32, ...       the times at all sizes, for that element type
  types          the rates of every type at the largest size
  rates          the times and rates of OPERATION and OPERATION_* at all sizes, by type
  variants       the times of OPERATION_* at the largest size that they all share
  shapes-f32     the times of products that are not square
  errors         the largest errors that occurred
  choices        which strategy a request gets if it names none, and what that costs
  targets        whether the aims of docs/measured/targets.json were met
  dates          the machine and the dates of the measurements; OPERATION is `all`

Between <!-- ladder: FILE OPERATION DTYPE SIZE --> and <!-- end --> a page has its own table with a
line for each strategy. The last cell of a line is filled in with the rate of the strategy in the
line's first link, or "unmeasured". Parentheses in that cell are kept. They name another type or
size whose rate is shown, for example (bf16) or (1 x 8192 x 8192). For each
![...](FILE_OPERATION.svg) in docs/measured/README.md, a plot is drawn.
"""

import collections
import functools
import json
import math
import pathlib
import re
import statistics
import textwrap

import pages
from pages import MEASURED, ROOT, markdown, rate_text, time_text

PLOTS_PAGE = MEASURED / "README.md"
CHAPTERS = sorted((ROOT / "kernels" / "cuda").glob("*/README.md"))
PAGES = [PLOTS_PAGE, MEASURED / "targets.md", *CHAPTERS]

DTYPES = ["f32", "f64", "f16", "bf16", "i32", "i64"]  # the order of columns
LIBRARY = {"dot": "cublas", "reduce": "library", "matmul": "cublas"}
# Other calls of the vendor that appear in an operation's tables.
PEERS = {"matmul": {"cublaslt_tf32": "cublasLt in TF32"}}
VENDORS = {"cublas", "cublas_lt"}
# Strategies that round their operands to fewer bits than they have.
ROUNDING = {("tensor_tf32", "f32"), ("tensor_bf16", "f32"), ("cublaslt_tf32", "f32")}


# --- raw runs to measurements ---------------------------------------------------------------------


def collect(options):
    runs_of = collections.defaultdict(list)
    for path in options.runs:
        raw = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        for run in raw["benchmarks"]:
            if run.get("run_type") != "aggregate" and not run.get("error_occurred"):
                runs_of[run["name"].split("/manual_time")[0]].append(run)
    rows = [figures_of(name, runs) for name, runs in sorted(runs_of.items())]
    head = {
        "caption": options.caption,
        "device": raw["context"].get("tessera_device", ""),
        "model": raw["context"].get("tessera_model", ""),
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    out = pathlib.Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8"
    )
    print(f"{out}: {len(rows)} rows")


def figures_of(name, runs):
    """Returns one row of measurements from the runs of one strategy on one problem."""
    microseconds_in = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
    times = [run["real_time"] * microseconds_in[run["time_unit"]] for run in runs]
    row = dict(zip(("operation", "strategy", "dtype", "size"), name.split("/")))
    row |= {
        "us": round(statistics.median(times), 3),
        "us_min": round(min(times), 3),
        "us_max": round(max(times), 3),
        "runs": len(times),
    }
    for counter, field in (("bytes_per_second", "gb_per_s"), ("flops_per_second", "gflop_per_s")):
        rate = statistics.median(run.get(counter, 0.0) for run in runs)
        if rate:
            row[field] = float(f"{rate / 1e9:.5g}")
    errors = [run["error"] for run in runs if "error" in run]
    if errors:
        row["error"] = float(f"{max(errors):.3g}")
    if any("chosen" in run for run in runs):
        row["chosen"] = True
    return row


# --- measurements ---------------------------------------------------------------------------------


class Figures:
    """The measurements in docs/measured/NAME.json."""

    def __init__(self, name):
        document = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
        self.caption = document["caption"]
        # The page shows the dates of all operations in one place (dates_table).
        self.machine = f"{self.caption.partition(', 20')[0]} ([dates](README.md#dates))"
        self.rows = document["rows"]
        self.cpu = document["device"] == "cpu"
        self.by_name = {
            "/".join((r["operation"], r["strategy"], r["dtype"], r["size"])): r for r in self.rows
        }

    def of(self, operation, dtype=None):
        """Returns the rows of an operation and of the vendor's other calls for it."""
        peers = PEERS.get(operation, {})
        return [
            r
            for r in self.rows
            if dtype in (None, r["dtype"])
            and (r["operation"] == operation or r["operation"] == "peer" and r["strategy"] in peers)
        ]

    def ceiling(self, operation, dtype):
        """Returns the device's ceiling in the unit of the operation's rates; None if unknown."""
        name = f"fma/{dtype}/" if operation == "matmul" else "read/f32/"
        field = rate_field(operation)
        found = [r for n, r in self.by_name.items() if n.startswith(f"ceiling/{name}")]
        return found[0][field] if found else None

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


@functools.cache
def figures(name):
    return Figures(name)


def rate_field(operation):
    return "gflop_per_s" if operation == "matmul" else "gb_per_s"


def size_text(size):
    """Returns 2^20 for powers of two from 1024 on, M x N x K for products, and other sizes
    unchanged."""
    if size.isdigit():
        number = int(size)
        exact = number >= 1024 and number & (number - 1) == 0
        return f"2^{number.bit_length() - 1}" if exact else size
    return re.sub(r"(?<=\d)x(?=\d)", " x ", size).replace("_", " ")


def size_name(text):
    """Returns the JSON's name for a size that is written in the format of size_text."""
    text = re.sub(r"2\^(\d+)", lambda power: str(2 ** int(power.group(1))), text)
    return text.replace(" x ", "x").replace(" ", "_")


def size_key(size):
    """Returns a sort key: numbers first, then shapes by their first extent."""
    digits = re.match(r"\d+", size)
    return not size.isdigit(), int(digits.group()) if digits else 0, size


def percent(value):
    return f"{100 * value:.3g} %" if value < 10 else f"{100 * value:.0f} %"


def label(operation, strategy):
    return PEERS.get(operation, {}).get(strategy) or f"`{strategy}`"


# --- tables ---------------------------------------------------------------------------------------


def grid(operation, corner, order, columns, cell, show, note):
    """Returns a table with a line for each strategy in `order`, and a column for each entry of
    columns = {key: head}. cell: {(strategy, key): row}; show(row): the text of a row's cell."""
    lines = [
        [label(operation, s)] + [show(cell[s, c]) if (s, c) in cell else "-" for c in columns]
        for s in order
    ]
    return markdown([corner, *columns.values()], lines, note)


def sizes_table(data, operation, dtype):
    """Returns a table of times by size. For the largest size, the table also shows the rate, as a
    number and as percentages of the ceiling and of the library's rate."""
    rows = data.of(operation, dtype)
    sizes = sorted({r["size"] for r in rows}, key=size_key)
    if operation == "matmul":
        sizes = [s for s in sizes if s.isdigit()]
    else:  # only a few of the many vector sizes
        wanted = {str(2**e) for e in (10, 16, 20, 24, 28, 30)}
        sizes = [s for s in sizes if s in wanted] or sizes
    largest = sizes[-1]
    cell = {(r["strategy"], r["size"]): r for r in rows}
    library = cell.get((LIBRARY.get(operation), largest))
    ceiling = data.ceiling(operation, dtype)
    unit, divisor = data.unit(operation)
    head = ["strategy", *(f"us at {size_text(s)}" for s in sizes)]
    head += [f"{unit} at {size_text(largest)}"]
    head += ["of the ceiling"] * bool(ceiling) + [f"of `{LIBRARY.get(operation)}`"] * bool(library)

    def slowest_first(strategy):
        last = cell.get((strategy, largest))
        return -last["us"] if last else -math.inf, strategy

    lines = []
    for strategy in sorted({s for s, size in cell if size in sizes}, key=slowest_first):
        here = [cell.get((strategy, size)) for size in sizes]
        line = [label(operation, strategy), *(time_text(r["us"]) if r else "-" for r in here)]
        last = here[-1]
        if last:
            line.append(data.rate(operation, last))
            if ceiling:
                line.append(percent(last[rate_field(operation)] / ceiling))
            if library:
                line.append(percent(library["us"] / last["us"]))
        lines.append(line + ["-"] * (len(head) - len(line)))
    note = data.note(rows)
    if ceiling:
        what = "multiply-adds in registers" if operation == "matmul" else "a loop that only reads"
        note += f" Ceiling: {what}, {rate_text(ceiling / divisor)} {unit} in the same run."
    return markdown(head, lines, note)


def types_table(data, operation):
    """Returns the rate of each type at the largest size at which it was measured."""
    rows = [r for r in data.of(operation) if r["size"].isdigit()]
    sizes_of = collections.defaultdict(set)
    for row in rows:
        sizes_of[row["dtype"]].add(row["size"])
    # Products of all types are shown for the same side. Vectors of f32, which are measured at
    # larger sizes than the other types, are shown at the largest size that was also measured with
    # i32.
    if operation == "matmul":
        sizes_of = {d: set.intersection(*sizes_of.values()) for d in sizes_of}
    else:
        sizes_of["f32"] &= sizes_of["i32"]
    size_of = {d: max(sizes_of[d], key=size_key) for d in DTYPES if d in sizes_of}
    cell = {(r["strategy"], r["dtype"]): r for r in rows if r["size"] == size_of[r["dtype"]]}

    def by_f32(strategy):
        return cell.get((strategy, "f32"), {}).get(rate_field(operation), 0.0), strategy

    return grid(
        operation,
        "strategy",
        sorted({s for s, _ in cell}, key=by_f32),
        {d: f"{d}, {size_text(size)}" for d, size in size_of.items()},
        cell,
        lambda row: data.rate(operation, row),
        f"{data.unit(operation)[0]}. {data.note(cell.values())}",
    )


def rates_table(data, operation):
    """Returns times and rates of OPERATION and OPERATION_* by variant, strategy and size."""
    cell = collections.defaultdict(dict)
    for row in data.rows:
        if row["operation"] == operation or row["operation"].startswith(operation + "_"):
            variant = row["operation"][len(operation) :].lstrip("_")
            key = variant, size_key(row["size"]), row["strategy"], row["size"]
            cell[key][row["dtype"]] = row
    dtypes = [d for d in DTYPES if any(d in rows for rows in cell.values())]

    def show(row):
        return f"{time_text(row['us'])}, {data.rate(operation, row)}" if row else "-"

    lines = [
        [variant or "-", size_text(size), f"`{strategy}`", *(show(rows.get(d)) for d in dtypes)]
        for (variant, _, strategy, size), rows in sorted(cell.items())
    ]
    measured = [row for rows in cell.values() for row in rows.values()]
    note = f"us, and {data.unit(operation)[0]} of operands and result. {data.note(measured)}"
    return markdown(["", "size", "strategy", *dtypes], lines, note)


def variants_table(data, operation):
    """Returns times of OPERATION and OPERATION_* in f32 at the largest size that they all share."""
    names = {r["operation"] for r in data.rows} - {"reduce_axes"}
    names = [n for n in names if n == operation or n.startswith(operation + "_")]
    names.sort(key=lambda n: ([int(p) if p.isdigit() else 0 for p in n.split("_")], n))
    rows = [r for r in data.rows if r["operation"] in names and r["dtype"] == "f32"]
    shared = set.intersection(*({r["size"] for r in rows if r["operation"] == n} for n in names))
    largest = max(shared, key=size_key)
    cell = {(r["strategy"], r["operation"]): r for r in rows if r["size"] == largest}
    return grid(
        operation,
        "strategy",
        sorted({s for s, _ in cell}, key=lambda s: (-cell[s, names[0]]["us"], s)),
        {n: n[len(operation) :].lstrip("_") or "sum" for n in names},
        cell,
        lambda row: time_text(row["us"]),
        f"us at {size_text(largest)} f32. {data.note(cell.values())}",
    )


def shapes_table(data, operation, dtype):
    """Returns times of the products that are not square."""
    rows = [r for r in data.of(operation, dtype) if not r["size"].isdigit()]
    sizes = sorted({r["size"] for r in rows}, key=lambda s: [int(d) for d in s.split("x")])
    slowest = collections.defaultdict(float)
    for row in rows:
        slowest[row["strategy"]] = max(slowest[row["strategy"]], row["us"])
    return grid(
        operation,
        "us, M x N x K",
        sorted(slowest, key=lambda s: (-slowest[s], s)),
        {s: size_text(s) for s in sizes},
        {(r["strategy"], r["size"]): r for r in rows},
        lambda row: time_text(row["us"]),
        f"{dtype}. {data.note(rows)}",
    )


def errors_table(data, operation):
    """Returns the largest error of each strategy at the largest side measured for all types."""
    rows = [r for r in data.of(operation) if "error" in r and r["size"].isdigit()]
    dtypes = [d for d in DTYPES if any(r["dtype"] == d and r["error"] > 0 for r in rows)]
    side = max(
        set.intersection(*({int(r["size"]) for r in rows if r["dtype"] == d} for d in dtypes))
    )
    cell = {
        (r["strategy"], r["dtype"]): r
        for r in rows
        if int(r["size"]) == side and r["dtype"] in dtypes
    }

    def worst_first(strategy):
        return [-cell.get((strategy, d), {"error": 0.0})["error"] for d in dtypes], strategy

    return grid(
        operation,
        "strategy",
        sorted({s for s, _ in cell}, key=worst_first),
        {d: d for d in dtypes},
        cell,
        lambda row: f"{row['error']:.1e}",
        f"The largest error of 64 elements of a product of {side} x {side} matrices of normal "
        "values, relative to the sum of the sizes of its terms. Rounding the result to the type is "
        f"included. {data.machine}.",
    )


def choices_table(data, operation):
    """Returns which strategies requests get if they name none, compared with the fastest strategy
    that rounds no operand and with the vendor's best."""
    problems = collections.defaultdict(list)
    rows = [r for r in data.of(operation) if (r["strategy"], r["dtype"]) not in ROUNDING]
    for row in rows:
        problems[DTYPES.index(row["dtype"]), size_key(row["size"])].append(row)

    def named(row):
        return f"{label(operation, row['strategy'])}, {time_text(row['us'])}"

    lines = []
    for _, here in sorted(problems.items()):
        here.sort(key=lambda r: r["us"])
        chosen = next((r for r in here if r.get("chosen")), None)
        if not chosen:
            continue
        fastest = next(r for r in here if r["operation"] == operation)
        vendors = [r for r in here if r["operation"] == "peer" or r["strategy"] in VENDORS]
        size = chosen["size"]
        line = [chosen["dtype"], size if size.isdigit() else size_text(size)]
        line += [f"`{chosen['strategy']}`", time_text(chosen["us"])]
        line += ["the same" if fastest is chosen else named(fastest)]
        if vendors:
            line += [named(vendors[0]), f"{vendors[0]['us'] / chosen['us']:.2f}"]
        lines.append(line + ["-"] * (7 - len(line)))
    head = ["type", "M x N x K", "chosen", "us", "the fastest strategy, us"]
    head += ["the vendor's best, us", "times as fast"]
    return markdown(head, lines, data.note(rows))


def targets_table(data, operation):
    """Returns a table of the aims and the measured values."""
    targets = json.loads((MEASURED / "targets.json").read_text(encoding="utf-8"))[operation]
    read = data.ceiling("reduce", "f32")
    copies = [r["gb_per_s"] for n, r in data.by_name.items() if n.startswith("ceiling/copy/f32/")]
    measured = []  # the rows

    def judge(target):
        """Returns the aim, the measured value, and whether the aim is reached."""
        ours = data.by_name[size_name(target["ours"])]
        measured.append(ours)
        if "copy_ceiling_at_least" in target:
            share, aim = ours["gb_per_s"] / copies[0], target["copy_ceiling_at_least"]
            return f">= {100 * aim:.0f} % of the copy rate", f"{100 * share:.1f} %", share >= aim
        if "read_ceiling_at_least" in target:
            share, aim = ours["gb_per_s"] / read, target["read_ceiling_at_least"]
            return f">= {100 * aim:.0f} % of the read ceiling", f"{100 * share:.1f} %", share >= aim
        if "gb_per_s_at_least" in target:
            rate, aim = ours["gb_per_s"], target["gb_per_s_at_least"]
            return f">= {aim} GB/s", f"{rate:.0f} GB/s", rate >= aim
        if "us_at_most" in target:
            aim = target["us_at_most"]
            return f"<= {aim} us", f"{ours['us']:.1f} us", ours["us"] <= aim
        peer = min(data.by_name[size_name(name)]["us"] for name in target["peers"])
        times = ", ".join(
            time_text(us) + (" us" if us < 1000 else "") for us in (ours["us"], peer)
        )
        if "time_at_most" in target:  # as a fraction of the peer's time
            share, aim = ours["us"] / peer, target["time_at_most"]
            return f"<= {aim:.2f} x the time", f"{share:.3f} x ({times})", share <= aim
        share, aim = peer / ours["us"], target["speed_at_least"]
        return f">= {aim:.2f} x", f"{share:.3f} x ({times})", share >= aim

    lines = []
    for target in targets:
        try:
            aim, found, met = judge(target)
            line = [aim, found, "reached" if met else "**missed**"]
        except KeyError:
            line = ["-", "-", "unmeasured"]
        lines.append([target["what"], *line])
    return markdown(["what", "aim", "measured", ""], lines, data.note(measured))


def regret_run(name):
    """Reads docs/measured/NAME.json, written by strategy_bench. Returns a note on the run, and a
    tuple for each of its random problems: the operation, the default's time, the vendor's time or
    None, and the best strategy's time."""
    run = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    problems = []
    for row in run["rows"]:
        strategies = [t["us"] for t in row["times"] if not t.get("call")]
        chosen = next(t["us"] for t in row["times"] if t.get("chosen"))
        vendor = min((t["us"] for t in row["times"] if t.get("vendor")), default=None)
        operation = row["operation"] if row["operation"] == "matmul" else "sums and dots"
        if row["operation"].startswith("batch"):
            operation = "batches"
        problems.append((operation, chosen, vendor, min(strategies)))
    note = f"{run['model']}, {run['date']}, seed {run['seed']}. Medians of 7 rounds, idle device."
    return note, problems


def regret_table(name):
    """Returns how the defaults performed on random problems."""
    note, problems = regret_run(name)
    groups = collections.defaultdict(list)
    for operation, chosen, vendor, best in problems:
        band = "-" if vendor is None else "below 30 us" if vendor < 30 else "30 us and more"
        groups[operation, band].append((chosen, vendor, best))
    lines = []
    for (operation, band), found in sorted(groups.items(), key=lambda item: item[0]):
        regret = 100 * statistics.mean(chosen / best - 1 for chosen, _, best in found)
        line = [operation, band, str(len(found))]
        if band != "-":
            ratios = [chosen / vendor for chosen, vendor, _ in found]
            line += [f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.2f}"]
            line += [str(sum(ratio > 1.05 for ratio in ratios))]
        lines.append(line + ["-"] * (6 - len(line)) + [f"{regret:.1f} %"])
    head = ["operation", "the vendor's time", "problems", "our time over it (geometric mean)"]
    head += ["at worst", "above 1.05", "above our own best, on average"]
    return markdown(head, lines, note)


def regret_plot(name):
    """Plots the ratio of the default's time to the vendor's for the n-th worst problem, by
    operation."""
    note, problems = regret_run(name)
    ratios = collections.defaultdict(list)
    for operation, chosen, vendor, _ in problems:
        if vendor is not None:
            ratios[operation].append(chosen / vendor)
    lines = []
    for operation, found in sorted(ratios.items(), key=lambda item: -len(item[1])):
        found.sort(reverse=True)
        ranks = [2**i for i in range(len(found).bit_length())]
        lines.append(pages.Line(operation, [(rank, found[rank - 1]) for rank in ranks]))
    title = "defaults on random problems: time over the vendor's, of the n-th worst"
    return pages.plot(title, note, lines, str)


def ladder(data, operation, dtype, size, table):
    """Returns a page's own table with the last cell of each strategy's line filled in."""

    def fill(match):
        line, strategy, extra = match.groups()
        what = {"dtype": dtype, "size": size_name(size)}
        for word in extra.strip("()").split(", ") if extra else []:
            what["dtype" if word in DTYPES else "size"] = size_name(word)
        row = data.by_name.get(f"{operation}/{strategy}/{what['dtype']}/{what['size']}")
        rate = "unmeasured"
        if row:
            # Products that are not square are limited by memory.
            of = operation if what["size"].isdigit() else "memory"
            rate = f"{data.rate(of, row)} {data.unit(of)[0]}"
        return f"{line}| {rate}{' ' + extra if extra else ''} |"

    return re.sub(r"(?m)^(\| \[`(\w+)`\].*)\|[^|]*?(\([^()|]*\))? \|$", fill, table)


# --- plots ----------------------------------------------------------------------------------------


def plot(data, operation, dtype):
    """Plots rate against size, one line per strategy."""
    field = rate_field(operation)
    series = collections.defaultdict(list)
    for row in data.of(operation, dtype):
        if row["size"].isdigit():
            series[row["strategy"]].append((int(row["size"]), row[field]))
    series = {name: sorted(points) for name, points in series.items() if len(points) > 1}
    matmul = operation == "matmul"
    title = f"{operation.replace('_8', ', radius 8')} {dtype}: "
    title += "GFLOP/s against side" if matmul else "GB/s against elements"
    return pages.plot(
        title,
        data.caption,
        [
            pages.Line(
                label(operation, name).strip("`"), series[name], name == LIBRARY.get(operation)
            )
            for name in sorted(series, key=lambda name: -series[name][-1][1])
        ],
        str if matmul else lambda size: f"2^{size.bit_length() - 1}",
        data.ceiling(operation, dtype),
    )


# --- pages ----------------------------------------------------------------------------------------


def dates_table(data, operation):
    return textwrap.fill(f"{data.caption}.", 100) + "\n"


TABLES = {
    "dates": dates_table,
    "rates": rates_table,
    "types": types_table,
    "variants": variants_table,
    "errors": errors_table,
    "choices": choices_table,
    "targets": targets_table,
}


def rendered(page):
    """Returns the text of a page with all its tables generated again."""

    def measured(match):
        begin, name, operation, what, end = match.groups()
        data = figures(name)
        if what in TABLES:
            table = TABLES[what](data, operation)
        elif what.startswith("shapes-"):
            table = shapes_table(data, operation, what[len("shapes-") :])
        else:
            table = sizes_table(data, operation, what)
        return f"{begin}\n{table}{end}"

    def filled(match):
        begin, name, operation, dtype, size, table, end = match.groups()
        return begin + ladder(figures(name), operation, dtype, size, table) + end
 
    text = page.read_text(encoding="utf-8")
    text = re.sub(
        r"(?s)(<!-- measured: (\S+) (\S+) (\S+) -->).*?(<!-- end -->)", measured, text
    )
    text = re.sub(
        r"(?s)(<!-- regret: (\S+) -->).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{regret_table(match[2])}{match[3]}",
        text,
    )
    return re.sub(
        r"(?s)(<!-- ladder: (\S+) (\S+) (\S+) (.+?) -->)(.*?)(<!-- end -->)", filled, text
    )


def render(options):
    outputs = {page: rendered(page) for page in PAGES}
    for name, operation in re.findall(r"!\[.*?\]\(([a-z0-9]+)_(\w+)\.svg\)", outputs[PLOTS_PAGE]):
        regret = operation == "regret"
        picture = regret_plot(f"{name}_regret") if regret else plot(figures(name), operation, "f32")
        outputs[MEASURED / f"{name}_{operation}.svg"] = picture
    pages.settle(outputs, options.check, "kernels/bench/report.py render")


if __name__ == "__main__":
    pages.run_command(__doc__, render, collect)

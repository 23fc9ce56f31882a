#!/usr/bin/python3
"""Generates the tables and plots of docs/performance.md, docs/measured/service.md and
docs/measured/python.md from runs of service_bench and client/python/peers.py.

  report.py render [--check]
      Fills in the pages' tables and plots from docs/measured/FILE.json, which service_bench --json
      FILE writes. With --check, it writes nothing, names the files that it would change, and exits
      with 1 if there are any.

A page's table is between <!-- service: FILE OPERATION LOAD --> and <!-- end -->. LOAD is
  closed         closed loops: rates, their ratios to the bare server's rates, and latencies
  open           open loops, at a rate and at a fraction of the closed loops' rate: latencies
  rest           the first call after a rest
  brief          only the servers of this project, with a line for each operation, size and load;
                 FILE and OPERATION may be lists, separated by commas

A table of results from client/python/peers.py is between <!-- peers: FILE WHAT --> and
<!-- end -->. The table says "unmeasured" if FILE.json is missing. WHAT is `full`, with plots, or
`brief`, with only the largest arrays.

A plot ![...](FILE_OPERATION_WHAT.svg) on a page in docs/measured shows closed loops, against the
number of callers, for the first size that was measured. WHAT is
  rate           thousands of calls per second, or GB/s of transfers
  latency        p50 and, dashed, p99
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels" / "bench"))

import pages  # noqa: E402
import peer_pages  # noqa: E402
from pages import MEASURED, markdown, rate_text, time_text  # noqa: E402

PAGES = [ROOT / "docs" / "performance.md", MEASURED / "service.md", MEASURED / "python.md"]
SCALE = {"calls": (1e3, "thousand calls/s"), "bytes": (1e9, "GB/s")}


class Run:
    """The results in docs/measured/NAME.json."""

    def __init__(self, name):
        document = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
        self.options = document["options"]
        self.rows = document["rows"]
        self.targets = [target["name"] for target in document["targets"]]
        self.host, self.date = ", ".join(self.machine(document)), document["date"]
        self.caption = f"{self.host}, {self.date}"

    @staticmethod
    def machine(document):
        machine = document["machine"]
        parts = [f"{machine['cpu'].replace('(R)', '')}, {machine['cores']} cores"]
        for target in document["targets"]:
            for device in target.get("devices", []):
                if target.get("version") and device["name"] != "cpu":
                    parts.append(device["model"])
        driver = re.search(r"\d+\.\d+[.\d]*", machine["driver"])
        if driver:
            parts.append(f"driver {driver.group()}")
        return list(dict.fromkeys(parts))

    def of(self, operation, *kinds):
        return [
            row
            for row in self.rows
            if row["operation"] == operation and row["load"]["kind"] in kinds
        ]

    def note(self):
        options = self.options
        text = f"{self.caption}. Medians of {options['rounds']} rounds"
        if not options["rest"]:
            text += f" of {options['seconds']:g} s"
        if options["beside"]:
            operation, callers = options["beside"].split(":")
            text += f", with {callers} concurrent callers of {operation}"
        return text + "; seed {seed}.".format(**options)


def scale(row):
    """Returns the divisor for the row's rates, and the unit of the quotient."""
    return SCALE["bytes" if row["size_unit"] == "MiB" else "calls"]


def size_text(row):
    return {
        "": "",
        "elements": f"{row['size']} elements",
        "side": f"{row['size']} x {row['size']}",
        "steps": f"{row['size']} steps",
        "MiB": f"{row['size']} MiB",
    }[row["size_unit"]]


def load_text(load):
    value = load["value"]
    return {
        "closed": "closed loop",
        "rate": f"{value:g}/s",
        "load": f"{100 * value:g} %",
        "rest": f"{value:g} s",
    }[load["kind"]]


def ratio_text(row, figure):
    return f"{row['of_bare'][figure]:.2f}" if figure in row["of_bare"] else "-"


# --- tables ---------------------------------------------------------------------------------------


TAIL = ["p90", "p99", "p99.9", "max"]


def tail(row):
    return [time_text(row["median"].get(f"{q}_us", 0.0)) for q in ("p90", "p99", "p999", "max")]


def rate_cells(row):
    divisor, _ = scale(row)
    return [f"{row['median'].get('per_second', 0.0) / divisor:.3g}"]


def extras(run, rows):
    """Returns the columns that only some tables have: {head: function of a row}."""

    def has(figure):
        return any(figure in row["median"] for row in rows)

    columns = {}
    if has("late_us"):
        columns["late"] = lambda row: time_text(row["median"].get("late_us", 0.0))
    if has("beside_per_second"):
        operation = run.options["beside"].split(":")[0]
        divisor, unit = SCALE["bytes" if operation in ("upload", "download") else "calls"]
        columns[f"concurrent {operation}s, {unit}"] = (
            lambda row: f"{row['median'].get('beside_per_second', 0.0) / divisor:.3g}"
        )
    if has("refused"):
        columns["refused"] = lambda row: f"{row['median'].get('refused', 0):.0f}"
    return columns


def closed_table(run, operation):
    rows = run.of(operation, "closed")
    more = extras(run, rows)
    head = ["size", "callers", "server", scale(rows[0])[1], "of bare", "p50 us"]
    lines = [
        [size_text(row), str(row["callers"]), row["target"], *rate_cells(row)]
        + [ratio_text(row, "per_second"), time_text(row["median"].get("p50_us", 0.0))]
        + [*tail(row), *(text(row) for text in more.values())]
        for row in rows
    ]
    return without_blank_sizes([*head, *TAIL, *more], lines, run.note())


def open_table(run, operation):
    rows = run.of(operation, "rate", "load")
    more = extras(run, rows)
    head = ["size", "load", "callers", "server", scale(rows[0])[1], "p50 us", "of bare"]
    lines = [
        [size_text(row), load_text(row["load"]), str(row["callers"]), row["target"]]
        + [*rate_cells(row), time_text(row["median"].get("p50_us", 0.0))]
        + [ratio_text(row, "p50_us"), *tail(row), *(text(row) for text in more.values())]
        for row in rows
    ]
    note = f"{run.note()} Late: how long after its time a call was made, p99; latencies count it."
    return without_blank_sizes([*head, *TAIL, *more], lines, note)


def rest_table(run, operation):
    rows = run.of(operation, "rest")
    lines = [
        [size_text(row), load_text(row["load"]), row["target"], time_text(row["median"]["p50_us"])]
        + [ratio_text(row, "p50_us"), time_text(max(r["max_us"] for r in row["rounds"]))]
        for row in rows
    ]
    head = ["size", "rest", "server", "median us", "of bare", "largest"]
    return without_blank_sizes(head, lines, run.note())


def latency_text(row, quantile):
    us = row["median"].get(f"{quantile}_us", 0.0)
    return f"{us:.0f} us" if us < 1000 else time_text(us)


def brief_cells(run, row, bare):
    """Returns the columns of one server in a brief table: {head: text}."""
    divisor, unit = scale(row)
    name = "" if row["target"] == "tessera" else ", unix socket"
    if row["load"]["kind"] == "rest":
        return {f"median{name}": latency_text(row, "p50"), "bare": latency_text(bare, "p50")}
    cells = {f"{unit}{name}": rate_text(row["median"].get("per_second", 0.0) / divisor)}
    if row["load"]["kind"] == "closed":
        cells[f"of bare{name}"] = ratio_text(row, "per_second")
    for quantile in ("p50", "p99") if row["size_unit"] != "MiB" else ():
        cells[f"{quantile}{name}"] = latency_text(row, quantile)
        if row["load"]["kind"] == "load":
            cells[f"bare {quantile}"] = latency_text(bare, quantile)
    return cells | {head: text(row) for head, text in extras(run, [row]).items() if head != "late"}


def brief_note(runs):
    """Returns the note for a table with several runs, similar to Run.note."""

    def each(values):
        return " and ".join(dict.fromkeys(values))

    rounds = each(str(run.options["rounds"]) for run in runs)
    medians = "One round" if rounds == "1" else f"Medians of {rounds} rounds"
    hosts = each(run.host for run in runs)
    return f"{hosts}, {each(sorted(run.date for run in runs))}. {medians}."


def brief_table(names, operations):
    """Returns a table with a line for each operation, size and load, and columns for this
    project's servers."""
    heads, found = ["operation", "size", "load", "callers"], {}
    runs = [Run(name) for name in names.split(",")]
    for operation in operations.split(","):
        for run in runs:
            rows = run.of(operation, "load", "rest") or run.of(operation, "closed")
            for row in rows:
                if not row["target"].startswith("tessera"):
                    continue
                kind = row["load"]["kind"]
                heads[2] = "rest" if kind == "rest" else "load"
                load = "" if kind == "closed" else load_text(row["load"])
                key = f"`{operation}`", size_text(row), load, str(row["callers"])
                bare = [r for r in rows if r["target"] == "bare gRPC" and r["load"] == row["load"]]
                cells = brief_cells(run, row, bare[0] if bare else None)
                found.setdefault(key, {}).update(cells)
                heads += [head for head in cells if head not in heads]
    lines = [[*key, *(cells.get(head, "-") for head in heads[4:])] for key, cells in found.items()]
    shown = [i for i in range(len(heads)) if i >= 4 or len({line[i] for line in lines}) > 1]
    if len({line[0] for line in lines}) == len({(line[0], line[1]) for line in lines}):
        shown = [i for i in shown if i != 1]  # the page names the only size
    lines = [[line[i] for i in shown] for line in lines]
    return markdown([heads[i] for i in shown], lines, brief_note(runs))


def without_blank_sizes(head, lines, note):
    """Returns a table. Its first column is left out if the operation has no sizes."""
    if not any(line[0] for line in lines):
        head, lines = head[1:], [line[1:] for line in lines]
    return markdown(head, lines, note)


TABLES = {"closed": closed_table, "open": open_table, "rest": rest_table}


# --- plots ----------------------------------------------------------------------------------------


def plot(run, operation, what):
    rows = run.of(operation, "closed")
    rows = [row for row in rows if row["size"] == rows[0]["size"]]
    divisor, unit = scale(rows[0])

    def points(target, figure, divide_by):
        found = [
            (row["callers"], row["median"][figure] / divide_by)
            for row in rows
            if row["target"] == target and figure in row["median"]
        ]
        return sorted(found)

    lines = []
    for color, target in enumerate(run.targets):
        if what == "rate":
            figures = [("", "per_second", divisor, False)]
        else:
            figures = [(" p50", "p50_us", 1, False), (" p99", "p99_us", 1, True)]
        for suffix, figure, divide_by, dashed in figures:
            line = pages.Line(target + suffix, points(target, figure, divide_by), dashed, color)
            if line.points:
                lines.append(line)
    title = f"{operation}{', ' * bool(size_text(rows[0]))}{size_text(rows[0])}: "
    title += f"{unit if what == 'rate' else 'latency in us'} against callers"
    return pages.plot(title, run.caption, lines, str)


# --- page -----------------------------------------------------------------------------------------


def rendered(page):
    """Returns the text of a page with all its tables updated."""

    def filled(match):
        begin, name, operation, load, end = match.groups()
        if load == "brief":
            return f"{begin}\n{brief_table(name, operation)}{end}"
        return f"{begin}\n{TABLES[load](Run(name), operation)}{end}"

    text = re.sub(
        r"(?s)(<!-- service: (\S+) (\S+) (\S+) -->).*?(<!-- end -->)",
        filled,
        page.read_text(encoding="utf-8"),
    )
    return re.sub(
        r"(?s)(<!-- peers: (\S+) (\S+) -->).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{peer_pages.TABLES[match[3]](match[2])}{match[4]}",
        text,
    )


def render(options):
    outputs = {page: rendered(page) for page in PAGES}
    text = "".join(outputs[page] for page in PAGES if page.parent == MEASURED)
    plots = re.findall(r"!\[.*?\]\((\w+)_([a-z]+)_(rate|latency)\.svg\)", text)
    for name, operation, what in plots:
        outputs[MEASURED / f"{name}_{operation}_{what}.svg"] = plot(Run(name), operation, what)
    for name, expression in re.findall(r"!\[.*?\]\((\w+)_([a-z]+)_us\.svg\)", text):
        outputs[MEASURED / f"{name}_{expression}_us.svg"] = peer_pages.plot(name, expression)
    pages.settle(outputs, options.check, "client/bench/report.py render")


if __name__ == "__main__":
    pages.run_command(__doc__, render)

#!/usr/bin/python3
"""Converts runs on several GPUs to the committed measurements, tables and plots of docs/scaling.md.

  scaling.py collect --caption "4 x NVIDIA H200" --out docs/measured/scaling_h200.json RUN.json...
      RUN: a file that tests/by_hand/many_gpus.py or product_bench writes with --json. If several
      runs have the same row, the median is taken.
  scaling.py render [--check]
      Fills in the tables that docs/scaling.md requests and draws its plots. With --check it writes
      nothing, names the files that it would change, and exits with code 1 if there are any.

The page requests a table of docs/measured/FILE.json between <!-- scaling: FILE WHAT --> and
<!-- end -->. WHAT is `arrays` (device times of operations on arrays) or `products`. A plot
![...](measured/FILE_WHAT.svg) is drawn from the same measurements.
"""

import collections
import json
import pathlib
import re
import statistics

import pages

PAGE = pages.ROOT / "docs" / "scaling.md"
WORDS = dict(enumerate("none one two three four five six seven eight".split()))
# The variants of product_bench, and where b is in each of them.
ALONE, TOGETHER, LIBRARY = "one", "overlapped", "cuBLASXt"
WAYS = {ALONE: "there", TOGETHER: "divided", LIBRARY: "on one"}


def collect(options):
    arrays, products = collections.defaultdict(list), collections.defaultdict(list)
    for path in options.runs:
        for row in json.loads(pathlib.Path(path).read_text(encoding="utf-8")):
            if "elements" in row:
                if row["worked"] != row["devices"]:
                    raise SystemExit(f"{path}: not by all: {row}")
                key = {"what": row["what"], "elements": row["elements"], "devices": row["devices"]}
                arrays[tuple(key.items())].append((row["us"], row["times"]))
            elif "way" in row and WAYS.get(row["way"]) == row["b"] and not row["transpose_b"]:
                if "OTHER" in row["bits"]:
                    raise SystemExit(f"{path}: other bits in {row}")
                if row["way"] == TOGETHER and row["devices"] == 1:
                    continue
                key = {"dtype": row["dtype"], "side": row["n"]}
                key |= {"way": row["way"], "devices": row["devices"]}
                products[tuple(key.items())].append((row["us"], row["one_us"] / row["us"]))

    def medians(rows):
        found = []
        for key, runs in sorted(rows.items(), key=lambda item: [value for _, value in item[0]]):
            times = [times for _, times in runs if times is not None]
            found.append(dict(key) | {"us": round(statistics.median(us for us, _ in runs), 2)})
            if times:
                found[-1]["times"] = round(statistics.median(times), 3)
        return found

    lines = {"arrays": medians(arrays), "products": medians(products)}
    text = [f'{{\n "caption": {json.dumps(options.caption)}']
    for what, rows in lines.items():
        text.append(f' "{what}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]")
    pathlib.Path(options.out).write_text(",\n".join(text) + "\n}\n", encoding="utf-8")


def figures(name):
    return json.loads((pages.MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def time_text(us):
    three_digits = float(f"{us / 1000:.3g}")
    return f"{three_digits:g} ms"


def cell(row):
    """Returns a time, and the speedup over one GPU."""
    if row is None:
        return ""
    times = f", {row['times']:.2f}" if row["devices"] > 1 and "times" in row else ""
    return time_text(row["us"]) + times


def power(elements):
    return f"2^{elements.bit_length() - 1}"


def arrays_table(data):
    rows = {(r["elements"], r["what"], r["devices"]): r for r in data["arrays"]}
    counts = sorted({devices for _, _, devices in rows})
    lines = []
    for elements, what in dict.fromkeys((e, w) for e, w, _ in sorted(rows)):
        found = [rows.get((elements, what, count)) for count in counts]
        rate = 4 * elements / min(row["us"] for row in found if row) / 1e6
        lines.append([f"{what}, {power(elements)}", *map(cell, found), f"{rate:.3g} TB/s"])
    titles = ["", *(WORDS[c] for c in counts), "at most"]
    return pages.markdown(titles, lines, data["caption"] + ".")


def product_series(data):
    """Returns {(dtype, side): {way: {devices: row}}}."""
    series = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in data["products"]:
        series[row["dtype"], row["side"]][row["way"]][row["devices"]] = row
    return series


def products_table(data):
    series = product_series(data)
    counts = sorted({c for ways in series.values() for c in ways[TOGETHER]})
    lines = []
    for (dtype, side), ways in sorted(series.items()):
        fastest = min(row["us"] for way in (ALONE, TOGETHER) for row in ways[way].values())
        library = ways[LIBRARY].get(counts[-1])
        lines.append(
            [f"{dtype}, {side}", cell(ways[ALONE].get(1))]
            + [cell(ways[TOGETHER].get(count)) for count in counts]
            + [f"{2 * side**3 / fastest / 1e6:.0f} TFLOP/s",
               time_text(library["us"]) if library else ""]
        )
    head = ["product, a side", "one GPU", *(WORDS[c] for c in counts), "at most"]
    return pages.markdown([*head, f"cuBLASXt on {WORDS[counts[-1]]}"], lines, data["caption"] + ".")


def speedup_plot(title, data, rows):
    """Plots the speedup over one GPU, and the ideal speedup. rows: {name: [row]}"""
    drawn = []
    for name, found in rows.items():
        points = {1: 1.0} | {row["devices"]: row["times"] for row in found if "times" in row}
        if len(points) > 1:
            drawn.append(pages.Line(name, sorted(points.items())))
    counts = sorted({count for line in drawn for count, _ in line.points})
    drawn.append(pages.Line("as many GPUs", [(count, count) for count in counts], dashed=True))
    return pages.plot(title, data["caption"], drawn, str)


def arrays_plot(data):
    """Plots the speedups of each operation on the largest array that one GPU holds."""
    sizes = collections.defaultdict(int)
    for row in data["arrays"]:
        if row["devices"] == 1:
            sizes[row["what"]] = max(sizes[row["what"]], row["elements"])
    rows = collections.defaultdict(list)
    for row in data["arrays"]:
        if row["elements"] == sizes.get(row["what"]):
            rows[f"{row['what']}, {power(row['elements'])}"].append(row)
    return speedup_plot("Arrays of f32: times as fast as one GPU", data, rows)


def products_plot(data):
    rows = {
        f"{dtype}, {side}": list(ways[TOGETHER].values())
        for (dtype, side), ways in sorted(product_series(data).items())
    }
    return speedup_plot("Products: times as fast as one GPU", data, rows)


TABLES = {"arrays": arrays_table, "products": products_table}
PLOTS = {"arrays": arrays_plot, "products": products_plot}


def render(options):
    text = re.sub(
        r"(?s)(<!-- scaling: (\S+) (\S+) -->).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{TABLES[match[3]](figures(match[2]))}{match[4]}",
        PAGE.read_text(encoding="utf-8"),
    )
    outputs = {PAGE: text}
    for name, what in re.findall(r"!\[.*?\]\(measured/(scaling_[a-z0-9]+)_(\w+)\.svg\)", text):
        outputs[pages.MEASURED / f"{name}_{what}.svg"] = PLOTS[what](figures(name))
    pages.settle(outputs, options.check, "kernels/bench/scaling.py render")


if __name__ == "__main__":
    pages.run_command(__doc__, render, collect)

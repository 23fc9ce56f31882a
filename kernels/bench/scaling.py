#!/usr/bin/python3
"""Turns runs over several GPUs into the committed figures, tables and plots of docs/scaling.md.

  scaling.py collect --caption "4 x NVIDIA H200" --out docs/measured/scaling_h200.json RUN.json...
      RUN: what tests/by_hand/many_gpus.py and product_bench write with --json. Of rows that several
      runs have, the median counts.
  scaling.py render [--check]
      Fills in what docs/scaling.md asks for and draws its plots. With --check it writes nothing,
      names what it would change, and exits 1 if there is any.

The page asks for a table between <!-- scaling: FILE WHAT --> and <!-- end -->, of docs/measured/FILE.json.
WHAT is `arrays`, device times of operations on arrays, or `products`. A plot
![...](measured/FILE_WHAT.svg) is drawn of the same.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics

import pages

PAGE = pages.ROOT / "docs" / "scaling.md"
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 8: "eight"}
# Ways of product_bench, and where b is.
ALONE, TOGETHER, LIBRARY = "one", "overlapped", "cuBLASXt"
WAYS = {ALONE: "there", TOGETHER: "divided", LIBRARY: "on one"}


def collect(options):
    arrays, products = collections.defaultdict(list), collections.defaultdict(list)
    for path in options.runs:
        for row in json.loads(pathlib.Path(path).read_text(encoding="utf-8")):
            if "elements" in row:
                arrays[row["elements"], row["what"], row["devices"]].append(row["us"])
            elif "way" in row and WAYS.get(row["way"]) == row["b"] and not row["transpose_b"]:
                if "OTHER" in row["bits"]:
                    raise SystemExit(f"{path}: other bits in {row}")
                products[row["dtype"], row["n"], row["way"], row["devices"]].append(row["us"])
    figures = {
        "caption": options.caption,
        "arrays": [
            {"elements": elements, "what": what, "devices": devices, "us": statistics.median(us)}
            for (elements, what, devices), us in sorted(arrays.items())
        ],
        "products": [
            {"dtype": dtype, "side": side, "way": way, "devices": devices, "us": statistics.median(us)}
            for (dtype, side, way, devices), us in sorted(products.items())
        ],
    }
    out = pathlib.Path(options.out)
    out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def figures(name):
    return json.loads((pages.MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def time_text(us):
    return f"{us / 1000:.3g} ms"


def cell(us, one):
    """A time, and how many times as fast as one GPU it is."""
    if us is None:
        return ""
    return time_text(us) + (f", {one / us:.2f}" if one and one != us else "")


def power(elements):
    return f"2^{elements.bit_length() - 1}"


def arrays_table(data):
    times = {(r["elements"], r["what"], r["devices"]): r["us"] for r in data["arrays"]}
    counts = sorted({devices for _, _, devices in times})
    lines = []
    for elements, what in dict.fromkeys((e, w) for e, w, _ in sorted(times)):
        one = times.get((elements, what, 1))
        found = [times.get((elements, what, count)) for count in counts]
        rate = 4 * elements / min(us for us in found if us) / 1e6
        lines.append(
            [f"{what}, {power(elements)}", *(cell(us, one) for us in found), f"{rate:.3g} TB/s"]
        )
    return pages.markdown(["", *(WORDS[c] for c in counts), "at most"], lines, data["caption"] + ".")


def product_series(data):
    """{(dtype, side): {way: {devices: us}}}"""
    series = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in data["products"]:
        series[row["dtype"], row["side"]][row["way"]][row["devices"]] = row["us"]
    return series


def products_table(data):
    series = product_series(data)
    counts = sorted({c for ways in series.values() for c in ways[TOGETHER]})
    lines = []
    for (dtype, side), ways in sorted(series.items()):
        one = ways[ALONE].get(1)
        rate = 2 * side**3 / min(us for way in (ALONE, TOGETHER) for us in ways[way].values()) / 1e6
        library = "; ".join(time_text(us) for _, us in sorted(ways[LIBRARY].items()))
        lines.append(
            [f"{dtype}, {side}", time_text(one) if one else ""]
            + [cell(ways[TOGETHER].get(count), one) for count in counts]
            + [f"{rate:.0f} TFLOP/s", library]
        )
    head = ["product, a side", "one GPU", *(WORDS[c] for c in counts), "at most"]
    return pages.markdown([*head, f"cuBLASXt on {WORDS[counts[-1]]}"], lines, data["caption"] + ".")


def arrays_plot(data):
    """Rate against GPUs, a line for each operation and size."""
    lines = collections.defaultdict(list)
    for row in sorted(data["arrays"], key=lambda row: row["devices"]):
        rate = 4 * row["elements"] / row["us"] / 1e6
        lines[row["what"], row["elements"]].append((row["devices"], rate))
    largest = {what: max(e for w, e in lines if w == what and len(lines[w, e]) > 1) for what, _ in lines}
    drawn = [
        pages.Line(f"{what}, {power(e)}", points)
        for (what, e), points in sorted(lines.items())
        if e == largest[what]
    ]
    return pages.plot("TB/s against GPUs", data["caption"], drawn, str)


def products_plot(data):
    drawn = []
    for (dtype, side), ways in sorted(product_series(data).items()):
        points = [*ways[ALONE].items(), *ways[TOGETHER].items()]
        rates = sorted((count, 2 * side**3 / us / 1e6) for count, us in points)
        if len(rates) > 1:
            drawn.append(pages.Line(f"{dtype}, {side}", rates))
    return pages.plot("TFLOP/s against GPUs", data["caption"], drawn, str)


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
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

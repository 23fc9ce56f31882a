"""Shared by the scripts that write measurements into pages: Markdown tables, SVG plots, and files
that are written again or reported as stale."""

import argparse
import dataclasses
import html
import math
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
COLORS = [
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5",
    "#9c6b4e", "#9498a0", "#1b4f72", "#b03a2e", "#117a65", "#7d6608", "#6c3483", "#515a5a",
    "#0e6251", "#784212",
]  # fmt: skip


def rate_text(rate):
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def time_text(us):
    if us < 1000:
        return f"{us:.1f}"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def markdown(head, lines, note):
    cells = ["| " + " | ".join(line) + " |" for line in [head] + lines]
    note = textwrap.fill(note, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join([cells[0], "|---" * len(head) + "|", *cells[1:]]) + f"\n\n{note}\n"


@dataclasses.dataclass
class Line:
    name: str
    points: list  # (x, y), in ascending order of x, all above 0
    dashed: bool = False
    color: int | None = None  # an index into COLORS; None: the line's own index


def plot(title, caption, lines, x_text, ceiling=None):
    """Returns an SVG plot of lines with two logarithmic axes. The lines' names are next to the
    plot, in the given order. x_text(x): the text of a tick. There must be at least two values of
    x."""
    width, height, left, right, top, bottom = 950, 520, 70, 240, 40, 56
    edge, floor = width - right, height - bottom
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [math.log10(y) for line in lines for _, y in line.points]
    x_low, x_high = math.log2(xs[0]), math.log2(xs[-1])
    y_low = math.floor(min(ys))
    y_high = max(math.ceil(max(ys)), y_low + 1)

    def px(x):
        return left + (math.log2(x) - x_low) / (x_high - x_low) * (edge - left)

    def py(y):
        return floor - (math.log10(y) - y_low) / (y_high - y_low) * (floor - top)

    def text(x, y, body, style):
        return f'<text x="{x}" y="{y}" {style}>{html.escape(str(body))}</text>'

    def rule(x1, x2, y1, y2, style):
        return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" {style}/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(left, 18, title, 'font-size="15" fill="#222"'),
        text(left, 33, caption, 'font-size="10" fill="#666"'),
    ]
    for decade in range(y_low, y_high + 1):
        y = py(10.0**decade)
        out.append(rule(left, edge, f"{y:.1f}", f"{y:.1f}", 'stroke="#ddd"'))
        tick = f"{10.0**decade:g}"
        out.append(text(left - 8, f"{y + 4:.1f}", tick, 'text-anchor="end" fill="#444"'))
    for x_value in xs:
        x = f"{px(x_value):.1f}"
        out.append(rule(x, x, top, floor, 'stroke="#eee"'))
        out.append(text(x, floor + 18, x_text(x_value), 'text-anchor="middle" fill="#444"'))
    if ceiling and math.log10(ceiling) <= y_high:
        y = py(ceiling)
        dash = 'stroke="#888" stroke-dasharray="5 4"'
        out.append(rule(left, edge, f"{y:.1f}", f"{y:.1f}", dash))
        out.append(text(left + 6, f"{y - 5:.1f}", f"ceiling {ceiling:.0f}", 'fill="#666"'))
    for index, line in enumerate(lines):
        color = COLORS[(index if line.color is None else line.color) % len(COLORS)]
        dash = ' stroke-dasharray="2 3"' if line.dashed else ""
        points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line.points)
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        y = top + 14 + index * 18
        style = f'stroke="{color}" stroke-width="3"{dash}'
        out.append(rule(edge + 14, edge + 38, y, y, style))
        out.append(text(edge + 44, y + 4, line.name, 'fill="#222"'))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def settle(outputs, check, command):
    """Writes the files that differ from outputs = {path: text}, and ends the process. With check,
    it only names these files, and the exit code is 1 if there are any."""
    stale = [p for p, t in outputs.items() if not p.exists() or p.read_text(encoding="utf-8") != t]
    for path in stale:
        if not check:
            path.write_text(outputs[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {f'is stale: {command}' if check else 'written'}")
    sys.exit(1 if stale and check else 0)


def run_command(description, render, collect=None):
    """Runs the command line of such a script. Its commands are render [--check] and, if the script
    has it, collect RUN... --out FILE --caption TEXT. options.runs holds the RUN files."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    if collect is not None:
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

"""Formats numbers, and makes Markdown tables and SVG plots, for the scripts that write measurements
into pages. Imports nothing from this tree."""

import dataclasses
import html
import math
import textwrap

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


def power_text(number):
    return f"2^{number.bit_length() - 1}"


def fill(text):
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def table(lines, note="", missing="-"):
    """Returns a Markdown table. A line is {head: text}; a column that has no text in any line is
    left out. missing: the text of a cell without text."""
    heads = dict.fromkeys(head for line in lines for head in line)
    heads = [head for head in heads if any(line.get(head) for line in lines)]
    rows = [heads, *([line.get(head) or missing for head in heads] for line in lines)]
    rows = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([rows[0], "|---" * len(heads) + "|", *rows[1:]]) + f"\n\n{fill(note)}"


@dataclasses.dataclass
class Line:
    name: str
    points: list  # (x, y), in ascending order of x, all above 0
    dashed: bool = False
    color: int | None = None  # an index into COLORS; None: the line's own index


def lines(points):
    """Groups points (name of the line, x, y) into lines, in the order of their first points."""
    found = {}
    for name, x, y in points:
        found.setdefault(name, []).append((x, y))
    return [Line(name, sorted(line)) for name, line in found.items()]


def text(x, y, body, style):
    return f'<text x="{x}" y="{y}" {style}>{html.escape(str(body))}</text>'


def rule(x1, x2, y1, y2, style):
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" {style}/>'


def svg(height, body):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 950 {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="950" height="{height}" fill="#ffffff"/>', *body, "</svg>\n",
    ])  # fmt: skip


def decades(low, high):
    """Returns the exponents of the powers of ten that enclose the range: at least two of them."""
    first = math.floor(math.log10(low))
    return range(first, max(math.ceil(math.log10(high)), first + 1) + 1)


def plot(title, caption, lines, x_text=str, ceiling=None):
    """Returns an SVG plot of lines with two logarithmic axes. The lines' names are next to the
    plot, in the given order. x_text(x): the text of a tick. There must be at least two values of
    x."""
    left, top, edge, floor = 70, 40, 710, 464
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    scale = decades(min(ys), max(ys))

    def px(x):
        part = (math.log2(x) - math.log2(xs[0])) / (math.log2(xs[-1]) - math.log2(xs[0]))
        return f"{left + part * (edge - left):.1f}"

    def py(y, down=0):
        part = (math.log10(y) - scale[0]) / (scale[-1] - scale[0])
        return f"{floor - part * (floor - top) + down:.1f}"

    out = [
        text(left, 18, title, 'font-size="15" fill="#222"'),
        text(left, 33, caption, 'font-size="10" fill="#666"'),
    ]
    for y in (10.0**decade for decade in scale):
        out.append(rule(left, edge, py(y), py(y), 'stroke="#ddd"'))
        out.append(text(left - 8, py(y, 4), f"{y:g}", 'text-anchor="end" fill="#444"'))
    for x in xs:
        out.append(rule(px(x), px(x), top, floor, 'stroke="#eee"'))
        out.append(text(px(x), floor + 18, x_text(x), 'text-anchor="middle" fill="#444"'))
    if ceiling and math.log10(ceiling) <= scale[-1]:
        dash = 'stroke="#888" stroke-dasharray="5 4"'
        out.append(rule(left, edge, py(ceiling), py(ceiling), dash))
        out.append(text(left + 6, py(ceiling, -5), f"ceiling {ceiling:.0f}", 'fill="#666"'))
    for index, line in enumerate(lines):
        color = COLORS[(index if line.color is None else line.color) % len(COLORS)]
        dash = ' stroke-dasharray="2 3"' if line.dashed else ""
        points = " ".join(f"{px(x)},{py(y)}" for x, y in line.points)
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        y = top + 14 + index * 18
        out.append(rule(edge + 14, edge + 38, y, y, f'stroke="{color}" stroke-width="3"{dash}'))
        out.append(text(edge + 44, y + 4, line.name, 'fill="#222"'))
    return svg(520, out)


@dataclasses.dataclass
class Point:
    name: str
    x: float  # operations per byte
    y: float  # operations per second
    color: int  # an index into COLORS
    hollow: bool = False


def roofline(title, caption, bandwidth, peaks, points):
    """Returns an SVG plot of points below the limits of a device, with two logarithmic axes.
    bandwidth: bytes per second; peaks: {name: operations per second}."""
    left, top, edge, floor = 70, 40, 660, 464
    xs = decades(min(p.x for p in points), max(p.x for p in points))
    least, most = 10.0 ** xs[0], 10.0 ** xs[-1]
    # Only the peaks that are the limit somewhere in the plot.
    peaks = {name: peak for name, peak in peaks.items() if peak < most * bandwidth}
    highest = min(most * bandwidth, max(peaks.values(), default=math.inf))
    ys = decades(min(p.y for p in points), max([highest, *(p.y for p in points)]))

    def px(x):
        return left + (math.log10(x) - xs[0]) / (xs[-1] - xs[0]) * (edge - left)

    def py(y):
        return floor - (math.log10(y) - ys[0]) / (ys[-1] - ys[0]) * (floor - top)

    out = [
        text(left, 18, title, 'font-size="15" fill="#222"'),
        text(left, 33, caption, 'font-size="10" fill="#666"'),
    ]
    for y in (10.0**decade for decade in ys):
        out.append(rule(left, edge, f"{py(y):.1f}", f"{py(y):.1f}", 'stroke="#ddd"'))
        anchor = 'text-anchor="end" fill="#444"'
        out.append(text(left - 8, f"{py(y) + 4:.1f}", f"{y / 1e9:g}", anchor))
    for x in (10.0**decade for decade in xs):
        out.append(rule(f"{px(x):.1f}", f"{px(x):.1f}", top, floor, 'stroke="#eee"'))
        out.append(text(f"{px(x):.1f}", floor + 18, f"{x:g}", 'text-anchor="middle" fill="#444"'))
    middle = (left + edge) / 2
    about = "operations per byte of memory traffic"
    out.append(text(middle, floor + 38, about, 'text-anchor="middle" fill="#444"'))
    for name, peak in peaks.items():
        ridge = max(least, peak / bandwidth)
        roof = 'stroke="#888" stroke-dasharray="5 4"'
        out.append(rule(f"{px(ridge):.1f}", edge, f"{py(peak):.1f}", f"{py(peak):.1f}", roof))
        end = 'text-anchor="end" fill="#666"'
        out.append(text(edge - 4, f"{py(peak) - 5:.1f}", name, end))
    ridge = highest / bandwidth
    begin = max(least, 10.0 ** ys[0] / bandwidth)
    slope = [px(begin), px(ridge), py(begin * bandwidth), py(ridge * bandwidth)]
    out.append(rule(*(f"{at:.1f}" for at in slope), 'stroke="#888" stroke-width="2"'))
    for index, point in enumerate(points):
        color = COLORS[point.color % len(COLORS)]
        fill = f'fill="{"none" if point.hollow else color}" stroke="{color}" stroke-width="2"'
        radius = 7 if point.hollow else 5
        out.append(f'<circle cx="{px(point.x):.1f}" cy="{py(point.y):.1f}" r="{radius}" {fill}/>')
        y = top + 14 + index * 18
        out.append(f'<circle cx="{edge + 20}" cy="{y}" r="{radius - 1}" {fill}/>')
        out.append(text(edge + 34, y + 4, point.name, 'fill="#222"'))
    return svg(520, out)

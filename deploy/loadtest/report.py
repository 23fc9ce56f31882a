#!/usr/bin/env python3
"""Judges the reports of ghz in a folder by slo.toml, and writes tables and plots next to them.

usage: report.py FOLDER --slo FILE [--compare EARLIER]

FOLDER has NAME.json of each case, or NAME.CALL.json of each call of a case with several, ghz's
configuration in NAME.config.json, and server.json, the output of `tessera --json info`. The script
writes these files there: summary.json, which a later --compare reads from the folder EARLIER,
report.md, latency.svg, and NAME.svg of each case in steps. It exits with 1 when a case misses its
objective, has no report, or is worse than the earlier one by more than slo.toml allows.

ghz itself exits with 0 even when every call failed: its statusCodeDistribution has the outcomes.
"""

import argparse
import datetime
import html
import json
import math
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "kernels" / "bench")]

import pages  # noqa: E402
import plan  # noqa: E402

QUANTILES = (50, 90, 95, 99)


# --- figures --------------------------------------------------------------------------------------


def quantile(latencies, percent):
    """Returns the least of ascending latencies that this percentage of them do not exceed."""
    return latencies[max(0, -(-len(latencies) * percent // 100) - 1)]


def milliseconds(latencies):
    return {f"p{q}_ms": quantile(latencies, q) / 1e6 for q in QUANTILES} if latencies else {}


def summarize(report):
    """Returns calls, failures and their reasons, rate of answered calls, and their latencies in
    ms."""
    statuses = report.get("statusCodeDistribution") or {}
    calls, answered = sum(statuses.values()), statuses.get("OK", 0)
    # ghz keeps the first million calls.
    latencies = sorted(
        detail["latency"] for detail in report.get("details") or [] if detail["status"] == "OK"
    )
    return {
        "calls": calls,
        "failed": calls - answered,
        "reasons": report.get("errorDistribution") or {},
        "rate": report.get("rps", 0.0) * answered / calls if calls else 0.0,
        **milliseconds(latencies),
        **({"max_ms": latencies[-1] / 1e6} if latencies else {}),
    }


def nanoseconds(timestamp):
    """Parses a time as Go writes it, with up to nine digits of a second."""
    whole, fraction = re.fullmatch(r"([^.]+?)(?:\.(\d+))?(?:Z|[+-]\d\d:\d\d)", timestamp).groups()
    seconds = datetime.datetime.fromisoformat(whole + "+00:00").timestamp()
    return int(seconds) * 10**9 + int((fraction or "").ljust(9, "0"))


def steps(report, seconds):
    """For a run at a rate that rises in steps, returns [(requested rate, the summary of its
    calls)]."""
    options, details = report["options"], report.get("details") or []
    if options.get("load-schedule") != "step" or not details:
        return []
    count = (options["load-end"] - options["load-start"]) // options["load-step"] + 1
    start = min(nanoseconds(detail["timestamp"]) for detail in details)
    groups = [[] for _ in range(count)]
    for detail in details:
        step = (nanoseconds(detail["timestamp"]) - start) * count // int(seconds * 1e9)
        groups[min(step, count - 1)].append(detail)
    found = []
    for step, group in enumerate(groups):
        statuses = {}
        for detail in group:
            statuses[detail["status"]] = statuses.get(detail["status"], 0) + 1
        found.append((
            options["load-start"] + step * options["load-step"],
            summarize({
                "statusCodeDistribution": statuses,
                "rps": len(group) * count / seconds,
                "details": group,
            }),
        ))  # fmt: skip
    return found


# --- verdicts -------------------------------------------------------------------------------------


def misses(summary, objective):
    """Returns which parts of the objective are missed."""
    found = []
    if summary["calls"] == 0:
        return ["no call was made"]
    if summary["failed"] > objective.get("failed", 0):
        found.append(f"{summary['failed']} of {summary['calls']} calls failed")
        found += [f"  {count} x {reason}" for reason, count in summary["reasons"].items()]
    for key, bound in objective.items():
        if key == "failed":
            continue
        figure = summary.get(key)
        if figure is None:
            found.append(f"{key} is unknown")
        elif figure < bound if key == "rate" else figure > bound:
            found.append(f"{key} is {figure:.4g}, the objective {bound:g}")
    return found


def losses(summary, before, factors):
    """Returns where it is worse than before by more than the factors of slo.toml's [compare]."""
    found = []
    for key, factor in factors.items():
        if key not in summary or key not in before:
            continue
        limit = before[key] * factor
        if summary[key] < limit if key == "rate" else summary[key] > limit:
            found.append(f"{key} is {summary[key]:.4g}, before {before[key]:.4g}")
    return found


def objective_text(objective):
    """Describes an objective: "100/s or more, p99 20 ms or less, 3 failed or fewer"."""
    found = []
    for key, bound in objective.items():
        if key == "rate":
            found.append(f"{bound:g}/s or more")
        elif key == "failed":
            found.append(f"{bound} failed or fewer")
        else:
            found.append(f"{key.removesuffix('_ms')} {bound:g} ms or less")
    return ", ".join(found) or "none failed"


def load_text(config):
    """Describes the load in a configuration of ghz: "32 callers, 4 connections, 200/s, 10 s"."""
    found = [f"{config[key]} {word}" for key, word in
             (("concurrency", "callers"), ("connections", "connections")) if key in config]
    if "load-schedule" in config:
        found.append(f"{config['load-start']} to {config['load-end']}/s")
    elif "rps" in config:
        found.append(f"{config['rps']}/s")
    return ", ".join([*found, config["duration"].replace("s", " s")])


def about(folder, reports):
    """Describes the server that was measured, its version and devices, and the date."""
    try:
        server = json.loads((folder / "server.json").read_text())
    except (OSError, ValueError):
        server = {}
    dates = sorted(re.sub(r"\.\d+", "", report["date"]) for report in reports.values())
    hosts = sorted({report["options"].get("host", "") for report in reports.values()} - {""})
    parts = [f"Server {', '.join(hosts)}"] if hosts else []
    if "version" in server:
        parts.append(f"version {server['version']}")
    parts += [f"{device['name']} ({device['model']})" for device in server.get("devices", [])]
    return ", ".join(parts + dates[:1])


def judge(folder, slo, earlier):
    """Returns ({name: summary}, {name: ghz's report}, [what is wrong])."""
    summaries, reports, problems = {}, {}, []
    for case_name, case in slo["case"].items():
        expected = plan.reports_of(case_name, case)
        if not any((folder / f"{name}.config.json").exists() for name in expected):
            continue  # it was not selected
        for name in expected:
            try:
                report = json.loads((folder / f"{name}.json").read_text())
                summaries[name] = summarize(report)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{name}: no readable report: {error!r}")
                continue
            reports[name] = report
            wrong = misses(summaries[name], case.get("objective", {}))
            if name in earlier:
                wrong += losses(summaries[name], earlier[name], slo.get("compare", {}))
            summaries[name]["missed"] = wrong
            summaries[name]["objective"] = objective_text(case.get("objective", {}))
            config = json.loads((folder / f"{name}.config.json").read_text())
            summaries[name]["load"] = load_text(config)
            problems += [f"{name}: {line}" for line in wrong]
    if not summaries and not problems:
        problems.append(f"no case was run in {folder}")
    return summaries, reports, problems


# --- pages ----------------------------------------------------------------------------------------


def cell(value):
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def table(summaries, earlier, conditions=()):
    """conditions: keys of summaries with texts, as additional columns."""
    head = ["case", "calls", "failed", "calls/s", *(f"p{q} ms" for q in QUANTILES), "max ms"]
    head += conditions
    if earlier:
        head += ["calls/s before", "p99 ms before"]
    lines = []
    for name, summary in summaries.items():
        line = [name + " (missed)" * bool(summary.get("missed")), str(summary["calls"])]
        line += [str(summary["failed"]), f"{summary['rate']:.1f}"]
        line += [cell(summary.get(f"p{q}_ms")) for q in QUANTILES] + [cell(summary.get("max_ms"))]
        line += [summary[key] for key in conditions]
        if earlier:
            before = earlier.get(name, {})
            line += [cell(before.get("rate")), cell(before.get("p99_ms"))]
        lines.append(line)
    return head, lines


def plain(head, lines):
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    return "\n".join(
        "  ".join(text.rjust(w) if i else text.ljust(w)
                  for i, (text, w) in enumerate(zip(line, widths)))
        for line in [head, *lines]
    )


def latency_plot(summaries, caption):
    """Draws a row for each case: its quantiles from the first to the last, on a logarithmic
    axis."""
    rows = [(name, [s[f"p{q}_ms"] for q in QUANTILES])
            for name, s in summaries.items() if s.get("p50_ms")]
    left, right, top, row = 240, 910, 74, 22
    low = math.floor(math.log10(min(values[0] for _, values in rows)))
    high = max(math.ceil(math.log10(max(values[-1] for _, values in rows))), low + 1)
    bottom = top + row * len(rows)

    def px(ms):
        return round(left + (math.log10(ms) - low) / (high - low) * (right - left), 1)

    def text(x, y, body, style):
        return f'<text x="{x}" y="{y}" {style}>{html.escape(body)}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 950 {bottom + 40}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="950" height="{bottom + 40}" fill="#ffffff"/>',
        text(16, 20, "Latency in ms", 'font-size="15" fill="#222"'),
        text(16, 37, caption, 'font-size="10" fill="#666"'),
    ]
    for index, q in enumerate(QUANTILES):
        x, color = left + 60 * index, pages.COLORS[index]
        out.append(f'<circle cx="{x}" cy="{top - 20}" r="4.5" fill="{color}"/>')
        out.append(text(x + 9, top - 16, f"p{q}", 'fill="#222"'))
    for decade in range(low, high + 1):
        x = px(10.0**decade)
        out.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="#ddd"/>')
        out.append(text(x, bottom + 18, f"{10.0**decade:g}", 'text-anchor="middle" fill="#444"'))
    for index, (name, values) in enumerate(rows):
        y = top + row * index + row // 2
        points = " ".join(f"{px(value)},{y}" for value in values)
        out.append(text(left - 14, y + 4, name, 'text-anchor="end" fill="#222"'))
        out.append(f'<polyline points="{points}" fill="none" stroke="#999" stroke-width="2"/>')
        # Where quantiles are the same, the last one is on top.
        out += [f'<circle cx="{px(value)}" cy="{y}" r="4.5" fill="{color}"/>'
                for value, color in zip(values, pages.COLORS)]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def step_plot(name, found, caption):
    lines = [
        pages.Line(f"p{q}", [(rate, s[f"p{q}_ms"]) for rate, s in found if f"p{q}_ms" in s])
        for q in QUANTILES
    ]
    return pages.plot(f"{name}: latency in ms against calls asked for a second", caption, lines,
                      str)


def write(folder, summaries, reports, problems, earlier):
    caption = about(folder, reports)
    (folder / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    figures = table(summaries, earlier, ["objective", "load"])
    parts = [f"# Load test\n\n{caption}.\n", pages.markdown(*figures, "Measured with ghz.")]
    if any("p50_ms" in summary for summary in summaries.values()):
        (folder / "latency.svg").write_text(latency_plot(summaries, caption))
        parts.append("![Latencies of all cases](latency.svg)\n")
    for name, report in reports.items():
        seconds = json.loads((folder / f"{name}.config.json").read_text())["duration"]
        found = steps(report, float(seconds.rstrip("s")))
        if len([s for _, s in found if "p50_ms" in s]) < 2:
            continue
        head, lines = table({f"{rate}/s": s for rate, s in found}, {})
        parts.append(f"## {name}\n\n{pages.markdown(['asked for', *head[1:]], lines, '')}")
        (folder / f"{name}.svg").write_text(step_plot(name, found, caption))
        parts.append(f"![Latency of {name}]({name}.svg)\n")
    if problems:
        parts.append("## Missed\n\n" + "\n".join(f"- {line}" for line in problems) + "\n")
    (folder / "report.md").write_text("\n".join(parts))


def main(arguments):
    parser = argparse.ArgumentParser(prog="report.py")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--slo", type=pathlib.Path, default=HERE / "slo.toml")
    parser.add_argument("--compare", type=pathlib.Path)
    options = parser.parse_args(arguments)
    earlier = {}
    if options.compare:
        earlier = json.loads((options.compare / "summary.json").read_text())
    summaries, reports, problems = judge(options.folder, plan.read(options.slo), earlier)
    write(options.folder, summaries, reports, problems, earlier)
    print(plain(*table(summaries, earlier)))
    print(about(options.folder, reports))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

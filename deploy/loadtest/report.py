#!/usr/bin/env python3
"""Compares ghz's reports in a folder with the objectives of slo.toml, and writes tables and plots.

usage: report.py FOLDER --slo FILE [--compare EARLIER]

FOLDER contains a report NAME.json for each case, or NAME.CALL.json for each call of a case with
several calls; ghz's configuration in NAME.config.json; and server.json, the output of `tessera
--json info`. The script writes these files to FOLDER: summary.json, which a later --compare reads
from the folder EARLIER; report.md; latency.svg; and NAME.svg for each case with steps. It exits
with 1 if a case misses its objective, has no report, or is worse than the earlier report by more
than slo.toml allows.

ghz itself exits with 0 even if every call failed: its statusCodeDistribution has the outcomes.
"""

import argparse
import collections
import datetime
import json
import math
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "kernels" / "bench")]

import pages  # noqa: E402
import plan  # noqa: E402

QUANTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}


# --- figures --------------------------------------------------------------------------------------


def milliseconds(latencies):
    """Returns the quantiles in ms of ascending latencies in ns. A quantile is the lowest latency
    that this percentage of the latencies do not exceed."""
    if not latencies:
        return {}
    ranks = {q: max(0, -(-len(latencies) * percent // 100) - 1) for q, percent in QUANTILES.items()}
    found = {f"{q}_ms": latencies[rank] / 1e6 for q, rank in ranks.items()}
    return found | {"max_ms": latencies[-1] / 1e6}


def summarize(report):
    """Returns the number of calls, failures and their reasons, and the rate and latencies in ms of
    the calls that succeeded."""
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
    groups = {options["load-start"] + step * options["load-step"]: [] for step in range(count)}
    for detail in details:
        step = (nanoseconds(detail["timestamp"]) - start) * count // int(seconds * 1e9)
        list(groups.values())[min(step, count - 1)].append(detail)
    return [
        (rate, summarize({
            "statusCodeDistribution": collections.Counter(detail["status"] for detail in group),
            "rps": len(group) * count / seconds,
            "details": group,
        }))
        for rate, group in groups.items()
    ]  # fmt: skip


# --- verdicts -------------------------------------------------------------------------------------


def worse(summary, key, bound):
    return summary[key] < bound if key == "rate" else summary[key] > bound


def misses(summary, objective):
    """Returns a text for each part of the objective that is missed."""
    found = []
    if summary["calls"] == 0:
        return ["no call was made"]
    if summary["failed"] > objective.get("failed", 0):
        found.append(f"{summary['failed']} of {summary['calls']} calls failed")
        found += [f"  {count} x {reason}" for reason, count in summary["reasons"].items()]
    for key, bound in objective.items():
        if key != "failed" and key not in summary:
            found.append(f"{key} is unknown")
        elif key != "failed" and worse(summary, key, bound):
            found.append(f"{key} is {summary[key]:.4g}, but the objective is {bound:g}")
    return found


def losses(summary, before, factors):
    """Returns a text for each value that is worse by more than slo.toml's [compare] allows."""
    return [
        f"{key} is {summary[key]:.4g}, but it was {before[key]:.4g}"
        for key, factor in factors.items()
        if key in summary and key in before and worse(summary, key, before[key] * factor)
    ]


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
                problems.append(f"{name}: there is no readable report: {error!r}")
                continue
            reports[name], objective = report, case.get("objective", {})
            wrong = misses(summaries[name], objective)
            wrong += losses(summaries[name], earlier.get(name, {}), slo.get("compare", {}))
            config = json.loads((folder / f"{name}.config.json").read_text())
            text = {"objective": objective_text(objective), "load": load_text(config)}
            summaries[name] |= {"missed": wrong, **text}
            problems += [f"{name}: {line}" for line in wrong]
    if not summaries and not problems:
        problems.append(f"no case was run in {folder}")
    return summaries, reports, problems


# --- pages ----------------------------------------------------------------------------------------


def cell(value):
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def table(summaries, earlier, conditions=(), name_head="case"):
    """Returns the lines of a table. conditions: keys of each summary whose string values become
    additional columns."""
    lines = []
    for name, summary in summaries.items():
        line = {name_head: name + " (missed)" * bool(summary.get("missed"))}
        line |= {key: str(summary[key]) for key in ("calls", "failed")}
        line["calls/s"] = f"{summary['rate']:.1f}"
        line |= {f"{key} ms": cell(summary.get(f"{key}_ms")) for key in (*QUANTILES, "max")}
        line |= {key: summary[key] for key in conditions}
        if earlier:
            before = earlier.get(name, {})
            line["calls/s before"] = cell(before.get("rate"))
            line["p99 ms before"] = cell(before.get("p99_ms"))
        lines.append(line)
    return lines


def plain(lines):
    rows = [list(lines[0]), *(list(line.values()) for line in lines)] if lines else []
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(text.rjust(w) if i else text.ljust(w)
                  for i, (text, w) in enumerate(zip(row, widths)))
        for row in rows
    )


def latency_plot(summaries, caption):
    """Draws a row for each case: its quantiles from the first to the last, on a logarithmic
    axis."""
    rows = [(name, [s[f"{q}_ms"] for q in QUANTILES])
            for name, s in summaries.items() if s.get("p50_ms")]
    left, right, top, row = 240, 910, 74, 22
    scale = pages.decades(min(found[0] for _, found in rows), max(found[-1] for _, found in rows))
    bottom = top + row * len(rows)

    def px(ms):
        part = (math.log10(ms) - scale[0]) / (scale[-1] - scale[0])
        return round(left + part * (right - left), 1)

    def dot(x, y, color):
        return f'<circle cx="{x}" cy="{y}" r="4.5" fill="{color}"/>'

    out = [
        pages.text(16, 20, "Latency in ms", 'font-size="15" fill="#222"'),
        pages.text(16, 37, caption, 'font-size="10" fill="#666"'),
    ]
    for x, q, color in zip(range(left, right, 60), QUANTILES, pages.COLORS):
        out += [dot(x, top - 20, color), pages.text(x + 9, top - 16, q, 'fill="#222"')]
    for ms in (10.0**decade for decade in scale):
        out.append(pages.rule(px(ms), px(ms), top, bottom, 'stroke="#ddd"'))
        out.append(pages.text(px(ms), bottom + 18, f"{ms:g}", 'text-anchor="middle" fill="#444"'))
    for index, (name, found) in enumerate(rows):
        y = top + row * index + row // 2
        points = " ".join(f"{px(ms)},{y}" for ms in found)
        out.append(pages.text(left - 14, y + 4, name, 'text-anchor="end" fill="#222"'))
        out.append(f'<polyline points="{points}" fill="none" stroke="#999" stroke-width="2"/>')
        # If several quantiles have the same value, the last one is on top.
        out += [dot(px(ms), y, color) for ms, color in zip(found, pages.COLORS)]
    return pages.svg(bottom + 40, out)


def step_plot(name, found, caption):
    lines = pages.lines((q, rate, s[f"{q}_ms"]) for q in QUANTILES
                        for rate, s in found if f"{q}_ms" in s)
    return pages.plot(f"{name}: latency in ms by requested calls per second", caption, lines)


def write(folder, summaries, reports, problems, earlier):
    caption = about(folder, reports)
    (folder / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    parts = [f"# Load test\n\n{caption}.\n"]
    if summaries:
        lines = table(summaries, earlier, ["objective", "load"])
        parts.append(pages.table(lines, "Measured with ghz."))
    if any("p50_ms" in summary for summary in summaries.values()):
        (folder / "latency.svg").write_text(latency_plot(summaries, caption))
        parts.append("![Latencies of all cases](latency.svg)\n")
    for name, report in reports.items():
        seconds = json.loads((folder / f"{name}.config.json").read_text())["duration"]
        found = steps(report, float(seconds.rstrip("s")))
        if len([s for _, s in found if "p50_ms" in s]) < 2:
            continue
        lines = table({f"{rate}/s": s for rate, s in found}, {}, name_head="requested")
        parts.append(f"## {name}\n\n{pages.table(lines)}")
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
    print(plain(table(summaries, earlier)))
    print(about(options.folder, reports))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

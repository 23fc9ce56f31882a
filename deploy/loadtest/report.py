#!/usr/bin/env python3
"""Reads JSON reports of ghz, prints a line each, and fails when any call failed or none was made.

ghz itself ends with exit code 0 even when every call failed: what happened is in its
statusCodeDistribution.

usage: report.py REPORT.json...
"""

import json
import pathlib
import sys

QUANTILES = (50, 95, 99)


def summarize(report):
    """Calls, failures and their reasons, rate, and latencies in ms (None without a success)."""
    statuses = report.get("statusCodeDistribution") or {}
    # Latencies are in nanoseconds, and null when no call succeeded.
    latencies = {
        entry["percentage"]: entry["latency"] / 1e6
        for entry in report.get("latencyDistribution") or []
    }
    return {
        "calls": sum(statuses.values()),
        "failed": sum(count for status, count in statuses.items() if status != "OK"),
        "reasons": report.get("errorDistribution") or {},
        "rps": report.get("rps", 0.0),
        "ms": [latencies.get(quantile) for quantile in QUANTILES],
    }


def main(paths):
    if not paths:
        print(__doc__.strip().splitlines()[-1], file=sys.stderr)
        return 2
    problems = []
    print(f"{'case':<12}{'calls':>10}{'failed':>10}{'calls/s':>12}", end="")
    print("".join(f"{f'p{quantile} ms':>12}" for quantile in QUANTILES))
    for path in map(pathlib.Path, paths):
        try:
            summary = summarize(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            problems.append(f"{path.stem}: no readable report: {error}")
            continue
        print(
            f"{path.stem:<12}{summary['calls']:>10}{summary['failed']:>10}{summary['rps']:>12.1f}"
            + "".join(f"{'-' if ms is None else f'{ms:.3f}':>12}" for ms in summary["ms"])
        )
        if summary["calls"] == 0:
            problems.append(f"{path.stem}: no call was made")
        if summary["failed"]:
            problems.append(f"{path.stem}: {summary['failed']} of {summary['calls']} calls failed")
            problems += [f"  {count} x {reason}" for reason, count in summary["reasons"].items()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

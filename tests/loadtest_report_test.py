#!/usr/bin/env python3
"""Tests deploy/loadtest/report.py with reports in the format of ghz 0.121, and run.sh without
ghz."""

import datetime
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout

LOADTEST = pathlib.Path(__file__).resolve().parent.parent / "deploy" / "loadtest"
sys.path.insert(0, str(LOADTEST))

import report  # noqa: E402

REFUSED = "rpc error: code = Unavailable desc = connection refused"
START = datetime.datetime(2026, 1, 31, 12, 0, 0)
SLO = """
[compare]
rate = 0.8
p99_ms = 1.5
[pattern.loop]
concurrency = 1
[case.dot]
call = "dot"
pattern = "loop"
objective = { rate = 100, p99_ms = 20 }
[case.lenient]
call = "dot"
pattern = "loop"
objective = { failed = 3 }
[case.mixed]
calls = ["dot", "reduce"]
pattern = "loop"
objective = { rate = 100 }
"""


def ghz(latencies_ms, failed=0, seconds=10.0, **options):
    """Returns a report of calls with these latencies. The calls begin at even intervals, with the
    failed calls last."""
    details = []
    count = len(latencies_ms) + failed
    for i in range(count):
        begun = START + datetime.timedelta(seconds=i * seconds / count)
        fine = i < len(latencies_ms)
        details.append({
            # Go writes nine digits of a second, or fewer if the last ones are zeros.
            "timestamp": begun.isoformat() + ("123" if begun.microsecond else "") + "Z",
            "latency": int(latencies_ms[i] * 1e6) if fine else 1000,
            "error": "" if fine else REFUSED,
            "status": "OK" if fine else "Unavailable"})
    return {"date": "2026-01-31T12:00:10Z",
            "options": {"load-schedule": "const", **options},
            "count": count,
            "rps": count / seconds,
            "errorDistribution": {REFUSED: failed} if failed else {},
            "statusCodeDistribution": {**({"OK": len(latencies_ms)} if latencies_ms else {}),
                                       **({"Unavailable": failed} if failed else {})},
            # In ghz, this is null if no call succeeded.
            "latencyDistribution": None if not latencies_ms else [],
            "details": details or None}


FINE = ghz([i / 100 for i in range(1, 2001)])  # 0.01 to 20 ms.


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "slo.toml").write_text(SLO)

    def run_on(self, *more, out="out", **reports):
        """Returns exit code, standard output and error for reports that are given as values or as
        raw text."""
        folder = self.folder / out
        folder.mkdir(exist_ok=True)
        for name, content in reports.items():
            name = name.replace("__", ".")
            config = {"duration": "10s", "concurrency": 32, "connections": 4, "rps": 200}
            (folder / f"{name}.config.json").write_text(json.dumps(config))
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (folder / f"{name}.json").write_text(text)
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            code = report.main([str(folder), "--slo", str(self.folder / "slo.toml"), *more])
        return code, stdout.getvalue(), stderr.getvalue()

    def test_figures(self):
        # Some failures are allowed.
        code, out, err = self.run_on(dot=FINE, lenient=ghz([1] * 100, failed=3))
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(
            out.splitlines()[1].split(),
            ["dot", "2000", "0", "200.0", "10.000", "18.000", "19.000", "19.800", "20.000"])
        page = (self.folder / "out" / "report.md").read_text()
        self.assertIn("| dot | 2000 | 0 | 200.0 |", page)
        self.assertIn("latency.svg", page)
        self.assertIn("<polyline", (self.folder / "out" / "latency.svg").read_text())

    def test_the_report_says_what_was_measured(self):
        measured = ghz([1] * 2000, host="gpu-host:50051")
        (self.folder / "out").mkdir()
        server = {"version": "1.2.3", "devices": [{"name": "cuda:0", "model": "NVIDIA H100"}]}
        (self.folder / "out" / "server.json").write_text(json.dumps(server))
        self.run_on(dot=measured, lenient=measured)
        page = (self.folder / "out" / "report.md").read_text()
        for wanted in ("Server gpu-host:50051, version 1.2.3, cuda:0 (NVIDIA H100),"
                       " 2026-01-31T12:00:10Z.",
                       "| 100/s or more, p99 20 ms or less | 32 callers, 4 connections,"
                       " 200/s, 10 s |",
                       "| 3 failed or fewer |"):
            self.assertIn(wanted, page)

    def test_what_makes_it_fail(self):
        slow = ghz([i / 50 for i in range(1, 2001)])
        for wanted, reports in [
                ("dot: p99_ms is 39.6, but the objective is 20", {"dot": slow}),
                ("dot: rate is 50, but the objective is 100", {"dot": ghz([1] * 500)}),
                # Refused calls are fast and do not count.
                ("dot: rate is 50, but the objective is 100", {"dot": ghz([1] * 500, failed=5000)}),
                ("dot: 1 of 2000 calls failed", {"dot": ghz([1] * 1999, failed=1)}),
                (f"dot:   1 x {REFUSED}", {"dot": ghz([1] * 1999, failed=1)}),
                ("dot: 40 of 40 calls failed", {"dot": ghz([], failed=40)}),
                ("dot: p99_ms is unknown", {"dot": ghz([], failed=40)}),
                ("dot: no call was made", {"dot": ghz([])}),
                ("dot: there is no readable report", {"dot": "{"}),
                ("dot: there is no readable report", {"dot": None}),
                ("lenient: 4 of 104 calls failed", {"lenient": ghz([1] * 100, failed=4)}),
                # One of several calls is too slow, and one of several left no report.
                ("mixed.reduce: rate is 1", {"mixed__dot": FINE, "mixed__reduce": ghz([1] * 10)}),
                ("mixed.reduce: there is no readable report", {"mixed__dot": FINE}),
                ("no case was run", {})]:
            with self.subTest(wanted):
                code, _, err = self.run_on(out=f"out{abs(hash(wanted))}", **reports)
                self.assertEqual(code, 1)
                self.assertIn(wanted, err)

    def test_comparison(self):
        earlier = ["--compare", str(self.folder / "before")]
        self.run_on(out="before", dot=FINE, lenient=ghz([1] * 1000))
        code, out, err = self.run_on(*earlier, dot=FINE, lenient=ghz([1.4] * 850))
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(out.splitlines()[1].split()[-2:], ["200", "19.800"])
        for found, says in ((ghz([1] * 790), "lenient: rate is 79, but it was 100\n"),
                            (ghz([1.6] * 1000), "lenient: p99_ms is 1.6, but it was 1\n")):
            code, _, err = self.run_on(*earlier, out=says[9:13], dot=FINE, lenient=found)
            self.assertEqual((code, err), (1, says))

    def test_steps(self):
        # 10 s at 100, 200, 300, 400 and 500 calls a second: 3000 calls, slower at each rate than at
        # the previous one.
        stepped = ghz([0] * 3000)
        schedule = {"load-schedule": "step", "load-start": 100, "load-step": 100, "load-end": 500}
        stepped["options"] = schedule
        begun = 0.0
        for i, detail in enumerate(stepped["details"]):
            step = next(s for s in range(5) if i < 100 * (s + 1) * (s + 2))
            time = START + datetime.timedelta(seconds=begun)
            begun += 1 / (100 * (step + 1))
            detail["timestamp"] = time.isoformat() + "Z"
            detail["latency"] = int((step + 1) * 1e6)
        code, _, err = self.run_on(lenient=stepped)
        self.assertEqual((code, err), (0, ""))
        page = (self.folder / "out" / "report.md").read_text()
        for rate in range(1, 6):
            self.assertRegex(page, rf"\| {rate}00/s \| \d+ \| 0 \| {rate}0\d\.\d \| {rate}\.000 ")
        self.assertIn("<polyline", (self.folder / "out" / "lenient.svg").read_text())

    def test_a_broken_objectives_file(self):
        for text, wanted in [
                ('[pattern.loop]\n[case.a]\ncall = "dot"\npattern = "lop"', "no pattern 'lop'"),
                ('[pattern.loop]\n[case.a]\ncall = "dott"\npattern = "loop"', "no call 'dott'"),
                ('[pattern.loop]\n[case.a]\npattern = "loop"', "either call or calls")]:
            (self.folder / "slo.toml").write_text(text)
            with self.assertRaisesRegex(ValueError, wanted):
                report.plan.read(self.folder / "slo.toml")

    def test_without_ghz_the_reason_is_said(self):
        result = subprocess.run(
            [LOADTEST / "run.sh", "--check"], env={**os.environ, "GHZ": "/nonexistent/ghz"},
            capture_output=True, text=True)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("no ghz", result.stderr)


if __name__ == "__main__":
    unittest.main()

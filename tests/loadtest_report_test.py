#!/usr/bin/env python3
"""deploy/loadtest: report.py on reports shaped as ghz 0.121 writes them, run.sh without a ghz."""

import importlib.util
import io
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout

LOADTEST = pathlib.Path(__file__).resolve().parent.parent / "deploy" / "loadtest"

spec = importlib.util.spec_from_file_location("report", LOADTEST / "report.py")
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)

GOOD = {
    "endReason": "normal",
    "count": 2000,
    "average": 3135202,
    "rps": 4731.93,
    "errorDistribution": {},
    "statusCodeDistribution": {"OK": 2000},
    "latencyDistribution": [
        {"percentage": 50, "latency": 2771217},
        {"percentage": 95, "latency": 6584375},
        {"percentage": 99, "latency": 10047198},
    ],
}
# Every call failed: ghz fills count and rps all the same and leaves the latencies null.
REFUSED = "rpc error: code = Unavailable desc = connection refused"
ALL_FAILED = {
    "endReason": "normal",
    "count": 40,
    "average": 22675,
    "rps": 3050.6,
    "errorDistribution": {REFUSED: 40},
    "statusCodeDistribution": {"Unavailable": 40},
    "latencyDistribution": None,
}
SOME_FAILED = dict(
    GOOD,
    errorDistribution={"rpc error: code = ResourceExhausted": 1},
    statusCodeDistribution={"OK": 1999, "ResourceExhausted": 1},
)
NO_CALLS = dict(GOOD, count=0, rps=0, statusCodeDistribution={}, latencyDistribution=None)


class ReportTest(unittest.TestCase):
    def run_on(self, **reports):
        """Exit code, standard output and error for reports given as values or as raw text."""
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, content in reports.items():
                paths.append(os.path.join(folder, name + ".json"))
                with open(paths[-1], "w") as file:
                    file.write(content if isinstance(content, str) else json.dumps(content))
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
                code = report.main(paths)
        return code, out.getvalue(), err.getvalue()

    def test_success_prints_rate_and_latencies(self):
        code, out, err = self.run_on(dot=GOOD)
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(
            out.splitlines()[1].split(), ["dot", "2000", "0", "4731.9", "2.771", "6.584", "10.047"]
        )

    def test_all_failed_is_a_failure_with_its_reason(self):
        code, out, err = self.run_on(dot=ALL_FAILED)
        self.assertEqual(code, 1)
        self.assertEqual(out.splitlines()[1].split()[1:3], ["40", "40"])
        self.assertIn("dot: 40 of 40 calls failed", err)
        self.assertIn(REFUSED, err)

    def test_one_failed_call_is_enough(self):
        code, _, err = self.run_on(dot=GOOD, reduce=SOME_FAILED)
        self.assertEqual(code, 1)
        self.assertIn("reduce: 1 of 2000 calls failed", err)
        self.assertNotIn("dot:", err)

    def test_no_calls_is_a_failure(self):
        code, _, err = self.run_on(dot=NO_CALLS)
        self.assertEqual(code, 1)
        self.assertIn("no call was made", err)

    def test_a_broken_report_is_a_failure(self):
        code, _, err = self.run_on(dot="{")
        self.assertEqual(code, 1)
        self.assertIn("no readable report", err)

    def test_without_ghz_the_reason_is_said(self):
        result = subprocess.run(
            [LOADTEST / "run.sh", "--check"],
            env={**os.environ, "GHZ": "/nonexistent/ghz"},
            capture_output=True,
            text=True,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("no ghz", result.stderr)

    def test_cases_name_calls_that_exist(self):
        protocol = "".join(
            path.read_text() for path in LOADTEST.parent.parent.glob("proto/tessera/v1/*")
        )
        cases = sorted(LOADTEST.glob("*.json"))
        self.assertTrue(cases)
        for case in cases:
            config = json.loads(case.read_text())
            service, method = config["call"].removeprefix("tessera.v1.").split(".")
            self.assertIn(f"service {service} ", protocol)
            self.assertIn(f"rpc {method}(", protocol)
            self.assertTrue((LOADTEST.parent.parent / config["proto"]).is_file())


if __name__ == "__main__":
    unittest.main()

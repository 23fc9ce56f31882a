#!/usr/bin/env python3
"""Tests how ./dev test counts the suites that have run, including failures and skips within Python
suites."""

import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-c++" tests="{count}" failures="0" disabled="0" skipped="0">
{cases}</testsuite>
"""
CASE = """\t<testcase name="{name}" classname="{name}" time="0.5" status="{status}">
\t\t<system-out>{output}
</system-out>
\t</testcase>
"""


def counted(*cases, googletest=""):
    """Returns what the runner prints for suites of (name, status, output)."""
    report = REPORT.format(count=len(cases), cases="".join(
        CASE.format(name=name, status=status, output=output) for name, status, output in cases))
    with tempfile.TemporaryDirectory() as folder:
        if googletest:
            pathlib.Path(folder, "kernel_test.xml").write_text(googletest)
        command = 'source tests/tools/test.sh; read_outcomes | count_tests "$1"'
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command, "-", folder], cwd=ROOT,
                              input=report, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


class RunnerTest(unittest.TestCase):
    def test_tests_of_unittest(self):
        dots = "..\n------\nRan {} tests in 1.5s\n\n{}"
        for ran, verdict, status, want in (
                (2, "OK", "run", ["2 passed, 0 failed, 0 skipped"]),
                (8, "OK (skipped=3)", "run", ["a_test: 3 of 8 skipped",
                                              "5 passed, 0 failed, 3 skipped"]),
                (9, "FAILED (failures=1, errors=2, skipped=1)", "fail",
                 ["a_test: 1 of 9 skipped", "5 passed, 3 failed, 1 skipped"]),
                (0, "FAILED (errors=1)", "fail", ["0 passed, 1 failed, 0 skipped"]),
                (0, "OK (skipped=1)", "run", ["a_test: 1 of 1 skipped",
                                              "0 passed, 0 failed, 1 skipped"]),
                (3, "OK (expected failures=1)", "run", ["3 passed, 0 failed, 0 skipped"])):
            with self.subTest(verdict):
                self.assertEqual(counted(("a_test", status, dots.format(ran, verdict))), want)

    def test_a_suite_that_ends_early_has_failed(self):
        for output in ("", "Ran 5 tests in 1s\n\nOK"):
            with self.subTest(output):
                self.assertRegex(counted(("a_test", "fail", output))[-1], "1 failed, 0 skipped$")

    def test_suites_that_count_themselves(self):
        output = "ok 0.1 s  test_a\nskipped 0.1 s  test_b\n4 passed, 0 failed, 2 skipped"
        self.assertEqual(counted(("a_test", "run", output), ("b_test", "run", "fine")),
                         ["a_test: 2 of 6 skipped", "5 passed, 0 failed, 2 skipped"])

    def test_a_report_of_googletest_comes_first(self):
        report = '''<testsuites tests="9" failures="1" skipped="4">
  <testsuite name="A" tests="9" failures="1" disabled="0" skipped="4" errors="0">
</testsuites>'''
        self.assertEqual(counted(("kernel_test", "fail", "7 passed, 0 failed, 0 skipped"),
                                 ("b_test", "notrun", ""), googletest=report),
                         ["4 passed, 1 failed, 5 skipped"])

    def test_what_is_run_again(self):
        """Suites are run again if only a few suites with fixed inputs failed without a clear
        reason."""
        def again(log, *names):
            with tempfile.NamedTemporaryFile("w") as file:
                file.write(log)
                file.flush()
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c",
                     'source tests/tools/test.sh; to_run_again "$1"', "-", file.name],
                    cwd=ROOT, capture_output=True, text=True, check=True,
                    input="".join(f"{i}:{name}\n" for i, name in enumerate(names, 7)))
            return done.stdout.split()

        late = "AssertionError: False is not true"
        self.assertEqual(again(late, "top_test", "cli_test"), ["top_test", "cli_test"])
        self.assertEqual(again(late, *"abcd"), [*"abcd"])
        self.assertEqual(again(late, *"abcde"), [])
        self.assertEqual(again(late, "replay_test"), ["replay_test"])
        for drawn in "fuzz_model_test", "service_fuzz", "npy_replay":
            self.assertEqual(again(late, "cli_test", drawn), [])
            self.assertEqual(again(late, drawn, "cli_test"), [])
        for found in ("WARNING: ThreadSanitizer: data race", "a.cc:1:2: runtime error: overflow",
                      "1/9 Test #47: team_test ...***Exception: SegFault  0.19 sec",
                      "the server (pid 7) is gone: exit code -11", "Segmentation fault",
                      "terminate called after"):
            self.assertEqual(again(f"a\n{found}\n", "cli_test"), [])


if __name__ == "__main__":
    unittest.main()

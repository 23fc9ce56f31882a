#!/usr/bin/env python3
"""Tests fuzz targets without libFuzzer. With mutated inputs, replay.cc finds a read beyond an
input, a number that overflows, an assertion that needs parts of two inputs, and an infinite loop.
It leaves the input that shows the fault.

usage: replay_test.py PROGRAM, with replay_test.cc as its target
"""

import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class ReplayTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_on(self, *arguments):
        done = subprocess.run([PROGRAM, *arguments], cwd=self.folder, text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    def find(self, inputs, message, *flags):
        """Lets replay.cc find a fault that none of the inputs shows, and returns the input that
        shows it."""
        corpus = self.folder / "corpus"
        corpus.mkdir()
        for i, content in enumerate(inputs):
            (corpus / str(i)).write_bytes(content)
        code, output = self.run_on(corpus)
        self.assertEqual((code, output.splitlines()[-1]), (0, f"{len(inputs)} inputs"), output)
        code, output = self.run_on("--seconds", "60", *flags, corpus)
        self.assertEqual(code, 1, output)
        self.assertIn(message, output)
        last = re.fullmatch(r"FAILED: .*\. The last input is in (/.*)", output.splitlines()[-1])
        self.assertTrue(last, output)
        found = pathlib.Path(last[1])
        self.assertNotIn(found.read_bytes(), inputs)
        return found

    def test_a_read_beyond_the_input(self):
        found = self.find([b"sum\x02ab"], "AddressSanitizer: heap-buffer-overflow")
        code, output = self.run_on(found)
        self.assertNotEqual(code, 0)
        self.assertIn("AddressSanitizer: heap-buffer-overflow", output)

    def test_an_overflow(self):
        found = self.find([b"next to 4"], "signed integer overflow")
        code, output = self.run_on(found)
        self.assertNotEqual(code, 0)
        self.assertIn("signed integer overflow", output)

    def test_parts_of_two_inputs(self):
        found = self.find([b"left: 1", b"right: 2"], "fuzz: both words")
        self.assertIn(b"left", found.read_bytes())
        self.assertIn(b"right", found.read_bytes())

    def test_a_loop_that_never_ends(self):
        found = self.find([b"wait"], "Alarm clock", "--timeout", "1")
        self.assertGreater(len(found.read_bytes()), 9)
        code, output = self.run_on("--timeout", "1", found)
        self.assertEqual(code, -signal.SIGALRM, output)

    def test_a_seed_makes_the_same_inputs(self):
        first = self.find([b"sum\x02ab"], "heap-buffer-overflow", "--seed", "7").read_bytes()
        code, output = self.run_on("--seconds", "60", "--seed", "7", self.folder / "corpus")
        self.assertEqual(code, 1)
        self.assertIn("seed 7\n", output)
        self.assertEqual(pathlib.Path(output.split()[-1]).read_bytes(), first)

    def test_nothing_is_left_where_nothing_fails(self):
        (self.folder / "input").write_bytes(b"harmless")
        # With this seed, the mutated inputs find no fault for far longer than that.
        code, output = self.run_on("--seconds", "1", "--seed", "1", "input")
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"(?m)^[1-9]\d* changed inputs$")
        self.assertEqual([path.name for path in self.folder.iterdir()], ["input"])


if __name__ == "__main__":
    unittest.main()

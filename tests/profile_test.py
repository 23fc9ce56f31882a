#!/usr/bin/env python3
"""Tests profiling from outside: the ranges that a profiler sees, and the window that SIGUSR1 opens.

usage: profile_test.py --server build/bin/tessera-server [--recorder libnvtx_recorder.so] [test ...]

--recorder: a library that listens to NVTX (tests/nvtx_recorder.cc). A build without the CUDA
headers has neither ranges nor this library."""

import signal

import numpy as np

import outsider as o
from outsider import eventually

ONES = np.ones(1000, np.float32)

SECONDS = 20  # The time that anything may take on a busy machine.
recorder = o.program_flag("--recorder")


class ProfileCase(o.Case):
    def serve(self, *flags, **more):
        return super().serve("--no-warm-up", "--memory-limit", "256Mi", *flags, **more)


class WindowTest(ProfileCase):
    BEGIN, END = "profilers record until", "profilers have stopped"

    def counts(self, server):
        log = server.log()
        return log.count(self.BEGIN), log.count(self.END)

    def test_a_second_signal_ends_it_and_a_stop_does(self):
        server = self.serve()
        for counts in ((1, 0), (1, 1), (2, 1)):
            server.signal(signal.SIGUSR1)
            self.assertTrue(eventually(lambda: self.counts(server) == counts, SECONDS),
                            server.log())
            server.client().dot_of_ones()
            self.assertEqual(self.counts(server), counts)
        self.assertEqual(server.stop(), 0)


class RangesTest(ProfileCase):
    def setUp(self):
        super().setUp()
        if recorder is None:
            self.skipTest("the build has no headers of NVTX")
        self.file = self.folder / "ranges"

    def ranges(self):
        """Returns each range as the names that lead to it: {("Dot", "fixed_tree"), ...}. Checks
        that ranges nest."""
        found, open_ranges = set(), {}
        for line in self.file.read_text().splitlines():
            kind, *rest = line.split(" ")
            if kind == "push":
                stack = open_ranges.setdefault(rest[1], [])
                stack.append(rest[0])
                found.add(tuple(stack))
            elif kind == "pop":
                open_ranges[rest[0]].pop()
            else:
                self.assertEqual(line, "domain tessera")
        return found

    def test_calls_phases_and_strategies_have_ranges(self):
        environment = ("env", f"NVTX_INJECTION64_PATH={recorder}", f"NVTX_RECORD={self.file}")
        server = self.serve(prefix=environment)
        client = server.client()
        client.put("x", ONES)
        x = o.resident("x")
        client.call("Dot", a=x, b=x)
        client.call("Dot", a=x, b=x, strategy="cpu_serial")
        gaps = o.resident("x", o.view([500], [2]))
        client.call("Dot", a=gaps, b=gaps, strategy="cpu_parallel")
        client.download("x")
        wanted = {("Upload",), ("Dot",), ("Dot", "fixed_tree"), ("Dot", "cpu_serial"),
                  ("Dot", "gather"), ("Dot", "wait"), ("Download",)}
        self.assertTrue(eventually(lambda: wanted <= self.ranges(), SECONDS), self.ranges())


if __name__ == "__main__":
    o.main()

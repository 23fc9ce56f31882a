#!/usr/bin/env python3
"""What one hostile or careless client may do to a server, and must not get away with.

Every case takes a promise of the .proto files or of the server's flags and tries to break it from
outside, with a server of its own. Cases wait more than they compute, so they run several at a time;
those that measure time run alone at the end.

usage: abuse_test.py --server build/bin/tessera-server [--device cuda:0] [--jobs N] [NAME...]

A NAME picks the cases whose names contain it. With --known-flags-only, flags that the server's help
does not list are left out, to see what a server without those limits does.
"""

import argparse
import concurrent.futures
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest

import grpc
import numpy as np
from google.protobuf import json_format

import outsider as o
from outsider import Client, Server, eventually, in_threads, inline, into, outcome_of, resident, view

ONE = np.ones(1, np.float32)
# Operations may take as long as a test likes.
PATIENT = ("--max-operation-seconds", "600", "--max-slow-operation-seconds", "600",
           "--scratch-limit", "1Gi")
# Multiply-adds a second of a slow row are 0.5e9 to 2e9, on one core: seconds() of work.
SLOW_ROW = "cpu_naive"
UPLOAD = "/tessera.v1.BufferService/Upload"


def side_for(seconds):
    """Of a square product that SLOW_ROW holds a worker with for about so long."""
    return round(1000 * (seconds / 1.2) ** (1 / 3))


def alone(test):
    """Marks a case that measures time: nothing else runs beside it."""
    test.alone = True
    return test


class Case(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="abuse")
        self.addCleanup(shutil.rmtree, self.folder)
        self.servers = []
        self.addCleanup(self.end_servers)

    def end_servers(self):
        crashed = []
        for server in self.servers:
            code = server.process.poll()
            if code is not None and code != getattr(server, "expected", 0):
                crashed.append(f"the server ended with {code}:\n{server.log()[-2000:]}")
            server.kill()
        self.assertEqual(crashed, [])

    def start(self, *flags, **how):
        server = Server(self.folder, *flags, **how)
        self.servers.append(server)
        return server

    def needs_cpu(self, why="a call that holds a worker for seconds takes the CPU device"):
        if o.Program.device != "cpu":
            self.skipTest(why)

    # --- Checks ---------------------------------------------------------------------------------

    def assert_fails(self, outcome, code, reason, *figures, **metadata):
        """The call failed with this code and reason; the keys figures have numbers."""
        self.assertEqual((outcome.code, outcome.reason), (code, reason), outcome)
        self.assertEqual(outcome.domain, "tessera", outcome)
        for key in figures:
            self.assertRegex(outcome.metadata.get(key, "(none)"), r"^-?[\d.e+-]+$",
                             f"{key} of {outcome}")
        for key, value in metadata.items():
            self.assertEqual(outcome.metadata.get(key), str(value), f"{key} of {outcome}")

    def assert_ok(self, outcome, what=""):
        self.assertEqual(outcome.code, "OK", f"{what} {outcome}")
        return outcome.answer

    def assert_missing(self, client, name):
        self.assert_fails(client.attempt("GetBuffer", name=name), "NOT_FOUND", "BUFFER_NOT_FOUND")

    def assert_serves(self, client, within=2):
        started = time.monotonic()
        outcome = outcome_of(lambda: client.dot_of_ones(timeout=within))
        self.assert_ok(outcome, f"a Dot of one element, after {time.monotonic() - started:.1f} s:")

    def assert_scratch_is_free(self, client):
        self.assertTrue(eventually(lambda: client.device().scratch_used_bytes == 0, 2),
                        f"scratch_used_bytes stays {client.device().scratch_used_bytes}")

    def assert_empty(self, client):
        """Nothing is left that counts."""
        self.assertTrue(eventually(lambda: client.device().buffer_used_bytes == 0, 2),
                        f"buffer_used_bytes stays {client.device().buffer_used_bytes}")
        self.assertEqual(client.names(), [])
        for name in ("buffers", "uploads", "downloads"):
            self.assertTrue(eventually(lambda: client.budget(name).used == 0, 2),
                            f"budget {name} stays at {client.budget(name).used}")

    def slow_product(self, client, seconds, timeout=60, **more):
        """A product that holds a worker; the client has a buffer "s" of one element for it."""
        n = side_for(seconds)
        a = resident("s", view([n, n], [0, 0]))
        more.setdefault("result", into(f"product{time.monotonic_ns()}"))
        return client.future("Matmul", timeout=timeout, a=a, b=a, strategy=SLOW_ROW, **more)

    def hold_worker(self, client, seconds=60, **more):
        """As slow_product, and it has begun."""
        future = self.slow_product(client, seconds, timeout=120, **more)
        self.assertTrue(
            eventually(lambda: future.done() or client.device().waiting == 0, 5), "it waits")
        time.sleep(0.2)
        self.assertFalse(future.done(), future.done() and outcome_of(future))
        return future


# --- Work and memory ----------------------------------------------------------------------------------


class WorkTest(Case):
    def assert_right_or_refused(self, outcome, value):
        if outcome.ok:
            self.assertEqual(outcome.answer.value.real, value)
            return
        self.assertIn((outcome.code, outcome.reason), {
            ("RESOURCE_EXHAUSTED", "SCRATCH_EXHAUSTED"),
            ("FAILED_PRECONDITION", "OPERATION_TOO_LONG"),
        }, outcome)
        keys = (("requested", "free", "total") if outcome.reason == "SCRATCH_EXHAUSTED"
                else ("estimate_seconds", "limit_seconds"))
        for key in keys:
            self.assertIn(key, outcome.metadata, outcome)
        # The call alone needs too much: to repeat it is of no use.
        self.assertIsNone(outcome.retry_s, outcome)

    def test_a_small_request_takes_little_memory(self):
        server = self.start("--memory-limit", "16Mi", "--scratch-limit", "16Mi")
        client = server.client()
        client.put("s", ONE)
        n = 300_000_000
        before = server.peak_rss()
        wide = resident("s", view([n], [0]))
        dot = client.attempt("Dot", a=wide, b=wide, timeout=20)
        self.assert_right_or_refused(dot, float(n))
        total = client.attempt("Reduce", x=wide, op="REDUCE_OP_SUM", timeout=20)
        self.assert_right_or_refused(total, float(n))
        half = inline(np.ones(1), view([1 << 27], [0]))
        self.assert_right_or_refused(client.attempt("Dot", a=half, b=half, timeout=20), 2.0**27)
        # With strides that no trick reads as one element.
        client.put("two", np.ones(2, np.float32))
        mixed = resident("two", view([n // 2, 2], [0, 1]))
        self.assert_right_or_refused(
            client.attempt("Dot", a=mixed, b=mixed, timeout=20), float(n // 2 * 2))
        growth = server.peak_rss() - before
        self.assertLess(growth, 64 * o.MI, f"peak RSS grew by {growth / o.MI:.0f} MiB")
        self.assert_scratch_is_free(client)
        self.assertTrue(eventually(lambda: server.rss() - before < 40 * o.MI, 2),
                        f"an idle server keeps {(server.rss() - before) / o.MI:.0f} MiB")

    def test_scratch_has_a_limit_by_default(self):
        device = self.start("--memory-limit", "64Mi").client().device()
        self.assertGreater(device.scratch_limit_bytes, 0)
        self.assertLessEqual(device.scratch_limit_bytes, device.memory_total_bytes)
        self.assertEqual(device.scratch_used_bytes, 0)

    def test_scratch_returns_after_every_kind_of_call(self):
        server = self.start("--scratch-limit", "64Mi")
        client = server.client()
        self.assertEqual(client.device().scratch_limit_bytes, 64 * o.MI)
        x = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
        client.put("x", x)
        across = resident("x", view([512, 512], [1, 512]))
        for rpc, fields in (
            ("Dot", dict(a=across, b=across)),
            ("Reduce", dict(x=across, op="REDUCE_OP_SUM")),
            ("Reduce", dict(x=across, op="REDUCE_OP_MAX", axes=[0])),
            ("Add", dict(a=across, b=across)),
            ("Matmul", dict(a=across, b=across)),
            ("WindowSum", dict(x=resident("x", view([1 << 17], [2])), radius=2)),
        ):
            self.assert_ok(client.attempt(rpc, **fields), rpc)
            self.assert_scratch_is_free(client)
        for fields in (dict(a=across, b=across, strategy="guess"),
                       dict(a=across, b=inline(ONE))):
            self.assertFalse(client.attempt("Dot", **fields).ok)
            self.assert_scratch_is_free(client)

    def test_a_result_larger_than_scratch_is_refused_with_figures(self):
        server = self.start("--scratch-limit", "1Mi")
        client = server.client()
        wide = inline(ONE, view([700_000], [0]))
        outcome = client.attempt("Add", a=wide, b=wide)
        self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "SCRATCH_EXHAUSTED",
                          "requested", "free", total=o.MI)
        self.assertIsNone(outcome.retry_s, outcome)
        self.assertGreater(int(outcome.metadata["requested"]), o.MI)

    def test_operations_of_hours_are_refused(self):
        self.needs_cpu()
        client = self.start().client()
        client.put("s", ONE)
        a = resident("s", view([12000, 12000], [0, 0]))
        calls = [client.future("Matmul", timeout=3, a=a, b=a, strategy=SLOW_ROW,
                               result=into(f"r{i}")) for i in range(8)]
        self.assert_serves(client, within=1)
        for call in calls:
            outcome = outcome_of(call)
            self.assert_fails(outcome, "FAILED_PRECONDITION", "OPERATION_TOO_LONG",
                              "estimate_seconds", "limit_seconds")
            self.assertGreater(float(outcome.metadata["estimate_seconds"]),
                               float(outcome.metadata["limit_seconds"]), outcome)
        limits = client.info().limits
        self.assertGreater(limits.max_operation.seconds, 0)
        self.assertLessEqual(limits.max_slow_operation.ToMilliseconds(),
                             limits.max_operation.ToMilliseconds())
        self.assertEqual(client.names(), ["s"])

    def test_the_row_that_runs_by_default_may_take_longer_than_a_lesson(self):
        """A product of a few seconds: refused by the slow row's limit, accepted otherwise."""
        self.needs_cpu()
        client = self.start("--max-slow-operation-seconds", "0.05",
                            "--max-operation-seconds", "60").client()
        client.put("s", ONE)
        a = resident("s", view([600, 600], [0, 0]))
        self.assert_fails(client.attempt("Matmul", a=a, b=a, strategy=SLOW_ROW),
                          "FAILED_PRECONDITION", "OPERATION_TOO_LONG", limit_seconds="0.05")
        self.assert_ok(client.attempt("Matmul", a=a, b=a))

    def test_work_whose_callers_have_left_stops(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--drain-timeout", "10s")
        client, leaver = server.client(), server.client()
        client.put("s", ONE)
        late = [self.slow_product(client, 40, timeout=0.7) for _ in range(4)]
        cancelled = [self.slow_product(client, 40) for _ in range(2)]
        cut = [self.slow_product(leaver, 40) for _ in range(2)]
        time.sleep(0.7)
        for call in cancelled:
            call.cancel()
        leaver.close()
        for call in late:
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        for call in cut:
            self.assertFalse(outcome_of(call).ok)
        started = time.monotonic()
        self.assertTrue(
            eventually(lambda: outcome_of(lambda: client.dot_of_ones(timeout=0.5)).ok, 4),
            "4 s after all eight callers had left no Dot of one element is answered")
        self.assertLess(time.monotonic() - started, 3)
        self.assert_scratch_is_free(client)
        self.assertEqual(client.names(), ["s"])
        started = time.monotonic()
        self.assertEqual(server.stop(timeout=15), 0, "exit code after SIGTERM")
        self.assertLess(time.monotonic() - started, 5)

    def test_places_of_callers_who_have_left_are_free(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--workers", "1", "--queue", "4")
        client = server.client()
        client.put("s", ONE)
        self.assertEqual(client.info().limits.queue_length, 4)
        self.hold_worker(client)
        x = inline(ONE)
        gone = [client.future("Dot", a=x, b=x, timeout=0.5) for _ in range(4)]
        self.assertTrue(eventually(lambda: client.device().waiting == 4, 0.4),
                        f"waiting is {client.device().waiting}")
        full = client.attempt("Dot", a=x, b=x, timeout=0.3)
        self.assert_fails(full, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
        self.assertIsNotNone(full.retry_s, "QUEUE_FULL without a RetryInfo")
        for call in gone:
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        self.assertTrue(eventually(lambda: client.device().waiting == 0, 1),
                        f"waiting stays {client.device().waiting} after all callers have left")
        again = [client.future("Dot", a=x, b=x, timeout=0.5) for _ in range(4)]
        for call in again:
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        cancelled = [client.future("Dot", a=x, b=x, timeout=20) for _ in range(4)]
        time.sleep(0.2)
        for call in cancelled:
            call.cancel()
        self.assertTrue(eventually(lambda: client.device().waiting == 0, 1),
                        f"waiting stays {client.device().waiting} after all were cancelled")

    def test_waiting_requests_are_bounded_in_bytes(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--workers", "1", "--queue", "1000",
                            "--host-memory", "32Mi")
        client = server.client()
        client.put("s", ONE)
        self.assertEqual(client.budget("host_memory").limit, 32 * o.MI)
        # The allocator's pools and the connections are warm.
        big = inline(np.ones(256 * 1024, np.float32))
        for _ in range(3):
            client.call("Dot", a=big, b=big)
        self.hold_worker(client)
        before = server.rss()
        calls = [client.future("Dot", a=big, b=big, timeout=2.5) for _ in range(60)]
        time.sleep(1.5)
        growth = server.rss() - before
        outcomes = [outcome_of(call) for call in calls]
        refused = [outcome for outcome in outcomes if outcome.code == "RESOURCE_EXHAUSTED"]
        self.assertGreater(len(refused), 30, outcomes[:3])
        self.assertGreater(len(outcomes) - len(refused), 3, "nothing waits")
        for outcome in refused:
            self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED",
                              "requested", "free", total=32 * o.MI)
            self.assertIsNotNone(outcome.retry_s, outcome)
        self.assertLess(growth, 80 * o.MI, f"60 queued calls of 2 MiB: {growth / o.MI:.0f} MiB")
        self.assertTrue(eventually(lambda: server.rss() - before < 40 * o.MI, 3),
                        f"callers have left, {(server.rss() - before) / o.MI:.0f} MiB stay")
        self.assertTrue(eventually(lambda: client.budget("host_memory").used < o.MI, 2),
                        f"host_memory used: {client.budget('host_memory').used}")

    def test_results_of_callers_who_gave_up_leave_nothing(self):
        self.needs_cpu()
        client = self.start(*PATIENT).client()
        client.put("s", ONE)
        kept = client.put("kept", ONE)
        for target in (into("gone"), into("kept", replace=True)):
            call = self.slow_product(client, 1.5, timeout=0.4, result=target)
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        time.sleep(3)
        self.assertEqual(client.names(), ["kept", "s"])
        self.assertEqual(client.call("GetBuffer", name="kept").buffer.version, kept.version)
        self.assertEqual(client.download("kept"), ONE.tobytes())

    def test_deleting_the_name_of_a_result_on_its_way_does_no_harm(self):
        self.needs_cpu()
        client = self.start(*PATIENT).client()
        client.put("s", ONE)
        call = self.hold_worker(client, 1.2, result=into("c"))
        self.assertIn(client.attempt("DeleteBuffer", name="c").code, ("OK", "NOT_FOUND"))
        self.assert_ok(outcome_of(call))
        self.assertEqual(client.names(), ["c", "s"])

    def test_a_request_is_checked_before_memory_is_taken(self):
        client = self.start("--memory-limit", "1Mi").client()
        wide = inline(ONE, view([1024, 1024], [0, 0]))
        self.assert_fails(
            client.attempt("Matmul", a=wide, b=wide, strategy="guess", result=into("c")),
            "INVALID_ARGUMENT", "UNKNOWN_STRATEGY")
        self.assert_fails(
            client.attempt("Matmul", a=wide, b=wide, result=into("c")),
            "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "free", total=o.MI)

    def test_a_worker_that_is_stuck_shows_in_the_health_service(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--watchdog", "1s")
        client = server.client()
        client.put("s", ONE)
        self.assertEqual(client.health(), 1)
        call = self.hold_worker(client)
        self.assertTrue(eventually(lambda: client.health() == 2, 4, 0.1),
                        "a worker is busy for 4 s, and health says SERVING")
        self.assertFalse(call.done())
        call.cancel()
        self.assertTrue(eventually(lambda: client.health() == 1, 4, 0.1),
                        "the worker is free again, and health says NOT_SERVING")
        self.assert_serves(client)


class MemoryTest(Case):
    def test_more_memory_than_there_is(self):
        """--memory-limit beyond the machine: the server does not start, or says so and clamps."""
        try:
            server = self.start("--memory-limit", "900Gi")
        except AssertionError as refused:
            self.assertIn("did not start", str(refused))
            self.assertIn("memory", str(refused))
            return
        device = server.client().device()
        self.assertLessEqual(device.buffer_limit_bytes, device.memory_total_bytes,
                             "the limit is more than the memory of the device")
        self.assertRegex(server.log(), r"warn\S* .*memory", "clamped without a warning")

    def test_an_allocation_that_fails_is_an_answer(self):
        # The address space ends before the machine's memory does.
        self.needs_cpu("RLIMIT_AS does not bound the memory of a GPU")
        server = self.start("--memory-limit", "8Gi", prefix=("prlimit", "--as=6442450944"))
        client = server.client()
        big = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[7 << 28])
        outcome = client.attempt("CreateBuffer", name="big", spec=big)
        self.assertEqual(outcome.code, "RESOURCE_EXHAUSTED", outcome)
        self.assertIn(outcome.reason, ("HOST_MEMORY_EXHAUSTED", "GPU_MEMORY_EXHAUSTED",
                                       "QUOTA_EXCEEDED"))
        self.assertEqual(outcome.metadata.get("requested"), str(7 << 30), outcome)
        self.assert_serves(client)
        self.assert_empty(client)

    def test_buffers_are_counted(self):
        client = self.start("--max-buffers", "10").client()
        self.assertEqual(client.budget("buffers").limit, 10)
        nothing = np.zeros(0, np.float32)
        for i in range(4):
            client.create(f"draft{i}", nothing)
            client.put(f"ready{i}", nothing)
        client.put("one", ONE)
        client.call("CopyBuffer", source="one", name="copy")
        self.assertEqual(client.budget("buffers").used, 10)
        x = inline(np.ones((2, 2), np.float32))
        for what, outcome in {
            "CreateBuffer": outcome_of(lambda: client.create("more", nothing)),
            "Upload": outcome_of(lambda: client.put("more", nothing)),
            "CopyBuffer": client.attempt("CopyBuffer", source="one", name="more"),
            "Matmul": client.attempt("Matmul", a=x, b=x, result=into("more")),
            "Reduce": client.attempt("Reduce", x=x, op="REDUCE_OP_SUM", axes=[0],
                                     result=into("more")),
        }.items():
            with self.subTest(what):
                self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "TOO_MANY_BUFFERS", limit=10)
        client.call("DeleteBuffer", name="draft0")
        client.put("more", nothing)
        for name in client.names():
            client.call("DeleteBuffer", name=name)
        self.assert_empty(client)

    def test_small_buffers_cost_what_they_take(self):
        client = self.start("--memory-limit", "64Ki").client()
        client.put("x0", ONE)
        cost = client.device().buffer_used_bytes
        self.assertGreaterEqual(cost, 64, "what a buffer of 4 bytes costs")
        outcome, count = None, 1
        while count <= 2000:
            outcome = outcome_of(lambda: client.put(f"x{count}", ONE))
            if not outcome.ok:
                break
            count += 1
        self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "requested", "free",
                          total=64 * 1024)
        self.assertEqual(count, 64 * 1024 // cost)
        for i in range(count):
            client.call("DeleteBuffer", name=f"x{i}")
        self.assert_empty(client)

    def test_empty_buffers_are_bounded_by_default(self):
        info = self.start().client().info()
        limits = {budget.name: budget.limit for budget in info.budgets}
        for name in ("host_memory", "buffers", "uploads", "downloads", "connections"):
            self.assertGreater(limits.get(name, 0), 0, f"budget {name!r} of {limits}")
            self.assertLess(limits[name], 1 << 40, f"budget {name!r} of {limits}")
        self.assertGreater(info.limits.max_ranges, 0)

    def test_ranges_of_a_draft_are_bounded(self):
        client = self.start().client()
        limit = client.info().limits.max_ranges
        self.assertTrue(0 < limit <= 1 << 20, f"max_ranges is {limit}")
        x = np.zeros(limit + 16, np.float32)
        client.create("x", x)

        def every_other_byte():
            for i in range(limit + 8):
                yield dict(name="x", offset=2 * i, data=b"x")

        outcome = client.try_upload(every_other_byte())
        self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "TOO_MANY_RANGES", limit=limit)
        # The draft can still be filled.
        size = x.nbytes
        step = 1 << 20
        self.assert_ok(client.try_upload(
            dict(name="x", offset=i, data=b"\1" * min(step, size - i)) for i in range(0, size, step)))
        client.call("SealBuffer", name="x")
        self.assertEqual(client.download("x"), b"\1" * size)

    def test_missing_ranges_and_drafts_are_listed_to_a_bound(self):
        client = self.start().client()
        client.create("x", np.zeros(200, np.float32))
        client.upload([dict(name="x", offset=4 * i + 1, data=b"x") for i in range(200)])
        answer = client.call("GetBuffer", name="x")
        self.assertEqual(len(answer.missing), 100)
        self.assertEqual((answer.missing[0].begin, answer.missing[0].end), (0, 1))
        self.assertEqual((answer.missing[1].begin, answer.missing[1].end), (2, 5))
        made = [client.create("y", ONE, replace=True).version for _ in range(20)]
        self.assertEqual([draft.version for draft in client.call("GetBuffer", name="y").drafts],
                         made[4:])

    def test_a_draft_that_nobody_writes_to_goes(self):
        client = self.start("--upload-timeout", "1s").client()
        client.create("x", ONE, ttl={"seconds": 600})
        self.assertTrue(eventually(lambda: client.names() == [], 4), "the draft stays")
        self.assert_empty(client)


# --- The log -----------------------------------------------------------------------------------------

LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S* (trace|debug|info|warn|warning|error|critical) ")
FORGED = "2026-01-01T00:00:00.000 critical device cpu: FORGED LINE"
HOSTILE_TEXTS = [
    "x\n" + FORGED,
    "x\r\n" + FORGED,
    "x\r" + FORGED,
    "\x1b[2J\x1b]0;title\x07",
    "x\u2028" + FORGED,
    "x\u0085" + FORGED,
    "x\u009b2J",
    "nul\0nul",
    'quote " backslash \\ {} %s %n {0}',
    "\u202egnirts",
    "\ud7ff\U0010ffff",
]


class LogTest(Case):
    def hostile_calls(self, client, text):
        """Every place that takes text from a client."""
        one = inline(ONE)
        spec = o.spec_of(ONE)
        device = o.spec_of(ONE, device=text)
        return [
            client.attempt("GetBuffer", name=text),
            client.attempt("DeleteBuffer", name=text),
            client.attempt("SealBuffer", name=text),
            client.attempt("UpdateBuffer", name=text),
            client.attempt("CopyBuffer", source=text, name="y"),
            client.attempt("CopyBuffer", source="y", name=text),
            client.attempt("CreateBuffer", name=text, spec=spec),
            client.attempt("CreateBuffer", name="y", spec=device),
            client.attempt("ListBuffers", page_token=text),
            client.try_upload([dict(name=text, spec=spec, data=b"1234")]),
            client.try_upload([dict(name=text, data=b"1234")]),
            outcome_of(lambda: client.download(text)),
            client.attempt("Dot", a=resident(text), b=one),
            client.attempt("Dot", a=one, b=one, strategy=text),
            client.attempt("Add", a=one, b=one, result=into(text)),
            client.attempt("ListStrategies", operation=text),
        ]

    def test_names_forge_no_lines(self):
        # The log takes a few lines a second, so a server for each text.
        for text in HOSTILE_TEXTS:
            server = self.start("--log-level", "debug")
            for outcome in self.hostile_calls(server.client(), text):
                self.assertNotIn(outcome.code, ("OK", "INTERNAL", "UNKNOWN"), outcome)
            self.assertEqual(server.stop(), 0)
            log = server.log()
            self.assertNotRegex(log, "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]",
                                f"raw control characters of {text!r}")
            for line in log.splitlines():
                self.assertRegex(line, LOG_LINE)
                self.assertFalse(line.startswith(FORGED), line)
            self.assertGreater(len(log.splitlines()), 4, "the refused calls have no lines")

    def test_json_lines_stay_json(self):
        for text in HOSTILE_TEXTS:
            server = self.start("--log-format", "json")
            self.hostile_calls(server.client(), text)
            self.assertEqual(server.stop(), 0)
            log = server.log()
            self.assertNotRegex(log, "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]",
                                f"raw control characters of {text!r}")
            for line in log.splitlines():
                self.assertEqual({"time", "level", "message"} - json.loads(line).keys(), set())

    def test_large_requests_make_short_lines(self):
        server = self.start()
        client = server.client()
        name = "A" * 4_000_000
        for outcome in (
            client.attempt("GetBuffer", name=name),
            client.attempt("DeleteBuffer", name=name),
            client.attempt("Dot", a=resident(name), b=inline(ONE)),
            client.attempt("Dot", a=inline(ONE), b=inline(ONE), strategy=name),
            client.attempt("ListBuffers", page_token=name),
            client.attempt("Dot", a=inline(ONE, view([1] * 4_000_000)), b=inline(ONE)),
            client.attempt("Dot", a=inline(ONE, view([1], [1] * 4_000_000)), b=inline(ONE)),
            client.attempt("Reduce", x=inline(ONE), op="REDUCE_OP_SUM", axes=[0] * 4_000_000),
            client.attempt("CreateBuffer", name="x",
                           spec=o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[1] * 4_000_000)),
        ):
            self.assertEqual(outcome.code, "INVALID_ARGUMENT", outcome)
            self.assertTrue(outcome.reason, outcome)
            size = len(outcome.text) + sum(map(len, outcome.metadata.values()))
            self.assertLess(size, 6000, "characters of an error")
        time.sleep(0.3)
        lines = server.log().splitlines()
        self.assertLess(max(map(len, lines)), 4096, "characters of the longest line")
        self.assertGreater(len(lines), 3)

    def fail_for(self, server, seconds):
        """Failing calls from four connections."""
        end = time.monotonic() + seconds

        def work(i):
            client = Client(server.address)
            while time.monotonic() < end:
                client.attempt("GetBuffer", name=f"{i}" * 120, timeout=0.3)
                client.attempt("Dot", a=resident("B" * 100_000), b=resident("C"), timeout=0.3)
            client.close()

        in_threads(4, work)

    def test_a_log_that_nobody_reads_stops_nothing(self):
        server = self.start(pipe=True)
        fcntl.fcntl(server.pipe, fcntl.F_SETPIPE_SZ, 4096)
        client = server.client()
        self.fail_for(server, 3)
        for _ in range(5):
            self.assert_serves(client)
            self.assertTrue(client.info().version)
        self.fail_for(server, 0.5)
        self.assert_serves(server.client())
        self.assertEqual(server.stop(timeout=10), 0, "exit code after SIGTERM, the log still unread")

    def test_a_log_whose_reader_is_gone_kills_nobody(self):
        server = self.start(pipe=True)
        client = server.client()
        server.process.stdout.close()
        server.process.stdout = None
        self.fail_for(server, 0.5)
        self.assertTrue(server.alive(), f"the server ended with {server.process.poll()}")
        self.assert_serves(client)
        self.assertEqual(server.stop(timeout=10), 0)

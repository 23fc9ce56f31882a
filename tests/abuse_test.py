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
import pathlib
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
from outsider import (
    Client,
    Server,
    eventually,
    in_threads,
    inline,
    into,
    outcome_of,
    resident,
    view,
)

ONE = np.ones(1, np.float32)
# Operations may take as long as a test likes.
PATIENT = (
    "--max-operation-seconds",
    "6000",
    "--max-slow-operation-seconds",
    "6000",
    "--scratch-limit",
    "1Gi",
)
# Multiply-adds per second of a slow strategy are 0.5e9 to 2e9, on one core: seconds() of work.
SLOW_STRATEGY = "cpu_naive"
LIST_SERVICES = b"\x3a\x01*"  # ServerReflectionRequest { list_services: "*" }
UPLOAD = "/tessera.v1.BufferService/Upload"


def side_for(seconds):
    """Of a square product that SLOW_STRATEGY holds a worker with for about so long."""
    if o.Program.sanitized():
        seconds /= 10
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
        if crashed:
            self.fail("; ".join(crashed))

    def start(self, *flags, **how):
        server = Server(self.folder, *flags, **how)
        self.servers.append(server)
        return server

    def needs_cpu(self, why="a call that holds a worker for seconds takes the CPU device"):
        if o.Program.device != "cpu":
            self.skipTest(why)

    def needs_exact_memory(self):
        if o.Program.sanitized():
            self.skipTest("a sanitized server takes memory of its own")

    # --- Checks -----------------------------------------------------------------------------------

    def assert_fails(self, outcome, code, reason, *figures, **metadata):
        """The call failed with this code and reason; the keys figures have numbers."""
        self.assertEqual((outcome.code, outcome.reason), (code, reason), outcome)
        self.assertEqual(outcome.domain, "tessera", outcome)
        for key in figures:
            self.assertRegex(
                outcome.metadata.get(key, "(none)"), r"^-?[\d.e+-]+$", f"{key} of {outcome}"
            )
        for key, value in metadata.items():
            self.assertEqual(outcome.metadata.get(key), str(value), f"{key} of {outcome}")

    def assert_ok(self, outcome, what=""):
        self.assertEqual(outcome.code, "OK", f"{what} {outcome}")
        return outcome.answer

    def assert_missing(self, client, name):
        self.assert_fails(client.attempt("GetBuffer", name=name), "NOT_FOUND", "BUFFER_NOT_FOUND")

    def assert_serves(self, client, within=2):
        started = time.monotonic()
        outcome = outcome_of(lambda: client.dot_of_ones(timeout=within * o.Program.patience()))
        self.assert_ok(outcome, f"a Dot of one element, after {time.monotonic() - started:.1f} s:")

    def assert_scratch_is_free(self, client):
        self.assertTrue(
            eventually(lambda: client.device().scratch_used_bytes == 0, 2),
            f"scratch_used_bytes stays {client.device().scratch_used_bytes}",
        )

    def assert_empty(self, client):
        """Nothing is left that counts."""
        self.assertTrue(
            eventually(lambda: client.device().buffer_used_bytes == 0, 2),
            f"buffer_used_bytes stays {client.device().buffer_used_bytes}",
        )
        self.assertEqual(client.names(), [])
        for name in ("buffers", "uploads", "downloads"):
            self.assertTrue(
                eventually(lambda: client.budget(name).used == 0, 2),
                f"budget {name} stays at {client.budget(name).used}",
            )

    def slow_product(self, client, seconds, timeout=60, **more):
        """A product that holds a worker; the client has a buffer "s" of one element for it."""
        n = side_for(seconds)
        a = resident("s", view([n, n], [0, 0]))
        more.setdefault("result", into(f"product{time.monotonic_ns()}"))
        return client.future("Matmul", timeout=timeout, a=a, b=a, strategy=SLOW_STRATEGY, **more)

    def idle_upload(self, client, stop, messages, timeout=60, sent=None):
        """An upload that sends the messages, appends to sent, and is idle until stop is set."""
        sent = [] if sent is None else sent

        def requests():
            for fields in messages:
                yield o.buffers.UploadRequest(**fields)
            sent.append(1)
            stop.wait(timeout)

        return client.b.Upload.future(requests(), timeout=timeout)

    def empty_upload(self, client, stop, name, pause):
        """An upload with data in its first message, and with none in those that follow until stop is set."""

        def requests():
            yield o.buffers.UploadRequest(name=name, data=NEW[:4], spec=o.spec_of(FOUR))
            while not stop.wait(pause):
                yield o.buffers.UploadRequest()

        return client.b.Upload.future(requests(), timeout=60)

    def slow_upload(self, client, messages, pause):
        """An upload with one element a message, and a pause behind each."""
        spec = o.spec_of(np.zeros(messages, np.float32))

        def requests():
            for _ in range(messages):
                yield o.buffers.UploadRequest(name="slow", data=NEW[:4], spec=spec)
                time.sleep(pause)

        return client.b.Upload.future(requests(), timeout=30)

    def hold_worker(self, client, seconds=60, **more):
        """As slow_product, and it has begun."""
        future = self.slow_product(client, seconds, timeout=120, **more)
        self.addCleanup(future.cancel)  # and a call that nobody holds is cancelled at once
        self.assertTrue(
            eventually(lambda: future.done() or client.device().waiting == 0, 5), "it waits"
        )
        time.sleep(0.2)
        self.assertFalse(future.done(), future.done() and outcome_of(future))
        return future


# --- Work and memory ------------------------------------------------------------------------------


class WorkTest(Case):
    def test_an_empty_product_is_not_walked_along(self):
        server = self.start("--workers", "1")
        client = server.client()
        client.put("x", np.ones(16, np.float32))
        huge = 1 << 40
        strategies = [s.name for s in client.call("ListStrategies", operation="matmul").strategies]
        for strategy in ["", *dict.fromkeys(strategies)]:
            for a, b in (([huge, 0], [0, 0]), ([0, 3], [3, huge]), ([huge, 3], [3, 0])):
                outcome = client.attempt(
                    "Matmul",
                    a=resident("x", view(a, [0, 0])),
                    b=resident("x", view(b, [0, 0])),
                    strategy=strategy,
                    timeout=5,
                )
                with self.subTest(strategy=strategy, a=a, b=b):
                    self.assertNotIn(outcome.code, ("DEADLINE_EXCEEDED", "CANCELLED"), outcome)
        self.assert_serves(client)

    def test_strides_of_an_empty_operand_lead_nowhere(self):
        server = self.start()
        client = server.client()
        client.put("x", ONE)
        far, back = (1 << 63) - 1, -(1 << 63)
        strides = ([1 << 62, 1], [1, 1 << 62], [far, far], [back, back], [far, back])
        strategies = {s.name for s in client.call("ListStrategies", operation="matmul").strategies}
        for strategy in ["", *sorted(strategies)]:
            for m, n in ((3, 4), (130, 130), (1, 4), (4, 1)):
                for i, s in enumerate(strides):
                    ta, tb = bool(i & 1), bool(i & 2)
                    outcome = client.attempt(
                        "Matmul",
                        a=resident("x", view([0, m] if ta else [m, 0], s)),
                        b=resident("x", view([n, 0] if tb else [0, n], s)),
                        transpose_a=ta,
                        transpose_b=tb,
                        strategy=strategy,
                    )
                    with self.subTest(strategy=strategy, m=m, n=n, strides=s):
                        if outcome.reason == "STRATEGY_UNSUPPORTED":
                            continue
                        self.assertTrue(outcome.ok, outcome)
                        self.assertEqual(outcome.answer.tensor.data, bytes(4 * m * n))
        for s in strides:
            nothing = resident("x", view([0, 1 << 60], s))
            with self.subTest(strides=s):
                for outcome in (
                    client.attempt("Dot", a=nothing, b=nothing),
                    client.attempt("Reduce", x=nothing, op="REDUCE_OP_SUM"),
                    client.attempt("Reduce", x=nothing, op="REDUCE_OP_SUM", axes=[1]),
                    client.attempt("Add", a=nothing, b=nothing),
                    client.attempt(
                        "CopyBuffer", source="x", name="x", view=nothing.view, replace=True
                    ),
                ):
                    self.assertTrue(outcome.ok, outcome)
            client.put("x", ONE, replace=True)
        self.assert_serves(client)
        self.assertEqual(server.stop(), 0)

    def assert_right_or_refused(self, outcome, value):
        if outcome.ok:
            self.assertEqual(outcome.answer.value.real, value)
            return
        self.assertIn(
            (outcome.code, outcome.reason),
            {
                ("RESOURCE_EXHAUSTED", "SCRATCH_EXHAUSTED"),
                ("FAILED_PRECONDITION", "OPERATION_TOO_LONG"),
            },
            outcome,
        )
        keys = (
            ("requested", "free", "total")
            if outcome.reason == "SCRATCH_EXHAUSTED"
            else ("estimate_seconds", "limit_seconds")
        )
        for key in keys:
            self.assertIn(key, outcome.metadata, outcome)
        # The call alone needs too much: to repeat it is of no use.
        self.assertIsNone(outcome.retry_s, outcome)

    def test_a_small_request_takes_little_memory(self):
        self.needs_exact_memory()
        server = self.start("--memory-limit", "16Mi", "--scratch-limit", "16Mi")
        client = server.client()
        client.put("s", ONE)
        n = 300_000_000
        half = inline(np.ones(1), view([1 << 27], [0]))
        wide = resident("s", view([n], [0]))
        # With strides that no trick reads as one element.
        client.put("two", np.ones(2, np.float32))
        mixed = resident("two", view([n // 2, 2], [0, 1]))
        before = server.peak_rss()
        outcomes = [
            (client.attempt("Dot", a=wide, b=wide, timeout=15), n),
            (client.attempt("Reduce", x=wide, op="REDUCE_OP_SUM", timeout=15), n),
            (client.attempt("Dot", a=half, b=half, timeout=15), 1 << 27),
            (client.attempt("Dot", a=mixed, b=mixed, timeout=15), n),
        ]
        growth = server.peak_rss() - before
        self.assertLess(growth, 64 * o.MI, f"peak RSS grew by {growth / o.MI:.0f} MiB")
        for outcome, value in outcomes:
            self.assert_right_or_refused(outcome, float(value))
        self.assert_scratch_is_free(client)
        self.assertTrue(
            eventually(lambda: server.rss() - before < 40 * o.MI, 2),
            f"an idle server keeps {(server.rss() - before) / o.MI:.0f} MiB",
        )

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
        for fields in (dict(a=across, b=across, strategy="guess"), dict(a=across, b=inline(ONE))):
            self.assertFalse(client.attempt("Dot", **fields).ok)
            self.assert_scratch_is_free(client)

    def test_a_result_larger_than_scratch_is_refused_with_figures(self):
        server = self.start("--scratch-limit", "1Mi")
        client = server.client()
        wide = inline(ONE, view([700_000], [0]))
        outcome = client.attempt("Add", a=wide, b=wide)
        self.assert_fails(
            outcome, "RESOURCE_EXHAUSTED", "SCRATCH_EXHAUSTED", "requested", "free", total=o.MI
        )
        self.assertIsNone(outcome.retry_s, outcome)
        self.assertGreater(int(outcome.metadata["requested"]), o.MI)

    def test_operations_of_hours_are_refused(self):
        self.needs_cpu()
        client = self.start("--scratch-limit", "2Gi").client()
        client.put("s", ONE)
        a = resident("s", view([12000, 12000], [0, 0]))
        calls = [
            client.future("Matmul", timeout=3, a=a, b=a, strategy=SLOW_STRATEGY, result=into(f"r{i}"))
            for i in range(8)
        ]
        self.assert_serves(client, within=2)
        for call in calls:
            outcome = outcome_of(call)
            self.assert_fails(
                outcome,
                "FAILED_PRECONDITION",
                "OPERATION_TOO_LONG",
                "estimate_seconds",
                "limit_seconds",
            )
            self.assertGreater(
                float(outcome.metadata["estimate_seconds"]),
                float(outcome.metadata["limit_seconds"]),
                outcome,
            )
        limits = client.info().limits
        self.assertGreater(limits.max_operation.seconds, 0)
        self.assertLessEqual(
            limits.max_slow_operation.ToMilliseconds(), limits.max_operation.ToMilliseconds()
        )
        self.assertEqual(client.names(), ["s"])

    def test_the_row_that_runs_by_default_may_take_longer_than_a_lesson(self):
        """A product of a few seconds: refused by the slow row's limit, accepted otherwise."""
        self.needs_cpu()
        client = self.start(
            "--max-slow-operation-seconds", "0.05", "--max-operation-seconds", "60"
        ).client()
        client.put("s", ONE)
        a = resident("s", view([1000, 1000], [0, 0]))
        outcome = client.attempt("Matmul", a=a, b=a, strategy=SLOW_STRATEGY)
        self.assert_fails(
            outcome,
            "FAILED_PRECONDITION",
            "OPERATION_TOO_LONG",
            "estimate_seconds",
            "limit_seconds",
        )
        self.assertEqual(float(outcome.metadata["limit_seconds"]), 0.05)
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
            "4 s after all eight callers had left no Dot of one element is answered",
        )
        self.assertLess(time.monotonic() - started, 3 * o.Program.patience())
        self.assert_scratch_is_free(client)
        self.assertEqual(client.names(), ["s"])
        started = time.monotonic()
        self.assertEqual(server.stop(timeout=15), 0, "exit code after SIGTERM")
        self.assertLess(time.monotonic() - started, 5 * o.Program.patience())

    def test_an_idle_server_leaves_the_processor_alone(self):
        server = self.start()
        client = server.client()
        for _ in range(200):  # workers and the device's last kernel have something to wait for
            self.assertEqual(client.dot_of_ones(), 1)
        time.sleep(0.5)
        before = server.cpu_seconds()
        time.sleep(2)
        # A thread that polls takes all of a core.
        self.assertLess(server.cpu_seconds() - before, 0.2)

    def test_places_of_callers_who_have_left_are_free(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--workers", "1", "--queue", "4")
        client = server.client()
        client.put("s", ONE)
        self.assertEqual(client.info().limits.queue_length, 4)
        self.hold_worker(client)
        x = inline(ONE)
        gone = [client.future("Dot", a=x, b=x, timeout=0.5) for _ in range(4)]
        self.assertTrue(
            eventually(lambda: client.device().waiting == 4, 0.4),
            f"waiting is {client.device().waiting}",
        )
        full = client.attempt("Dot", a=x, b=x, timeout=0.3)
        self.assert_fails(full, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
        self.assertIsNotNone(full.retry_s, "QUEUE_FULL without a RetryInfo")
        for call in gone:
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        self.assertTrue(
            eventually(lambda: client.device().waiting == 0, 1),
            f"waiting stays {client.device().waiting} after all callers have left",
        )
        again = [client.future("Dot", a=x, b=x, timeout=0.5) for _ in range(4)]
        for call in again:
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        cancelled = [client.future("Dot", a=x, b=x, timeout=20) for _ in range(4)]
        time.sleep(0.2)
        for call in cancelled:
            call.cancel()
        self.assertTrue(
            eventually(lambda: client.device().waiting == 0, 1),
            f"waiting stays {client.device().waiting} after all were cancelled",
        )

    def test_waiting_requests_are_bounded_in_bytes(self):
        self.needs_exact_memory()
        self.needs_cpu()
        server = self.start(*PATIENT, "--workers", "1", "--queue", "1000", "--host-memory", "32Mi")
        client = server.client()
        client.put("s", ONE)
        # The allocator's pools and the connections are warm.
        big = inline(np.ones(256 * 1024, np.float32))
        for _ in range(3):
            client.call("Dot", a=big, b=big)
        self.hold_worker(client)
        before = server.rss()
        calls = [client.future("Dot", a=big, b=big, timeout=8) for _ in range(60)]
        self.assertTrue(
            eventually(lambda: sum(call.done() for call in calls) > 30, 6), "calls are refused"
        )
        self.assertTrue(
            eventually(lambda: server.rss() - before < 110 * o.MI, 4),
            f"60 queued calls of 2 MiB take {(server.rss() - before) / o.MI:.0f} MiB",
        )
        self.assertFalse(all(call.done() for call in calls), "none waits by now")
        outcomes = [outcome_of(call) for call in calls]
        refused = [outcome for outcome in outcomes if outcome.code == "RESOURCE_EXHAUSTED"]
        self.assertGreater(len(refused), 30, outcomes[:3])
        self.assertGreater(len(outcomes) - len(refused), 3, "nothing waits")
        # Of requests that have not arrived completely, gRPC itself gives some up where they come faster than
        # they are read.
        ours = [outcome for outcome in refused if "RST_STREAM with error code 11" not in outcome.text]
        self.assertGreater(len(ours), len(refused) // 2, outcomes)
        for outcome in ours:
            self.assert_fails(
                outcome,
                "RESOURCE_EXHAUSTED",
                "HOST_MEMORY_EXHAUSTED",
                "requested",
                "free",
                total=32 * o.MI,
            )
            self.assertIsNotNone(outcome.retry_s, outcome)
        self.assertTrue(
            eventually(lambda: server.rss() - before < 80 * o.MI, 6),
            f"callers have left, {(server.rss() - before) / o.MI:.0f} MiB stay",
        )
        self.assertEqual(client.budget("host_memory").limit, 32 * o.MI)
        self.assertTrue(
            eventually(lambda: client.budget("host_memory").used < o.MI, 2),
            f"host_memory used: {client.budget('host_memory').used}",
        )

    def test_the_bytes_of_a_program_count_until_it_is_parsed(self):
        self.needs_cpu()
        client = self.start(*PATIENT, "--workers", "1").client()
        client.put("s", ONE)
        self.hold_worker(client)
        before = client.budget("host_memory").used
        x = inline(np.ones(3 * o.MI // 4, np.float32))
        step = o.compute.Step(reduce=dict(x=x, op="REDUCE_OP_SUM"))
        call = client.future("Execute", steps=[step])
        self.assertTrue(eventually(lambda: client.device().waiting == 1, 5), "it does not wait")
        held = client.budget("host_memory").used - before
        self.assertTrue(3 * o.MI < held < 4 * o.MI, f"3 MiB count as {held / o.MI:.1f} MiB")
        call.cancel()
        self.assertTrue(eventually(lambda: client.budget("host_memory").used <= before, 5))

    def test_a_small_request_of_many_parts_counts_as_what_it_takes(self):
        self.needs_cpu()
        client = self.start(*PATIENT, "--workers", "1").client()
        client.put("s", ONE)
        self.hold_worker(client)
        before = client.budget("host_memory").used
        s = resident("s")
        dot = o.compute.DotRequest(a=s, b=s).SerializeToString()
        groups = b"\x7b\x7c" * 150  # of a field that no message has
        call = client.channel.unary_unary("/tessera.v1.ComputeService/Dot").future(dot + groups)
        self.addCleanup(call.cancel)
        self.assertTrue(eventually(lambda: client.device().waiting == 1, 5), "it does not wait")
        held = client.budget("host_memory").used - before
        self.assertGreater(held, 150 * 50, f"{len(dot + groups)} bytes")

    def test_what_host_memory_cannot_hold_is_refused_for_good(self):
        total = 16 * o.MI
        client = self.start("--host-memory", str(total)).client()
        wide = inline(ONE, view([3 * o.MI // 4], [0]))
        add = o.compute.AddRequest(a=wide, b=wide)  # 3 MiB of a result
        program = o.compute.ExecuteRequest(steps=[o.compute.Step(add=add)])

        def attempt(rpc, message, groups):
            """With so many fields that no message has, each of which takes dozens of bytes in memory."""
            message = message.SerializeToString() + b"\x7b\x7c" * groups
            call = client.channel.unary_unary("/tessera.v1.ComputeService/" + rpc)
            return outcome_of(lambda: call(message, timeout=20))

        def assert_is_refused(outcome):
            self.assert_fails(
                outcome, "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED", "free", total=total
            )
            requested = int(outcome.metadata["requested"])
            self.assertGreater(requested, total, outcome)
            self.assertIn("than the server has", outcome.text)
            self.assertIn(f"requested: {requested}, total: {total}", outcome.text)
            self.assertIsNone(outcome.retry_s, outcome)
            return requested

        for rpc, message in (("Add", add), ("Execute", program)):
            with self.subTest(rpc=rpc):
                many = 1 << 19
                size = assert_is_refused(attempt(rpc, message, many)) / many
                # The request alone finds room, and its answer none beside it.
                requested = assert_is_refused(attempt(rpc, message, int((total - 2 * o.MI) / size)))
                self.assertLess(requested, total + 12 * o.MI)
                # With half of that both do.
                self.assert_ok(attempt(rpc, message, int(6 * o.MI / size)))
        self.assertTrue(eventually(lambda: client.budget("host_memory").used == 0, 5))

    def test_results_of_callers_who_gave_up_leave_nothing(self):
        self.needs_cpu()
        client = self.start(*PATIENT).client()
        client.put("s", ONE)
        kept = client.put("kept", ONE)
        for target in (into("gone"), into("kept", replace=True)):
            call = self.slow_product(client, 3, timeout=0.4, result=target)
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
        time.sleep(5)
        self.assertEqual(client.names(), ["kept", "s"])
        self.assertEqual(client.call("GetBuffer", name="kept").buffer.version, kept.version)
        self.assertEqual(client.download("kept"), ONE.tobytes())

    def test_deleting_the_name_of_a_result_on_its_way_does_no_harm(self):
        self.needs_cpu()
        client = self.start(*PATIENT).client()
        client.put("s", ONE)
        call = self.hold_worker(client, 3, result=into("c"))
        self.assertIn(client.attempt("DeleteBuffer", name="c").code, ("OK", "NOT_FOUND"))
        self.assert_ok(outcome_of(call))
        self.assertEqual(client.names(), ["c", "s"])

    def test_a_request_is_checked_before_memory_is_taken(self):
        client = self.start("--memory-limit", "1Mi").client()
        wide = inline(ONE, view([1024, 1024], [0, 0]))
        self.assert_fails(
            client.attempt("Matmul", a=wide, b=wide, strategy="guess", result=into("c")),
            "INVALID_ARGUMENT",
            "UNKNOWN_STRATEGY",
        )
        self.assert_fails(
            client.attempt("Matmul", a=wide, b=wide, result=into("c")),
            "RESOURCE_EXHAUSTED",
            "QUOTA_EXCEEDED",
            "free",
            total=o.MI,
        )

    def test_a_worker_that_is_stuck_shows_in_the_health_service(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--watchdog", "1s")
        client = server.client()
        client.put("s", ONE)
        self.assertEqual(client.health(), 1)
        call = self.hold_worker(client)
        self.assertTrue(
            eventually(lambda: client.health() == 2, 4, 0.1),
            "a worker is busy for 4 s, and health says SERVING",
        )
        self.assertFalse(call.done())
        call.cancel()
        self.assertTrue(
            eventually(lambda: client.health() == 1, 4, 0.1),
            "the worker is free again, and health says NOT_SERVING",
        )
        self.assert_serves(client)


    def test_a_process_that_was_stopped_has_lost_no_device(self):
        """The clock goes on while it is stopped in mid-operation, for longer than a hang may last."""
        self.needs_cpu()
        limits = ("--max-operation-seconds", "1.5", "--max-slow-operation-seconds", "1.5")
        server = self.start("--watchdog", "500ms", "--workers", "1", *limits)
        client = server.client()
        # Each takes for longer than the server needs to look at it once it goes on.
        client.put("s", ONE)
        a = resident("s", view([2048, 2048], [0, 0]))
        calls = [
            client.future("Matmul", a=a, b=a, result=into(f"r{i}"), timeout=60) for i in range(8)
        ]
        time.sleep(0.2)
        server.signal(signal.SIGSTOP)
        time.sleep(8)
        server.signal(signal.SIGCONT)
        for call in calls:
            call.result(60)
        self.assertTrue(eventually(lambda: client.health() == 1, 10, 0.1))
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
        self.assertLessEqual(
            device.buffer_limit_bytes,
            device.memory_total_bytes,
            "the limit is more than the memory of the device",
        )
        self.assertRegex(server.log(), r"warn\S* .*memory", "clamped without a warning")

    def test_an_allocation_that_fails_is_an_answer(self):
        # The address space ends before the machine's memory does.
        self.needs_cpu("RLIMIT_AS does not bound the memory of a GPU")
        self.needs_exact_memory()
        server = self.start("--memory-limit", "8Gi", prefix=("prlimit", "--as=6442450944"))
        client = server.client()
        big = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[7 << 28])
        outcome = client.attempt("CreateBuffer", name="big", spec=big)
        self.assertEqual(outcome.code, "RESOURCE_EXHAUSTED", outcome)
        self.assertIn(
            outcome.reason, ("HOST_MEMORY_EXHAUSTED", "GPU_MEMORY_EXHAUSTED", "QUOTA_EXCEEDED")
        )
        self.assertEqual(outcome.metadata.get("requested"), str(7 << 30), outcome)
        self.assert_serves(client)
        self.assert_empty(client)

    def test_buffers_are_counted(self):
        client = self.start("--max-buffers", "10").client()
        nothing = np.zeros(0, np.float32)
        for i in range(4):
            client.create(f"draft{i}", nothing)
            client.put(f"ready{i}", nothing)
        client.put("one", ONE)
        client.call("CopyBuffer", source="one", name="copy")
        in_use = client.budget("buffers")
        x = inline(np.ones((2, 2), np.float32))
        for what, outcome in {
            "CreateBuffer": outcome_of(lambda: client.create("more", nothing)),
            "Upload": outcome_of(lambda: client.put("more", nothing)),
            "CopyBuffer": client.attempt("CopyBuffer", source="one", name="more"),
            "Matmul": client.attempt("Matmul", a=x, b=x, result=into("more")),
            "Reduce": client.attempt(
                "Reduce", x=x, op="REDUCE_OP_SUM", axes=[0], result=into("more")
            ),
        }.items():
            with self.subTest(what):
                self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "TOO_MANY_BUFFERS", limit=10)
        self.assertEqual((in_use.used, in_use.limit), (10, 10))
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
        self.assert_fails(
            outcome, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "requested", "free", total=64 * 1024
        )
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
        self.assert_ok(
            client.try_upload(
                dict(name="x", offset=i, data=b"\1" * min(step, size - i))
                for i in range(0, size, step)
            )
        )
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
        self.assertEqual(
            [draft.version for draft in client.call("GetBuffer", name="y").drafts], made[4:]
        )

    def test_a_draft_that_nobody_writes_to_goes(self):
        client = self.start("--upload-timeout", "1s").client()
        client.create("x", ONE, ttl={"seconds": 600})
        self.assertTrue(eventually(lambda: client.names() == [], 4), "the draft stays")
        self.assert_empty(client)


# --- The log --------------------------------------------------------------------------------------

LOG_LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S* (trace|debug|info|warn|warning|error|critical) "
)
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
    "x" * 127 + "\u00e4" * 700,  # whose characters errors must not cut in two
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

    def test_libraries_write_no_lines_of_their_own(self):
        # libprotobuf writes about text that is no UTF-8 to standard error, unless told otherwise.
        server = self.start("--log-level", "debug")
        client = server.client()
        get = "/tessera.v1.BufferService/GetBuffer"
        upload = "/tessera.v1.BufferService/Upload"
        strategies = "/tessera.v1.ComputeService/ListStrategies"
        body = b"\x0a\x01\xff"
        for outcome in (
            outcome_of(lambda: client.channel.unary_unary(get)(body, timeout=5)),
            outcome_of(lambda: client.channel.unary_unary(strategies)(body, timeout=5)),
            outcome_of(lambda: client.channel.stream_unary(upload)(iter([body]), timeout=5)),
        ):
            self.assertFalse(outcome.ok, outcome)
        self.assertEqual(server.stop(), 0)
        for line in server.log().split("\n")[:-1]:
            self.assertRegex(line, LOG_LINE)

    def test_names_forge_no_lines(self):
        # The log takes a few lines a second, so a server for each text.
        for text in HOSTILE_TEXTS:
            server = self.start("--log-level", "debug")
            for outcome in self.hostile_calls(server.client(), text):
                self.assertNotIn(outcome.code, ("OK", "INTERNAL", "UNKNOWN"), outcome)
            self.assertEqual(server.stop(), 0)
            log = server.log()
            self.assertNotRegex(
                log,
                "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]",
                f"raw control characters of {text!r}",
            )
            for line in log.split("\n")[:-1]:
                self.assertRegex(line, LOG_LINE)
                self.assertFalse(line.startswith(FORGED), line)
            self.assertGreater(len(log.split("\n")[:-1]), 4, "the refused calls have no lines")

    def test_json_lines_stay_json(self):
        for text in HOSTILE_TEXTS:
            server = self.start("--log-format", "json")
            self.hostile_calls(server.client(), text)
            self.assertEqual(server.stop(), 0)
            log = server.log()
            self.assertNotRegex(
                log,
                "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]",
                f"raw control characters of {text!r}",
            )
            for line in log.split("\n")[:-1]:
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
            client.attempt(
                "CreateBuffer",
                name="x",
                spec=o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[1] * 4_000_000),
            ),
        ):
            self.assertIn(outcome.code, ("INVALID_ARGUMENT", "NOT_FOUND"), outcome)
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
                no_utf8 = client.channel.unary_unary("/tessera.v1.BufferService/GetBuffer")
                outcome_of(lambda call=no_utf8: call(b"\x0a\x01\xff", timeout=0.3))
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
        self.assertEqual(
            server.stop(timeout=10), 0, "exit code after SIGTERM, the log still unread"
        )

    def test_a_log_whose_reader_is_gone_kills_nobody(self):
        server = self.start(pipe=True)
        client = server.client()
        server.process.stdout.close()
        server.process.stdout = None
        self.fail_for(server, 0.5)
        self.assertTrue(server.alive(), f"the server ended with {server.process.poll()}")
        self.assert_serves(client)
        self.assertEqual(server.stop(timeout=10), 0)


# --- Drafts, versions, ttl ------------------------------------------------------------------------

OLD, NEW, OTHER = b"OLD!" * 4, b"NEW!" * 4, b"oth." * 4
FOUR = np.zeros(4, np.float32)  # what these bytes are the data of


class DraftTest(Case):
    def put_bytes(self, client, name, data, **spec):
        return client.upload([dict(name=name, spec=o.spec_of(FOUR, **spec), data=data)]).buffer

    def test_sealing_a_draft_that_is_gone(self):
        client = self.start("--upload-timeout", "1s").client()
        old = self.put_bytes(client, "x", OLD)
        draft = client.create("x", FOUR, replace=True)
        client.upload([dict(name="x", offset=0, data=NEW, version=draft.version)])
        self.assertTrue(
            eventually(
                lambda: not client.call("GetBuffer", name="x").drafts
                and client.device().buffer_used_bytes
                and client.budget("buffers").used == 1,
                5,
            ),
            "the idle draft stays",
        )
        self.assert_fails(client.attempt("SealBuffer", name="x"), "NOT_FOUND", "BUFFER_NOT_FOUND")
        outcome = client.attempt("SealBuffer", name="x", version=draft.version)
        self.assertIn(outcome.reason, ("BUFFER_NOT_FOUND", "VERSION_MISMATCH"), outcome)
        outcome = client.try_upload([dict(name="x", offset=0, data=NEW, version=draft.version)])
        self.assertFalse(outcome.ok, "data went to a draft that is gone")
        self.assertEqual(client.call("GetBuffer", name="x").buffer.version, old.version)
        self.assertEqual(client.download("x"), OLD)

    def test_sealing_again_is_the_same(self):
        client = self.start().client()
        version = client.create("x", FOUR).version
        client.upload([dict(name="x", data=NEW)])
        sealed = client.call("SealBuffer", name="x", version=version).buffer
        self.assertEqual((sealed.version, sealed.state), (version, o.buffers.Buffer.STATE_READY))
        again = client.call("SealBuffer", name="x", version=version).buffer
        self.assertEqual(again, sealed)
        # A checksum is checked then, too: this buffer's bytes came without any.
        self.assert_fails(
            client.attempt("SealBuffer", name="x", version=version, crc32c=1),
            "FAILED_PRECONDITION",
            "CHECKSUM_UNKNOWN",
        )
        checked = client.create("y", FOUR).version
        client.upload([dict(name="y", data=NEW, crc32c=o.crc32c(NEW))])
        client.call("SealBuffer", name="y", version=checked)
        client.call("SealBuffer", name="y", version=checked, crc32c=o.crc32c(NEW))
        self.assert_fails(
            client.attempt("SealBuffer", name="y", version=checked, crc32c=1),
            "DATA_LOSS",
            "BAD_CHECKSUM",
        )
        # Also while somebody is about to replace it.
        client.create("x", FOUR, replace=True)
        self.assertEqual(client.call("SealBuffer", name="x", version=version).buffer, sealed)

    def test_wrong_versions_change_nothing(self):
        client = self.start().client()
        ready = self.put_bytes(client, "x", OLD)
        draft = client.create("y", FOUR)
        client.upload([dict(name="y", data=NEW)])
        wrong = draft.version + 1000
        for what, outcome, actual in (
            ("Seal", client.attempt("SealBuffer", name="y", version=wrong), draft),
            ("Upload", client.try_upload([dict(name="y", data=OTHER, version=wrong)]), draft),
            ("Get", client.attempt("GetBuffer", name="x", version=wrong), ready),
            ("Update", client.attempt("UpdateBuffer", name="x", version=wrong), ready),
            ("Delete", client.attempt("DeleteBuffer", name="x", version=wrong), ready),
            ("Download", outcome_of(lambda: client.download("x", version=wrong)), ready),
            (
                "Copy",
                client.attempt("CopyBuffer", source="x", name="z", source_version=wrong),
                ready,
            ),
            ("Dot", client.attempt("Dot", a=resident("x", version=wrong), b=resident("x")), ready),
        ):
            with self.subTest(what):
                self.assert_fails(
                    outcome,
                    "FAILED_PRECONDITION",
                    "VERSION_MISMATCH",
                    expected=wrong,
                    actual=actual.version,
                )
        self.assertEqual(client.download("x"), OLD)
        self.assertEqual(
            client.call("SealBuffer", name="y", version=draft.version).buffer.version, draft.version
        )
        self.assertEqual(client.download("y"), NEW)
        # And the right ones are taken.
        client.call("GetBuffer", name="x", version=ready.version)
        client.call("UpdateBuffer", name="x", version=ready.version)
        self.assertEqual(client.download("x", version=ready.version), OLD)
        client.call("CopyBuffer", source="x", name="z", source_version=ready.version)
        client.call("DeleteBuffer", name="x", version=ready.version)
        self.assert_missing(client, "x")

    def test_a_stale_writer_does_not_reach_the_next_draft(self):
        client = self.start().client()
        first = client.create("w", FOUR)
        client.upload([dict(name="w", offset=0, data=OLD[:8], version=first.version)])
        client.call("DeleteBuffer", name="w")
        second = client.create("w", FOUR)
        client.upload([dict(name="w", offset=0, data=NEW[:8], version=second.version)])
        outcome = client.try_upload([dict(name="w", offset=8, data=OLD[8:], version=first.version)])
        self.assertIn(
            (outcome.code, outcome.reason),
            {("FAILED_PRECONDITION", "VERSION_MISMATCH"), ("NOT_FOUND", "BUFFER_NOT_FOUND")},
            outcome,
        )
        outcome = client.attempt("SealBuffer", name="w", version=second.version)
        self.assert_fails(outcome, "FAILED_PRECONDITION", "BUFFER_NOT_READY")
        self.assertIn("8", outcome.metadata["missing"])
        client.upload([dict(name="w", offset=8, data=NEW[8:], version=second.version)])
        client.call("SealBuffer", name="w", version=second.version)
        self.assertEqual(client.download("w"), NEW)

    def test_two_drafts_of_a_name(self):
        for newest_first in (False, True):
            with self.subTest(newest_first=newest_first):
                client = self.start().client()
                live = self.put_bytes(client, "x", OLD)
                one = client.create("x", FOUR, replace=True)
                two = client.create("x", FOUR, replace=True)
                self.assertLess(live.version, one.version)
                self.assertLess(one.version, two.version)
                outcome = client.try_upload([dict(name="x", data=NEW)])
                self.assert_fails(outcome, "FAILED_PRECONDITION", "VERSION_REQUIRED")
                for version in (one.version, two.version):
                    self.assertIn(str(version), outcome.metadata["versions"])
                self.assert_fails(
                    client.attempt("SealBuffer", name="x"),
                    "FAILED_PRECONDITION",
                    "VERSION_REQUIRED",
                )
                client.upload([dict(name="x", data=NEW, version=one.version)])
                client.upload([dict(name="x", data=OTHER[:4], version=two.version)])
                answer = client.call("GetBuffer", name="x")
                self.assertEqual(
                    (answer.buffer.version, answer.buffer.state),
                    (live.version, o.buffers.Buffer.STATE_READY),
                )
                self.assertEqual(
                    [(d.version, d.committed_bytes) for d in answer.drafts],
                    [(one.version, 16), (two.version, 4)],
                )
                seen = client.call("GetBuffer", name="x", version=two.version)
                self.assertEqual(seen.buffer.state, o.buffers.Buffer.STATE_WRITING)
                self.assertEqual([(gap.begin, gap.end) for gap in seen.missing], [(4, 16)])
                client.upload([dict(name="x", offset=4, data=OTHER[4:], version=two.version)])
                order = [(two, OTHER), (one, NEW)] if newest_first else [(one, NEW), (two, OTHER)]
                newest = live.version
                for draft, data in order:
                    sealed = client.call("SealBuffer", name="x", version=draft.version).buffer
                    self.assertGreater(sealed.version, newest)
                    newest = sealed.version
                    self.assertEqual(client.call("GetBuffer", name="x").buffer.version, newest)
                    self.assertEqual(client.download("x"), data)
                if not newest_first:
                    self.assertEqual(newest, two.version)
                self.assertEqual(client.budget("buffers").used, 1)

    def test_a_draft_is_deleted_without_the_live_buffer_and_the_other_way_round(self):
        client = self.start().client()
        live = self.put_bytes(client, "x", OLD)
        draft = client.create("x", FOUR, replace=True)
        client.call("DeleteBuffer", name="x", version=draft.version)
        self.assertEqual(client.download("x"), OLD)
        self.assertEqual(len(client.call("GetBuffer", name="x").drafts), 0)
        draft = client.create("x", FOUR, replace=True)
        client.call("DeleteBuffer", name="x", version=live.version)
        self.assertEqual(client.call("GetBuffer", name="x").buffer.version, draft.version)
        client.upload([dict(name="x", data=NEW)])
        client.call("SealBuffer", name="x")
        self.assertEqual(client.download("x"), NEW)
        client.create("x", FOUR, replace=True)
        client.call("DeleteBuffer", name="x")
        self.assert_empty(client)

    def test_a_name_is_claimed_once_without_replace(self):
        client = self.start().client()
        client.create("x", FOUR)
        self.assert_fails(
            outcome_of(lambda: client.create("x", FOUR)), "ALREADY_EXISTS", "BUFFER_EXISTS"
        )
        self.put_bytes(client, "y", OLD)
        self.assert_fails(
            outcome_of(lambda: client.create("y", FOUR)), "ALREADY_EXISTS", "BUFFER_EXISTS"
        )
        self.assert_fails(
            outcome_of(lambda: self.put_bytes(client, "y", NEW)), "ALREADY_EXISTS", "BUFFER_EXISTS"
        )
        self.assertEqual(client.download("y"), OLD)

    def test_a_broken_replacement_does_not_lock_the_name(self):
        """CreateBuffer(replace), then the client is gone: others replace and see the draft."""
        client = self.start("--upload-timeout", "0").client()
        self.put_bytes(client, "x", OLD)
        draft = client.create("x", FOUR, replace=True)
        self.put_bytes(client, "x", NEW, replace=True)
        self.assertEqual(client.download("x"), NEW)
        self.assertEqual(
            [d.version for d in client.call("GetBuffer", name="x").drafts], [draft.version]
        )

    def test_versions_grow_over_restarts(self):
        first = self.start()
        client = first.client()
        versions = [self.put_bytes(client, "x", OLD, replace=True).version for _ in range(20)]
        self.assertEqual(sorted(set(versions)), versions)
        self.assertEqual(first.stop(), 0)
        again = self.put_bytes(self.start().client(), "x", OLD).version
        self.assertGreater(again, versions[-1], "a version of the server before this one")

    def test_drafts_and_their_versions_in_the_list(self):
        client = self.start().client()
        client.create("b", FOUR, replace=True)
        newest = client.create("b", FOUR, replace=True)
        ready = self.put_bytes(client, "a", OLD)
        client.create("a", FOUR, replace=True)
        listed = client.call("ListBuffers").buffers
        self.assertEqual(
            [(x.name, x.version) for x in listed], [("a", ready.version), ("b", newest.version)]
        )


class TtlTest(Case):
    def test_ttl_counts_from_ready(self):
        client = self.start().client()
        client.put("x", FOUR)
        ttl = {"seconds": 1, "nanos": 200_000_000}
        draft = client.create("x", FOUR, replace=True, ttl=ttl)
        time.sleep(1.5)
        client.upload([dict(name="x", data=NEW, version=draft.version)])
        sealed = client.call("SealBuffer", name="x", version=draft.version).buffer
        self.assertEqual(client.download("x"), NEW)
        left = sealed.expire_time.seconds + sealed.expire_time.nanos / 1e9 - time.time()
        self.assertTrue(0 < left < 1.3, f"{left} s left of a ttl of 1.2 s")
        self.assertTrue(
            eventually(
                lambda: client.attempt("GetBuffer", name="x").reason == "BUFFER_NOT_FOUND", 4
            )
        )
        self.assert_empty(client)

    def test_uploads_slower_than_their_ttl(self):
        for flags, spec in (((), dict(ttl={"seconds": 1})), (("--default-ttl", "1s"), {})):
            with self.subTest(flags=flags):
                client = self.start(*flags).client()
                client.put("x", FOUR, ttl={"seconds": 600})

                def slow(spec=spec):
                    yield dict(name="x", spec=o.spec_of(FOUR, replace=True, **spec), data=NEW[:4])
                    time.sleep(1.6)
                    yield dict(data=NEW[4:])

                client.upload(slow())
                self.assertEqual(client.download("x"), NEW)
                self.assertTrue(
                    eventually(lambda: client.attempt("GetBuffer", name="x").code == "NOT_FOUND", 4)
                )

    def test_ttl_of_a_draft_is_renewed_before_it_is_ready(self):
        client = self.start().client()
        client.create("x", FOUR, ttl={"seconds": 1})
        client.call("UpdateBuffer", name="x", ttl={"seconds": 3600})
        client.upload([dict(name="x", data=NEW)])
        buffer = client.call("SealBuffer", name="x").buffer
        self.assertAlmostEqual(buffer.expire_time.seconds, time.time() + 3600, delta=30)

    def test_each_buffer_goes_at_its_own_time(self):
        client = self.start().client()
        client.put("a", FOUR, ttl={"nanos": 500_000_000})
        client.put("b", FOUR, ttl={"seconds": 3})
        client.put("c", FOUR, ttl={"seconds": 600})
        client.call("UpdateBuffer", name="c", ttl={"seconds": 1, "nanos": 500_000_000})
        due = {
            x.name: x.expire_time.ToNanoseconds() / 1e9 for x in client.call("ListBuffers").buffers
        }
        last = {}
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up:
            asked = time.time()
            names = client.names()
            last.update({name: asked for name in names})
            if not names:
                break
            time.sleep(0.01)
        self.assertEqual(client.names(), [])
        for name in "abc":
            self.assertLess(last.get(name, 0) - due.get(name, 0), 2, f"{name} was there too long")
        self.assertLess(last["a"], last["c"])
        self.assertLess(last["c"], last["b"])
        self.assert_empty(client)

    def test_ttls_out_of_range(self):
        client = self.start().client()
        client.put("x", FOUR)
        ages = {"seconds": 315_576_000_000}
        one = inline(ONE)

        def every_call(ttl, i):
            return {
                "CreateBuffer": outcome_of(lambda: client.create(f"a{i}", FOUR, ttl=ttl)),
                "Upload": outcome_of(lambda: client.put(f"b{i}", FOUR, ttl=ttl)),
                "UpdateBuffer": client.attempt("UpdateBuffer", name="x", ttl=ttl),
                "CopyBuffer": client.attempt("CopyBuffer", source="x", name=f"c{i}", ttl=ttl),
                "Add": client.attempt("Add", a=one, b=one, result=into(f"d{i}", ttl=ttl)),
            }

        for rpc, outcome in every_call(ages, 0).items():
            with self.subTest(rpc):
                if not outcome.ok:
                    self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_TTL")
        json_format.MessageToJson(client.call("ListBuffers"))
        bad = (
            {"seconds": -1},
            {"nanos": -1},
            {"seconds": 5, "nanos": 10**9},
            {"seconds": 5, "nanos": -1},
            {"seconds": 2**63 - 1},
            {"seconds": -(2**63)},
            {},
        )
        for i, ttl in enumerate(bad, 1):
            for rpc, outcome in every_call(ttl, i).items():
                with self.subTest(rpc, ttl=ttl):
                    self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_TTL")


class ReplaceTest(Case):
    def test_the_last_one_wins(self):
        client = self.start().client()
        x = inline(np.eye(4, dtype=np.float32))
        y = {i: inline(np.full((4, 4), i, np.float32)) for i in range(4)}

        def result(i):
            return client.call("Matmul", a=x, b=y[i], result=into("out", replace=True)).buffer

        def upload(i):
            return client.put("out", np.full((4, 4), i, np.float32), replace=True)

        def copy(i):
            client.put(f"source{i}", np.full((4, 4), i, np.float32), replace=True)
            return client.call("CopyBuffer", source=f"source{i}", name="out", replace=True).buffer

        for kinds in ((result, result), (upload, upload), (result, upload, copy, result)):
            with self.subTest(kinds=[kind.__name__ for kind in kinds]):
                failed, last = [], {}

                def work(i, kinds=kinds, failed=failed, last=last):
                    for _ in range(40):
                        outcome = outcome_of(lambda: kinds[i](i))
                        if not outcome.ok:
                            failed.append(outcome)
                        elif outcome.answer.version <= last.get(i, 0):
                            failed.append(f"version {outcome.answer.version} after {last[i]}")
                        else:
                            last[i] = outcome.answer.version

                in_threads(len(kinds), work)
                if failed:
                    self.fail(f"{len(failed)} of {40 * len(kinds)} calls: {failed[0]}")
                version = client.call("GetBuffer", name="out").buffer.version
                self.assertIn(version, last.values())
                winner = next(i for i, v in last.items() if v == version)
                self.assertEqual(
                    client.download("out"), np.full((4, 4), winner, np.float32).tobytes()
                )
                for name in client.names():
                    client.call("DeleteBuffer", name=name)
                self.assert_empty(client)

    def test_operands_are_read_at_one_moment(self):
        """A writer replaces a, then b, by the same number: nobody sees b newer than a."""
        server = self.start()
        writer = server.client()
        values = {}
        end = time.monotonic() + 3

        def put(name, k):
            values[writer.put(name, np.array([k], np.float64), replace=True).version] = k

        put("a", 1)
        put("b", 1)
        seen, counts = [], [0, 0, 0]

        def work(i):
            if i == 0:
                k = 1
                while time.monotonic() < end:
                    k += 1
                    put("a", k)
                    put("b", k)
                return
            client = server.client()
            while time.monotonic() < end:
                for names in (("a", "b"), ("a", "a")):
                    answer = client.call("Dot", a=resident(names[0]), b=resident(names[1]))
                    seen.append((names, answer.value.real, tuple(answer.stats.operand_versions)))
                    counts[i] += 1

        in_threads(3, work)
        self.assertGreater(min(counts[1:]), 20)
        for names, product, versions in seen:
            self.assertEqual(len(versions), 2, "operand_versions")
            first, second = (values[version] for version in versions)
            self.assertEqual(product, first * second, "not the product of the versions stated")
            if names[0] == names[1]:
                self.assertEqual(versions[0], versions[1], "one name, two versions")
            else:
                self.assertIn(first - second, (0, 1), "a and b are of two moments")

    def test_operand_versions_follow_the_fields(self):
        client = self.start().client()
        x = client.put("x", FOUR)
        y = client.put("y", FOUR)
        four = inline(FOUR)
        for fields, versions in (
            (dict(a=resident("x"), b=resident("y", version=y.version)), [x.version, y.version]),
            (dict(a=four, b=resident("x")), [0, x.version]),
            (dict(a=resident("y"), b=four), [y.version, 0]),
            (dict(a=four, b=four), [0, 0]),
        ):
            for rpc in ("Dot", "Add"):
                self.assertEqual(list(client.call(rpc, **fields).stats.operand_versions), versions)
        stats = client.call("Reduce", x=resident("x"), op="REDUCE_OP_SUM").stats
        self.assertEqual(list(stats.operand_versions), [x.version])
        self.assertGreaterEqual(stats.queue_us, 0)


# --- Uploads and downloads ------------------------------------------------------------------------


class BrokenUploadTest(Case):
    TRIES = 60

    def check_tries(self, second, data, **how):
        """Uploads whose every byte has come before a second message that breaks them."""
        server = self.start()
        client = server.client(**how)
        raw = client.channel.stream_unary(
            UPLOAD,
            request_serializer=lambda m: m,
            response_deserializer=o.buffers.UploadResponse.FromString,
        )
        old = np.full(len(data) // 4, 7, np.float32)
        judge = server.client()
        judge.put("live", old)
        ok, wrong = [], []

        def work(worker):
            for i in range(worker, self.TRIES, 4):
                replace = i % 2 == 1
                name = "live" if replace else f"new{i}"
                spec = o.buffers.BufferSpec(
                    dtype="DTYPE_F32", shape=[len(data) // 4], replace=replace
                )
                first = o.buffers.UploadRequest(name=name, spec=spec, data=data)

                def messages(first=first):
                    yield first.SerializeToString()
                    time.sleep(0.005)
                    yield second

                outcome = outcome_of(lambda: raw(messages(), timeout=10))
                if outcome.ok:
                    ok.append(i)

        in_threads(4, work)
        time.sleep(0.3)
        left = judge.names()
        if left != ["live"]:
            wrong.append(f"{len(left) - 1} READY buffers of refused uploads, {left[:3]}")
        if judge.download("live") != old.tobytes():
            wrong.append("a refused upload has replaced a buffer")
        if ok or wrong:
            self.fail(
                f"{len(ok)} of {self.TRIES} uploads were answered with OK; " + "; ".join(wrong)
            )
        judge.call("DeleteBuffer", name="live")
        self.assert_empty(judge)
        self.assert_serves(judge)

    def test_a_refused_message_is_not_the_end(self):
        self.check_tries(padded_message(9 * o.MI), os.urandom(64))

    def test_a_message_above_the_limit_is_not_the_end(self):
        self.check_tries(padded_message(5 * o.MI), os.urandom(64))

    def test_garbage_is_not_the_end(self):
        self.check_tries(b"\xff" * 50, os.urandom(64))

    def test_half_a_message_is_not_the_end(self):
        self.check_tries(padded_message(1000)[:-500], os.urandom(64))

    def test_a_compressed_message_is_not_the_end(self):
        # gRPC sends what does not shrink as it is: the random first message, not the second.
        self.check_tries(
            padded_message(100_000), os.urandom(4096), compression=grpc.Compression.Gzip
        )

    def test_garbage_is_not_the_end_of_a_range(self):
        client = self.start().client()
        raw = client.channel.stream_unary(UPLOAD, request_serializer=lambda m: m)
        client.create("x", FOUR)
        for second in (b"\xff" * 50, padded_message(9 * o.MI), padded_message(1000)[:-500]):
            first = o.buffers.UploadRequest(name="x", offset=0, data=NEW).SerializeToString()
            outcome = outcome_of(lambda m=(first, second): raw(iter(m), timeout=10))
            self.assertFalse(outcome.ok, f"OK after {second[:10]!r}")

    def test_cancelled_cut_and_late_uploads_leave_nothing(self):
        server = self.start()
        client = server.client()
        for i in range(12):
            own = server.client()
            stop = threading.Event()

            def messages(stop=stop, i=i):
                yield o.buffers.UploadRequest(name=f"x{i}", spec=o.spec_of(FOUR), data=NEW)
                stop.wait(10)

            call = own.b.Upload.future(messages(), timeout=1 if i % 3 == 0 else 20)
            self.assertTrue(eventually(client.names, 5) or i % 3 == 0)
            if i % 3 == 1:
                call.cancel()
            elif i % 3 == 2:
                own.close()
            else:
                self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
            stop.set()
            self.assertTrue(eventually(lambda: not client.names(), 5), f"try {i}")
        self.assert_empty(client)

    def test_uploads_whose_first_message_is_wrong(self):
        client = self.start().client()
        client.put("x", FOUR)
        client.create("d", FOUR)
        spec = o.spec_of(FOUR, replace=True)
        first = dict(name="x", spec=spec)
        for code, reason, messages in (
            (None, None, []),
            (None, None, [dict()]),
            ("INVALID_ARGUMENT", "MISSING_DATA", [dict(first, data=NEW[:12])]),
            ("INVALID_ARGUMENT", "BAD_RANGE", [dict(first, data=NEW + b"!")]),
            ("INVALID_ARGUMENT", "BAD_RANGE", [dict(first, data=NEW, offset=1)]),
            ("INVALID_ARGUMENT", "BAD_RANGE", [dict(first, data=NEW, offset=2**64 - 8)]),
            ("INVALID_ARGUMENT", "BAD_MESSAGE", [dict(first, data=NEW), dict(name="y")]),
            ("INVALID_ARGUMENT", "BAD_MESSAGE", [dict(first, data=NEW), dict(spec=o.spec_of(ONE))]),
            ("INVALID_ARGUMENT", "BAD_MESSAGE", [dict(first, data=NEW, version=7)]),
            ("INVALID_ARGUMENT", "BAD_MESSAGE", [dict(name="d", data=NEW, buffer_crc32c=1)]),
            ("FAILED_PRECONDITION", "BUFFER_SEALED", [dict(name="x", data=NEW)]),
            ("NOT_FOUND", "BUFFER_NOT_FOUND", [dict(name="none", data=NEW)]),
        ):
            with self.subTest(messages=str(messages)):
                outcome = client.try_upload(messages)
                self.assertIn(outcome.code, (code,) if code else ("INVALID_ARGUMENT", "NOT_FOUND"))
                if reason:
                    self.assert_fails(outcome, code, reason)
                if outcome.metadata.get("field") == "spec":
                    self.assertEqual(set(outcome.metadata), {"field"}, "figures of no spec")
        self.assertEqual(client.download("x"), FOUR.tobytes())
        self.assertEqual(client.names(), ["d", "x"])
        self.assertEqual(client.call("GetBuffer", name="d").buffer.committed_bytes, 0)

    def test_offset_zero_in_a_later_message_counts(self):
        client = self.start().client()
        client.upload(
            [
                dict(name="x", spec=o.spec_of(FOUR), data=OLD[:8]),
                dict(data=OLD[8:]),
                dict(offset=0, data=NEW[:4]),
            ]
        )
        self.assertEqual(client.download("x"), NEW[:4] + OLD[4:])


def padded_message(size):
    """A valid UploadRequest of about so many bytes, all in field 15, which it does not know."""
    length, n = b"", size
    while n > 127:
        length += bytes([n & 127 | 128])
        n >>= 7
    return b"\x7a" + length + bytes([n]) + b"\0" * size


class StreamTest(Case):
    def test_idle_uploads_hold_little_memory(self):
        self.needs_exact_memory()
        server = self.start("--max-uploads", "1000")
        client = server.client()
        size = 3 * o.MI
        x = np.zeros(size // 4, np.float32)
        client.create("x", x)
        data = x.tobytes()
        client.upload([dict(name="x", offset=0, data=data)] * 8)
        time.sleep(0.2)
        stop = threading.Event()
        before = server.rss()
        sizes, sent = [], []
        streams = [
            self.idle_upload(
                server.client() if i % 25 == 0 else server.clients[-1],
                stop,
                [dict(name="x", data=data)],
                sent=sent,
            )
            for i in range(100)
        ]
        self.assertTrue(eventually(lambda: len(sent) == 100, 30, 0.2), f"{len(sent)} of 100 sent")
        time.sleep(1)
        for _ in range(10):
            time.sleep(0.1)
            sizes.append(server.rss())
        each = (min(sizes) - before) / 100 / 1024
        self.assertLess(each, 300, "KiB an idle upload holds")
        self.assertFalse(any(stream.done() for stream in streams))
        self.assertEqual(client.budget("uploads").used, 100)
        stop.set()
        for stream in streams:
            self.assert_ok(outcome_of(stream))

    def test_uploads_are_counted(self):
        server = self.start("--max-uploads", "5")
        client = server.client()
        self.assertEqual(client.budget("uploads").limit, 5)
        stop = threading.Event()
        spec = o.spec_of(FOUR)
        streams = [
            self.idle_upload(client, stop, [dict(name=f"x{i}", spec=spec, data=NEW)])
            for i in range(5)
        ]
        self.assertTrue(eventually(lambda: client.budget("uploads").used == 5, 3))
        self.assert_fails(
            outcome_of(lambda: client.put("more", FOUR)),
            "RESOURCE_EXHAUSTED",
            "TOO_MANY_UPLOADS",
            limit=5,
        )
        streams[0].cancel()
        self.assertTrue(eventually(lambda: client.budget("uploads").used == 4, 3))
        client.put("more", FOUR)
        stop.set()
        for stream in streams[1:]:
            self.assert_ok(outcome_of(stream))
        self.assertEqual(client.budget("uploads").used, 0)

    def test_streams_of_deleted_drafts_end(self):
        client = self.start().client()
        size = 1_000_000

        def keep_alive(first):
            yield o.buffers.UploadRequest(**first)
            for _ in range(200):
                time.sleep(0.05)
                yield o.buffers.UploadRequest()

        spec = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[size // 4])
        client.call("CreateBuffer", name="ranges", spec=spec)
        for first in (dict(name="whole", spec=spec, data=NEW), dict(name="ranges", data=NEW)):
            with self.subTest(first["name"]):
                call = client.b.Upload.future(keep_alive(first), timeout=30)
                self.assertTrue(eventually(lambda: client.device().buffer_used_bytes >= size, 2))
                time.sleep(0.2)
                client.call("DeleteBuffer", name=first["name"])
                ended = eventually(call.done, 3)
                used = client.device().buffer_used_bytes
                if not ended:
                    call.cancel()
                self.assertTrue(ended, f"the stream goes on for 3 s; {used} bytes are in use")
                self.assert_fails(outcome_of(call), "NOT_FOUND", "BUFFER_NOT_FOUND")
        self.assert_empty(client)

    def test_half_closing_does_not_hide_that_the_draft_is_gone(self):
        client = self.start().client()
        for name, spec in (("ranges", None), ("whole", o.spec_of(FOUR))):
            if spec is None:
                client.create(name, FOUR)
            stop = threading.Event()
            call = self.idle_upload(client, stop, [dict(name=name, spec=spec, data=NEW)])
            self.assertTrue(
                eventually(
                    lambda: client.attempt("GetBuffer", name=name).ok
                    and client.call("GetBuffer", name=name).buffer.committed_bytes == 16,
                    3,
                )
            )
            client.call("DeleteBuffer", name=name)
            stop.set()
            self.assert_fails(outcome_of(call), "NOT_FOUND", "BUFFER_NOT_FOUND")
        self.assert_empty(client)

    def test_idle_uploads_end_and_slow_ones_do_not(self):
        client = self.start("--upload-timeout", "1s").client()
        stop = threading.Event()
        self.addCleanup(stop.set)
        idle = {
            "nothing": self.idle_upload(
                client, stop, [dict(name="idle", spec=o.spec_of(FOUR), data=NEW)]
            ),
            "now and then an empty message": self.empty_upload(client, stop, "drip", 0.2),
            "empty messages all the time": self.empty_upload(client, stop, "flood", 0),
        }
        running = self.slow_upload(client, 6, 0.4)
        for sends, call in idle.items():
            self.assertTrue(eventually(call.done, 4 * o.Program.patience()), f"it sends {sends}")
            self.assert_fails(outcome_of(call), "DEADLINE_EXCEEDED", "UPLOAD_IDLE", limit="1s")
        stop.set()
        self.assert_ok(outcome_of(running))
        self.assertEqual(client.names(), ["slow"])

    def unread_downloads(self, client, count=3):
        """Downloads of 32 MiB whose reader takes the first chunk only."""
        client.put("big", np.zeros(0, np.float32))
        client.call("DeleteBuffer", name="big")
        one = inline(ONE, view([8 << 20], [0]))
        client.call("Add", a=one, b=one, result=into("big"))
        calls = []
        for _ in range(count):
            call = client.b.Download(o.buffers.DownloadRequest(name="big"), timeout=60)
            self.assertEqual(len(next(call).data), o.MI)
            calls.append(call)
        return calls

    def test_downloads_that_nobody_reads_end(self):
        server = self.start("--download-timeout", "1s")
        client = server.client()
        calls = self.unread_downloads(client)
        in_use = client.budget("downloads").used
        client.call("DeleteBuffer", name="big")
        self.assertTrue(
            eventually(lambda: client.device().buffer_used_bytes == 0, 5),
            f"{client.device().buffer_used_bytes} bytes are held by unread downloads",
        )
        self.assertEqual(in_use, 3)
        self.assertTrue(eventually(lambda: client.budget("downloads").used == 0, 2))
        said = "DEADLINE_EXCEEDED DOWNLOAD_IDLE"
        self.assertTrue(eventually(lambda: said in server.log(), 5), server.log())
        for call in calls:
            self.assertFalse(outcome_of(lambda call=call: list(call)).ok)

    def test_slow_downloads_do_not_end(self):
        client = self.start("--download-timeout", "3s").client()
        data = os.urandom(20 * o.MI)
        client.upload(
            [
                dict(
                    name="x",
                    data=data[: o.MI],
                    spec=o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[len(data) // 4]),
                )
            ]
            + [dict(data=data[i : i + o.MI]) for i in range(o.MI, len(data), o.MI)]
        )
        read = b""
        for message in client.b.Download(o.buffers.DownloadRequest(name="x"), timeout=60):
            read += message.data
            time.sleep(0.25)
        self.assertEqual(read, data)

    def test_time_in_which_the_server_is_stopped_makes_nobody_idle(self):
        server = self.start("--upload-timeout", "1s", "--download-timeout", "1s")
        client = server.client()
        (download,) = self.unread_downloads(client, count=1)
        go_on = threading.Event()
        self.addCleanup(go_on.set)

        def messages():
            yield o.buffers.UploadRequest(name="slow", data=NEW[:8], spec=o.spec_of(FOUR))
            go_on.wait(60)
            yield o.buffers.UploadRequest(data=NEW[8:])

        upload = client.b.Upload.future(messages(), timeout=60)
        self.assertTrue(eventually(lambda: client.budget("uploads").used == 1, 5))
        server.signal(signal.SIGSTOP)
        time.sleep(4)
        server.signal(signal.SIGCONT)
        time.sleep(1)
        go_on.set()
        self.assert_ok(outcome_of(upload))
        self.assertEqual(sum(len(message.data) for message in download), 31 * o.MI)
        # What stands still later ends as ever.
        download = client.b.Download(o.buffers.DownloadRequest(name="big"), timeout=60)
        next(download)
        self.assertTrue(eventually(lambda: client.budget("downloads").used == 0, 15))
        self.assertFalse(outcome_of(lambda: list(download)).ok)

    def test_a_drain_does_not_wait_for_readers_who_do_not_read(self):
        """Of a download, or of an answer."""
        # The shorter of --download-timeout and what a stream may stand still for in a drain.
        for timeout, at_least in (("1s", 0), ("60s", 3)):
            with self.subTest(timeout=timeout):
                server = self.start("--download-timeout", timeout, "--drain-timeout", "40s")
                calls = self.unread_downloads(server.client())
                raw = o.RawConnection(server, window=0)
                self.addCleanup(raw.close)
                raw.call("/tessera.v1.ComputeService/GetServerInfo", o.compute.GetServerInfoRequest())
                self.assertIsNotNone(raw.find_frame(o.HEADERS, 5), "no answer comes")
                started = time.monotonic()
                code = server.stop(timeout=15 * o.Program.patience())
                took = time.monotonic() - started
                self.assertEqual(code, 0, f"exit code after {took:.1f} s")
                self.assertGreater(took, at_least)
                for call in calls:
                    self.assertFalse(outcome_of(lambda call=call: list(call)).ok)

    def test_a_drain_waits_for_readers_who_read_slowly(self):
        server = self.start("--drain-timeout", "60s")
        call = self.unread_downloads(server.client(), count=1)[0]
        server.signal()
        size = o.MI
        for message in call:
            size += len(message.data)
            time.sleep(0.3)
        self.assertEqual(size, 32 << 20)
        self.assertEqual(server.wait(10), 0, "exit code")

    def test_downloads_are_counted(self):
        client = self.start("--max-downloads", "3", "--download-timeout", "60s").client()
        calls = self.unread_downloads(client)
        self.assert_fails(
            outcome_of(lambda: client.download("big")),
            "RESOURCE_EXHAUSTED",
            "TOO_MANY_DOWNLOADS",
            limit=3,
        )
        calls[0].cancel()
        self.assertTrue(eventually(lambda: client.budget("downloads").used == 2, 3))
        self.assertEqual(len(client.download("big")), 32 << 20)

    def test_memory_of_a_download_is_stable(self):
        """Deleted and replaced meanwhile, a reader gets the bytes it began with."""
        client = self.start().client()
        call = self.unread_downloads(client, count=1)[0]
        two = inline(2 * ONE, view([8 << 20], [0]))
        client.call("Add", a=two, b=two, result=into("big", replace=True))
        client.call("DeleteBuffer", name="big")
        rest = b"".join(message.data for message in call)
        self.assertEqual(len(rest), 31 << 20)
        self.assertEqual(rest, np.full(len(rest) // 4, 2, np.float32).tobytes())
        self.assert_empty(client)


class ChecksumTest(Case):
    DATA = bytes(range(256)) * 64

    def spec(self, **more):
        return o.buffers.BufferSpec(dtype="DTYPE_I32", shape=[len(self.DATA) // 4], **more)

    def messages(self, wrong=None, without=None, whole=None, name="x", **spec):
        """Four messages with checksums."""
        quarter = len(self.DATA) // 4
        for i in range(4):
            data = self.DATA[i * quarter : (i + 1) * quarter]
            fields = dict(name=name, spec=self.spec(**spec), data=data, crc32c=o.crc32c(data))
            if i == wrong:
                fields["crc32c"] ^= 1
            if i == without:
                del fields["crc32c"]
            if i == 3 and whole is not None:
                fields["buffer_crc32c"] = whole
            yield fields

    def test_castagnoli(self):
        self.assertEqual(o.crc32c(b"123456789"), 0xE3069283)

    def test_of_messages_and_of_whole_buffers(self):
        client = self.start().client()
        right = o.crc32c(self.DATA)
        old = client.put("x", FOUR)
        for i in range(4):
            quarter = len(self.DATA) // 4
            actual = o.crc32c(self.DATA[i * quarter : (i + 1) * quarter])
            outcome = client.try_upload(self.messages(wrong=i, replace=True))
            self.assert_fails(
                outcome,
                "DATA_LOSS",
                "BAD_CHECKSUM",
                field="crc32c",
                expected=outcome.metadata.get("expected"),
                actual=outcome.metadata.get("actual"),
            )
            self.assertEqual(
                {int(outcome.metadata["expected"], 0), int(outcome.metadata["actual"], 0)},
                {actual, actual ^ 1},
            )
        outcome = client.try_upload(self.messages(whole=right ^ 1, replace=True))
        self.assert_fails(outcome, "DATA_LOSS", "BAD_CHECKSUM", field="buffer_crc32c")
        outcome = client.try_upload(self.messages(without=2, whole=right, replace=True))
        self.assert_fails(outcome, "FAILED_PRECONDITION", "CHECKSUM_UNKNOWN")
        self.assertEqual(client.call("GetBuffer", name="x").buffer, old)
        buffer = client.upload(self.messages(whole=right, replace=True)).buffer
        self.assertTrue(buffer.HasField("crc32c"))
        self.assertEqual(buffer.crc32c, right)
        self.assertEqual(client.upload(self.messages(replace=True)).buffer.crc32c, right)
        buffer = client.upload(self.messages(without=1, replace=True)).buffer
        self.assertFalse(buffer.HasField("crc32c"))
        self.assertEqual(client.download("x"), self.DATA)

    def test_of_ranges(self):
        client = self.start().client()
        right = o.crc32c(self.DATA)
        quarter = len(self.DATA) // 4

        def write(version, order, checksums=True):
            for i in order:
                data = self.DATA[i * quarter : (i + 1) * quarter]
                fields = dict(name="x", version=version, offset=i * quarter, data=data)
                if checksums:
                    fields["crc32c"] = o.crc32c(data)
                client.upload([fields])

        version = client.call("CreateBuffer", name="x", spec=self.spec()).buffer.version
        outcome = client.try_upload([dict(name="x", offset=0, data=b"1234", crc32c=1)])
        self.assert_fails(outcome, "DATA_LOSS", "BAD_CHECKSUM", field="crc32c")
        client.call("DeleteBuffer", name="x")
        version = client.call("CreateBuffer", name="x", spec=self.spec()).buffer.version
        write(version, (3, 1, 0, 2))
        outcome = client.attempt("SealBuffer", name="x", version=version, crc32c=right ^ 1)
        self.assert_fails(outcome, "DATA_LOSS", "BAD_CHECKSUM")
        self.assertFalse(client.attempt("Dot", a=resident("x"), b=resident("x")).ok)
        sealed = client.attempt("SealBuffer", name="x", version=version, crc32c=right)
        if not sealed.ok:  # The proto does not say whether the draft outlives a wrong checksum.
            self.assertEqual(sealed.reason, "BUFFER_NOT_FOUND", sealed)
        client.attempt("DeleteBuffer", name="x")
        for order, checksums in (((0, 1, 2, 3), False), ((0, 1, 1, 2, 3), True)):
            version = client.call("CreateBuffer", name="x", spec=self.spec()).buffer.version
            write(version, order, checksums)
            outcome = client.attempt("SealBuffer", name="x", version=version, crc32c=right)
            self.assert_fails(outcome, "FAILED_PRECONDITION", "CHECKSUM_UNKNOWN")
            client.attempt("DeleteBuffer", name="x")
        version = client.call("CreateBuffer", name="x", spec=self.spec()).buffer.version
        write(version, (2, 3, 0, 1))
        sealed = client.call("SealBuffer", name="x", version=version, crc32c=right).buffer
        self.assertEqual(sealed.crc32c, right)
        self.assertEqual(client.download("x"), self.DATA)

    def test_of_downloads(self):
        client = self.start().client()
        data = os.urandom(1_300_000)
        client.upload(
            [
                dict(
                    name="x",
                    data=data,
                    spec=o.buffers.BufferSpec(dtype="DTYPE_I32", shape=[len(data) // 4]),
                )
            ]
        )
        for offset, limit in ((0, 0), (777, 5000)):
            request = o.buffers.DownloadRequest(
                name="x", offset=offset, limit=limit, checksums=True
            )
            at = offset
            for message in client.b.Download(request, timeout=20):
                self.assertTrue(message.HasField("crc32c"), "no checksum")
                self.assertEqual(message.crc32c, o.crc32c(message.data))
                self.assertEqual(message.data, data[at : at + len(message.data)])
                at += len(message.data)
            self.assertEqual(at, offset + limit if limit else len(data))
        for message in client.b.Download(o.buffers.DownloadRequest(name="x"), timeout=20):
            self.assertFalse(message.HasField("crc32c"))


# --- Messages and results -------------------------------------------------------------------------

UNARY = {
    "BufferService": (
        "CreateBuffer",
        "GetBuffer",
        "ListBuffers",
        "SealBuffer",
        "UpdateBuffer",
        "CopyBuffer",
        "ImportBuffer",
        "DeleteBuffer",
    ),
    "ComputeService": (
        "Dot",
        "Reduce",
        "Matmul",
        "Add",
        "WindowSum",
        "ListStrategies",
        "GetServerInfo",
    ),
}


class MessageTest(Case):
    def test_messages_of_many_parts_count_as_what_they_take(self):
        """Two bytes of a message may be an object of fifty in memory."""
        server = self.start("--host-memory", "64Mi")
        client = server.client()
        client.put("x", ONE)
        groups = b"\x7b\x7c" * (2 << 20)  # of a field that no message has
        before = server.peak_rss()

        def field(number, value):
            length, digits = len(value), b""
            while length > 0x7F:
                digits += bytes([length & 0x7F | 0x80])
                length >>= 7
            return bytes([number << 3 | 2]) + digits + bytes([length]) + value

        x = resident("x").SerializeToString()
        dot = field(1, x) + field(2, x)
        # An operand that begins as a tensor of many dimensions, and is a buffer in the end.
        shape = field(1, field(2, field(2, bytes(4 << 20)))) + dot
        execute = field(1, field(1, dot))
        compute, buffers = "/tessera.v1.ComputeService/", "/tessera.v1.BufferService/"
        full = ("RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED")
        bad = ("INVALID_ARGUMENT", "BAD_MESSAGE")
        upload = field(1, b"y") + field(2, o.spec_of(ONE).SerializeToString() + groups)
        long_name = field(1, b"x" * (5 << 20))

        def unary(method, message):
            return outcome_of(lambda: client.channel.unary_unary(method)(message, timeout=20))

        for what, expected, outcome in (
            ("Dot", full, unary(compute + "Dot", dot + groups)),
            ("a shape", full, unary(compute + "Dot", shape)),
            ("Execute", full, unary(compute + "Execute", execute + groups)),
            ("GetBuffer", full, unary(buffers + "GetBuffer", field(1, b"x") + groups)),
            ("Upload", bad, outcome_of(lambda: client.channel.stream_unary(buffers + "Upload")(
                iter([upload]), timeout=20))),
            ("Download", bad, outcome_of(lambda: list(client.channel.unary_stream(
                buffers + "Download")(field(1, b"x") + groups, timeout=20)))),
            ("a large Download", bad, outcome_of(lambda: list(client.channel.unary_stream(
                buffers + "Download")(long_name, timeout=20)))),
        ):  # fmt: skip
            self.assertEqual((outcome.code, outcome.reason), expected, (what, outcome))
        # None of them has been parsed: gRPC holds messages of 4 MiB, and their pieces.
        if not o.Program.sanitized():
            growth = server.peak_rss() - before
            self.assertLess(growth, 64 * o.MI, f"peak RSS grew by {growth / o.MI:.0f} MiB")
        check = "/grpc.health.v1.Health/Check"
        self.assertEqual(unary(check, groups).code, "INVALID_ARGUMENT")
        self.assertTrue(unary(check, b"").ok)
        # A few fields that a newer client knows do no harm.
        few = groups[: 32 << 10]
        for method, message in (("Dot", dot), ("Execute", execute)):
            self.assert_ok(unary(compute + method, message + few), method)
        self.assertTrue(eventually(lambda: client.budget("host_memory").used == 0, 5))

    def test_unary_garbage(self):
        server = self.start()
        client = server.client()
        for service, methods in UNARY.items():
            for method in methods:
                call = client.channel.unary_unary(f"/tessera.v1.{service}/{method}")
                bad = [b"\xff" * 40, b"\x0a\x7fshort"]
                if service == "BufferService" and method != "ListBuffers":
                    bad.append(b"\x0a\x02\xff\xfe")  # a name that is no UTF-8
                for request in bad:
                    outcome = outcome_of(lambda m=request: call(m, timeout=5))
                    self.assertIn(
                        outcome.code,
                        ("UNIMPLEMENTED", "INVALID_ARGUMENT", "INTERNAL"),
                        f"{method} {request!r} {outcome}",
                    )
                    if outcome.code == "INVALID_ARGUMENT":
                        self.assertTrue(outcome.reason, outcome)
        self.assert_serves(client)
        self.assert_empty(client)

    def test_messages_above_the_limit(self):
        client = self.start().client()
        limit = client.info().limits.max_message_bytes
        for size, code, reason in (
            (limit + 100, "INVALID_ARGUMENT", "BAD_MESSAGE"),
            (2 * limit - 100, "INVALID_ARGUMENT", "BAD_MESSAGE"),
            (2 * limit + 100, "RESOURCE_EXHAUSTED", ""),
        ):
            x = o.compute.Operand(
                tensor=o.compute.Tensor(
                    dtype="DTYPE_F32", shape=[size // 4], data=bytes(size // 4 * 4)
                )
            )
            outcome = client.attempt("Reduce", x=x, op="REDUCE_OP_SUM")
            self.assertEqual((outcome.code, outcome.reason), (code, reason), outcome)
            if reason:
                self.assert_fails(outcome, code, reason, "value", limit=limit)
                self.assertIn(str(limit), outcome.text)

    def test_a_bomb_of_gzip(self):
        self.needs_exact_memory()
        server = self.start()
        client = server.client(compression=grpc.Compression.Gzip)
        judge = server.client()
        judge.dot_of_ones()
        before = server.peak_rss()
        bomb = padded_message(128 * o.MI)
        unary = client.channel.unary_unary("/tessera.v1.ComputeService/Dot")
        stream = client.channel.stream_unary(UPLOAD, request_serializer=lambda m: m)
        for call in (lambda: unary(bomb, timeout=20), lambda: stream(iter([bomb]), timeout=20)):
            outcome = outcome_of(call)
            self.assertIn(outcome.code, ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"))
        growth = server.peak_rss() - before
        self.assertLess(growth, 64 * o.MI, f"peak RSS grew by {growth / o.MI:.0f} MiB")
        self.assert_serves(judge)

    def test_results_of_four_mebibytes(self):
        client = self.start().client()
        rng = np.random.default_rng(1)
        x = rng.standard_normal((1024, 1024), np.float32)
        client.upload(
            [
                dict(name="x", spec=o.spec_of(x), data=x.tobytes()[: 2 << 20]),
                dict(data=x.tobytes()[2 << 20 :]),
            ]
        )
        eye = inline(np.eye(2, dtype=np.float32), view([1024, 1024], [0, 0]))
        limit = client.info().limits.max_inline_result_bytes
        for rpc in ("Add", "Matmul"):
            outcome = client.attempt(rpc, a=resident("x"), b=eye)
            if outcome.ok:
                self.assertEqual(len(outcome.answer.tensor.data), 4 << 20)
                if rpc == "Add":
                    np.testing.assert_array_equal(o.to_numpy(outcome.answer.tensor), x + 1)
            else:
                self.assert_fails(outcome, "INVALID_ARGUMENT", "RESULT_TOO_LARGE")
                self.assertIn(str(limit), outcome.text + str(outcome.metadata))

    def test_the_largest_inline_result_arrives(self):
        client = self.start().client()
        limit = client.info().limits.max_inline_result_bytes
        self.assertGreater(limit, 3 << 20)
        n = limit // 4
        wide = inline(3 * ONE, view([n], [0]))
        add = self.assert_ok(client.attempt("Add", a=wide, b=wide), f"{n} elements:")
        self.assertEqual(add.tensor.data, np.full(n, 6, np.float32).tobytes())
        window = self.assert_ok(client.attempt("WindowSum", x=wide, radius=0))
        self.assertEqual(len(window.tensor.data), 4 * n)
        tall = inline(ONE, view([1, n], [0, 0]))
        axes = self.assert_ok(client.attempt("Reduce", x=tall, op="REDUCE_OP_SUM", axes=[0]))
        self.assertEqual(len(axes.tensor.data), 4 * n)
        product = self.assert_ok(
            client.attempt(
                "Matmul", a=inline(ONE, view([n, 1], [0, 0])), b=inline(ONE, view([1, 1], [0, 0]))
            )
        )
        self.assertEqual(len(product.tensor.data), 4 * n)
        more = inline(ONE, view([limit // 4 + 1], [0]))
        outcome = client.attempt("Add", a=more, b=more)
        self.assert_fails(outcome, "INVALID_ARGUMENT", "RESULT_TOO_LARGE")
        self.assertIn(str(limit), outcome.text)


class ErrorTest(Case):
    def test_errors_name_the_operand(self):
        client = self.start().client()
        x = np.arange(6, dtype=np.float32)
        client.put("x", x)
        client.create("open", x)
        short = o.compute.Operand(
            tensor=o.compute.Tensor(dtype="DTYPE_F32", shape=[6], data=b"123")
        )
        untyped = o.compute.Operand(tensor=o.compute.Tensor(shape=[1], data=b"1234"))
        good = resident("x")
        version = client.call("GetBuffer", name="x").buffer.version + 5
        bad = (
            ("BAD_VIEW", resident("x", view([6], offset=1))),
            ("BAD_VIEW", resident("x", view([6], [-1]))),
            ("BAD_VIEW", resident("x", view([6], [2**62]))),
            ("BAD_OPERAND", short),
            ("BAD_DTYPE", untyped),
            ("BAD_OPERAND", o.compute.Operand()),
            ("BUFFER_NOT_FOUND", resident("none")),
            ("BUFFER_NOT_READY", resident("open")),
            ("VERSION_MISMATCH", resident("x", version=version)),
        )
        for reason, operand in bad:
            for rpc in ("Dot", "Add", "Matmul"):
                for which in ("a", "b"):
                    with self.subTest(rpc, reason=reason, which=which):
                        fields = {"a": good, "b": good, which: operand}
                        outcome = client.attempt(rpc, **fields)
                        self.assertEqual(outcome.reason, reason, outcome)
                        self.assertEqual(outcome.metadata.get("operand"), which, outcome)
            for rpc, more in (("Reduce", dict(op="REDUCE_OP_SUM")), ("WindowSum", dict(radius=1))):
                with self.subTest(rpc, reason=reason):
                    outcome = client.attempt(rpc, x=operand, **more)
                    self.assertEqual(outcome.reason, reason, outcome)
                    self.assertEqual(outcome.metadata.get("operand"), "x", outcome)

    def test_messages_have_figures(self):
        """What a person reads says which value was wrong and what is allowed."""
        client = self.start("--memory-limit", "1Mi").client()
        x = np.arange(6, dtype=np.float32)
        client.put("x", x)
        good = resident("x")
        spec = o.buffers.BufferSpec
        limit = client.info().limits.max_message_bytes
        for reason, figures, call in (
            (
                "BAD_SHAPE",
                "-3",
                lambda: client.call("CreateBuffer", name="y", spec=spec(dtype=1, shape=[-3])),
            ),
            (
                "BAD_SHAPE",
                "9",
                lambda: client.call("CreateBuffer", name="y", spec=spec(dtype=1, shape=[1] * 9)),
            ),
            (
                "BAD_DTYPE",
                "77",
                lambda: client.call("CreateBuffer", name="y", spec=spec(dtype=77, shape=[1])),
            ),
            (
                "BAD_NAME",
                "128",
                lambda: client.call("CreateBuffer", name="y" * 129, spec=spec(dtype=1, shape=[1])),
            ),
            (
                "BAD_NAME",
                "value: a b",  # and not only in "a buffer's name"
                lambda: client.call("CreateBuffer", name="a b", spec=spec(dtype=1)),
            ),
            (
                "EMPTY_INPUT",
                "min",
                lambda: client.call(
                    "Reduce", x=inline(np.zeros(0, np.float32)), op="REDUCE_OP_MIN"
                ),
            ),
            ("BAD_TTL", "-7", lambda: client.call("UpdateBuffer", name="x", ttl={"seconds": -7})),
            (
                "QUOTA_EXCEEDED",
                str(1 << 22),
                lambda: client.call("CreateBuffer", name="y", spec=spec(dtype=1, shape=[1 << 20])),
            ),
            ("BAD_RANGE", "25", lambda: client.download("x", offset=25)),
            ("BAD_RANGE", "4711", lambda: client.download("x", offset=4711)),
            (
                "BAD_RANGE",
                "24",
                lambda: client.upload(
                    [dict(name="y", spec=o.spec_of(x), offset=20, data=b"12345678")]
                ),
            ),
            (
                "MISSING_DATA",
                "24",
                lambda: client.upload([dict(name="y", spec=o.spec_of(x), data=b"12345678")]),
            ),
            ("BAD_PAGE", "-1", lambda: client.call("ListBuffers", page_size=-1)),
            ("BAD_PAGE", "1001", lambda: client.call("ListBuffers", page_size=1001)),
            (
                "BAD_VIEW",
                "5",
                lambda: client.call("Dot", a=resident("x", view([3], offset=5)), b=good),
            ),
            ("BAD_SHAPE", "6", lambda: client.call("Dot", a=good, b=inline(ONE))),
            ("BAD_AXES", "4", lambda: client.call("Reduce", x=good, op="REDUCE_OP_SUM", axes=[4])),
            ("BAD_OPERATION", "99", lambda: client.call("Reduce", x=good, op=99)),
            ("BAD_RADIUS", "-9", lambda: client.call("WindowSum", x=good, radius=-9)),
            (
                "BAD_OPERAND",
                "3",
                lambda: client.call(
                    "Dot",
                    a=o.compute.Operand(tensor=o.compute.Tensor(dtype=1, shape=[6], data=b"123")),
                    b=good,
                ),
            ),
            (
                "BAD_MESSAGE",
                str(limit),
                lambda: client.call(
                    "Reduce", op="REDUCE_OP_SUM", x=inline(np.zeros(limit // 4 + 1, np.float32))
                ),
            ),
        ):
            with self.subTest(reason, figures=figures):
                outcome = outcome_of(call)
                self.assertEqual(outcome.reason, reason, outcome)
                self.assertRegex(outcome.text, rf"(?<!\d){re.escape(figures)}(?!\d)", outcome)

    def test_a_limit_beyond_the_end_names_the_limit(self):
        client = self.start().client()
        client.put("x", FOUR)
        outcome = outcome_of(lambda: client.download("x", offset=4, limit=13))
        if outcome.ok:  # "At most so many bytes"
            self.assertEqual(outcome.answer, FOUR.tobytes()[4:])
        else:
            self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_RANGE")
            self.assertIn("limit", str(outcome.metadata) + outcome.text)
        outcome = outcome_of(lambda: client.download("x", offset=2**64 - 1, limit=2))
        self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_RANGE")
        self.assertIn("offset", str(outcome.metadata) + outcome.text)

    def test_an_axis_of_a_scalar(self):
        client = self.start().client()
        outcome = client.attempt("Reduce", x=inline(np.float32(1)), op="REDUCE_OP_SUM", axes=[0])
        self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_AXES")
        self.assertNotRegex(outcome.text, r"0 to -1", "an interval that is none")

    def test_launch_takes_what_the_table_says(self):
        client = self.start().client()
        x = inline(np.ones((4, 4), np.float32))
        flat = inline(np.ones(16, np.float32))
        backend = client.device().backend
        requests = {
            "dot": ("Dot", dict(a=flat, b=flat)),
            "reduce": ("Reduce", dict(x=flat, op="REDUCE_OP_SUM")),
            "reduce_axes": ("Reduce", dict(x=x, op="REDUCE_OP_SUM", axes=[0])),
            "matmul": ("Matmul", dict(a=x, b=x)),
            "add": ("Add", dict(a=flat, b=flat)),
            "window_sum": ("WindowSum", dict(x=flat, radius=1)),
            "top_k": ("TopK", dict(x=flat, k=1)),
            "map": (
                "Map",
                dict(
                    operands=[flat],
                    expression=o.compute.Expression(nodes=[o.compute.Expression.Node(operand=0)]),
                ),
            ),
        }
        rows = client.call("ListStrategies", backend=backend).strategies
        tried = 0
        for row in rows:
            if not row.available or o.buffers.DTYPE_F32 not in row.dtypes:
                continue
            rpc, fields = requests[row.operation]
            fields = dict(fields, strategy=row.name)
            for knob in ("block_size", "grid_size", "items_per_thread"):
                known = row.HasField(knob)
                allowed = getattr(row, knob)
                good = [0] + ([allowed.min, allowed.max] if known else [])
                bad = [2**32 - 1] + ([allowed.max + 1] if known else [1])
                if known and allowed.min > 1:
                    bad.append(allowed.min - 1)
                if known:
                    self.assertLessEqual(allowed.min, allowed.max, row)
                for value in good:
                    with self.subTest(row=row.operation + " " + row.name, knob=knob, value=value):
                        outcome = client.attempt(rpc, launch={knob: value}, **fields)
                        # Rows of the tensor cores want 16-bit operands, others want large ones.
                        if outcome.reason != "STRATEGY_UNSUPPORTED":
                            self.assert_ok(outcome)
                for value in bad:
                    with self.subTest(row=row.operation + " " + row.name, knob=knob, value=value):
                        if known and value <= allowed.max and value >= allowed.min:
                            continue
                        outcome = client.attempt(rpc, launch={knob: value}, **fields)
                        if outcome.reason == "STRATEGY_UNSUPPORTED":
                            continue
                        self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_LAUNCH", value=value)
                        self.assertIn(knob, outcome.metadata["field"])
                        tried += 1
        self.assertGreater(tried, 10)


class ArithmeticTest(Case):
    """Values that lose NaN, infinity or range on the way."""

    def rows(self, client, operation, dtype):
        found = [
            row.name
            for row in client.call(
                "ListStrategies", operation=operation, backend=client.device().backend
            ).strategies
            if row.available and dtype in row.dtypes
        ]
        return ["", *found]

    def test_variance_keeps_nan_and_infinity(self):
        client = self.start().client()
        for dtype in (np.float32, np.float64, np.float16):
            for values in ([np.nan], [np.inf], [1, np.inf], [-np.inf, 2, 3], [1, 2, np.nan]):
                x = inline(np.array(values, dtype))
                for row in self.rows(client, "reduce", x.tensor.dtype):
                    if row == "atomic":  # refuses VARIANCE
                        continue
                    with self.subTest(row, values=values, dtype=dtype.__name__):
                        value = client.call(
                            "Reduce", x=x, op="REDUCE_OP_VARIANCE", strategy=row
                        ).value.real
                        self.assertTrue(np.isnan(value), value)
                column = inline(np.array(values, dtype).reshape(-1, 1))
                for row in self.rows(client, "reduce_axes", x.tensor.dtype):
                    with self.subTest(row, axes=[0], values=values, dtype=dtype.__name__):
                        value = o.to_numpy(
                            client.call(
                                "Reduce", x=column, op="REDUCE_OP_VARIANCE", axes=[0], strategy=row
                            ).tensor
                        )
                        self.assertTrue(np.isnan(value).all(), value)

    def test_variance_overflows_to_infinity(self):
        client = self.start().client()
        x = np.zeros(1024)
        x[0], x[700] = 1e200, 1
        for row in self.rows(client, "reduce", o.buffers.DTYPE_F64):
            if row == "atomic":  # refuses VARIANCE
                continue
            with self.subTest(row):
                value = client.call("Reduce", x=inline(x), op="REDUCE_OP_VARIANCE", strategy=row)
                self.assertEqual(value.value.real, np.inf)

    def test_mean_of_integers_does_not_wrap(self):
        client = self.start().client()
        top = 2**63 - 1
        for values in ([2**62, 2**62], [top, top], [-(2**63)] * 3, [top, -(2**63), 5]):
            expected = sum(values) / len(values)
            x = np.array(values, np.int64)
            for row in self.rows(client, "reduce", o.buffers.DTYPE_I64):
                with self.subTest(row, values=values):
                    value = client.call(
                        "Reduce", x=inline(x), op="REDUCE_OP_MEAN", strategy=row
                    ).value.real
                    self.assertLessEqual(abs(value - expected), 1e-14 * 2.0**63, value)
            for row in self.rows(client, "reduce_axes", o.buffers.DTYPE_I64):
                with self.subTest(row, axes=[0], values=values):
                    value = o.to_numpy(
                        client.call(
                            "Reduce",
                            x=inline(x.reshape(-1, 1)),
                            op="REDUCE_OP_MEAN",
                            axes=[0],
                            strategy=row,
                        ).tensor
                    )[0]
                    self.assertLessEqual(abs(value - expected), 1e-14 * 2.0**63, value)

    def test_default_rows_do_not_overflow_inside(self):
        client = self.start().client()
        big = np.full(31, 3e38, np.float32)
        big[::2] *= -1
        turned = np.roll(big, 1)
        for expected, rpc, fields in (
            (1e40, "Dot", dict(a=inline(np.float32([1e20])), b=inline(np.float32([1e20])))),
            (
                float(np.dot(big.astype(float), turned.astype(float))),
                "Dot",
                dict(a=inline(big), b=inline(turned)),
            ),
            (1e-80, "Dot", dict(a=inline(np.float32([1e-40])), b=inline(np.float32([1e-40])))),
            (3e38, "Reduce", dict(x=inline(np.full(2048, 3e38, np.float32)), op="REDUCE_OP_MEAN")),
            (
                2048 * 3e38,
                "Reduce",
                dict(x=inline(np.full(2048, 3e38, np.float32)), op="REDUCE_OP_SUM"),
            ),
            (
                2048 * 3e38,
                "Reduce",
                dict(x=inline(np.full(2048, -3e38, np.float32)), op="REDUCE_OP_NORM_L1"),
            ),
            (
                3e38 * 2048**0.5,
                "Reduce",
                dict(x=inline(np.full(2048, 3e38, np.float32)), op="REDUCE_OP_NORM_L2"),
            ),
        ):
            with self.subTest(rpc, expected=expected):
                answer = client.call(rpc, **fields)
                if abs(expected) < 1e-40:  # terms of denormals: the bound is on overflow, not on these
                    self.assertTrue(0 <= answer.value.real < 1e-70)
                else:
                    self.assertLess(abs(answer.value.real / expected - 1), 1e-5, answer)

    def test_results_of_16_bits_are_rounded_once(self):
        client = self.start().client()
        x = np.array([[2048], [1], [2.0**-24]], np.float16)
        for row in self.rows(client, "reduce_axes", o.buffers.DTYPE_F16):
            with self.subTest(row, dtype="f16"):
                answer = client.call(
                    "Reduce", x=inline(x), op="REDUCE_OP_SUM", axes=[0], strategy=row
                )
                self.assertEqual(o.to_numpy(answer.tensor)[0], 2050)
        bits = (np.array([[256], [1], [2.0**-40]], np.float32).view(np.uint32) >> 16).astype(
            "<u2"
        )
        for row in self.rows(client, "reduce_axes", o.buffers.DTYPE_BF16):
            with self.subTest(row, dtype="bf16"):
                answer = client.call(
                    "Reduce", x=inline(bits), op="REDUCE_OP_SUM", axes=[0], strategy=row
                )
                value = (o.to_numpy(answer.tensor).astype(np.uint32) << 16).view(np.float32)[0]
                self.assertEqual(value, 258)


# --- Sockets --------------------------------------------------------------------------------------


class SocketTest(Case):
    def open_sockets(self, server, count):
        sockets = []
        for _ in range(count):
            try:
                sockets.append(server.socket())
            except OSError:
                pass
        for one in sockets:
            self.addCleanup(one.close)
        return sockets

    @staticmethod
    def ended(one):
        """Whether the peer has closed; what it sent before is thrown away."""
        one.settimeout(0)
        try:
            while True:
                if not one.recv(65536):
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def test_connections_that_say_nothing_are_closed(self):
        server = self.start("--max-connections", "400")
        client = server.client()
        client.dot_of_ones()
        started = time.monotonic()
        silent = self.open_sockets(server, 300)
        self.assertEqual(len(silent), 300)
        self.assert_serves(server.client())
        open_ones = silent
        while open_ones and time.monotonic() - started < 24:
            time.sleep(0.5)
            open_ones = [one for one in open_ones if not self.ended(one)]
        self.assertEqual(len(open_ones), 0, "of 300 silent connections are open after 24 s")
        self.assertGreater(time.monotonic() - started, 1, "too soon for a slow network")
        self.assert_serves(client)

    def test_connections_are_counted(self):
        server = self.start("--max-connections", "20")
        client = server.client()
        client.dot_of_ones()
        raw = [o.RawConnection(server) for _ in range(60)]
        time.sleep(0.5)
        kept = [one for one in raw if not self.ended(one.socket)]
        self.assertLessEqual(len(kept), 19, "of 60 connections are open, 1 + 19 are allowed")
        self.assertGreater(len(kept), 10)
        self.assertEqual(client.budget("connections").limit, 20)
        self.assertLessEqual(client.budget("connections").used, 20)
        self.assert_serves(client)
        for one in raw:
            one.close()
        self.assertTrue(
            eventually(lambda: outcome_of(lambda: server.client().dot_of_ones(timeout=1)).ok, 4),
            "no new client gets in after the others have left",
        )

    def test_few_descriptors(self):
        self.needs_cpu("a driver's own files are among the 256")
        server = self.start(prefix=("prlimit", "--nofile=256:256"))
        client = server.client()
        client.dot_of_ones()
        sockets = self.open_sockets(server, 200)
        raw = []
        for _ in range(200):
            try:
                raw.append(o.RawConnection(server))
            except OSError:
                break
        time.sleep(0.5)
        self.assertTrue(server.alive(), f"the server ended with {server.process.poll()}")
        self.assert_serves(client, within=5)
        for one in sockets:
            one.close()
        for one in raw:
            one.close()
        self.assertTrue(
            eventually(lambda: outcome_of(lambda: server.client().dot_of_ones(timeout=1)).ok, 6),
            "no new client gets in after the others have left",
        )
        self.assertEqual(server.stop(timeout=10), 0)

    def test_idle_connections_are_closed(self):
        server = self.start("--connection-idle", "1s")
        raw = o.RawConnection(server)
        self.addCleanup(raw.close)
        self.assertIsNotNone(raw.find_frame(o.GOAWAY, 5), "no GOAWAY after 5 s of silence")
        # A client that comes back does not notice.
        client = server.client()
        self.assert_serves(client)
        time.sleep(2.5)
        self.assert_serves(client)

    def test_streams_of_a_connection_are_bounded(self):
        for flags, check in (
            ((), lambda n: 0 < n <= 10_000),
            (("--max-streams", "10"), lambda n: n == 10),
        ):
            with self.subTest(flags=flags):
                raw = o.RawConnection(self.start(*flags))
                self.addCleanup(raw.close)
                settings = raw.find_frame(o.SETTINGS, 5)
                pairs = {
                    int.from_bytes(settings[3][i : i + 2], "big"): int.from_bytes(
                        settings[3][i + 2 : i + 6], "big"
                    )
                    for i in range(0, len(settings[3]), 6)
                }
                self.assertTrue(
                    check(pairs.get(3, 1 << 32)),
                    f"SETTINGS_MAX_CONCURRENT_STREAMS is {pairs.get(3, 'absent')}",
                )

    def test_who_acknowledges_no_settings_has_no_more_streams(self):
        for other in (None, "127.0.0.1", "[::1]"):
            with self.subTest(listen=other):
                server = self.start("--max-streams", "16", "--listen", "[::]:0", "--insecure")
                client = server.client()
                if other is not None:
                    listening = re.compile(r"listening on \[::\]:(\d+)")
                    self.assertTrue(eventually(lambda: listening.search(server.log()), 5))
                    server.address = f"{other}:{listening.search(server.log())[1]}"
                headers = o.request_headers("/tessera.v1.ComputeService/Dot")
                calls = [o.frame(o.HEADERS, o.END_HEADERS, 2 * i + 1, headers) for i in range(1024)]
                few, many = o.RawConnection(server), o.RawConnection(server)
                self.addCleanup(few.close)
                self.addCleanup(many.close)
                few.send(*calls[:16])
                many.send(*calls)
                many.socket.settimeout(5)
                while many.socket.recv(65536):  # the server's settings; no answers
                    pass
                said = "1 connections ended for more than 288 calls: ipv"
                self.assertTrue(eventually(lambda: said in server.log(), 5), server.log())
                self.assert_serves(client)
                few.send(o.frame(o.PING, 0, 0, b"answered"))
                self.assertIsNotNone(few.find_frame(o.PING, 5), "it has ended as well")

    def test_only_the_connection_with_too_many_streams_ends(self):
        """Not one from the same port to another address of the server."""
        server = self.start("--max-streams", "16", "--listen", "0.0.0.0:0", "--insecure")
        listening = re.compile(r"listening on 0\.0\.0\.0:(\d+)")
        self.assertTrue(eventually(lambda: listening.search(server.log()), 5))
        headers = o.request_headers("/tessera.v1.ComputeService/Dot")
        opened = []
        for host, calls in (("127.0.0.1", 1), ("127.0.0.2", 400), ("127.0.0.3", 1)):
            server.address = f"{host}:{listening.search(server.log())[1]}"
            here = ("127.0.0.1", opened[0].socket.getsockname()[1] if opened else 0)
            opened.append(o.RawConnection(server, here=here))
            self.addCleanup(opened[-1].close)
            opened[-1].send(
                *(o.frame(o.HEADERS, o.END_HEADERS, 2 * i + 1, headers) for i in range(calls))
            )
        opened[1].socket.settimeout(5)
        while opened[1].socket.recv(65536):
            pass
        for other in (opened[0], opened[2]):
            other.send(o.frame(o.PING, 0, 0, b"answered"))
            self.assertIsNotNone(other.find_frame(o.PING, 5), "it has ended as well")

    def test_who_gives_many_calls_up_is_not_ended(self):
        server = self.start("--max-streams", "16", "--workers", "1")
        client = server.client()
        headers = o.request_headers("/tessera.v1.ComputeService/GetServerInfo")
        raw = o.RawConnection(server)
        self.addCleanup(raw.close)
        server.signal(signal.SIGSTOP)
        for begin in range(1, 1000, 32):
            streams = range(begin, begin + 32, 2)
            raw.send(*(o.frame(o.HEADERS, o.END_HEADERS, i, headers) for i in streams))
            raw.send(*(o.frame(o.RST_STREAM, 0, i, b"\0\0\0\x08") for i in streams))
        server.signal(signal.SIGCONT)
        raw.send(o.frame(o.PING, 0, 0, b"answered"))
        self.assertIsNotNone(raw.find_frame(o.PING, 10), "it has been ended")
        time.sleep(1)
        raw.send(o.frame(o.PING, 0, 0, b"answered"))
        self.assertIsNotNone(raw.find_frame(o.PING, 10), "it has been ended")
        self.assert_serves(client)

    def test_requests_that_come_a_byte_at_a_time(self):
        self.needs_exact_memory()
        server = self.start()
        client = server.client()
        client.dot_of_ones()
        before = server.rss()
        headers = o.request_headers("/tessera.v1.ComputeService/Dot")
        raw = [o.RawConnection(server) for _ in range(40)]
        for one in raw:
            self.addCleanup(one.close)
            # A message of 4 MiB is announced; 5 bytes of its data come.
            one.send(
                o.frame(o.HEADERS, o.END_HEADERS, 1, headers),
                o.frame(o.DATA, 0, 1, b"\0" + (4 << 20).to_bytes(4, "big")),
            )
        for _ in range(5):
            for one in raw:
                try:
                    one.send(o.frame(o.DATA, 0, 1, b"\x0a"))
                except OSError:
                    pass
            self.assert_serves(client)
            time.sleep(0.1)
        growth = server.rss() - before
        self.assertLess(growth, 40 * o.MI, f"40 slow requests take {growth / o.MI:.0f} MiB")
        for one in raw:
            one.close()
        self.assert_serves(client)
        self.assertEqual(server.stop(timeout=10), 0)

    def test_answers_that_nobody_reads_are_bounded(self):
        self.needs_exact_memory()
        server = self.start("--host-memory", "32Mi")
        client = server.client()
        n = (client.info().limits.max_inline_result_bytes - 4096) // 4
        wide = inline(ONE, view([n], [0]))
        for _ in range(3):
            client.call("Add", a=wide, b=wide)
        before = server.rss()
        body = o.compute.AddRequest(a=wide, b=wide).SerializeToString()
        headers = o.request_headers("/tessera.v1.ComputeService/Add")
        # The window of a connection is 64 KiB until its reader widens it: this one never does.
        connections = [o.RawConnection(server) for _ in range(4)]
        for raw in connections:
            self.addCleanup(raw.close)
            raw.send(
                *(
                    o.frame(o.HEADERS, o.END_HEADERS, stream, headers)
                    + o.frame(
                        o.DATA, o.END_STREAM, stream, b"\0" + len(body).to_bytes(4, "big") + body
                    )
                    for stream in range(1, 180, 2)
                )
            )
        sizes = []
        for _ in range(40):
            time.sleep(0.1)
            sizes.append(server.rss())
        growth = max(sizes) - before
        self.assertLess(
            growth, 80 * o.MI, f"360 unread answers of {4 * n} bytes take {growth / o.MI:.0f} MiB"
        )
        for raw in connections:
            raw.close()
        self.assertTrue(
            eventually(lambda: server.rss() - before < 40 * o.MI, 4),
            f"readers have gone, {(server.rss() - before) / o.MI:.0f} MiB stay",
        )
        self.assert_serves(client)

    def test_requests_are_let_go_of_when_they_are_answered(self):
        server = self.start()
        client = server.client()
        x = inline(np.ones(12000, np.float32))
        reduce = o.compute.ReduceRequest(x=x, op=o.compute.REDUCE_OP_SUM)
        step = o.compute.Step(reduce=reduce)
        for method, request in (
            ("Reduce", reduce),
            ("Execute", o.compute.ExecuteRequest(steps=[step])),
        ):
            raw = o.RawConnection(server, window=0)
            self.addCleanup(raw.close)
            raw.call("/tessera.v1.ComputeService/" + method, request)
            self.assertIsNotNone(raw.find_frame(o.HEADERS, 5), "no answer comes")
            held = client.budget("host_memory").used
            self.assertLess(held, 10_000, f"bytes stay charged behind {method}")

    def test_small_answers_that_cannot_leave(self):
        # What an answer takes is held as long as gRPC holds it, and no longer than --download-timeout.
        server = self.start("--download-timeout", "1s")
        client = server.client()
        wide = inline(ONE, view([12000], [0]))
        raw = o.RawConnection(server, window=0)
        self.addCleanup(raw.close)
        raw.call("/tessera.v1.ComputeService/Add", o.compute.AddRequest(a=wide, b=wide))
        held = lambda: client.budget("host_memory").used
        self.assertTrue(eventually(lambda: held() >= 48000, 1), "the answer was not charged")
        self.assertIsNotNone(raw.find_frame(o.RST_STREAM, 5), "nothing ends the call")
        self.assertTrue(eventually(lambda: held() < 1000, 5), f"{held()} bytes stay charged")
        self.assert_serves(client)

    def test_an_answer_that_needs_no_token_and_nobody_reads(self):
        server = self.start("--download-timeout", "1s")
        raw = o.RawConnection(server, window=0)
        self.addCleanup(raw.close)
        # No bytes: of any type, a message without fields.
        raw.call("/grpc.health.v1.Health/Check", o.compute.DotRequest())
        self.assertIsNotNone(raw.find_frame(o.RST_STREAM, 5), "nothing ends the call")
        self.assert_serves(server.client())

    def test_lists_that_nobody_reads(self):
        server = self.start("--host-memory", "24Mi", "--download-timeout", "2s")
        client = server.client()
        for i in range(1000):
            client.put(f"{i:04}" + "x" * 124, ONE)
        raw = o.RawConnection(server, window=0)
        self.addCleanup(raw.close)
        before = server.rss()
        for _ in range(500):
            raw.call(
                "/tessera.v1.BufferService/ListBuffers",
                o.buffers.ListBuffersRequest(page_size=1000),
            )
        largest = 0
        for _ in range(15):
            time.sleep(0.1)
            largest = max(largest, server.rss() - before)
        if not o.Program.sanitized():
            self.assertLess(largest, 64 * o.MI, f"500 unread lists take {largest / o.MI:.0f} MiB")
        self.assertIsNotNone(raw.find_frame(o.RST_STREAM, 8), "nothing ends the calls")
        held = lambda: client.budget("host_memory").used
        self.assertTrue(eventually(lambda: held() < 1000, 30), f"{held()} bytes stay charged")
        self.assert_serves(client)

    def test_garbage(self):
        server = self.start()
        client = server.client()
        generator = random.Random(5)
        attempts = (
            [
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
                o.PREFACE + b"\xff" * 4000,
                o.PREFACE + o.frame(o.SETTINGS, 0, 0) + o.frame(o.DATA, 0, 0, b"x" * 100),
                o.PREFACE + o.frame(o.SETTINGS, 0, 0) + o.frame(o.HEADERS, 4, 1, b"\xff" * 200),
                o.PREFACE + o.frame(o.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"),
                o.PREFACE + o.frame(o.SETTINGS, 0, 0) + o.frame(9, 0, 1, b"\0" * 50) * 50,
                o.PREFACE[:10],
            ]
            + [generator.randbytes(generator.randrange(1, 3000)) for _ in range(60)]
            + [
                o.PREFACE
                + o.frame(o.SETTINGS, 0, 0)
                + b"".join(
                    o.frame(
                        generator.randrange(12),
                        generator.randrange(256),
                        generator.randrange(6),
                        generator.randbytes(generator.randrange(60)),
                    )
                    for _ in range(20)
                )
                for _ in range(60)
            ]
        )
        for data in attempts:
            one = server.socket()
            try:
                one.sendall(data)
                one.settimeout(0.01)
                one.recv(1000)
            except OSError:
                pass
            one.close()
        self.assertTrue(server.alive(), f"the server ended with {server.process.poll()}")
        self.assert_serves(client)
        self.assertTrue(
            eventually(lambda: client.budget("connections").used <= 2, 5),
            f"connections used: {client.budget('connections').used}",
        )

    def test_streams_reset_at_once(self):
        self.needs_exact_memory()
        server = self.start()
        client = server.client()
        client.dot_of_ones()
        before = server.rss()
        headers = o.request_headers("/tessera.v1.ComputeService/GetServerInfo")
        raw = o.RawConnection(server)
        self.addCleanup(raw.close)
        try:
            for begin in range(1, 20_001, 200):
                raw.send(
                    *(
                        o.frame(o.HEADERS, o.END_HEADERS, stream, headers)
                        + o.frame(o.RST_STREAM, 0, stream, b"\0\0\0\x08")
                        for stream in range(begin, begin + 200, 2)
                    )
                )
        except OSError:
            pass  # closed by the server: as good an answer as any
        self.assert_serves(client)
        growth = server.rss() - before
        self.assertLess(growth, 64 * o.MI, f"10,000 reset streams: {growth / o.MI:.0f} MiB")
        self.assertEqual(server.stop(timeout=10), 0)

    def test_half_open_connections(self):
        server = self.start("--upload-timeout", "2s")
        client = server.client()
        headers = o.request_headers(UPLOAD)
        first = o.buffers.UploadRequest(
            name="half",
            spec=o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[1000], replace=True),
            data=b"1234",
        ).SerializeToString()
        body = b"\0" + len(first).to_bytes(4, "big") + first
        for how in ("reset", "shut", "silent"):
            for _ in range(5):
                raw = o.RawConnection(server)
                self.addCleanup(raw.close)
                raw.send(o.frame(o.HEADERS, o.END_HEADERS, 1, headers), o.frame(o.DATA, 0, 1, body))
                if how == "shut":
                    raw.socket.shutdown(socket.SHUT_WR)
                elif how == "reset":
                    time.sleep(0.02)
                    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    raw.close()
        self.assert_serves(client)
        self.assertTrue(eventually(lambda: client.device().buffer_used_bytes == 0, 6))
        self.assert_empty(client)

    def test_a_thousand_clients_that_die_while_they_upload(self):
        self.needs_exact_memory()
        server = self.start()
        client = server.client()
        client.dot_of_ones()
        generator = random.Random(11)

        def open_files():
            return len(os.listdir(f"/proc/{server.process.pid}/fd"))

        def message(**fields):
            body = o.buffers.UploadRequest(**fields).SerializeToString()
            return b"\0" + len(body).to_bytes(4, "big") + body

        spec = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[64 << 10], replace=True)
        data = message(name="x", spec=spec, data=bytes(48 << 10)) + 3 * message(data=bytes(64 << 10))
        data += message(data=bytes(16 << 10))
        # What a window lets through before the server has granted more.
        stream = o.PREFACE + o.frame(o.SETTINGS, 0, 0)
        stream += o.frame(o.HEADERS, o.END_HEADERS, 1, o.request_headers(UPLOAD))
        for begin in range(0, 65_535, 16_000):
            stream += o.frame(o.DATA, 0, 1, data[begin : min(begin + 16_000, 65_535)])
        files, before = open_files(), server.rss()
        for i in range(1000):
            one = server.socket()
            one.sendall(stream[: generator.randrange(len(stream) + 1)])
            if i % 3 == 0:
                time.sleep(generator.random() / 200)
            if i % 2 == 0:  # a reset instead of an orderly end
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.close()
        self.assert_serves(client)
        for name in ("uploads", "host_memory"):
            self.assertTrue(
                eventually(lambda name=name: client.budget(name).used == 0, 5),
                f"{name}: {client.budget(name).used} are held",
            )
        self.assertTrue(
            eventually(lambda: open_files() <= files, 5), f"{open_files()} files for {files}"
        )
        self.assert_empty(client)
        growth = server.rss() - before
        self.assertLess(growth, 32 * o.MI, f"{growth / o.MI:.0f} MiB")

    def open_reflection(self, channel, *requests, stop):
        """A stream of reflection that rests after the requests, until stop is set."""

        def messages():
            yield from requests
            stop.wait(60)

        call = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )(messages(), timeout=60)
        self.addCleanup(call.cancel)
        return call

    def test_open_reflection_streams_take_no_threads(self):
        server = self.start()
        server.client().dot_of_ones()
        before = server.threads()
        stop = threading.Event()
        self.addCleanup(stop.set)
        calls = []
        for i in range(400):
            if i % 90 == 0:
                channel = server.client().channel
            calls.append(self.open_reflection(channel, LIST_SERVICES, stop=stop))
            if i < 90:
                self.assertIn(b"tessera.v1.ComputeService", next(calls[-1]))
        outcomes = [outcome_of(lambda call=call: next(call)).code for call in calls[90:]]
        self.assertEqual(outcomes.count("RESOURCE_EXHAUSTED"), 400 - 128)
        self.assertEqual(outcomes.count("OK"), 128 - 90)
        self.assertLess(server.threads() - before, 24, "threads more for 400 reflection streams")
        self.assert_serves(server.client())
        stop.set()
        self.assertEqual([outcome_of(lambda: list(call)).code for call in calls[:90]], ["OK"] * 90)

    def test_reflection_takes_small_requests(self):
        self.needs_exact_memory()
        server = self.start()
        client = server.client()
        client.dot_of_ones()
        stop = threading.Event()
        self.addCleanup(stop.set)
        before = server.rss()
        large = b"\x22\x80\x80\xc0\x03" + b"x" * (7 * o.MI)  # { file_containing_symbol: "xx..." }
        calls = [self.open_reflection(client.channel, large, stop=stop) for _ in range(20)]
        for call in calls:
            outcome = outcome_of(lambda call=call: next(call))
            self.assertEqual(outcome.code, "INVALID_ARGUMENT", outcome)
        self.assertTrue(
            eventually(lambda: server.rss() - before < 120 * o.MI, 6),
            f"20 streams that sent 7 MiB each hold {(server.rss() - before) / o.MI:.0f} MiB",
        )

    def test_no_reflection(self):
        client = self.start("--no-reflection").client()
        for version in ("v1", "v1alpha"):
            call = client.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            )
            outcome = outcome_of(lambda call=call: list(call(iter([LIST_SERVICES]), timeout=5)))
            self.assertEqual(outcome.code, "UNIMPLEMENTED", version)


# --- The end --------------------------------------------------------------------------------------


class DrainTest(Case):
    def test_the_port_closes_and_calls_in_progress_end_well(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--drain-timeout", "60s")
        client = server.client()
        client.put("s", ONE)
        raw = o.RawConnection(server)
        self.addCleanup(raw.close)
        raw.find_frame(o.SETTINGS, 5)
        call = self.hold_worker(client, 2.5)
        server.signal()
        signalled = time.monotonic()
        goaway = raw.find_frame(o.GOAWAY, 1)
        self.assertIsNotNone(goaway, "no GOAWAY within 1 s of SIGTERM")

        def refused():
            try:
                server.socket(timeout=1).close()
                return False
            except OSError:
                return True

        self.assertTrue(eventually(refused, 1), "the port accepts connections 1 s after SIGTERM")
        self.assertLess(time.monotonic() - signalled, o.Program.patience())
        self.assertFalse(call.done(), "the call in progress has ended too early")
        self.assert_ok(outcome_of(call), "the call in progress:")
        self.assertEqual(server.wait(10), 0, "exit code")

    def test_a_signal_counts_before_the_server_listens(self):
        log = pathlib.Path(self.folder) / "starting.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                [o.Program.path, "--listen", "127.0.0.1:0", "--device", o.Program.device],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)

        def catches():
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"SigCgt:\s*(\w+)", status).group(1), 16) >> 14 & 1

        self.assertTrue(eventually(catches, 30, pause=0.001), "SIGTERM is never caught")
        self.assertNotIn(b"listening", log.read_bytes(), "SIGTERM is caught too late")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(20), 0, "exit code")

    def test_closed_standard_streams_are_no_sockets(self):
        path = pathlib.Path(self.folder) / "closed.sock"
        process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", o.Program.path]
            + ["--listen", f"unix:{path}", "--device", o.Program.device]
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertTrue(eventually(path.exists, 60), "the server did not start")
        for number in range(3):
            target = os.readlink(f"/proc/{process.pid}/fd/{number}")
            self.assertEqual(target, "/dev/null", f"descriptor {number}")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(20), 0, "exit code")

    def test_a_drain_that_cuts_calls_off_says_so(self):
        self.needs_cpu()
        server = self.start(*PATIENT, "--drain-timeout", "1s")
        server.expected = 75
        client = server.client()
        client.put("s", ONE)
        call = self.hold_worker(client)
        started = time.monotonic()
        code = server.stop(timeout=10)
        self.assertEqual(code, 75, f"exit code after {time.monotonic() - started:.1f} s")
        self.assertLess(time.monotonic() - started, 6 * o.Program.patience())
        self.assertFalse(outcome_of(call).ok)

    def test_a_drain_waits_for_uploads_that_go_on_alone(self):
        server = self.start("--drain-timeout", "60s")
        client = server.client()
        stop = threading.Event()
        first = dict(name="still", spec=o.spec_of(FOUR), data=NEW[:4])
        self.addCleanup(stop.set)
        still = {
            "nothing after its first message": self.idle_upload(client, stop, [first]),
            "nothing": self.idle_upload(client, stop, []),
            "now and then an empty message": self.empty_upload(client, stop, "drip", 0.5),
            "empty messages all the time": self.empty_upload(client, stop, "flood", 0),
        }
        running = self.slow_upload(client, 5, 2)
        self.assertTrue(eventually(lambda: client.budget("uploads").used == 5, 5))
        server.signal()
        for sends, call in still.items():
            self.assertTrue(eventually(call.done, 8 * o.Program.patience()), f"it sends {sends}")
            self.assert_fails(outcome_of(call), "UNAVAILABLE", "DRAINING", limit="5s")
        self.assertFalse(running.done(), "the upload that goes on has ended too early")
        self.assert_ok(outcome_of(running))
        stop.set()
        self.assertEqual(server.wait(10), 0, "exit code")

    def test_a_second_signal_ends_at_once(self):
        self.needs_cpu()
        for number in (signal.SIGTERM, signal.SIGINT):
            server = self.start(*PATIENT, "--drain-timeout", "60s")
            server.expected = 128 + number
            client = server.client()
            client.put("s", ONE)
            self.hold_worker(client)
            server.signal(number)
            time.sleep(0.5)
            self.assertTrue(server.alive(), "it did not wait for the call in progress")
            server.signal(number)
            self.assertEqual(server.wait(5), 128 + number, "exit code of the second signal")

    def test_the_delay_serves_and_says_not_serving(self):
        server = self.start("--drain-delay", "4s")
        client = server.client()
        client.dot_of_ones()
        server.signal()
        self.assertTrue(eventually(lambda: client.health() == 2, 2))
        self.assertEqual(client.health("tessera.v1.BufferService"), 2)
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            self.assert_serves(client)
        self.assert_serves(server.client())
        self.assertEqual(server.wait(10), 0)

    def test_a_drain_under_load_fails_no_call_that_it_accepted(self):
        """Clients of gRPC that reconnect see UNAVAILABLE at most, and it leaves soon."""
        server = self.start()
        clients = [server.client() for _ in range(4)]
        wrong = []
        stop = threading.Event()

        def work(i):
            while not stop.is_set():
                outcome = outcome_of(lambda: clients[i].dot_of_ones(timeout=5 * o.Program.patience()))
                if not outcome.ok:
                    if outcome.code != "UNAVAILABLE":
                        wrong.append(outcome)
                    return

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        started = time.monotonic()
        code = server.stop(timeout=10)
        took = time.monotonic() - started
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual((code, wrong[:3]), (0, []))
        self.assertLess(took, 3 * o.Program.patience())

    def test_what_cannot_start_exits_with_1(self):
        taken = self.start().address
        for flags in (
            ("--listen", taken, "--device", "cpu"),
            ("--listen", "256.1.1.1:1", "--device", "cpu"),
            ("--listen", "127.0.0.1:0", "--device", "cuda:77"),
        ):
            with self.subTest(flags=flags):
                ended = subprocess.run(
                    [o.Program.path, *flags],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=20,
                )
                self.assertEqual(ended.returncode, 1, ended.stdout)
                self.assertTrue(ended.stdout, "it says nothing")


class LatencyTest(Case):
    @alone
    def test_the_first_call_after_a_rest_is_fast(self):
        """A second of silence, then a call: what it takes, with and without reflection."""
        self.needs_cpu("ten servers at once, each with a context of the device")
        kinds = {"default": (), "--no-reflection": ("--no-reflection",)}
        slow = {}
        # A machine that is busy with something else gets another chance.
        for _ in range(2):
            # Only such as have been slow, and each with five servers at once.
            tried = [kind for kind in kinds if not slow or slow.get(kind)]
            samples = {kind: [] for kind in tried}
            servers = [(kind, self.start(*kinds[kind])) for kind in tried for _ in range(5)]

            def work(i, servers=servers, samples=samples):
                kind, server = servers[i]
                client = server.client()
                for _ in range(5):
                    client.dot_of_ones()
                generator = random.Random(i)
                for _ in range(4):
                    time.sleep(1.0 + 0.1 * generator.random())
                    started = time.monotonic()
                    client.dot_of_ones()
                    samples[kind].append((time.monotonic() - started) * 1e3)

            in_threads(len(servers), work)
            for _, server in servers:
                server.kill()
                self.servers.remove(server)
            slow = {
                kind: [f"{ms:.1f}" for ms in sorted(took, reverse=True)]
                for kind, took in samples.items()
                if max(took) > 30
            }
            if not slow:
                return
        self.fail(f"milliseconds of the first Dot after 1.0 to 1.1 s of silence: {slow}")


# --- Running --------------------------------------------------------------------------------------


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def run_case(test):
    """(name, verdict, seconds, texts)"""
    result = unittest.TestResult()
    started = time.monotonic()
    try:
        test.run(result)
    except BaseException:  # pylint: disable=broad-except
        result.errors.append((test, traceback.format_exc()))
    texts = [
        f"{which}\n{text}" if str(which) != str(test) else text
        for which, text in result.failures + result.errors
    ]
    verdict = "FAILED" if texts else "skipped" if result.skipped else "ok"
    if verdict == "skipped":
        texts = [reason for _, reason in result.skipped]
    return (
        f"{type(test).__name__}.{test._testMethodName}",
        verdict,
        time.monotonic() - started,
        texts,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, help="cases at a time; 8, or 4 under a sanitizer")
    parser.add_argument("--known-flags-only", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    o.Program.path = os.path.abspath(arguments.server)
    o.Program.device = arguments.device
    o.Program.known_flags_only = arguments.known_flags_only

    counts = {"ok": 0, "FAILED": 0, "skipped": 0}
    lock = threading.Lock()

    def report(outcome):
        name, verdict, seconds, texts = outcome
        with lock:
            counts[verdict] += 1
            print(f"{verdict:8}{seconds:6.1f} s  {name}", flush=True)
            if verdict == "FAILED" and len(texts) > 4:
                texts = [*texts[:4], f"and {len(texts) - 4} more"]
            for text in texts:
                print("    " + text.strip().replace("\n", "\n    "), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        everything = [
            test
            for test in cases(unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__]))
            if not arguments.names or any(name in test.id() for name in arguments.names)
        ]
        # The long ones first, so that they do not run alone at the end.
        first = ("say_nothing", "each_buffer", "idle_uploads", "health_service", "gave_up")
        everything.sort(key=lambda test: not any(part in test.id() for part in first))
        single = [t for t in everything if getattr(getattr(t, t._testMethodName), "alone", False)]
        jobs = arguments.jobs or (4 if o.Program.sanitized() else 8)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in concurrent.futures.as_completed(
                pool.submit(run_case, test) for test in everything if test not in single
            ):
                report(done.result())
        for test in single:
            report(run_case(test))

    print(f"{counts['ok']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return 0 if counts["ok"] and not counts["FAILED"] else 1


if __name__ == "__main__":
    sys.exit(main())

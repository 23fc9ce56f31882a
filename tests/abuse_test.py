#!/usr/bin/env python3
"""Checks that one hostile or careless client cannot harm a server.

Every case tries to break a promise of the .proto files or of the server's flags from outside. The
cases of a class run one after the other and share servers that have the same flags. Classes run in
parallel, because cases wait more than they compute.

usage: abuse_test.py --server build/bin/tessera-server [--device cuda:0] [NAME...]

A NAME selects the cases whose names contain it."""

import contextlib
import fcntl
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
import time

import grpc
import numpy as np

import outsider as o
from outsider import Server, eventually, inline, into, outcome_of, resident, view

ONE = np.ones(1, np.float32)
FOUR = np.zeros(4, np.float32)
OLD, NEW = b"OLD!" * 4, b"NEW!" * 4  # Two possible contents of an array like FOUR.
# The timeout for a condition that becomes true eventually. No case depends on when that happens.
LONG_S = 60
# Limits under which operations may take as long as a test needs.
PATIENT = ("--max-operation-seconds", "36000", "--scratch-limit", "1Gi")
METRICS = ("--metrics-listen", "127.0.0.1:0")
# This strategy does 0.5e9 to 2e9 multiply-adds per second, on one core; see side_for().
SLOW_STRATEGY = "cpu_naive"
LIST_SERVICES = b"\x3a\x01*"  # ServerReflectionRequest { list_services: "*" }
BUFFERS, COMPUTE = "/tessera.v1.BufferService/", "/tessera.v1.ComputeService/"


def side_for(seconds):
    """Returns the side of a square product that keeps a worker busy with SLOW_STRATEGY for about
    this many seconds."""
    if o.Program.sanitized():
        seconds /= 4
    return round(1000 * (seconds / 1.2) ** (1 / 3))


def field(number, value):
    """Returns the encoding of a message's field whose value is bytes."""
    length, digits = len(value), b""
    while length > 0x7F:
        digits += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + digits + bytes([length]) + value


def padded_message(size):
    """Returns a valid UploadRequest of about `size` bytes, all in field 15, which the protocol does
    not define."""
    return field(15, bytes(size))


def in_frames(request):
    """Returns a message as gRPC encodes it in DATA frames."""
    body = request.SerializeToString()
    return b"\0" + len(body).to_bytes(4, "big") + body


class Case(o.Case):
    maxDiff = 2000

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shared = {}

    def start(self, *flags, **how):
        """Starts a server for this case only. If the server exits before the end of the case, its
        exit code must be 0."""
        server = Server(self.folder, "--no-warm-up", *flags, **how)
        self.addCleanup(self.end, server)
        return server

    def end(self, server):
        code = server.process.poll()
        server.kill()
        self.assertIn(code, (None, 0), "" if server.pipe else server.log()[-2000:])

    def share(self, *flags):
        """Returns a server that other cases of the class use as well. Anything that a case leaves
        there is deleted afterwards, and nothing may remain charged."""
        if flags not in self.shared:
            self.shared[flags] = Server(self.folder, "--no-warm-up", *flags)
            self.shared[flags].client()
            self.addClassCleanup(self.stop_shared, self.shared[flags])
        self.addCleanup(self.clean, self.shared[flags])
        return self.shared[flags]

    @staticmethod
    def stop_shared(server):
        code = server.stop()
        server.kill()
        assert code == 0, f"the server ended with {code}:\n{server.log()[-2000:]}"

    def clean(self, server):
        client, *others = server.clients
        for other in others:
            other.close()
        server.clients = [client]
        for name in client.names():
            client.call("DeleteBuffer", name=name)
        self.assert_empty(client)

    def needs_cpu(self, why="a call that holds a worker for seconds takes the CPU device"):
        if o.Program.device != "cpu":
            self.skipTest(why)

    # --- Checks -----------------------------------------------------------------------------------

    def assert_fails(self, outcome, code, reason, *numbers, **metadata):
        """Checks that the call failed with this code and reason. numbers: keys of the metadata that
        must have a number."""
        o.check_refusal(outcome, code, reason, **metadata)
        for key in numbers:
            value = outcome.metadata.get(key, "(none)")
            self.assertRegex(value, r"^-?[\d.e+-]+$", f"{key} of {outcome}")

    def assert_ok(self, outcome, what=""):
        self.assertEqual(outcome.code, "OK", f"{what} {outcome}")
        return outcome.answer

    def assert_eventually(self, condition, what=""):
        self.assertTrue(eventually(condition), what)

    def assert_becomes(self, expected, read, what=""):
        seen = []  # A second read might count what the first one allocated.

        def reached():
            seen.append(read())
            return seen[-1] == expected

        eventually(reached)
        self.assertEqual(seen[-1], expected, what)

    def assert_serves(self, client):
        """Checks that a call gets its response long before the work that delays the server would be
        over."""
        timeout = LONG_S * o.Program.patience()
        outcome = outcome_of(lambda: client.dot_of_ones(timeout=timeout))
        self.assert_ok(outcome, "a Dot of one element:")

    def assert_scratch_is_free(self, client):
        self.assert_becomes(0, lambda: client.device().scratch_used_bytes)

    def assert_empty(self, client):
        """Checks that nothing is left that counts against a limit."""
        self.assert_becomes(0, lambda: client.device().buffer_used_bytes)
        self.assert_becomes(0, lambda: client.device().scratch_used_bytes)
        self.assertEqual(client.names(), [])
        for name in ("buffers", "uploads", "downloads"):
            self.assert_becomes(0, lambda name=name: client.budget(name).used, name)

    def assert_steady(self, server, work, limit, rounds=10):
        """Checks that memory does not leak. Leaked memory grows in every round. Memory that the
        allocator retains does not, so some round adds less than the limit."""
        growth, before = [], server.rss()
        while not growth or growth[-1] >= limit:
            work()
            growth.append(server.rss() - before)
            before += growth[-1]
            if o.Program.sanitized():
                return
            self.assertLess(len(growth), rounds, f"each of {rounds} rounds adds bytes: {growth}")

    def assert_grew_less(self, limit, before, read):
        """Checks growth against a limit, which is at most half of what a faulty server would
        use."""
        if not o.Program.sanitized():
            eventually(lambda: read() - before < limit)
            self.assertLess((read() - before) / o.MI, limit / o.MI, "MiB of growth")

    @staticmethod
    def metric(server, name, label=""):
        """Returns the sum of the metric's values with this label, as in 'key="value"'."""
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", server.page(), re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    # --- Long calls -------------------------------------------------------------------------------

    def slow_product(self, client, seconds=120, timeout=600, **more):
        """Starts a product that keeps a worker busy. The client must have a buffer "s" of one
        element."""
        n = side_for(seconds)
        a = resident("s", view([n, n], [0, 0]))
        more.setdefault("result", into(f"product{time.monotonic_ns()}"))
        call = client.future("Matmul", timeout=timeout, a=a, b=a, strategy=SLOW_STRATEGY, **more)
        self.addCleanup(call.cancel)
        return call

    def hold_worker(self, client, **how):
        """Like slow_product, but waits until a worker has begun, that is, has copied the
        operands."""
        client.put("s", ONE, replace=True)
        call = self.slow_product(client, **how)
        self.assert_eventually(lambda: client.device().scratch_used_bytes > 0 or call.done())
        self.assertFalse(call.done(), call.done() and outcome_of(call))
        return call

    def idle_upload(self, client, stop, *messages, pause=None):
        self.addCleanup(stop.set)
        return client.begin_upload(stop, *messages, pause=pause)

    @staticmethod
    def slow_upload(client, stop):
        """Uploads one element at a time until stop is set, and then the rest."""

        def requests():
            left, spec = 4000, o.spec_of(np.zeros(1000, np.float32))
            while not stop.is_set() and left > 4:
                yield o.buffers.UploadRequest(name="slow", data=NEW[:4], spec=spec)
                left -= 4
                stop.wait(0.1)
            yield o.buffers.UploadRequest(name="slow", data=bytes(left), spec=spec)

        return client.b.Upload.future(requests(), timeout=600)

    @staticmethod
    def unread_downloads(server, count=3):
        """Starts downloads of 32 MiB that read only the first chunk. The flow-control window stays
        small, however long a chunk takes to arrive."""
        client = server.client(options=[("grpc.http2.bdp_probe", 0)])
        one = inline(ONE, view([8 << 20], [0]))
        if "big" not in client.names():
            client.call("Add", a=one, b=one, result=into("big"))
        request = o.buffers.DownloadRequest(name="big")
        calls = []
        for _ in range(count):
            calls.append(client.b.Download(request, timeout=600))
            assert len(next(calls[-1]).data) == o.MI
        return calls

    @staticmethod
    def one_upload():
        """Returns a whole upload in one message."""
        return o.buffers.UploadRequest(name="u", data=ONE.tobytes(), spec=o.spec_of(ONE))

    @staticmethod
    def send(client, method, message):
        """Returns the outcome of a call of any kind whose request is this one message."""
        call = client.channel.stream_stream(method)
        return outcome_of(lambda: list(call(iter([message]), timeout=LONG_S)))

    def raw(self, server, **how):
        """Opens an HTTP/2 connection by hand."""
        raw = o.RawConnection(server, **how)
        self.addCleanup(raw.close)
        return raw


class BusyWorkerTest(Case):
    """The only worker is busy with a product that takes minutes."""

    QUEUE = 8

    def setUp(self):
        self.needs_cpu()
        self.server = self.share(*PATIENT, "--workers", "1", "--queue", str(self.QUEUE))
        self.client = self.server.client()

    def waiting(self):
        return self.client.device().waiting

    def test_places_of_callers_that_have_left_are_free(self):
        client, x = self.client, inline(ONE)
        self.assertEqual(client.info().limits.queue_length, self.QUEUE)
        self.hold_worker(client)
        for ending, timeout in (("CANCELLED", 600), ("DEADLINE_EXCEEDED", 0.3)):
            calls = [client.future("Dot", a=x, b=x, timeout=timeout) for _ in range(self.QUEUE)]
            if ending == "CANCELLED":
                self.assert_becomes(self.QUEUE, self.waiting)
                full = client.attempt("Dot", a=x, b=x)
                self.assert_fails(full, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
                self.assertIsNotNone(full.retry_s, "QUEUE_FULL without a RetryInfo")
                for call in calls:
                    call.cancel()
            for call in calls:
                self.assertEqual(outcome_of(call).code, ending)
            self.assert_becomes(0, self.waiting, f"calls that ended with {ending}")

    def test_the_bytes_of_a_program_count_until_it_is_parsed(self):
        client = self.client
        self.hold_worker(client)
        used = lambda: client.budget("host_memory").used
        before = used()
        x = inline(np.ones(3 * o.MI // 4, np.float32))
        call = client.future(
            "Execute", steps=[o.compute.Step(reduce=dict(x=x, op="REDUCE_OP_SUM"))])
        self.assert_becomes(1, self.waiting)
        held = used() - before
        self.assertTrue(3 * o.MI < held < 4 * o.MI, f"3 MiB count as {held / o.MI:.1f} MiB")
        call.cancel()
        self.assert_eventually(lambda: used() <= before)

    def test_results_of_callers_that_gave_up_leave_nothing(self):
        client = self.client
        kept = client.put("kept", ONE)
        for target in (into("gone"), into("kept", replace=True)):
            self.hold_worker(client, result=target).cancel()
            call = self.slow_product(client, timeout=0.5, result=target)
            self.assertEqual(outcome_of(call).code, "DEADLINE_EXCEEDED")
            self.assert_serves(client)  # Both calls have been made.
            self.assert_scratch_is_free(client)
        self.assertEqual(client.names(), ["kept", "s"])
        self.assertEqual(client.call("GetBuffer", name="kept").buffer.version, kept.version)
        self.assertEqual(client.download("kept"), ONE.tobytes())

    def test_waiting_requests_are_bounded_in_bytes(self):
        total, each = 32 * o.MI, 2 * o.MI
        flags = ("--workers", "1", "--queue", "1000", "--host-memory", str(total))
        server = self.start(*PATIENT, *flags)
        client = server.client()
        product = self.hold_worker(client)
        big = inline(np.ones(each // 8, np.float32))
        waiting, refused = [], []
        while len(refused) < 30:
            if len(refused) == 1:
                before = server.rss()
            # Calls are made one at a time, because gRPC itself rejects calls that arrive faster
            # than they are read.
            call = client.future("Dot", a=big, b=big, timeout=600)
            count = len(waiting) + 1
            self.assert_eventually(lambda: call.done() or client.device().waiting == count)
            (refused if call.done() else waiting).append(call)
        self.assertFalse(product.done(), product.done() and outcome_of(product))
        self.assertTrue(3 < len(waiting) <= total // each, len(waiting))
        self.assert_grew_less(15 * each, before, server.rss)
        for call in refused:
            end = outcome_of(call)
            self.assert_fails(
                end, "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED", "requested", "free", total=total
            )
            self.assertIsNotNone(end.retry_s, end)
        for call in waiting:
            call.cancel()
        self.assertEqual(client.budget("host_memory").limit, total)
        self.assert_eventually(lambda: client.budget("host_memory").used < o.MI)


class WorkTest(Case):
    def strategies(self, client):
        """Returns the strategies of Matmul, and "" for the server's own choice."""
        rows = client.call("ListStrategies", operation="matmul").strategies
        return ["", *sorted({row.name for row in rows})]

    def test_an_empty_operand_is_not_walked_along(self):
        client = self.share().client()
        client.put("x", ONE)
        huge, far, back = 1 << 40, (1 << 63) - 1, -(1 << 63)
        strides = ([1 << 62, 1], [1, 1 << 62], [far, far], [back, back], [far, back])
        for strategy in self.strategies(client):
            for a, b in (([huge, 0], [0, 0]), ([0, 3], [3, huge]), ([huge, 3], [3, 0])):
                with self.subTest(strategy=strategy, a=a, b=b):
                    a, b = (resident("x", view(shape, [0, 0])) for shape in (a, b))
                    outcome = client.attempt("Matmul", a=a, b=b, strategy=strategy)
                    self.assertNotIn(outcome.code, ("DEADLINE_EXCEEDED", "CANCELLED"), outcome)
            for m, n in ((3, 4), (130, 130), (1, 4), (4, 1)):
                for i, s in enumerate(strides):
                    ta, tb = bool(i & 1), bool(i & 2)
                    a = resident("x", view([0, m] if ta else [m, 0], s))
                    b = resident("x", view([n, 0] if tb else [0, n], s))
                    with self.subTest(strategy=strategy, m=m, n=n, strides=s):
                        outcome = client.attempt(
                            "Matmul", a=a, b=b, transpose_a=ta, transpose_b=tb, strategy=strategy)
                        if outcome.reason != "STRATEGY_UNSUPPORTED":
                            answer = self.assert_ok(outcome)
                            self.assertEqual(answer.tensor.data, bytes(4 * m * n))
        for s in strides:
            nothing = resident("x", view([0, 1 << 60], s))
            copy = dict(source="x", name="x", view=nothing.view, replace=True)
            for rpc, fields in (("Dot", dict(a=nothing, b=nothing)),
                                ("Reduce", dict(x=nothing, op="REDUCE_OP_SUM")),
                                ("Reduce", dict(x=nothing, op="REDUCE_OP_SUM", axes=[1])),
                                ("Add", dict(a=nothing, b=nothing)),
                                ("CopyBuffer", copy)):
                with self.subTest(rpc, strides=s):
                    self.assert_ok(client.attempt(rpc, **fields))
            client.put("x", ONE, replace=True)
        self.assert_serves(client)

    def test_a_small_request_takes_little_memory(self):
        server = self.start("--memory-limit", "16Mi", "--scratch-limit", "16Mi")
        client = server.client()
        client.put("s", ONE)
        n = 100_000_000  # Elements of 4 or 8 bytes.
        half = inline(np.ones(1), view([n], [0]))
        wide = resident("s", view([n], [0]))
        # These strides cannot be simplified to the strides of one element.
        client.put("two", np.ones(2, np.float32))
        mixed = resident("two", view([n // 2, 2], [0, 1]))
        before = server.peak_rss()
        for rpc, fields in (("Dot", dict(a=wide, b=wide)),
                            ("Reduce", dict(x=wide, op="REDUCE_OP_SUM")),
                            ("Dot", dict(a=half, b=half)),
                            ("Dot", dict(a=mixed, b=mixed))):
            outcome = client.attempt(rpc, **fields)
            if outcome.ok:
                self.assertEqual(outcome.answer.value.real, n)
                continue
            numbers = {"SCRATCH_EXHAUSTED": ("requested", "free", "total"),
                       "OPERATION_TOO_LONG": ("estimate_seconds", "limit_seconds")}
            self.assertIn(outcome.reason, numbers, outcome)
            self.assert_fails(outcome, outcome.code, outcome.reason, *numbers[outcome.reason])
            # The call exceeds the limit by itself, so a retry is pointless.
            self.assertIsNone(outcome.retry_s, outcome)
        self.assert_grew_less(2 * n, before, server.peak_rss)
        self.assert_scratch_is_free(client)

    def test_the_row_that_runs_by_default_may_take_longer_than_a_lesson(self):
        """A product that is within the limit for the default strategy exceeds the limit for slow
        strategies, so it is refused."""
        self.needs_cpu()
        client = self.start("--max-operation-seconds", "1.2").client()
        limits = [client.info().limits.max_operation, client.info().limits.max_slow_operation]
        self.assertEqual([limit.ToMilliseconds() for limit in limits], [1200, 200])
        client.put("s", ONE)
        a = resident("s", view([1000, 1000], [0, 0]))
        outcome = client.attempt("Matmul", a=a, b=a, strategy=SLOW_STRATEGY, result=into("r"))
        too_long = ("FAILED_PRECONDITION", "OPERATION_TOO_LONG")
        self.assert_fails(outcome, *too_long, "estimate_seconds", limit_seconds=0.2)
        self.assertGreater(float(outcome.metadata["estimate_seconds"]), 0.2, outcome)
        self.assertEqual(client.names(), ["s"])
        self.assert_ok(client.attempt("Matmul", a=a, b=a))

    def test_an_idle_server_leaves_the_processor_alone(self):
        server = self.share()
        client = server.client()
        for _ in range(200):  # Gives every worker time to wait.
            self.assertEqual(client.dot_of_ones(), 1)

        def is_idle():
            """Returns whether no thread is running or runnable in all samples, and all threads
            together use little time."""
            before, begin, always = server.cpu_seconds(), time.monotonic(), None
            for _ in range(20):
                time.sleep(0.01)
                tasks = pathlib.Path(f"/proc/{server.pid}/task").iterdir()
                stats = {task.name: (task / "stat").read_text() for task in tasks}
                running = {name for name, stat in stats.items() if ") R " in stat}
                always = running if always is None else always & running
            spent = server.cpu_seconds() - before
            return not always and spent <= 0.1 * (time.monotonic() - begin)

        self.assert_eventually(is_idle)

    def test_no_thread_of_grpc_sleeps_between_calls(self):
        """The server has none of gRPC's callback threads. After each second without a call, these
        sleep for a tenth of a second, and a call that arrived in that time would have to wait."""
        server = self.share()
        client = server.client()
        client.put("x", FOUR)
        client.download("x")
        self.assert_serves(client)
        self.assertEqual(client.health(), 1)
        tasks = pathlib.Path(f"/proc/{server.pid}/task").iterdir()
        names = [(task / "comm").read_text().strip() for task in tasks]
        self.assertIn("grpc_global_tim", names, "gRPC's threads have other names")
        self.assertNotIn("nexting_thread", names)

    def test_what_host_memory_cannot_hold_is_refused_for_good(self):
        total = 16 * o.MI
        client = self.start("--host-memory", str(total)).client()
        wide = inline(ONE, view([3 * o.MI // 4], [0]))
        add = o.compute.AddRequest(a=wide, b=wide)  # A result of 3 MiB.
        program = o.compute.ExecuteRequest(steps=[o.compute.Step(add=add)])

        def attempt(rpc, message, groups):
            """Sends that many unknown fields, each of which takes dozens of bytes in memory."""
            message = message.SerializeToString() + b"\x7b\x7c" * groups
            return self.send(client, COMPUTE + rpc, message)

        def assert_is_refused(outcome):
            self.assert_fails(
                outcome, "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED", "free", total=total)
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
                # The request fits, but not together with its response.
                requested = assert_is_refused(attempt(rpc, message, int((total - 2 * o.MI) / size)))
                self.assertLess(requested, total + 12 * o.MI)
                # With half as many fields, both fit.
                self.assert_ok(attempt(rpc, message, int(6 * o.MI / size)))
        self.assert_becomes(0, lambda: client.budget("host_memory").used)


class MemoryTest(Case):
    def test_more_memory_than_there_is(self):
        """With --memory-limit beyond the machine's memory, the server does not start, or says so
        and clamps the limit."""
        try:
            server = self.start("--memory-limit", "900Gi")
        except AssertionError as refused:
            self.assertIn("did not start", str(refused))
            self.assertIn("memory", str(refused))
            return
        device = server.client().device()
        self.assertLessEqual(device.buffer_limit_bytes, device.memory_total_bytes)
        self.assertRegex(server.log(), r"warn\S* .*memory", "clamped without a warning")

    def test_an_allocation_that_fails_is_an_answer(self):
        # The limit on the address space is below the machine's memory.
        self.needs_cpu("RLIMIT_AS does not bound the memory of a GPU")
        if o.Program.sanitized():
            self.skipTest("a sanitizer takes additional memory")
        server = self.start("--memory-limit", "8Gi", prefix=("prlimit", "--as=6442450944"))
        client = server.client()
        big = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[7 << 28])
        outcome = client.attempt("CreateBuffer", name="big", spec=big)
        self.assertEqual(outcome.code, "RESOURCE_EXHAUSTED", outcome)
        self.assertIn(
            outcome.reason, ("HOST_MEMORY_EXHAUSTED", "GPU_MEMORY_EXHAUSTED", "QUOTA_EXCEEDED"))
        self.assertEqual(outcome.metadata.get("requested"), str(7 << 30), outcome)
        self.assert_serves(client)
        self.assert_empty(client)

    def test_memory_and_counts_are_bounded_by_default(self):
        info = self.share().client().info()
        limits = {budget.name: budget.limit for budget in info.budgets}
        for name in ("host_memory", "buffers", "uploads", "downloads", "connections"):
            self.assertTrue(0 < limits.get(name, 0) < 1 << 40, f"budget {name!r} of {limits}")
        self.assertGreater(info.limits.max_ranges, 0)
        device = info.devices[0]
        self.assertTrue(0 < device.scratch_limit_bytes <= device.memory_total_bytes, device)

    def test_missing_ranges_and_drafts_are_listed_to_a_bound(self):
        client = self.share().client()
        client.create("x", np.zeros(200, np.float32))
        client.upload([dict(name="x", offset=4 * i + 1, data=b"x") for i in range(200)])
        answer = client.call("GetBuffer", name="x")
        self.assertEqual(len(answer.missing), 100)
        missing = [(gap.begin, gap.end) for gap in answer.missing[:2]]
        self.assertEqual(missing, [(0, 1), (2, 5)])
        made = [client.create("y", ONE, replace=True).version for _ in range(20)]
        self.assertEqual(
            [draft.version for draft in client.call("GetBuffer", name="y").drafts], made[4:])

    def test_ttls_out_of_range(self):
        """Tests copies and results. tests/fuzz_model_test.py covers the other calls."""
        client = self.share().client()
        client.put("x", FOUR)
        one = inline(ONE)
        for ttl in ({"seconds": -1}, {"seconds": 5, "nanos": 10**9}, {"seconds": 2**63 - 1}, {}):
            for outcome in (client.attempt("CopyBuffer", source="x", name="c", ttl=ttl),
                            client.attempt("Add", a=one, b=one, result=into("d", ttl=ttl))):
                with self.subTest(ttl=ttl):
                    self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_TTL")

    def test_sealing_again_checks_the_checksum(self):
        client = self.share().client()
        right = o.crc32c(NEW)
        for reason, message, crc32c in (("", dict(crc32c=right), right),
                                        ("BAD_CHECKSUM", dict(crc32c=right), 1),
                                        ("CHECKSUM_UNKNOWN", {}, right)):
            version = client.create("x", FOUR, replace=True).version
            client.upload([dict(name="x", data=NEW, **message)])
            seal = lambda **more: client.attempt("SealBuffer", name="x", version=version, **more)
            self.assertEqual(seal().answer.buffer, seal().answer.buffer)
            self.assertEqual(seal(crc32c=crc32c).reason, reason)


class CountTest(Case):
    """The server has a small limit on each of these counts."""

    def setUp(self):
        self.server = self.share(
            "--max-transfers", "3", "--max-connections", "20", "--max-streams", "10")
        self.client = self.server.client()

    def used(self, budget):
        return self.server.clients[0].budget(budget).used

    def test_uploads_are_counted(self):
        client, stop, spec = self.client, threading.Event(), o.spec_of(FOUR)
        self.assertEqual(client.budget("uploads").limit, 3)
        streams = [self.idle_upload(client, stop, dict(name=f"x{i}", spec=spec, data=NEW))
                   for i in range(3)]
        self.assert_becomes(3, lambda: self.used("uploads"))
        self.assert_fails(outcome_of(lambda: client.put("more", FOUR)),
                          "RESOURCE_EXHAUSTED", "TOO_MANY_UPLOADS", limit=3)
        streams[0].cancel()
        self.assert_becomes(2, lambda: self.used("uploads"))
        client.put("more", FOUR)
        stop.set()
        for stream in streams[1:]:
            self.assert_ok(outcome_of(stream))

    def test_downloads_are_counted(self):
        client = self.client
        calls = self.unread_downloads(self.server)
        self.assert_fails(outcome_of(lambda: client.download("big")),
                          "RESOURCE_EXHAUSTED", "TOO_MANY_DOWNLOADS", limit=3)
        calls[0].cancel()
        self.assert_becomes(2, lambda: self.used("downloads"))
        self.assertEqual(len(client.download("big")), 32 << 20)
        for call in calls:
            call.cancel()

    def test_connections_are_counted(self):
        client = self.server.clients[0]
        self.client.close()
        self.assert_becomes(1, lambda: self.used("connections"))
        raw = []
        for _ in range(60):
            with contextlib.suppress(OSError):  # The server may close it early.
                raw.append(self.raw(self.server))
        kept = [one for one in raw if one.find_frame(o.SETTINGS, LONG_S)]
        counts = (len(kept), self.used("connections"), client.budget("connections").limit)
        self.assertEqual(counts, (19, 20, 20))
        self.assert_serves(client)
        for one in raw:
            one.close()
        self.assert_becomes(1, lambda: self.used("connections"))
        self.assert_serves(self.server.client())

    def test_streams_of_a_connection_are_bounded(self):
        payload = self.raw(self.server).find_frame(o.SETTINGS, LONG_S)[3]
        self.assertEqual(dict(struct.iter_unpack(">HI", payload))[3], 10)


LOG_LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S* (trace|debug|info|warn|warning|error|critical) ")
CONTROL = "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
# An error quotes a hundred characters of each text.
HOSTILE_TEXTS = [
    "x\nFORGED\r\nFORGED\rFORGED\u2028FORGED\u0085FORGED\u009b2J\x1b[2J\x1b]0;title\x07",
    'nul\0nul, quote " backslash \\ {} %s %n {0} \u202egnirts\u061c \ud7ff\U0010ffff',
    "x" * 127 + "\u00e4" * 700,  # Errors must not split these characters.
]


class LogTest(Case):
    def hostile_calls(self, client, text):
        """Sends the text in every field that takes text from a client."""
        one, spec = inline(ONE), o.spec_of(ONE)
        named = ("GetBuffer", "DeleteBuffer", "SealBuffer", "UpdateBuffer")
        # The log writes ten lines a second, so calls with different texts come first.
        return [client.attempt("CreateBuffer", name="y", spec=o.spec_of(ONE, device=text)),
                client.attempt("ListBuffers", page_token=text),
                client.attempt("Dot", a=one, b=one, strategy=text),
                client.attempt("ListStrategies", operation=text),
                client.try_upload([dict(name=text, spec=spec, data=b"1234")]),
                client.try_upload([dict(name=text, data=b"1234")]),
                client.attempt("Add", a=one, b=one, result=into(text)),
                client.attempt("CopyBuffer", source=text, name="y"),
                *(client.attempt(rpc, name=text) for rpc in named),
                client.attempt("CopyBuffer", source="y", name=text),
                client.attempt("CreateBuffer", name=text, spec=spec),
                outcome_of(lambda: client.download(text)),
                client.attempt("Dot", a=resident(text), b=one)]

    def test_texts_forge_no_lines(self):
        # By default, libprotobuf reports text that is not UTF-8 on standard error.
        body = b"\x0a\x01\xff"
        for text in HOSTILE_TEXTS:
            for form in ("text", "json"):
                with self.subTest(text=text, form=form):
                    server = self.start("--log-level", "debug", "--log-format", form)
                    client = server.client()
                    outcomes = self.hostile_calls(client, text)
                    outcomes += [self.send(client, BUFFERS + rpc, body)
                                 for rpc in ("GetBuffer", "Upload")]
                    for outcome in outcomes:
                        self.assertNotIn(outcome.code, ("OK", "UNKNOWN"), outcome)
                        self.assertTrue(outcome.reason or outcome.code != "INTERNAL", outcome)
                    self.assertEqual(server.stop(), 0)
                    log = server.log()
                    self.assertNotRegex(log, CONTROL)
                    lines = log.split("\n")[:-1]
                    self.assertGreater(len(lines), 10, "the refused calls have no lines")
                    for line in lines:
                        if form == "text":
                            self.assertRegex(line, LOG_LINE)
                        else:
                            missing = {"time", "level", "message"} - set(json.loads(line))
                            self.assertEqual(missing, set(), line)

    def test_large_requests_make_short_lines(self):
        server = self.start()
        client = server.client()
        name, one = "A" * 4_000_000, inline(ONE)
        many = [1] * 4_000_000
        spec = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=many)
        for rpc, fields in (("GetBuffer", dict(name=name)),
                            ("DeleteBuffer", dict(name=name)),
                            ("Dot", dict(a=resident(name), b=one)),
                            ("Dot", dict(a=one, b=one, strategy=name)),
                            ("ListBuffers", dict(page_token=name)),
                            ("Dot", dict(a=inline(ONE, view(many)), b=one)),
                            ("Dot", dict(a=inline(ONE, view([1], many)), b=one)),
                            ("Reduce", dict(x=one, op="REDUCE_OP_SUM", axes=many)),
                            ("CreateBuffer", dict(name="x", spec=spec))):
            outcome = client.attempt(rpc, **fields)
            self.assertIn(outcome.code, ("INVALID_ARGUMENT", "NOT_FOUND"), outcome)
            self.assertTrue(outcome.reason, outcome)
            size = len(outcome.text) + sum(map(len, outcome.metadata.values()))
            self.assertLess(size, 6000, "characters of an error")
        self.assertEqual(server.stop(), 0)
        lines = server.log().splitlines()
        self.assertLess(max(map(len, lines)), 4096, "characters of the longest line")
        self.assertGreater(len(lines), 3)

    @staticmethod
    def fail(client):
        """Makes calls that log long lines."""
        client.attempt("Dot", a=resident("\1" * 100_000), b=resident("C"))
        client.attempt("Dot", a=inline(ONE), b=inline(ONE), strategy="\1" * 100_000)

    def test_a_log_that_is_not_read_stops_nothing(self):
        server = self.start(pipe=True)
        size = fcntl.fcntl(server.pipe, fcntl.F_SETPIPE_SZ, 4096)
        client = server.client()

        def is_full():
            """Returns whether the pipe may lack space for another line."""
            self.fail(client)
            (used,) = struct.unpack("i", fcntl.ioctl(server.pipe, termios.FIONREAD, bytes(4)))
            return used > size - 700

        self.assert_eventually(is_full)
        for _ in range(20):
            self.fail(client)
        self.assert_serves(client)
        self.assert_serves(server.client())
        self.assertEqual(server.stop(), 0, "exit code after SIGTERM, the log still unread")

    def test_a_log_whose_reader_is_gone_does_not_end_the_server(self):
        server = self.start(pipe=True)
        client = server.client()
        server.process.stdout.close()
        server.process.stdout = None
        self.fail(client)
        self.assert_serves(client)
        self.assertEqual(server.stop(), 0)


class BrokenUploadTest(Case):
    def check(self, second, data, **how):
        """Checks uploads whose bytes have all arrived before, or together with, a second message
        that makes them invalid."""
        server = self.share()
        judge, client = server.client(), server.client(**how)
        raw = client.channel.stream_unary(BUFFERS + "Upload", request_serializer=lambda m: m)
        old = np.full(len(data) // 4, 7, np.float32)
        judge.put("live", old)

        def has_arrived(name):
            found = judge.attempt("GetBuffer", name=name).answer
            drafts = found and [found.buffer, *found.drafts]
            return any(d.state == o.buffers.Buffer.STATE_WRITING and d.committed_bytes == len(data)
                       for d in drafts or ())

        for i in range(8):
            name, replace, wait = "live" if i & 1 else f"new{i}", bool(i & 1), bool(i & 2)
            spec = o.spec_of(old, replace=replace)
            first = o.buffers.UploadRequest(name=name, spec=spec, data=data)

            def messages(first=first, name=name, wait=wait):
                yield first.SerializeToString()
                if wait:
                    eventually(lambda: has_arrived(name))
                yield second

            outcome = outcome_of(lambda: raw(messages(), timeout=600))
            self.assertFalse(outcome.ok, f"the upload is answered with OK, try {i}")
        self.assert_becomes(0, lambda: judge.budget("uploads").used)
        self.assertEqual(judge.names(), ["live"], "buffers of refused uploads")
        self.assertEqual(judge.download("live"), old.tobytes(), "a refused upload replaces")
        # A refused upload does not write to a range either.
        judge.create("range", old)
        first = o.buffers.UploadRequest(name="range", offset=0, data=data).SerializeToString()
        self.assertFalse(outcome_of(lambda: raw(iter([first, second]), timeout=600)).ok)
        for name in ("live", "range"):
            judge.call("DeleteBuffer", name=name)
        self.assert_serves(judge)

    def test_messages_that_are_refused_are_not_the_end(self):
        for what, second in (("larger than gRPC takes", padded_message(9 * o.MI)),
                             ("above the limit", padded_message(5 * o.MI)),
                             ("garbage", b"\xff" * 50),
                             ("half a message", padded_message(1000)[:-500])):
            with self.subTest(what):
                self.check(second, os.urandom(64))
        # gRPC sends incompressible messages uncompressed. Here, only the first message, which is
        # random, is incompressible.
        self.check(padded_message(100_000), os.urandom(4096), compression=grpc.Compression.Gzip)

    def test_uploads_whose_first_message_is_wrong(self):
        client = self.share().client()
        client.put("x", FOUR)
        client.create("d", FOUR)
        first = dict(name="x", spec=o.spec_of(FOUR, replace=True))
        for message in (
                dict(first, data=NEW, version=7), dict(name="d", data=NEW, buffer_crc32c=1)):
            outcome = client.try_upload([message])
            self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_MESSAGE")
            if outcome.metadata["field"] == "spec":
                self.assertEqual(set(outcome.metadata), {"field"}, "numbers of no spec")
        self.assertEqual(client.download("x"), FOUR.tobytes())
        self.assertEqual(client.names(), ["d", "x"])
        self.assertEqual(client.call("GetBuffer", name="d").buffer.committed_bytes, 0)


class SlowClientTest(Case):
    def setUp(self):
        self.server = self.share("--transfer-timeout", "3s", *METRICS)
        self.client = self.server.client()

    def test_idle_uploads_end(self):
        client, stop = self.client, threading.Event()
        first = dict(name="idle", spec=o.spec_of(FOUR), data=NEW[:4])
        idle = {
            "nothing": self.idle_upload(client, stop, first),
            "empty messages": self.idle_upload(client, stop, dict(first, name="e"), pause=0.05)}
        for sends, call in idle.items():
            self.assert_eventually(call.done, f"it sends {sends}")
            self.assert_fails(outcome_of(call), "DEADLINE_EXCEEDED", "UPLOAD_IDLE", limit="3s")
        self.assertEqual(client.names(), [])

    def test_half_open_connections(self):
        client, server = self.client, self.server
        spec = o.spec_of(np.zeros(1000, np.float32), replace=True)
        request = o.buffers.UploadRequest(name="half", spec=spec, data=b"1234")
        ended = lambda: self.metric(server, "tessera_requests_total", 'rpc="Upload"')
        before = ended()
        raw = [self.raw(server) for _ in range(15)]
        for one in raw:
            one.send(o.frame(o.HEADERS, o.END_HEADERS, 1, o.request_headers(BUFFERS + "Upload")),
                     o.frame(o.DATA, 0, 1, in_frames(request)))
        # All uploads have begun, and some may have ended already.
        self.assert_eventually(lambda: ended() + client.budget("uploads").used >= before + 15)
        # The first third of the connections sends nothing from here on.
        for one in raw[5:10]:
            one.socket.shutdown(socket.SHUT_WR)
        for one in raw[10:]:
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        self.assert_serves(client)
        self.assert_empty(client)


class UnreadTest(Case):
    """Downloads and other responses that their callers do not read."""

    def setUp(self):
        # Longer than a client may be delayed between two steps.
        flags = ("--transfer-timeout", "5s", "--host-memory", "32Mi")
        self.server = self.share(*flags, *METRICS)
        self.client = self.server.client()

    def held(self):
        return self.client.budget("host_memory").used

    def test_unread_downloads_end(self):
        client = self.client
        calls = self.unread_downloads(self.server)
        client.call("DeleteBuffer", name="big")
        self.assert_becomes(0, lambda: client.device().buffer_used_bytes)
        self.assert_becomes(0, lambda: client.budget("downloads").used)
        self.assert_eventually(lambda: "DEADLINE_EXCEEDED DOWNLOAD_IDLE" in self.server.log())
        for call in calls:
            self.assertFalse(outcome_of(lambda call=call: list(call)).ok)

    def test_slow_downloads_do_not_end(self):
        client = self.client
        unread, slow = self.unread_downloads(self.server, count=2)
        size = o.MI
        while client.budget("downloads").used == 2:
            size += len(next(slow).data)
            time.sleep(0.5)
        self.assertFalse(outcome_of(lambda: list(unread)).ok)
        self.assertEqual(size + sum(len(message.data) for message in slow), 32 << 20)

    def test_unread_responses_are_bounded(self):
        server = self.start("--transfer-timeout", "600s", "--host-memory", "32Mi", *METRICS)
        client = server.client()
        n = (client.info().limits.max_inline_result_bytes - 4096) // 4
        wide = inline(ONE, view([n], [0]))
        client.call("Add", a=wide, b=wide)
        client.put("x", ONE)
        for i in range(500):
            client.call("CopyBuffer", source="x", name=f"{i:04}" + "x" * 124)
        size = client.call("ListBuffers", page_size=1000).ByteSize()
        refused = lambda: self.metric(server, "tessera_errors_total", '"HOST_MEMORY_EXHAUSTED"')
        for method, request, each, count in (
                (COMPUTE + "Add", o.compute.AddRequest(a=wide, b=wide), 4 * n, 50),
                (BUFFERS + "ListBuffers", o.buffers.ListBuffersRequest(page_size=1000), size, 300)):
            with self.subTest(method):
                before, begin = server.rss(), refused()
                # The window of a connection is 64 KiB until its reader widens it, and these readers
                # never do.
                connections = [self.raw(server, window=0) for _ in range(4)]
                for raw in connections:
                    for _ in range(count):
                        raw.call(method, request)
                sum_of_all = 4 * count * each
                self.assertGreater(sum_of_all, 3 * 32 * o.MI)
                self.assert_eventually(lambda: refused() - begin >= 2 * count)
                if not o.Program.sanitized():
                    self.assertLess(server.rss() - before, 2 * count * each, "bytes")
                for raw in connections:
                    raw.close()
                self.assert_eventually(lambda: client.budget("host_memory").used < 1000)
        self.assert_serves(client)

    def test_small_unread_responses_end(self):
        # The memory of a response is charged as long as gRPC holds it, but no longer than the
        # timeout.
        wide = inline(ONE, view([12000], [0]))
        raw = [self.raw(self.server, window=0) for _ in range(3)]
        raw[0].call(COMPUTE + "Add", o.compute.AddRequest(a=wide, b=wide))
        self.assert_eventually(lambda: self.held() >= 48000, "the response was not charged")
        raw[1].call(BUFFERS + "Upload", self.one_upload())
        # This method needs no token. Zero bytes are a valid message of any type, without fields.
        raw[2].call("/grpc.health.v1.Health/Check", o.compute.DotRequest())
        for one in raw:
            self.assertIsNotNone(one.find_frame(o.RST_STREAM, LONG_S), "the call does not end")
        self.assert_eventually(lambda: self.held() < 1000)
        self.assert_serves(self.client)

    def test_requests_are_let_go_of_when_they_are_answered(self):
        x = inline(np.ones(12000, np.float32))
        reduce = o.compute.ReduceRequest(x=x, op=o.compute.REDUCE_OP_SUM)
        execute = o.compute.ExecuteRequest(steps=[o.compute.Step(reduce=reduce)])
        for method, request in (("Reduce", reduce), ("Execute", execute)):
            raw = self.raw(self.server, window=0)
            raw.call(COMPUTE + method, request)
            self.assertIsNotNone(raw.find_frame(o.HEADERS, LONG_S), "no response comes")
            self.assertLess(self.held(), 10_000, f"bytes stay charged after {method}")


class MessageTest(Case):
    def test_messages_of_many_parts_count_as_what_they_take(self):
        """Two bytes of a message may become an object of fifty bytes in memory."""
        server = self.start("--host-memory", "64Mi")
        client = server.client()
        client.put("x", ONE)
        groups = b"\x7b\x7c" * (2 << 20)  # An unknown field in every message.
        before = server.peak_rss()
        x = resident("x").SerializeToString()
        dot = field(1, x) + field(2, x)
        # An operand that begins as a tensor of many dimensions and ends as a buffer.
        shape = field(1, field(2, field(2, bytes(4 << 20)))) + dot
        execute = field(1, field(1, dot))
        upload = field(1, b"y") + field(2, o.spec_of(ONE).SerializeToString() + groups)
        long_name = field(1, b"x" * (5 << 20))
        ask = lambda *call: self.send(client, *call)
        full = ("RESOURCE_EXHAUSTED", "HOST_MEMORY_EXHAUSTED")
        bad = ("INVALID_ARGUMENT", "BAD_MESSAGE")
        for what, expected, outcome in (
                ("Dot", full, ask(COMPUTE + "Dot", dot + groups)),
                ("a shape", full, ask(COMPUTE + "Dot", shape)),
                ("Execute", full, ask(COMPUTE + "Execute", execute + groups)),
                ("GetBuffer", full, ask(BUFFERS + "GetBuffer", field(1, b"x") + groups)),
                ("Upload", bad, ask(BUFFERS + "Upload", upload)),
                ("Download", bad, ask(BUFFERS + "Download", field(1, b"x") + groups)),
                ("a large Download", bad, ask(BUFFERS + "Download", long_name))):
            self.assertEqual((outcome.code, outcome.reason), expected, (what, outcome))
        # Parsing them would take 100 MiB, but none has been parsed. gRPC holds 4 MiB and the pieces
        # of the messages.
        self.assert_grew_less(64 * o.MI, before, server.peak_rss)
        check = "/grpc.health.v1.Health/Check"
        self.assertEqual(ask(check, groups).code, "INVALID_ARGUMENT")
        self.assertTrue(ask(check, b"").ok)
        # A few unknown fields, as a newer client may send them, do no harm.
        few = groups[: 32 << 10]
        for method, message in (("Dot", dot), ("Execute", execute)):
            self.assert_ok(ask(COMPUTE + method, message + few), method)
        self.assert_becomes(0, lambda: client.budget("host_memory").used)

    def test_messages_that_are_none(self):
        client = self.share().client()
        for method, path in o.methods(o.buffers, o.compute).items():
            bad = [b"\xff" * 40, b"\x0a\x7fshort", b"\x00\x01", b"\x08" + b"\xff" * 10 + b"\x01",
                   b"\x0a\x7f" + bytes(400)]  # Its memory is counted first.
            if path.startswith(BUFFERS) and method not in ("ListBuffers", "Snapshot"):
                bad.append(b"\x0a\x02\xff\xfe")  # A name that is not UTF-8.
            for request in bad:
                with self.subTest(method, request=request):
                    outcome = self.send(client, path, request)
                    self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_MESSAGE", method=method)
                    self.assertIn(f"not a valid {method}Request", outcome.text)
        outcome = self.send(client, "/grpc.health.v1.Health/Check", b"\xff")
        self.assertEqual(outcome.code, "INVALID_ARGUMENT", outcome)
        self.assertIn("not a valid HealthCheckRequest", outcome.text)
        self.assert_serves(client)

    def test_messages_above_the_limit(self):
        client = self.share().client()
        limit = client.info().limits.max_message_bytes
        for size, code, reason in ((limit + 100, "INVALID_ARGUMENT", "BAD_MESSAGE"),
                                   (2 * limit - 100, "INVALID_ARGUMENT", "BAD_MESSAGE"),
                                   (2 * limit + 100, "RESOURCE_EXHAUSTED", "")):
            x = inline(np.zeros(size // 4, np.float32))
            outcome = client.attempt("Reduce", x=x, op="REDUCE_OP_SUM")
            self.assertEqual((outcome.code, outcome.reason), (code, reason), outcome)
            if reason:
                self.assert_fails(outcome, code, reason, "value", limit=limit)
                self.assertIn(str(limit), outcome.text)

    def test_a_bomb_of_gzip(self):
        server = self.start()
        client = server.client(compression=grpc.Compression.Gzip)
        judge = server.client()
        self.assert_serves(judge)
        before = server.peak_rss()
        bomb = padded_message(128 * o.MI)
        unary = client.channel.unary_unary(COMPUTE + "Dot")
        stream = client.channel.stream_unary(BUFFERS + "Upload", request_serializer=lambda m: m)
        for call in (lambda: unary(bomb, timeout=600), lambda: stream(iter([bomb]), timeout=600)):
            code = outcome_of(call).code
            self.assertIn(code, ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"))
        self.assert_grew_less(64 * o.MI, before, server.peak_rss)
        self.assert_serves(judge)


class ErrorTest(Case):
    def test_errors_name_the_operand(self):
        client = self.share().client()
        client.put("x", FOUR)
        client.create("open", FOUR)
        good, short = resident("x"), o.compute.Tensor(dtype="DTYPE_F32", shape=[6], data=b"123")
        for reason, operand in (("BAD_VIEW", resident("x", view([4], offset=1))),
                                ("BAD_OPERAND", o.compute.Operand(tensor=short)),
                                ("BUFFER_NOT_READY", resident("open"))):
            for rpc, which, fields in (
                    *((rpc, "a", dict(a=operand, b=good)) for rpc in ("Dot", "Add", "Matmul")),
                    *((rpc, "b", dict(a=good, b=operand)) for rpc in ("Dot", "Add", "Matmul")),
                    ("Reduce", "x", dict(x=operand, op="REDUCE_OP_SUM")),
                    ("WindowSum", "x", dict(x=operand, radius=1)),
                    ("Scan", "x", dict(x=operand, op="REDUCE_OP_SUM")),
                    ("Sort", "x", dict(x=operand)),
                    ("Take", "x", dict(x=operand, indices=inline(np.zeros(1, np.int64)))),
                    ("Take", "indices", dict(x=good, indices=operand)),
                    ("Select", "x", dict(x=operand, mask=inline(np.ones(1, bool)))),
                    ("Select", "mask", dict(x=good, mask=operand)),
                    ("Histogram", "x", dict(x=operand, even=dict(count=1, low=0, high=1))),
                    ("Histogram", "edges", dict(x=good, edges=operand)),
                    ("SearchSorted", "x", dict(x=operand, keys=good)),
                    ("SearchSorted", "keys", dict(x=good, keys=operand)),
                    ("SumByLabel", "x", dict(x=operand, labels=good, length=1)),
                    ("SumByLabel", "labels", dict(x=good, labels=operand, length=1)),
                    ("Linalg", "x", dict(x=operand, function="LINALG_FUNCTION_QR")),
                    ("Linalg", "b", dict(x=good, b=operand, function="LINALG_FUNCTION_SOLVE"))):
                outcome = client.attempt(rpc, **fields)
                self.assertEqual((outcome.reason, outcome.metadata.get("operand")), (reason, which))

    def test_messages_say_which_value_is_wrong(self):
        client = self.share().client()
        x = np.arange(6, dtype=np.float32)
        client.put("x", x)
        good = resident("x")
        sum_of = dict(x=good, op="REDUCE_OP_SUM")
        spec, negative = o.spec_of(x), dict(dtype=1, shape=[-3])
        eight = dict(name="y", spec=spec, data=b"12345678")
        far = inline(np.array([0, -77]))
        square, matrix = inline(np.ones((1, 1), bool)), inline(np.ones((2, 2), np.float32))
        for reason, part, outcome in (
            ("BAD_SHAPE", "-3", client.attempt("CreateBuffer", name="y", spec=negative)),
            # The word "name" would also match "a buffer's name".
            ("BAD_NAME", "value: a b", client.attempt("CreateBuffer", name="a b", spec=spec)),
            ("BAD_TTL", "-7", client.attempt("UpdateBuffer", name="x", ttl={"seconds": -7})),
            ("BAD_VIEW", "5", client.attempt("Dot", a=resident("x", view([3], offset=5)), b=good)),
            ("BAD_AXES", "4", client.attempt("Reduce", **sum_of, axes=[4])),
            ("BAD_AXES", "4", client.attempt("Sort", x=good, axis=4)),
            ("BAD_OPERATION", "mean", client.attempt("Scan", x=good, op="REDUCE_OP_MEAN")),
            ("BAD_OPERATION", "99", client.attempt("Take", x=good, indices=good, mode=99)),
            ("BAD_RADIUS", "-9", client.attempt("WindowSum", x=good, radius=-9)),
            ("BAD_INDEX", "-77", client.attempt("Take", x=good, indices=far)),
            ("BAD_DTYPE", "f32", client.attempt("Take", x=good, indices=good)),
            ("BAD_DTYPE", "f32", client.attempt("Select", x=good, mask=good)),
            ("BAD_SHAPE", "[1, 1]", client.attempt("Select", x=good, mask=square)),
            ("BAD_BINS", "bins", client.attempt("Histogram", x=good)),
            ("BAD_BINS", "0 to 0", client.attempt("Histogram", x=good, even=dict(count=1))),
            ("BAD_DTYPE", "f32", client.attempt("Histogram", x=good, integers=5)),
            ("BAD_DTYPE", "i64", client.attempt("SearchSorted", x=good, keys=far)),
            ("BAD_SHAPE", "[]", client.attempt("SearchSorted", x=inline(np.float32(1)), keys=good)),
            ("BAD_OPERATION", "9", client.attempt("SumByLabel", x=good, labels=good, mode=9)),
            ("BAD_DTYPE", "f32", client.attempt("SumByLabel", x=good, labels=good, length=3)),
            ("BAD_SHAPE", "[6]", client.attempt("SumByLabel", x=good, labels=far, length=3)),
            ("BAD_SHAPE", "-2", client.attempt("SumByLabel", x=far, labels=far, length=-2)),
            ("BAD_INDEX", "-77", client.attempt("SumByLabel", x=far, labels=far, length=3)),
            ("BAD_OPERATION", "0", client.attempt("Linalg", x=square)),
            ("BAD_OPERATION", "99", client.attempt("Linalg", x=square, function=99)),
            ("BAD_OPERAND", "b", client.attempt("Linalg", x=matrix, function=2)),
            ("BAD_OPERAND", "b", client.attempt("Linalg", x=matrix, b=matrix, function=3)),
            ("BAD_SHAPE", "[6]", client.attempt("Linalg", x=good, function=6)),
            ("BAD_DTYPE", "bool", client.attempt("Linalg", x=square, function=6)),
            ("BAD_MATRIX", "0", client.attempt("Linalg", x=matrix, function=3)),
            ("BAD_RANGE", "4711", outcome_of(lambda: client.download("x", offset=4711))),
            ("MISSING_DATA", "24", client.try_upload([eight])),
        ):
            with self.subTest(reason):
                self.assertEqual(outcome.reason, reason, outcome)
                self.assertRegex(outcome.text, rf"(?<!\d){re.escape(part)}(?!\d)", outcome)
        scalar = client.attempt("Reduce", x=inline(np.float32(1)), op="REDUCE_OP_SUM", axes=[0])
        self.assert_fails(scalar, "INVALID_ARGUMENT", "BAD_AXES")
        self.assertNotRegex(scalar.text, r"0 to -1", "an interval that is none")

    def test_a_request_is_checked_before_memory_is_taken(self):
        client = self.share("--memory-limit", "1Mi").client()
        wide = inline(ONE, view([1024, 1024], [0, 0]))
        fields = dict(a=wide, b=wide, result=into("c"))
        outcome = client.attempt("Matmul", strategy="guess", **fields)
        self.assert_fails(outcome, "INVALID_ARGUMENT", "UNKNOWN_STRATEGY")
        outcome = client.attempt("Matmul", **fields)
        self.assert_fails(outcome, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "free", total=o.MI)

    def test_launch_takes_what_the_table_says(self):
        client = self.share().client()
        x, flat = inline(np.ones((4, 4), np.float32)), inline(np.ones(16, np.float32))
        requests = {**{name: (rpc, o.fields_of(rpc, flat)) for name, rpc in o.operations().items()},
                    "reduce_axes": ("Reduce", dict(x=x, op="REDUCE_OP_SUM", axes=[0])),
                    "matmul": ("Matmul", dict(a=x, b=x))}
        refused = 0
        for row in client.call("ListStrategies", backend=client.device().backend).strategies:
            if not row.available or o.buffers.DTYPE_F32 not in row.dtypes:
                continue
            rpc, fields = requests[row.operation]
            for knob in ("block_size", "grid_size", "items_per_thread"):
                allowed = getattr(row, knob)
                least, most = (allowed.min, allowed.max) if row.HasField(knob) else (0, 0)
                self.assertLessEqual(least, most, row)
                for value in {0, least, most, most + 1, max(least - 1, 0), 2**32 - 1}:
                    outcome = client.attempt(rpc, launch={knob: value}, strategy=row.name, **fields)
                    # Tensor core strategies need 16-bit operands, and others need large ones.
                    if outcome.reason == "STRATEGY_UNSUPPORTED":
                        continue
                    what = (row.operation, row.name, knob, value, outcome)
                    if value == 0 or least <= value <= most:
                        self.assertTrue(outcome.ok, what)
                        continue
                    self.assert_fails(outcome, "INVALID_ARGUMENT", "BAD_LAUNCH", value=value)
                    self.assertIn(knob, outcome.metadata["field"], what)
                    refused += 1
        self.assertGreater(refused, 10)


class ConnectionTest(Case):
    def test_requests_that_come_a_byte_at_a_time(self):
        server = self.share()
        client = server.client()
        self.assert_serves(client)
        before, size = server.rss(), 4 * o.MI
        headers = o.request_headers(COMPUTE + "Dot")
        raw = [self.raw(server) for _ in range(40)]
        for one in raw:
            # This announces a message and sends 5 bytes of its data.
            one.send(o.frame(o.HEADERS, o.END_HEADERS, 1, headers),
                     o.frame(o.DATA, 0, 1, b"\0" + size.to_bytes(4, "big")))
        for _ in range(5):
            for one in raw:
                with contextlib.suppress(OSError):
                    one.send(o.frame(o.DATA, 0, 1, b"\x0a"))
            self.assert_serves(client)
        self.assert_grew_less(len(raw) * size // 2, before, server.rss)

    def test_streams_reset_at_once(self):
        server = self.share()
        client = server.client()
        headers = o.request_headers(COMPUTE + "GetServerInfo")
        count = 5000

        def open_and_reset():
            raw = self.raw(server)
            with contextlib.suppress(OSError):  # The server may close it.
                for begin in range(1, 2 * count, 200):
                    raw.send(*(o.frame(o.HEADERS, o.END_HEADERS, stream, headers)
                               + o.frame(o.RST_STREAM, 0, stream, b"\0\0\0\x08")
                               for stream in range(begin, begin + 200, 2)))
            self.assert_serves(client)

        # A call that is not freed would take 17 KiB.
        self.assert_steady(server, open_and_reset, count * 4 << 10)

    def test_a_thousand_clients_that_die_while_they_upload(self):
        server = self.share()
        client = server.client()
        generator, count = random.Random(11), 500
        spec = o.buffers.BufferSpec(dtype="DTYPE_F32", shape=[64 << 10], replace=True)
        first = o.buffers.UploadRequest(name="x", spec=spec, data=bytes(48 << 10))
        data = in_frames(first) + 4 * in_frames(o.buffers.UploadRequest(data=bytes(52 << 10)))
        # The stream holds as much data as the window allows before the server grants more.
        stream = o.PREFACE + o.frame(o.SETTINGS, 0, 0)
        stream += o.frame(o.HEADERS, o.END_HEADERS, 1, o.request_headers(BUFFERS + "Upload"))
        for begin in range(0, 65_535, 16_000):
            stream += o.frame(o.DATA, 0, 1, data[begin : min(begin + 16_000, 65_535)])

        def die():
            for i in range(count):
                one = server.socket()
                one.sendall(stream[: generator.randrange(len(stream) + 1)])
                if i % 3 == 0:
                    one.recv(100)  # It has been accepted.
                if i % 2 == 0:  # A reset instead of an orderly end.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
            self.assert_serves(client)
            for name in ("uploads", "host_memory"):
                self.assert_becomes(0, lambda name=name: client.budget(name).used, name)
            self.assert_eventually(lambda: o.descriptors(server) <= files)
            self.assert_empty(client)

        self.assert_serves(client)
        files = o.descriptors(server)
        # Each client has sent 32 KiB on average.
        self.assert_steady(server, die, count * 16 << 10)

    def test_open_reflection_streams_take_no_threads(self):
        server = self.share()
        client, stop = server.client(), threading.Event()
        self.addCleanup(stop.set)

        def messages():
            yield LIST_SERVICES
            stop.wait(600)

        self.assert_serves(client)
        before = server.threads()
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        reflect = client.channel.stream_stream(method)
        calls = [reflect(messages(), timeout=600) for _ in range(100)]
        for call in calls:
            self.assertIn(b"tessera.v1.ComputeService", next(call))
        self.assertLess(server.threads() - before, 24, "threads more for 100 reflection streams")
        stop.set()
        self.assertEqual([list(call) for call in calls], [[]] * 100)


class TooManyStreamsTest(Case):
    """A connection with more than 576 calls, or with more than 288 for half a second, is closed."""

    HEADERS = o.request_headers(COMPUTE + "Dot")

    def setUp(self):
        addresses = ("--listen", "[::]:0", "--listen", "0.0.0.0:0", "--insecure")
        self.server = self.share("--max-streams", "16", *addresses, *METRICS)
        self.client = self.server.client()
        self.addCleanup(setattr, self.server, "address", self.server.address)

    def port_of(self, address):
        found = re.compile(rf"listening on {re.escape(address)}:(\d+)")
        self.assert_eventually(lambda: found.search(self.server.log()))
        return found.search(self.server.log())[1]

    def open_calls(self, count, **how):
        """Opens a connection and that many calls on it, without their messages."""
        raw = self.raw(self.server, **how)
        raw.send(
            *(o.frame(o.HEADERS, o.END_HEADERS, 2 * i + 1, self.HEADERS) for i in range(count)))
        return raw

    @staticmethod
    def wait_for_end(raw):
        raw.socket.settimeout(LONG_S * o.Program.patience())
        with contextlib.suppress(ConnectionResetError):
            while raw.socket.recv(65536):  # Reads settings, but no responses.
                pass

    def assert_open(self, raw):
        raw.send(o.frame(o.PING, 0, 0, b"answered"))
        self.assertIsNotNone(raw.find_frame(o.PING, LONG_S), "it has been ended")

    def test_clients_that_ignore_settings_have_no_more_streams(self):
        ended = lambda: self.metric(self.server, "tessera_connections_ended_total")
        before, port = ended(), self.port_of("[::]")
        for i, address in enumerate((self.server.address, f"127.0.0.1:{port}", f"[::1]:{port}"), 1):
            with self.subTest(address):
                self.server.address = address
                few, many = self.open_calls(16), self.open_calls(1024)
                self.wait_for_end(many)
                self.assert_serves(self.client)
                self.assert_open(few)
                self.assert_becomes(before + i, ended)
        said = r"because they had more than 288 calls: ipv"
        self.assert_eventually(lambda: re.search(said, self.server.log()))

    def test_only_the_connection_with_too_many_streams_ends(self):
        """A connection from the same port to another address of the server stays open."""
        port, here = self.port_of("0.0.0.0"), ("127.0.0.1", 0)
        opened = []
        for host, calls in (("127.0.0.1", 1), ("127.0.0.2", 400), ("127.0.0.3", 1)):
            self.server.address = f"{host}:{port}"
            opened.append(self.open_calls(calls, here=here))
            here = opened[0].socket.getsockname()
        self.wait_for_end(opened[1])
        self.assert_open(opened[0])
        self.assert_open(opened[2])

    def test_clients_that_give_up_many_calls_are_not_ended(self):
        server, raw = self.server, self.raw(self.server)
        server.signal(signal.SIGSTOP)
        for begin in range(1, 1000, 32):
            streams = range(begin, begin + 32, 2)
            raw.send(*(o.frame(o.HEADERS, o.END_HEADERS, i, self.HEADERS) for i in streams))
            raw.send(*(o.frame(o.RST_STREAM, 0, i, b"\0\0\0\x08") for i in streams))
        server.signal(signal.SIGCONT)
        self.assert_open(raw)
        self.wait_for_end(self.open_calls(400))  # The server has waited half a second.
        self.assert_open(raw)
        self.assert_serves(self.client)


class DrainTest(Case):
    def begin(self, listen, *shell, **streams):
        """Starts a server, which may not be listening yet."""
        command = [*shell, o.Program.path, "--listen", listen, "--device", o.Program.device]
        process = subprocess.Popen(command, **streams)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_a_signal_counts_before_the_server_listens(self):
        log = self.folder / "starting.log"

        def begin():
            """Returns a process that catches SIGTERM and does not listen yet, or None if this
            process has been delayed until it listens."""
            with open(log, "wb") as stream:
                process = self.begin("127.0.0.1:0", stdout=stream, stderr=stream)

            def catches():
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                return int(re.search(r"SigCgt:\s*(\w+)", status).group(1), 16) >> 14 & 1

            self.assertTrue(eventually(catches, LONG_S, pause=0.001), "SIGTERM is never caught")
            if b"listening" not in log.read_bytes():
                return process
            process.kill()
            return None

        process = eventually(begin)
        self.assertTrue(process, "SIGTERM is caught too late")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(LONG_S), 0, "exit code")

    def test_closed_standard_streams_are_no_sockets(self):
        path = self.folder / "closed.sock"
        process = self.begin(f"unix:{path}", "bash", "-c", 'exec "$@" <&- >&- 2>&-', "-")
        self.assert_eventually(path.exists, "the server did not start")
        for number in range(3):
            target = os.readlink(f"/proc/{process.pid}/fd/{number}")
            self.assertEqual(target, "/dev/null", f"descriptor {number}")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(LONG_S), 0, "exit code")


class SlowDrainTest(Case):
    def test_a_drain_does_not_wait_for_readers_that_do_not_read(self):
        """The readers of a download, of a response and of an upload's response do not read."""
        # The limit is the stall timeout of a stream in a drain, or --transfer-timeout if that is
        # shorter.
        servers, calls = [], []
        for timeout in ("4s", "60s"):
            server = self.start("--transfer-timeout", timeout, "--drain-timeout", "600s")
            servers.append(server)
            calls += self.unread_downloads(server)
            raw = self.raw(server, window=0)
            for call in ((COMPUTE + "GetServerInfo", o.compute.GetServerInfoRequest()),
                         (BUFFERS + "Upload", self.one_upload())):
                raw.call(*call)
                self.assertIsNotNone(raw.find_frame(o.HEADERS, LONG_S), "no response comes")
            server.signal()
        for server, limit in zip(servers, ("4s", "5s")):
            self.assertEqual(server.wait(LONG_S * o.Program.patience()), 0, "exit code")
            # On a busy machine, four seconds may be over before the signal.
            if limit == "5s" or "DOWNLOAD_IDLE" not in server.log():
                self.assertIn(f"waits no longer than {limit} for a stream", server.log())
        for call in calls:
            self.assertFalse(outcome_of(lambda call=call: list(call)).ok)

    def test_a_drain_waits_for_readers_that_read_slowly(self):
        server = self.start("--drain-timeout", "600s")
        unread, slow = self.unread_downloads(server, count=2)
        server.signal()
        size = o.MI
        while "UNAVAILABLE DRAINING" not in server.log():
            size += len(next(slow).data)
            time.sleep(0.3)
        self.assertFalse(outcome_of(lambda: list(unread)).ok)
        self.assertEqual(size + sum(len(message.data) for message in slow), 32 << 20)
        self.assertEqual(server.wait(LONG_S), 0, "exit code")

    def test_a_drain_waits_for_uploads_that_go_on_alone(self):
        server = self.start("--drain-timeout", "600s")
        client, stop, go_on = server.client(), threading.Event(), threading.Event()
        first = dict(name="still", spec=o.spec_of(FOUR), data=NEW[:4])
        still = {
            "nothing after its first message": self.idle_upload(client, stop, first),
            "nothing": self.idle_upload(client, stop),
            "empty messages": self.idle_upload(client, stop, dict(first, name="e"), pause=0.05)}
        running = self.slow_upload(client, go_on)
        self.addCleanup(go_on.set)
        self.assert_becomes(4, lambda: client.budget("uploads").used)
        server.signal()
        for sends, call in still.items():
            self.assert_eventually(call.done, f"it sends {sends}")
            self.assert_fails(outcome_of(call), "UNAVAILABLE", "DRAINING", limit="5s")
        self.assertFalse(running.done(), "the running upload has ended too early")
        go_on.set()
        self.assert_ok(outcome_of(running))
        self.assertEqual(server.wait(LONG_S), 0, "exit code")


if __name__ == "__main__":
    o.main(jobs=6, by_class=True)

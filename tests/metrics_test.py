#!/usr/bin/env python3
"""Tests metrics from outside: a scrape agrees with the calls that were made, wrong or slow HTTP
clients do not delay other clients, and alerts and dashboard name existing metrics."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc
import numpy as np

import outsider as o
from outsider import eventually
from rolling import lasting_address

DEPLOY = o.ROOT / "deploy"
RULES = DEPLOY / "helm" / "tessera" / "files" / "rules.yaml"
RULES_TEST = DEPLOY / "monitoring" / "rules_test.yaml"
DOCUMENT = o.ROOT / "docs" / "metrics.md"
DASHBOARD = DEPLOY / "helm" / "tessera" / "files" / "dashboard.json"
ONES = np.ones(1000, np.float32)
# Limits under which operations may take as long as a test needs.
PATIENT = ("--max-operation-seconds", "36000", "--scratch-limit", "1Gi")

LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


class Scrape:
    """A parsed metrics page. Checks the rules of the text format 0.0.4."""

    def __init__(self, text):
        self.types, self.samples = {}, {}
        helped, current, finished = set(), None, set()
        assert text.endswith("\n")
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                assert name not in helped, f"two HELP of {name}"
                helped.add(name)
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert kind in ("counter", "gauge", "histogram") and name in helped, line
                assert name not in self.types, f"two TYPE of {name}"
                assert (kind == "counter") == name.endswith("_total"), line
                if current:
                    finished.add(current)
                self.types[name], current = kind, name
            else:
                match = SAMPLE.fullmatch(line)
                assert match, line
                name, labels, value = match.groups()
                base = name
                if self.types[current] == "histogram":
                    base = re.sub("_(bucket|sum|count)$", "", name)
                assert base == current, f"{name} among the samples of {current}"
                pairs = tuple(sorted(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")))
                assert (name, pairs) not in self.samples, f"twice: {line}"
                self.samples[name, pairs] = float(value)
        self._check_histograms()

    def _check_histograms(self):
        rows = {}
        for (name, pairs), value in self.samples.items():
            if name.endswith("_bucket"):
                labels = dict(pairs)
                bound = float(labels.pop("le"))
                key = name.removesuffix("_bucket"), tuple(sorted(labels.items()))
                rows.setdefault(key, []).append((bound, value))
        for (name, pairs), buckets in rows.items():
            buckets.sort()
            counts = [count for _, count in buckets]
            assert counts == sorted(counts), (name, pairs, "is not cumulative")
            assert buckets[-1][0] == float("inf")
            assert counts[-1] == self.samples[name + "_count", pairs]
            assert self.samples[name + "_sum", pairs] >= 0

    def names(self):
        return {name for name, _ in self.samples}

    def sum(self, name, **labels):
        wanted = set(labels.items())
        return sum(value for (sample, pairs), value in self.samples.items()
                   if sample == name and wanted <= set(pairs))

    def values(self, name, label):
        return {dict(pairs)[label] for n, pairs in self.samples if n == name}


def get(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return answer.read().decode()


def http_socket(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def read_all(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


class MetricsCase(o.Case):
    def serve(self, *flags):
        server = super().serve("--metrics-listen", "127.0.0.1:0", "--memory-limit", "256Mi", *flags)
        self.address = server.http_address()
        self.client = server.client()
        return server

    def scrape(self):
        return Scrape(get(self.address))

    def comes(self, wanted, name, **labels):
        """Checks that the metric eventually has that value."""
        sums = lambda: self.scrape().sum(name, **labels)
        self.assertTrue(eventually(lambda: sums() == wanted), (name, labels, sums()))

    def assert_grown(self, before, after, name, by, **labels):
        self.assertEqual(after.sum(name, **labels) - before.sum(name, **labels), by, (name, labels))


class CountsTest(MetricsCase):
    def test_requests_by_method_strategy_and_code(self):
        self.serve()
        c, x = self.client, o.resident("x")
        c.put("x", ONES)
        before = self.scrape()
        for _ in range(7):
            self.assertTrue(c.attempt("Dot", a=x, b=x, strategy="fixed_tree").ok)
        for _ in range(3):
            self.assertTrue(c.attempt("Reduce", x=x, op="REDUCE_OP_SUM", axes=[0]).ok)
        self.assertTrue(c.attempt("Add", a=x, b=x, result=o.into("y")).ok)
        for _ in range(2):
            self.assertEqual(c.attempt("Dot", a=x, b=o.resident("none")).code, "NOT_FOUND")
        c.info()
        after = self.scrape()
        grown = lambda by, **labels: self.assert_grown(
            before, after, "tessera_requests_total", by, **labels)
        grown(7, rpc="Dot", strategy="fixed_tree", code="OK")
        grown(2, rpc="Dot", code="NOT_FOUND")
        grown(3, rpc="Reduce", code="OK")
        grown(1, rpc="Add", code="OK")
        grown(1, rpc="GetServerInfo", code="OK")
        grown(14)
        for phase, by in (("request", 9), ("queue", 7), ("run", 7)):
            self.assert_grown(before, after, f"tessera_{phase}_seconds_count", by, rpc="Dot")
        for phase in ("request", "queue", "run"):
            self.assertGreater(after.sum(f"tessera_{phase}_seconds_sum", rpc="Dot"), 0)
        total, queue, run = (after.sum(f"tessera_{phase}_seconds_sum", rpc="Reduce")
                             for phase in ("request", "queue", "run"))
        self.assertAlmostEqual(total, queue + run, delta=1e-6)

    def test_every_code_is_counted_with_its_reason(self):
        silent = threading.Event()
        self.addCleanup(silent.set)
        begin = lambda: self.client.begin_upload(silent, dict(name="y", spec=o.spec_of(ONES)))
        self.serve("--transfer-timeout", "100ms")  # Only for an upload that is idle.
        labels = dict(code="DEADLINE_EXCEEDED", reason="UPLOAD_IDLE")
        o.check_refusal(o.outcome_of(begin()), *labels.values())
        self.assertEqual(self.scrape().sum("tessera_errors_total", **labels), 1)
        self.serve()
        c, x = self.client, o.resident("x")
        c.put("x", ONES)
        c.create("draft", ONES)
        before = self.scrape()
        outcomes = [
            c.attempt("Dot", a=x, b=x),
            c.attempt("Dot", a=x, b=x, strategy="no-such-strategy"),
            c.attempt("GetBuffer", name="none"),
            c.attempt("CreateBuffer", name="x", spec=o.spec_of(ONES)),
            c.attempt("Dot", a=x, b=o.resident("draft")),
            c.attempt("CreateBuffer", name="big",
                      spec=o.buffers.BufferSpec(dtype=1, shape=[1 << 40])),
            c.try_upload([dict(name="y", spec=o.spec_of(ONES), data=ONES.tobytes(), crc32c=1)])]
        codes = [outcome.code for outcome in outcomes]
        self.assertEqual(codes, ["OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS",
                                 "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DATA_LOSS"])
        with self.assertRaises(grpc.RpcError):
            c.channel.unary_unary("/tessera.v1.ComputeService/NoSuchMethod")(b"", timeout=20)
        after = self.scrape()
        for outcome in outcomes:
            self.assert_grown(before, after, "tessera_requests_total", codes.count(outcome.code),
                              code=outcome.code)
            if not outcome.ok:
                self.assert_grown(before, after, "tessera_errors_total", 1, code=outcome.code,
                                  reason=outcome.reason)
                last = after.sum("tessera_error_last_timestamp_seconds", reason=outcome.reason)
                self.assertLess(abs(last - time.time()), 60)
        self.assert_grown(before, after, "tessera_requests_total", 1, rpc="other",
                          code="UNIMPLEMENTED")
        calls = after.sum("tessera_requests_total")
        failed = calls - after.sum("tessera_requests_total", code="OK")
        self.assertEqual(after.sum("tessera_errors_total"), failed)
        # The client leaves.
        call = begin()
        self.comes(1, "tessera_budget_used", budget="uploads")
        call.cancel()
        self.comes(1, "tessera_errors_total", code="CANCELLED")

    def test_clients_that_leave_count_as_such(self):
        """They are counted whether their call runs or waits."""
        self.serve("--workers", "1", "--max-operation-seconds", "1e6")
        long = o.inline(np.ones(1, np.float32), o.view([1 << 42], [0]))
        calls = [self.client.future("Reduce", op="REDUCE_OP_SUM", x=long) for _ in range(2)]
        self.comes(1, "tessera_queue_length", queue="compute")
        for call in calls:
            call.cancel()
        self.comes(2, "tessera_errors_total", reason="CANCELLED")
        self.assertEqual(self.scrape().sum("tessera_errors_total"), 2)

    def test_unknown_strategies_become_no_labels(self):
        self.serve()
        x = o.inline(ONES)
        known = {s.name for s in self.client.call("ListStrategies").strategies} | {"none"}
        for i in range(50):
            self.client.attempt("Dot", a=x, b=x, strategy=f"s{i}\"\n")
        after = self.scrape()
        self.assertLessEqual(after.values("tessera_requests_total", "strategy"), known)
        self.assertEqual(after.sum("tessera_requests_total", rpc="Dot", strategy="none",
                                   code="INVALID_ARGUMENT"), 50)
        self.assertEqual(after.sum("tessera_errors_total", reason="UNKNOWN_STRATEGY"), 50)

    def test_times_of_an_answer(self):
        self.serve()
        x = o.inline(ONES)
        before = self.scrape()
        begin = time.monotonic()
        stats = self.client.call("Dot", a=x, b=x).stats
        wall_us = (time.monotonic() - begin) * 1e6
        self.assertGreater(stats.queue_us, 0)
        self.assertGreater(stats.total_us, stats.queue_us)
        self.assertLess(stats.total_us, wall_us)
        after = self.scrape()
        grown = after.sum("tessera_request_seconds_sum") - before.sum("tessera_request_seconds_sum")
        self.assertAlmostEqual(grown * 1e6, stats.total_us, delta=0.01)
        slow = np.ones((600, 600), np.float32)
        self.client.put("a", slow)
        stats = self.client.call("Matmul", a=o.resident("a"), b=o.resident("a"),
                                 timing=True, result=o.into("c")).stats
        self.assertGreaterEqual(stats.total_us, stats.queue_us + stats.kernel_us)
        timed = self.scrape()
        labels = dict(rpc="Matmul", strategy=stats.strategy)
        self.assertEqual(timed.sum("tessera_kernel_seconds_count", **labels), 1)
        kernel_us = timed.sum("tessera_kernel_seconds_sum", **labels) * 1e6
        self.assertAlmostEqual(kernel_us, stats.kernel_us, delta=0.01)
        self.assertEqual(timed.sum("tessera_kernel_seconds_count"), 1)

        steps = [o.compute.Step(dot=dict(a=x, b=b)) for b in (x, o.resident("none"))]
        program = self.client.call("Execute", steps=steps)
        self.assertGreater(program.total_us, program.queue_us)
        after = self.scrape()
        self.assertEqual(after.sum("tessera_program_steps_total", result="ok"), 1)
        self.assertEqual(after.sum("tessera_program_steps_total", result="failed"), 1)

    def test_slow_calls(self):
        for limit, slow in (("1ns", 1), ("1h", 0)):
            self.serve("--slow-call", limit)
            self.client.dot_of_ones()
            self.client.put("x", ONES)
            self.client.attempt("GetBuffer", name="none")
            scrape = self.scrape()
            self.assertEqual(scrape.types["tessera_slow_calls_total"], "counter")
            for rpc in ("Dot", "Upload", "GetBuffer"):
                self.assertEqual(scrape.sum("tessera_slow_calls_total", rpc=rpc), slow, rpc)

    def test_buffers_and_transfers(self):
        self.serve()
        data = np.ones(3 << 20, np.uint8).view(np.float32)
        self.client.upload([dict(name="x", spec=o.spec_of(data), data=data.tobytes()[: 1 << 20]),
                            dict(data=data.tobytes()[1 << 20 :])])
        self.client.create("draft", ONES)
        self.assertEqual(len(self.client.download("x", offset=5)), data.nbytes - 5)
        device = self.client.device()
        one = self.scrape()
        for wanted, name, labels in (
                (1, "buffers", dict(state="ready")),
                (data.nbytes, "buffer_bytes", dict(state="ready")),
                (1, "buffers", dict(state="writing")),
                (ONES.nbytes, "buffer_bytes", dict(state="writing")),
                (device.buffer_used_bytes, "buffer_memory_used_bytes", {}),
                (device.buffer_limit_bytes, "buffer_memory_limit_bytes", {}),
                (data.nbytes, "transfer_bytes_total", dict(direction="upload", via="stream")),
                (data.nbytes - 5, "transfer_bytes_total", dict(direction="download"))):
            self.assertEqual(one.sum(f"tessera_{name}", **labels), wanted, (name, labels))
        for direction in ("upload", "download"):
            self.assertGreater(one.sum("tessera_copy_seconds_count", direction=direction), 0)
        self.client.call("DeleteBuffer", name="draft")
        self.client.call("UpdateBuffer", name="x", ttl={"nanos": 1000})
        self.comes(0, "tessera_buffers")
        self.assertEqual(self.scrape().sum("tessera_buffer_bytes"), 0)
        # An expired buffer is not counted, even before its memory is free.
        self.comes(0, "tessera_buffer_memory_used_bytes")

    def test_what_waits_and_runs(self):
        if o.Program.device != "cpu":
            self.skipTest("its products would end immediately")
        self.serve("--workers", "1", "--queue", "2", *PATIENT)
        # The products are so large that they do not end before the others are waiting.
        self.client.put("a", np.ones((4000, 1), np.float32))
        a = o.resident("a", o.view((4000, 4000), (1, 0)))

        product = lambda name: self.client.future(
            "Matmul", a=a, b=a, strategy="cpu_naive", result=o.into(name))
        calls = [product("c0")]
        runs = lambda: self.scrape().sum("tessera_longest_run_seconds") > 0
        self.assertTrue(eventually(runs))
        calls += [product("c1"), product("c2")]
        self.comes(2, "tessera_queue_length")
        full = self.client.attempt("Dot", a=a, b=a)
        now = self.scrape()
        self.assertEqual(full.reason, "QUEUE_FULL")
        self.assertEqual(now.sum("tessera_errors_total", reason="QUEUE_FULL"), 1)
        self.assertGreater(now.sum("tessera_longest_run_seconds"), 0)
        self.assertEqual(now.sum("tessera_queue_limit"), 2)
        # A call is in progress until gRPC has sent its response.
        self.comes(3, "tessera_calls_in_progress")
        for call in calls:
            call.cancel()
        for name in ("queue_length", "longest_run_seconds", "calls_in_progress"):
            self.comes(0, f"tessera_{name}")

    def test_every_method_has_a_name(self):
        self.serve("--shared-memory", self.folder / "shared.sock")
        methods = o.methods()
        self.assertGreater(len(methods), 19)
        for path in methods.values():
            # For most methods, neither a stream of one empty message nor an empty request is valid.
            call = self.client.channel.stream_stream(path)
            with contextlib.suppress(grpc.RpcError):
                list(call(iter([b""]), timeout=20))
        self.assertEqual(self.scrape().values("tessera_requests_total", "rpc"), set(methods))

    def test_of_many_callers_no_call_is_lost(self):
        self.serve()
        self.client.put("x", ONES)
        x = o.resident("x")

        def work(_):
            counts = []
            for i in range(200):
                self.client.call("Dot", a=x, b=x)
                if i % 20 == 0:
                    counts.append(self.scrape().sum("tessera_requests_total", rpc="Dot"))
            self.assertEqual(counts, sorted(counts))

        o.in_threads(8, work)
        self.assertEqual(self.scrape().sum("tessera_requests_total", rpc="Dot", code="OK"), 1600)

    def test_the_server(self):
        begin = time.time()
        self.serve()
        now = self.scrape()
        info = self.client.info()
        self.assertEqual(now.values("tessera_build_info", "version"), {info.version})
        self.assertEqual(now.values("tessera_device_info", "device"), {o.Program.device})
        self.assertEqual(now.values("tessera_device_info", "model"), {info.devices[0].model})
        self.assertEqual(now.sum("tessera_ready"), 1)
        for started in (now.sum("process_start_time_seconds"), info.start_time.seconds):
            self.assertLess(begin - 2, started)
            self.assertLess(started, time.time() + 2)
        self.assertGreater(now.sum("process_resident_memory_bytes"), 1 << 20)
        budgets = {budget.name: budget.limit for budget in info.budgets}
        for name, limit in budgets.items():
            self.assertEqual(now.sum("tessera_budget_limit", budget=name), limit)


class HttpTest(MetricsCase):
    def setUp(self):
        self.server = self.serve()

    def assert_code(self, request, code):
        with http_socket(self.address) as connection:
            connection.sendall(request)
            answer = read_all(connection)
        self.assertEqual(answer[:13], b"HTTP/1.1 %d " % code, request[:80])
        head, _, body = answer.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        if not request.startswith(b"HEAD"):
            self.assertEqual(len(body), length)
        else:
            self.assertEqual(body, b"")
        return head, body

    def test_pages(self):
        head, body = self.assert_code(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200)
        self.assertIn(b"Content-Type: text/plain; version=0.0.4", head)
        Scrape(body.decode())
        head, body = self.assert_code(b"GET /?a=b HTTP/1.1\r\nhost: x\r\n\r\n", 200)
        self.assertIn(b"Content-Type: text/html", head)
        self.assertIn(b"Content-Security-Policy: default-src 'none'; ", head)
        self.assertIn(b"</html>", body)
        links = set(re.findall(rb"https?://[^\"' ]+", body))
        self.assertEqual(links, {b"http://www.w3.org/2000/svg"})
        self.assert_code(b"GET /healthz HTTP/1.0\r\n\r\n", 200)
        head, _ = self.assert_code(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200)
        self.assertGreater(int(re.search(rb"Content-Length: (\d+)", head)[1]), 1000)

    def test_what_it_answers_and_refuses(self):
        """A request may have the absolute form, which proxies send, or lines that end with LF."""
        for code, lines in (
            (200, (b"GET http://x:1/healthz HTTP/1.1", b"GET HTTP://x HTTP/1.1",
                   b"GET http://x?a=/none HTTP/1.1")),
            (404, (b"GET http://x/none HTTP/1.1", b"GET /none HTTP/1.1", b"GET /metrics/ HTTP/1.1",
                   b"GET /../etc/passwd HTTP/1.1")),
            (405, (b"DELETE / HTTP/1.1",)),
            (400, (b"GET ftp://x/ HTTP/1.1", b"GET  HTTP/1.1", b"GET metrics HTTP/1.1",
                   b"GET / / HTTP/1.1", b"G\x00T / HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x",
                   b"GET / HTTP/1.1\r\nno colon", b"GET / HTTP/1.1\r\nSpace : x",
                   b"GET / HTTP/1.1\r\n folded")),
            (431, (b"GET /" + b"x" * 9000 + b" HTTP/1.1", b"GET / HTTP/1.1" + b"\r\nA: b" * 2000)),
        ):
            for line in lines:
                with self.subTest(line[:60]):
                    self.assert_code(line + b"\r\nHost: x\r\n\r\n", code)
        for request, code in (
                (b"GET /healthz HTTP/1.1\nHost: x\n\n", 200),
                (b"GET /healthz HTTP/1.1\r\nHost: x\n\r\n", 200),
                (b"GET /healthz HTTP/1.1\nHost: x\r\n\n", 200),
                (b"GET /healthz HTTP/1.1\nHost: x\rA: b\n\n", 400),
                (b"GET / HTTP/1.1\r\n\r\n", 400),
                (b"hello\r\n\r\n", 400),
                (b"\r\n\r\n", 400),
                (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\nHost: x\r\n\r\nabc", 405),
                (o.PREFACE, 505),
                (b"x" * 100_000, 431)):
            with self.subTest(request[:60]):
                self.assert_code(request, code)
        rng = np.random.default_rng(7)
        for size in rng.integers(1, 20000, 100):
            with http_socket(self.address) as connection:
                with contextlib.suppress(OSError):  # The server has closed.
                    connection.sendall(rng.bytes(size))
        self.scrape()

    def test_a_request_in_pieces(self):
        with http_socket(self.address) as connection:
            for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
                connection.sendall(bytes([byte]))
                self.assertTrue(eventually(self.server.asleep), "it has read the byte")
            self.assertIn(b"200 OK", read_all(connection))

    def test_others_are_served_beside_slow_senders_and_readers(self):
        held = []
        memory, idle = self.server.rss(), o.descriptors(self.server)
        try:
            for i in range(200):
                connection = http_socket(self.address)
                held.append(connection)
                if i % 2:
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x")  # It sends no more.
                else:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")  # reads nothing
            for _ in range(20):
                self.assertEqual(get(self.address, "/healthz"), "ready\n")
                self.scrape()
            self.assertLess(self.server.rss() - memory, 64 << 20)
            self.assertTrue(eventually(lambda: o.descriptors(self.server) <= idle + 2),
                            "slow connections are closed in the end")
        finally:
            for connection in held:
                connection.close()
        self.assertEqual(self.client.dot_of_ones(), 1)

    def test_clients_that_leave(self):
        for i in range(300):
            connection = http_socket(self.address)
            if i % 3:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        self.scrape()
        self.assertTrue(self.server.alive())


class LifeTest(MetricsCase):
    def test_where_it_listens_and_what_the_log_says(self):
        for flags, variables, said in (
                ((), dict(TESSERA_METRICS_LISTEN="localhost:0"), "metrics at http://localhost:"),
                (("--metrics-listen", "0.0.0.0:0"), {}, "other hosts can read the metrics")):
            server = o.Case.serve(self, *flags, **variables)
            self.assertIn(said, server.log())
        self.assertNotIn("metrics", o.Case.serve(self).log())

    def test_a_port_that_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            said = o.refused("--listen", "127.0.0.1:0", "--metrics-listen", address)
        self.assertIn(f"cannot listen on {address}", said)

    def test_it_tells_of_a_drain(self):
        server = self.serve("--drain-delay", "20s")
        server.signal()
        self.comes(0, "tessera_ready")
        with self.assertRaises(urllib.error.HTTPError) as failed:
            get(self.address, "/healthz")
        self.assertEqual(failed.exception.code, 503)
        failed.exception.close()
        self.assertEqual(self.client.dot_of_ones(), 1)  # It still serves.
        server.kill()

    def test_it_is_not_ready_before_its_file(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "filled"
            file.touch()
            os.utime(file, (1, 1))  # The file is older than the server.
            server = self.serve("--ready-file", str(file))
            self.assertIn(f"not ready until {file} is created", server.log())
            # By the second line the server has looked for the file.
            for count in (1, 2):
                server.signal(signal.SIGHUP)
                again = lambda: server.log().count("to read again") == count  # noqa: B023
                self.assertTrue(eventually(again), server.log())
            self.assertEqual(self.scrape().sum("tessera_ready"), 0)
            self.assertEqual(self.client.dot_of_ones(), 1)  # Callers can fill it with data.
            file.touch()
            self.comes(1, "tessera_ready")


class DeployedTest(MetricsCase):
    def test_every_metric_that_is_named_exists(self):
        self.serve("--data-dir", self.folder / "data")
        x = o.resident("x")
        self.client.put("x", ONES)
        self.client.call("Dot", a=x, b=x, timing=True)
        self.client.download("x")
        self.client.attempt("GetBuffer", name="none")
        scrape = self.scrape()
        # tests/gpu_monitor_test.cc checks the samples of the driver's GPU metrics.
        source = (o.ROOT / "server" / "status" / "metrics_text.cc").read_text()
        gpu = set(re.findall(r'"(tessera_gpu_\w+)"', source))
        self.assertGreater(len(gpu), 5)
        known = scrape.names() | set(scrape.types) | gpu
        text = "".join(path.read_text() for path in (RULES, RULES_TEST, DASHBOARD))
        named = set(re.findall(r"\b(?:tessera|process)_[a-z_]+\b", text))
        self.assertGreater(len(named), 15)
        self.assertEqual(named - known, set())
        documented = set(re.findall(r"(?m)^\| `((?:tessera|process)_\w+)`", DOCUMENT.read_text()))
        self.assertEqual(documented, set(scrape.types) | gpu)
        page = get(self.address, "/")
        self.assertEqual(set(re.findall(r'"((?:tessera|process)_[a-z_]+)"', page))
                         - known - {name.removesuffix("_bucket") for name in known}, set())

    def test_every_alert_is_documented_and_tested(self):
        alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
        documented = set(re.findall(r"(?m)^\| `(Tessera\w+)`", DOCUMENT.read_text()))
        self.assertEqual(alerts, documented)
        raised = set(re.findall(r"alertname: (\w+)\s+exp_alerts", RULES_TEST.read_text()))
        self.assertEqual(alerts, raised)

    def test_dashboard(self):
        board = json.loads(DASHBOARD.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertGreater(len(ids), 8)
        cells = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            for column in range(place["x"], place["x"] + place["w"]):
                for row in range(place["y"], place["y"] + place["h"]):
                    self.assertLess(column, 24)
                    self.assertNotIn((column, row), cells, panel["title"])
                    cells.add((column, row))
            for target in panel.get("targets", []):
                self.assertIn("instance", target["expr"], panel["title"])


class PrometheusTest(MetricsCase):
    @classmethod
    def setUpClass(cls):
        if not shutil.which("promtool") or not shutil.which("prometheus"):
            raise unittest.SkipTest("prometheus is not installed")
        super().setUpClass()

    def test_promtool(self):
        for command in (["check", "rules", RULES], ["test", "rules", RULES_TEST]):
            ended = o.run("promtool", *command, cwd=DEPLOY / "monitoring")
            self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        self.serve()
        self.client.dot_of_ones()
        page = self.folder / "page"
        page.write_text(get(self.address))
        ended = o.run("sh", "-c", f"promtool check metrics <{page}")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_a_real_prometheus(self):
        self.serve()
        for _ in range(5):
            self.client.dot_of_ones()
        address = lasting_address()
        (self.folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n"
            f"rule_files: [{RULES}]\n"
            f"scrape_configs: [{{job_name: tessera, "
            f"static_configs: [{{targets: ['{self.address}']}}]}}]\n")
        process = subprocess.Popen(
            ["prometheus", f"--config.file={self.folder}/prometheus.yml",
             f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address={address}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)

        def query(path):
            try:
                return json.loads(get(address, path))["data"]
            except (OSError, ValueError):
                return {}

        def value(of):
            found = query(f"/api/v1/query?query={of}").get("result")
            return found and float(found[0]["value"][1])

        dots = "sum(tessera_requests_total%7Brpc=%22Dot%22,code=%22OK%22%7D)"
        self.assertTrue(eventually(lambda: value(dots) == 5 and value("up") == 1))
        self.assertTrue(eventually(
            lambda: {rule["health"] for group in query("/api/v1/rules").get("groups", ())
                     for rule in group["rules"]} == {"ok"}))


if __name__ == "__main__":
    o.main()

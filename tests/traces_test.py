#!/usr/bin/env python3
"""Tests traces from outside: which calls get a response and a log line with their trace, what is
said about slow calls, and spans in a file, including files that cannot be written."""

import contextlib
import json
import os
import pathlib
import re
import resource
import threading
import time

import grpc
import numpy as np

import outsider as o
from callers import line_of
from outsider import eventually

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = f"00-{ID}-{PARENT}-01"
UNSAMPLED = f"00-{ID}-{PARENT}-00"
ONES = np.ones(1000, np.float32)
COMPUTE = "tessera.v1.ComputeService"
BUFFERS = "tessera.v1.BufferService"


def with_trace(value, *more):
    return (("traceparent", value), *more)


def stream(client, path, requests=(), metadata=()):
    """Returns (code, trailing metadata) of a call of any kind."""
    call = client.channel.stream_stream(path)(
        iter(requests), metadata=metadata, timeout=o.CALL_TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass
    return call.code().name, [*(call.trailing_metadata() or ())]


def unary(client, path, request=b"", metadata=()):
    return stream(client, path, [request], metadata)


def answers(trailing):
    return [value for key, value in trailing if key == "traceresponse"]


def dot(**fields):
    ones = o.inline(ONES)
    return o.compute.DotRequest(a=ones, b=ones, **fields).SerializeToString()


class TracesCase(o.FreshCase):
    def serve(self, *flags, **more):
        server = super().serve("--memory-limit", "256Mi", *flags, **more)
        self.client = server.client()
        return server

    def serve_tenant(self, *flags):
        """Starts a server that knows the token "secret"."""
        tokens = self.folder / "tokens"
        tokens.write_text(line_of("secret", "read", "vision") + "\n")
        return self.serve("--tokens", tokens, *flags)

    def lines_with(self, server, text, count):
        found = []

        def enough():
            found[:] = [line for line in server.log().splitlines() if text in line]
            return len(found) >= count

        self.assertTrue(eventually(enough), server.log())
        self.assertEqual(len(found), count, found)
        return found


class AnswersTest(TracesCase):
    def assert_answered(self, end, code, flags="01"):
        self.assertEqual(end[0], code, end)
        self.assertEqual(len(answers(end[1])), 1, end)
        version, trace_id, span, sampled = answers(end[1])[0].split("-")
        self.assertEqual((version, trace_id, sampled), ("00", ID, flags))
        self.assertRegex(span, "^[0-9a-f]{16}$")
        self.assertNotIn(span, (PARENT, 16 * "0"))

    def test_every_method_whatever_its_end(self):
        self.serve("--shared-memory", self.folder / "shared")
        self.client.put("x", ONES)
        metadata = with_trace(SAMPLED)
        codes = set()
        good = {"GetBuffer": o.buffers.GetBufferRequest(name="x"),
                "Download": o.buffers.DownloadRequest(name="x"),
                "Upload": o.buffers.UploadRequest(
                    name="y", spec=o.spec_of(ONES), data=ONES.tobytes()),
                "Dot": o.compute.DotRequest(a=o.resident("x"), b=o.resident("x"))}
        for name, path in o.methods().items():
            right = [good[name].SerializeToString()] if name in good else []
            for message in (b"", b"\xff", *right):
                with self.subTest(name, message=message[:20]):
                    end = unary(self.client, path, message, metadata)
                    self.assert_answered(end, end[0])
                    codes.add(end[0])
        self.assertLessEqual({"OK", "NOT_FOUND", "INVALID_ARGUMENT"}, codes)
        self.assert_answered(stream(self.client, "/a.b/None", (), metadata), "UNIMPLEMENTED")
        check, dots = "/grpc.health.v1.Health/Check", f"/{COMPUTE}/Dot"
        self.assert_answered(unary(self.client, check, b"", metadata), "OK")
        reflect = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        self.assert_answered(unary(self.client, reflect, b"\x3a\x00", metadata), "OK")
        end = unary(self.client, dots, dot(), with_trace(UNSAMPLED))
        self.assert_answered(end, "OK", flags="00")

    def test_a_refused_caller_too(self):
        server = self.serve_tenant()
        metadata = with_trace(SAMPLED, ("authorization", "Bearer wrong"))
        for end in (unary(self.client, f"/{COMPUTE}/Dot", b"", metadata),
                    stream(self.client, f"/{BUFFERS}/Upload", [], metadata)):
            self.assert_answered(end, "UNAUTHENTICATED")
        lines = self.lines_with(server, f"(trace {ID})", 2)
        self.assertEqual([line.split(" ")[2] for line in lines], ["Dot", "Upload"])

    def test_without_a_trace_there_is_no_answer(self):
        server = self.serve()
        path = f"/{COMPUTE}/Dot"
        for values in ((), ("",), (SAMPLED.upper(),), (7000 * "0",), (SAMPLED, SAMPLED),
                       (SAMPLED, UNSAMPLED)):
            with self.subTest(values):
                metadata = tuple(("traceparent", value) for value in values)
                for request, code in ((dot(), "OK"), (b"", "INVALID_ARGUMENT")):
                    end = unary(self.client, path, request, metadata)
                    self.assertEqual((end[0], answers(end[1])), (code, []))
                end = stream(self.client, f"/{BUFFERS}/Download", [b""], metadata)
                self.assertEqual(answers(end[1]), [])
        end = unary(self.client, path, dot(), (("traceparents", SAMPLED), ("tracestate", "a=b")))
        self.assertEqual(answers(end[1]), [])
        self.assertNotIn("trace ", server.log())

    def test_lines_about_failed_calls_name_it(self):
        server = self.serve()
        metadata = with_trace(UNSAMPLED)
        self.client.put("x", ONES)
        unary(self.client, f"/{COMPUTE}/Dot", b"", metadata)
        stream(self.client, f"/{BUFFERS}/Download", [b"\x0a\x04none"], metadata)
        stream(self.client, f"/{BUFFERS}/Upload", [b"\x0a\x04none"], metadata)
        unary(self.client, f"/{BUFFERS}/GetBuffer", b"\x0a\x04none", metadata)
        lines = self.lines_with(server, f"(trace {ID})", 4)
        called = sorted(line.split(" ")[2] for line in lines)
        self.assertEqual(called, ["Dot", "Download", "GetBuffer", "Upload"])
        unary(self.client, f"/{BUFFERS}/GetBuffer", b"\x0a\x05other")
        self.assertNotIn("trace", self.lines_with(server, "other", 1)[0])

    def test_a_transfer_that_its_client_breaks_off(self):
        server = self.serve("--log-format", "json")
        more = threading.Event()
        self.addCleanup(more.set)
        first = dict(name="half", spec=o.spec_of(ONES), data=b"1234")
        call = self.client.begin_upload(more, first, metadata=with_trace(SAMPLED))
        self.assertTrue(eventually(lambda: self.client.names() == ["half"]))
        call.cancel()
        line = json.loads(self.lines_with(server, ID, 1)[0])
        self.assertRegex(line["message"], r"^Upload from .*CANCELLED")
        self.assertNotIn(ID, line["message"])
        self.assertEqual(line["trace_id"], ID)


TIME = r"[0-9][0-9a-zµ.]*s"


class SlowCallsTest(TracesCase):
    def test_where_the_time_went(self):
        server = self.serve("--slow-call", "1ns")
        self.client.put("x", ONES)
        unary(self.client, f"/{COMPUTE}/Dot", dot(timing=True, strategy="cpu_serial"),
              with_trace(UNSAMPLED))
        unary(self.client, f"/{COMPUTE}/Dot", dot(strategy="new\nline"))
        self.client.download("x")
        unary(self.client, f"/{BUFFERS}/GetBuffer", b"\x0a\x01x")
        peer = r"ipv4:127\.0\.0\.1:\d+"
        expected = [
            rf"slow: Upload from {peer}: OK after {TIME}: queue {TIME}, copies {TIME}",
            rf"slow: Dot by cpu_serial from {peer}: OK after {TIME}: queue {TIME}, run {TIME}, "
            rf"kernel {TIME} \(trace {ID}\)",
            rf"slow: Dot by new\\x0aline from {peer}: INVALID_ARGUMENT after {TIME}.*",
            rf"slow: Download from {peer}: OK after {TIME}: queue {TIME}, copies {TIME}",
            rf"slow: GetBuffer from {peer}: OK after {TIME}"]
        lines = self.lines_with(server, " slow: ", len(expected))
        for line, pattern in zip(lines, expected):
            self.assertRegex(line.split(" ", 2)[2], f"^{pattern}$")

    def test_a_tenant_is_named(self):
        server = self.serve_tenant("--slow-call", "1ns", "--log-format", "json")
        unary(self.client, f"/{COMPUTE}/Dot", dot(), (("authorization", "Bearer secret"),))

        line = json.loads(self.lines_with(server, '"slow: ', 1)[0])
        self.assertEqual(line["level"], "warning")
        self.assertRegex(line["message"], r"^slow: Dot by \w+ from \S+ \(tenant vision\): OK after")

    def test_none_are_slow_unless_asked_for(self):
        for flags in ((), ("--slow-call", "0"), ("--slow-call", "1h")):
            server = self.serve(*flags)
            self.client.dot_of_ones()
            unary(self.client, f"/{COMPUTE}/Dot", b"\xff")
            self.client.attempt("GetBuffer", name="none")
            self.assertTrue(eventually(lambda: "NOT_FOUND" in server.log()))
            self.assertNotIn("slow", server.log())

    def test_a_flood_is_cut_and_counted(self):
        server = self.serve("--slow-call", "1ns")
        begin = time.monotonic()
        made = 300
        for _ in range(made):
            self.client.dot_of_ones()
        seconds = int(time.monotonic() - begin) + 2  # an upper bound, in whole seconds
        self.assertLessEqual(server.log().count(" slow: "), 10 * seconds)
        text = ""

        def told():
            nonlocal made, text
            self.client.dot_of_ones()
            made += 1
            text = server.log()
            return "more calls were slow and were not logged" in text

        self.assertTrue(eventually(told, pause=0.2))
        left_out = sum(map(int, re.findall(r"(\d+) more calls were slow", text)))
        self.assertGreater(left_out, 0)
        self.assertLessEqual(text.count(" slow: ") + left_out, made)


def attributes(span):
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def metrics(server):
    found = re.findall(r'tessera_spans_total\{result="(\w+)"\} (\d+)', server.page())
    return {result: int(count) for result, count in found}


class SpansTest(TracesCase):
    def serve(self, *flags, file=None, **more):
        self.file = self.folder / "spans.jsonl" if file is None else file
        return super().serve(
            "--spans", self.file, "--metrics-listen", "127.0.0.1:0", *flags, **more)

    def spans(self, count):
        """Returns this number of spans, in the order in which they were written."""
        def enough():
            try:
                lines = self.file.read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) >= count and lines

        lines = eventually(enough)
        self.assertTrue(lines)
        self.assertEqual(len(lines), count)
        return [json.loads(line) for line in lines]

    def sampled_dot(self, **fields):
        return unary(self.client, f"/{COMPUTE}/Dot", dot(**fields), with_trace(SAMPLED))

    def test_a_call_and_its_phases(self):
        server = self.serve()
        begin = time.time_ns()
        code, trailing = self.sampled_dot(timing=True, strategy="cpu_serial")
        end = time.time_ns()
        self.assertEqual(code, "OK")
        queue, run, call = self.spans(3)
        self.assertEqual(call["spanId"], answers(trailing)[0].split("-")[2])
        self.assertEqual(call["parentSpanId"], PARENT)
        self.assertEqual((call["name"], call["kind"]), (f"{COMPUTE}/Dot", 2))
        self.assertEqual(call["status"], {})
        self.assertEqual([queue["name"], run["name"]], ["queue", "run"])
        for child in (queue, run):
            self.assertEqual((child["parentSpanId"], child["kind"]), (call["spanId"], 1))
        for span in (queue, run, call):
            self.assertEqual(span["traceId"], ID)
            self.assertRegex(span["spanId"], "^[0-9a-f]{16}$")
        self.assertEqual(len({queue["spanId"], run["spanId"], call["spanId"]}), 3)
        times = [int(time) for time in (
            call["startTimeUnixNano"], queue["startTimeUnixNano"], queue["endTimeUnixNano"],
            run["startTimeUnixNano"], run["endTimeUnixNano"], call["endTimeUnixNano"])]
        self.assertEqual(times, sorted(times))
        self.assertEqual((times[0], times[2], times[4]), (times[1], times[3], times[5]))
        self.assertGreater(times[0], begin - 50_000_000)
        self.assertLess(times[5], end + 50_000_000)
        found = attributes(call)
        kernel = found.pop("tessera.kernel_seconds")
        self.assertLess(0, kernel)
        self.assertLess(kernel * 1e9, times[5] - times[3] + 1)
        self.assertEqual(found, {"rpc.system": "grpc", "rpc.service": COMPUTE, "rpc.method": "Dot",
                                 "rpc.grpc.status_code": "0", "tessera.strategy": "cpu_serial"})
        self.assertEqual(metrics(server), {"written": 3, "dropped": 0})
        self.assertEqual(self.file.stat().st_mode & 0o007, 0)

    def test_transfers_and_look_ups(self):
        self.serve()
        upload = o.buffers.UploadRequest(name="x", spec=o.spec_of(ONES), data=ONES.tobytes())
        for path, request in (("Upload", upload.SerializeToString()), ("Download", b"\x0a\x01x")):
            self.assertEqual(
                stream(self.client, f"/{BUFFERS}/{path}", [request], with_trace(SAMPLED))[0], "OK")
        unary(self.client, f"/{BUFFERS}/GetBuffer", b"\x0a\x01x", with_trace(SAMPLED))
        upload, download, look = self.spans(3)
        for span, name in ((upload, "Upload"), (download, "Download"), (look, "GetBuffer")):
            self.assertEqual(span["name"], f"{BUFFERS}/{name}")
            seconds = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) * 1e-9
            found = attributes(span)
            if name == "GetBuffer":
                self.assertNotIn("tessera.copy_seconds", found)
            else:
                self.assertGreater(found["tessera.copy_seconds"], 0)
                self.assertLess(found["tessera.copy_seconds"] + found["tessera.queue_seconds"],
                                seconds)

    def test_errors(self):
        self.serve("--max-operation-seconds", "1e-12")
        self.sampled_dot(strategy='"\\\n\x01')
        unary(self.client, f"/{BUFFERS}/GetBuffer", b"\x0a\x01x", with_trace(SAMPLED))
        *_, refused, missing = self.spans(4)
        self.assertEqual(attributes(refused)["tessera.strategy"], '"\\\\x0a\\x01')
        self.assertEqual(attributes(missing)["rpc.grpc.status_code"], "5")
        self.assertEqual(attributes(missing)["error.type"], "BUFFER_NOT_FOUND")
        self.assertEqual(missing["status"], {})  # The client's fault.

    def test_only_sampled_calls_of_known_callers(self):
        self.serve_tenant()
        token = ("authorization", "Bearer secret")
        path = f"/{COMPUTE}/Dot"
        unary(self.client, path, dot(), with_trace(SAMPLED))
        unary(self.client, path, dot(), with_trace(UNSAMPLED, token))
        unary(self.client, path, dot(), (token,))
        self.assertEqual(unary(self.client, path, dot(), with_trace(SAMPLED, token))[0], "OK")
        self.assertEqual(attributes(self.spans(3)[2])["tessera.tenant"], "vision")

    def test_the_file_is_appended_to(self):
        file = self.folder / "spans.jsonl"
        file.write_text('{"old": 1}\n')
        server = self.serve()
        for _ in range(20):
            self.sampled_dot()
        self.assertEqual(server.stop(), 0)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        self.assertEqual((len(lines), lines[0]), (61, {"old": 1}))

    def test_a_file_that_is_moved_away_is_made_again(self):
        server = self.serve()
        self.sampled_dot()
        self.spans(3)
        os.rename(self.file, self.folder / "old")
        self.assertTrue(
            eventually(lambda: self.sampled_dot() and self.file.exists(), pause=0.1))
        self.assertEqual(server.stop(), 0)
        self.assertGreater(len(self.file.read_text().splitlines()), 0)
        old = len((self.folder / "old").read_text().splitlines())
        self.assertEqual(old % 3, 0)

    def assert_dropped(self, server):
        """Checks that calls succeed, and that their spans are counted as dropped."""
        before = metrics(server)
        for _ in range(5):
            self.assertEqual(self.sampled_dot()[0], "OK")
        self.assertTrue(eventually(
            lambda: metrics(server)["dropped"] == before["dropped"] + 15), metrics(server))
        self.assertEqual(metrics(server)["written"], before["written"])
        # The line in the log comes after the count.
        said = lambda: server.log().count("spans are dropped until")  # noqa: E731
        self.assertTrue(eventually(lambda: said() > 0))
        self.assertEqual(said(), 1)

    def assert_written_again(self, server):
        def again():
            self.sampled_dot()
            return metrics(server)["written"] > 0

        self.assertTrue(eventually(again, pause=0.1))
        self.assertTrue(eventually(lambda: "are written to" in server.log()))

    def test_a_folder_that_is_not_there_yet(self):
        server = self.serve(file=self.folder / "later" / "spans.jsonl")
        self.assert_dropped(server)
        self.file.parent.mkdir()
        self.assert_written_again(server)

    def test_a_full_disk(self):
        server = self.serve(file=pathlib.Path("/dev/full"))
        self.assert_dropped(server)
        self.assertIn("No space left", server.log())
        self.assertEqual(server.stop(), 0)

    def test_a_line_that_is_torn_costs_no_other(self):
        limit = 5000
        server = self.serve()
        calls = 0

        def call():
            nonlocal calls
            self.sampled_dot()
            calls += 1
            return metrics(server)

        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        self.assertTrue(eventually(lambda: call()["dropped"] > 0))
        self.assertEqual(self.file.stat().st_size, limit)
        whole = metrics(server)["written"]
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        self.assertTrue(eventually(lambda: call()["written"] > whole, pause=0.1))
        self.assertTrue(eventually(lambda: sum(metrics(server).values()) == 3 * calls))
        lines = self.file.read_text().splitlines()
        torn = [line for line in lines if not line.endswith('"status":{}}')]
        self.assertEqual(len(torn), 1)
        lines.remove(torn[0])
        self.assertEqual({json.loads(line)["traceId"] for line in lines}, {ID})
        self.assertEqual(len(lines), metrics(server)["written"])

    def test_an_unread_pipe(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        server = self.serve(file=pipe)
        self.assert_dropped(server)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assert_written_again(server)
        # The reader reads nothing, so the pipe is soon full.
        before = metrics(server)["dropped"]

        def full():
            for _ in range(50):
                self.assertEqual(self.sampled_dot()[0], "OK")
            return metrics(server)["dropped"] > before

        self.assertTrue(eventually(full))
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    o.main()

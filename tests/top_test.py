#!/usr/bin/env python3
"""Tests `tessera top` from outside: its output is compared with the server and its metrics, metrics
pages may be malformed, and the terminal is restored regardless of how the program ends."""

import contextlib
import http.server
import json
import pathlib
import re
import signal
import socket
import threading
import time

import numpy as np

import outsider as o
from outsider import eventually
from rolling import lasting_address
from terminal import Terminal

ONES = np.ones(1000, np.float32)


LONG = ("--timeout", "60s")


def run(*arguments, timeout=LONG):
    return o.run(o.Program.cli, *timeout, *arguments)


class TopCase(o.Case):
    def serve(self, **how):
        server = super().serve("--memory-limit", "256Mi", "--metrics-listen", "127.0.0.1:0", **how)
        self.client = server.client()
        self.metrics = "http://" + server.http_address()
        return server


class OnceTest(TopCase):
    def top(self, server, *arguments):
        ended = run("-s", server.address, "top", *arguments)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""), ended)
        return ended.stdout

    def test_devices_budgets_and_buffers(self):
        server = self.serve()
        for i in range(25):
            self.client.put(f"b{i}", np.ones(1000 * (i + 1), np.float32))
        text = self.top(server)
        self.assertNotIn("\x1b", text)
        self.assertRegex(text, r"^tessera-server \S+, up ")
        info = self.client.info()
        device = info.devices[0]
        row = re.search(rf"^{device.name}  .*$", text, re.MULTILINE)[0].split()
        self.assertEqual(row[-2:], [str(device.workers), "0"])
        self.assertIn("256 MiB", " ".join(row))
        for budget in info.budgets:
            self.assertRegex(text, rf"(?m)^{budget.name} +\S+")
        self.assertRegex(text, r"(?m)^buffers +25 +104857 +0%$")
        shown = re.findall(r"(?m)^(b\d+) +f32 +\[(\d+)\]", text)
        self.assertEqual(shown, [(f"b{i}", str(1000 * (i + 1))) for i in range(24, 4, -1)])
        self.assertIn("\nand 5 smaller ones\n", text)
        self.assertNotIn("CALLS/S", text)

    def test_json(self):
        server = self.serve()
        self.client.put("x", ONES)
        document = json.loads(self.top(server, "--json", "--metrics", self.metrics,
                                       "--interval", "100ms"))
        self.assertEqual([b["name"] for b in document["buffers"]], ["x"])
        self.assertEqual(document["devices"][0]["name"], self.client.device().name)
        self.assertIn("Upload", [c["rpc"] for c in document["calls"]])
        self.assertEqual(document["refusals"], [])

    def test_names_cannot_reach_the_terminal(self):
        server = self.serve()
        page = PAGE.replace('"BAD_NAME"', '"\x1b[2J\\n"')
        with page_of(lambda: page) as metrics:
            text = self.top(server, "--metrics", metrics, "--interval", "50ms")
        self.assertNotIn("\x1b", text)
        self.assertIn("\\x1b[2J\\x0a", text)

    def test_options_that_are_wrong(self):
        for url in ("https://127.0.0.1:1", "127.0.0.1", "http://127.0.0.1:port/",
                    "http://127.0.0.1:70000", "http://127.0.0.1:1/\r\nX: y"):
            self.assertEqual(run("top", "--metrics", url).returncode, 2, url)
        for interval in ("0", "soon"):
            self.assertEqual(run("top", "--interval", interval).returncode, 2, interval)


BOUNDS = (0.001, 0.01, 0.1, float("inf"))


def histogram(rpc, *counts):
    """Returns the text of a histogram. counts: the counts of each bucket."""
    lines = []
    for i, bound in enumerate(BOUNDS):
        le = "+Inf" if i == len(BOUNDS) - 1 else bound
        lines.append(f'tessera_request_seconds_bucket{{rpc="{rpc}",le="{le}"}} '
                     f"{sum(counts[: i + 1])}")
    return "\n".join(lines) + "\n"


PAGE = """# HELP tessera_requests_total Calls.
# TYPE tessera_requests_total counter
tessera_requests_total{rpc="Dot",strategy="none",code="OK"} 5
process_start_time_seconds 1000
tessera_errors_total{code="INVALID_ARGUMENT",reason="BAD_NAME"} 3
"""


@contextlib.contextmanager
def page_of(content, chunked=False):
    """Yields the address of an HTTP server whose page is the result of content()."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            text = content().encode()
            self.send_response(200)
            self.send_header("Connection", "close")
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
                parts = (text[i : i + 100] for i in range(0, len(text), 100))
                text = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts)
                text += b"0\r\n\r\n"
            else:
                self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class RatesTest(TopCase):
    def rates(self, first, second, chunked=False):
        """Returns what the program computes from these two consecutive pages, and the seconds that
        it takes."""
        pages = [first, second]
        begin = time.monotonic()
        with page_of(lambda: pages.pop(0), chunked) as metrics:
            ended = run("-s", self.server.address, "--json", "top", "--metrics", metrics,
                        "--interval", "300ms")
        self.assertEqual((ended.returncode, pages), (0, []), ended.stdout)
        return json.loads(ended.stdout), time.monotonic() - begin

    def setUp(self):
        self.server = self.serve()

    def test_differences(self):
        requests = 'tessera_requests_total{{rpc="{}",strategy="{}",code="{}"}} {}\n'
        errors = 'tessera_errors_total{{code="{}",reason="{}"}} {}\n'
        both = ("process_start_time_seconds 1700000000\n" + requests.format("Add", "none", "OK", 7)
                + histogram("Add", 0, 7, 0, 0) + errors.format("UNAVAILABLE", "DRAINING", 0))
        before = (both + requests.format("Dot", "a", "OK", 10) + histogram("Dot", 10, 0, 0, 0)
                  + errors.format("RESOURCE_EXHAUSTED", "QUEUE_FULL", 4))
        after = (both + requests.format("Dot", "a", "OK", 60)
                 + requests.format("Dot", "b", "INTERNAL", 50) + histogram("Dot", 10, 20, 80, 0)
                 + errors.format("RESOURCE_EXHAUSTED", "QUEUE_FULL", 10)
                 + errors.format("INTERNAL", r"a \"b\" \\n\n", 50))
        for chunked in (False, True):
            document, seconds = self.rates(before, after, chunked)
            dot, add = document["calls"]
            self.assertEqual((dot["rpc"], add["rpc"]), ("Dot", "Add"))
            # There were 100 calls between the two pages.
            self.assertGreater(dot["per_second"], 100 / seconds)
            self.assertLess(dot["per_second"], 100 / 1e-4)
            self.assertAlmostEqual(dot["failed_per_second"] / dot["per_second"], 0.5)
            # With 20 calls from 1 to 10 ms and 80 from 10 to 100 ms, these are the 50th and the
            # 99th of 100 calls.
            self.assertAlmostEqual(dot["p50_seconds"], 0.01 + 0.09 * 30 / 80)
            self.assertAlmostEqual(dot["p99_seconds"], 0.01 + 0.09 * 79 / 80)
            self.assertEqual((add["per_second"], add["p50_seconds"]), (0, "NaN"))
            internal, full = document["refusals"]
            self.assertEqual((internal["reason"], internal["total"]), ('a "b" \\n\n', 50))
            self.assertEqual((full["code"], full["reason"], full["total"]),
                             ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 10))
            self.assertAlmostEqual(full["per_second"] / internal["per_second"], 6 / 50)

    def test_figures_of_gpus(self):
        page = PAGE + ('tessera_gpu_busy_ratio{device="cuda:0"} 0.87\n'
                       'tessera_gpu_memory_used_bytes{device="cuda:0"} 75161927680\n'
                       'tessera_gpu_temperature_celsius{device="cuda:0"} 61\n'
                       'tessera_gpu_power_watts{device="cuda:0"} 512.345\n'
                       'tessera_gpu_sm_clock_hertz{device="cuda:0"} 1.755e+09\n'
                       'tessera_gpu_slowdown{device="cuda:0",reason="power_cap"} 1\n'
                       'tessera_gpu_slowdown{device="cuda:0",reason="thermal_hardware"} 0\n'
                       'tessera_gpu_memory_errors_total{device="cuda:0",kind="corrected"} 3\n'
                       'tessera_gpu_memory_errors_total{device="cuda:0",kind="uncorrected"} 1\n'
                       'tessera_gpu_temperature_celsius{device="cuda:1"} 40\n')
        document, _ = self.rates(page, page)
        first, second = document["gpus"]
        self.assertEqual((first["device"], first["busy_ratio"], first["slowed_by"]),
                         ("cuda:0", 0.87, ["power_cap"]))
        self.assertEqual(first["memory_used_bytes"], 75161927680)
        self.assertEqual(second, {"device": "cuda:1", "temperature_celsius": 40, "slowed_by": []})
        with page_of(lambda: page) as metrics:
            text = run("-s", self.server.address, "top", "--metrics", metrics, "--interval",
                       "50ms").stdout
        self.assertRegex(text, r"(?m)^cuda:0 +87% +70 GiB +61 C +512 W +- +1.75 GHz +4 +power_cap$")
        self.assertRegex(text, r"(?m)^cuda:1 +- +- +40 C +- +- +- +- +-$")
        document, _ = self.rates(PAGE, PAGE)
        self.assertNotIn("gpus", document)

    def test_quantiles_beyond_the_last_bucket(self):
        page = PAGE + histogram("Dot", 0, 0, 0, 5)
        document, _ = self.rates("process_start_time_seconds 1\n", page)
        self.assertEqual(document["calls"][0]["p50_seconds"], "Infinity")

    def test_a_server_that_was_started_again(self):
        fresh = PAGE.replace(" 1000", " 2000")
        document, seconds = self.rates(PAGE.replace(" 5", " 500"), fresh)
        # The server has completed 5 calls since its restart, so the difference is negative.
        self.assertGreater(document["calls"][0]["per_second"], 5 / seconds)
        self.assertGreater(document["refusals"][0]["per_second"], 0)

    def test_lines_that_are_no_samples(self):
        page = PAGE + ('{} 3\nx\ntessera_requests_total{rpc="Dot 7\n'
                       'tessera_requests_total{rpc="Dot"\ntessera_requests_total{rpc\n'
                       'tessera_requests_total{rpc="\\\ntessera_requests_total x\n\n \n')
        document, _ = self.rates(page, page)
        self.assertEqual([c["rpc"] for c in document["calls"]], ["Dot"])

    def test_a_real_server(self):
        def work():
            self.client.dot_of_ones()
            self.client.attempt("GetBuffer", name="none")

        rate = r"([1-9][\d.]*|0\.\d*[1-9]\d*)"

        def seen():
            """Returns whether the program shows both calls. On a busy machine, none may be made
            during its interval."""
            ended = run("-s", self.server.address, "top", "--once", "--metrics",
                        self.server.http_address(), "--interval", "300ms")
            self.assertEqual(ended.returncode, 0, ended.stderr)
            dot = rf"(?m)^Dot +{rate} +0(\.0*)? +(\S+ [um]?s) +(\S+ [um]?s)$"
            missing = rf"(?m)^BUFFER_NOT_FOUND +NOT_FOUND +{rate} +(\d+)$"
            return re.search(dot, ended.stdout) and re.search(missing, ended.stdout)

        with o.meanwhile(work):
            self.assertTrue(eventually(seen))

    def test_pages_that_are_wrong(self):
        well = b"HTTP/1.1 200 OK\r\n"
        chunked = well + b"Transfer-Encoding: chunked\r\n\r\n"
        answers = {b"": "not HTTP/1.1",
                   b"SSH-2.0-OpenSSH\r\n": "not HTTP/1.1",
                   b"HTTP/1.1 503 Busy\r\n\r\n": "503 Busy",
                   well + b"Content-Length: 9\r\n\r\nshort": "incomplete",
                   chunked + b"5\r\nab": "incomplete",
                   chunked + b"ffffffffffffffff\r\n": "incomplete",
                   chunked + b"x\r\n": "incomplete",
                   None: "no response arrived in time"}
        for answer, text in answers.items():
            with self.subTest(answer), socket.create_server(("127.0.0.1", 0)) as listener:
                def talk():
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        if answer is None:
                            connection.recv(1)  # It returns once the client gives up.
                        else:
                            connection.sendall(answer)

                thread = threading.Thread(target=talk)
                thread.start()
                ended = run("-s", self.server.address, "top", "--metrics",
                            f"127.0.0.1:{listener.getsockname()[1]}", "--interval", "500ms",
                            timeout=() if answer is None else LONG)
                thread.join()
                self.assertIn("NO_METRICS", ended.stderr)
                self.assertIn(text, ended.stderr)
                self.assertNotEqual(ended.returncode, 0)
        ended = run("-s", self.server.address, "top", "--metrics", "127.0.0.1:1")
        self.assertIn("Connection refused", ended.stderr)


ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class LiveTest(TopCase):
    def start(self, server, *arguments, interval="100ms", timeout="60s", **more):
        terminal = Terminal(o.Program.cli, "-s", server.address, "--timeout", timeout, "top",
                            "--interval", interval, *arguments,
                            **{"rows": 40, "columns": 120, **more})
        self.addCleanup(terminal.close)
        return terminal

    def quits(self, terminal, end=b"q", code=0):
        """Ends the program. end: a key or a signal."""
        if isinstance(end, bytes):
            terminal.key(end)
        else:
            terminal.process.send_signal(end)
        self.assertEqual(terminal.wait(), code)
        self.assertIn(LEAVE, terminal.text)
        self.assertTrue(terminal.as_before())

    def test_it_follows_the_server(self):
        server = self.serve()
        terminal = self.start(server, "--metrics", self.metrics)
        terminal.wait_for(ENTER)
        terminal.wait_for(b"tessera-server ")
        self.assertFalse(terminal.as_before())
        terminal.key(b"x\x1b[A\r\n")  # None of these is one of its keys.
        self.client.put("new_one", ONES)
        terminal.wait_for(b"new_one")
        terminal.wait_for(b"Upload ")
        self.client.call("DeleteBuffer", name="new_one")
        self.client.attempt("GetBuffer", name="none")
        terminal.wait_for(b"BUFFER_NOT_FOUND")
        self.quits(terminal)

    def test_whatever_ends_it(self):
        server = self.serve()
        for end in (b"q", b"Q", b"\x03", signal.SIGINT, signal.SIGTERM, signal.SIGHUP,
                    signal.SIGQUIT):
            with self.subTest(end):
                terminal = self.start(server)
                terminal.wait_for(b"q: quit")
                self.quits(terminal, end)
                self.assertIn(b"\x1b[?25h", terminal.text)

    def test_a_key_counts_however_late_a_picture_is(self):
        server = self.serve()
        for interval, stopped in (("1ms", False), ("200ms", True)):
            with self.subTest(interval):
                terminal = self.start(server, interval=interval, timeout="300ms")
                terminal.wait_for(b"q: quit")
                if stopped:
                    server.signal(signal.SIGSTOP)
                    self.addCleanup(server.signal, signal.SIGCONT)
                    terminal.wait_for(b"no answer within")
                self.quits(terminal)

    def test_it_fits_the_terminal(self):
        server = self.serve()
        for i in range(50):
            self.client.put(f"a_long_name_{i:060}", ONES)
        terminal = self.start(server, rows=24, columns=100)
        terminal.wait_for(b"q: quit")
        for rows, columns in ((30, 60), (5, 20), (2, 5), (60, 200)):
            terminal.resize(rows, columns)

            def frame():
                terminal.wait_for(b"\x1b[H")
                return terminal.wait_for(b"\x1b[H").decode()

            def fits():
                text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame())
                lines = text.split("\r\n")
                return len(lines) == rows and max(map(len, lines)) <= columns and text

            text = eventually(fits, pause=0)
            self.assertTrue(text, (rows, columns))
            if columns == 200:
                self.assertGreater(text.count("a_long_name"), 20)
        self.quits(terminal)

    def test_a_window_that_changes_is_drawn_at_once(self):
        terminal = self.start(self.serve(), interval="1h")
        terminal.wait_for(b"q: quit")
        terminal.resize(20, 60)
        terminal.wait_for(b"q: quit")
        self.quits(terminal)

    def test_it_stops_and_goes_on(self):
        terminal = self.start(self.serve())
        terminal.wait_for(b"q: quit")
        terminal.key(b"\x1a")
        terminal.wait_for(LEAVE)
        self.assertTrue(eventually(terminal.as_before))

        def stopped():
            text = pathlib.Path(f"/proc/{terminal.process.pid}/stat").read_text()
            return text.rsplit(")", 1)[1].split()[0] == "T"

        self.assertTrue(eventually(stopped))
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for(ENTER)
        terminal.wait_for(b"q: quit")
        self.quits(terminal)

    def test_a_server_that_goes_and_comes_back(self):
        server = self.serve(listen=lasting_address())
        terminal = self.start(server, timeout="1s")
        terminal.wait_for(b"q: quit")
        server.kill()
        terminal.wait_for(b"127.0.0.1")  # The address in the error.
        self.serve(listen=server.address)
        terminal.wait_for(b"q: quit")
        self.quits(terminal)

    def test_a_second_interrupt_does_not_wait_for_a_call(self):
        asked, release = threading.Event(), threading.Event()

        def silent(_method, _request):
            asked.set()
            release.wait(60)

        with o.answering(silent) as address:
            terminal = Terminal(o.Program.cli, "-s", address, "--timeout", "inf", "top")
            self.addCleanup(terminal.close)
            self.assertTrue(asked.wait(60))
            terminal.process.send_signal(signal.SIGINT)
            self.assertTrue(eventually(lambda: o.asleep(terminal.process.pid)))
            self.assertIsNone(terminal.process.poll())
            self.quits(terminal, signal.SIGINT, 130)
            release.set()

    def test_without_a_terminal_to_draw_on(self):
        server = self.serve()
        terminal = self.start(server, TERM="dumb")
        self.assertEqual(terminal.wait(), 0)
        self.assertIn(b"DEVICE", terminal.text)
        self.assertNotIn(b"\x1b", terminal.text)
        terminal = self.start(server, "--once")
        self.assertEqual(terminal.wait(), 0)
        self.assertNotIn(b"\x1b", terminal.text)


if __name__ == "__main__":
    o.main()

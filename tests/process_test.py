#!/usr/bin/env python3
"""Tests the server as a process: signals, limits on threads and memory, its environment, and what
its log says at the start."""

import json
import os
import pathlib
import re
import signal
import threading
import unittest

import numpy as np

import outsider as o
from callers import Caller, line_of, replace

LONG_S = 60
ONES = np.ones(3, np.float32)
BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


class Case(o.FreshCase):
    def assert_logs(self, server, text, count=1):
        said = lambda: server.log().count(text) >= count
        self.assertTrue(o.eventually(said), f"{text!r} is not in\n{server.log()}")


class SignalTest(Case):
    def test_signals_that_ask_for_nothing_end_nothing(self):
        server = self.serve()
        client = server.client()
        client.put("x", ONES)
        for name in ("HUP", "PIPE", "USR2", "ALRM", "VTALRM", "IO", "PWR", "XFSZ", "USR1"):
            with self.subTest(name):
                server.signal(getattr(signal, "SIG" + name))
                self.assertEqual(client.names(), ["x"])
        self.assert_logs(server, "there are no files for TLS, tokens or a ring to read again")
        self.assertEqual(server.stop(), 0)

    def test_hup_reads_files_again_and_says_what_came_of_it(self):
        tokens, ring = self.folder / "callers", self.folder / "ring"
        replace(tokens, line_of("first") + "\n")
        replace(ring, "here 127.0.0.1:1\n")
        server = self.serve("--tokens", tokens, "--ring", ring, "--ring-name", "here")
        before = (tokens.stat(), ring.stat())
        server.signal(signal.SIGHUP)
        for file in ("tokens", "ring"):
            self.assert_logs(server, f"--{file}: the file has been read again and is in effect")
        self.assertEqual(before, (tokens.stat(), ring.stat()))
        Caller(server, "first").put("x", ONES)
        # An invalid file is not used, and the log says so each time.
        replace(tokens, "nobody\n")
        replace(ring, "there 127.0.0.1:1\n")
        for count in (1, 2):
            for said in (f"cannot use {tokens} as --tokens: line 1",
                         f"cannot use {ring} as --ring"):
                self.assert_logs(server, said, count)
            server.signal(signal.SIGHUP)
        self.assertEqual(Caller(server, "first").names(), ["x"])
        # Stopping right after a reload works.
        server.signal(signal.SIGHUP)
        self.assertEqual(server.stop(), 0)

    def test_hup_while_it_starts(self):
        server = self.serve(prefix=("sh", "-c", 'trap "" HUP; "$@" & kill -HUP $!; wait', "-"))
        self.assertEqual(server.client().names(), [])
        os.kill(int(pathlib.Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()), 15)
        self.assertEqual(server.wait(LONG_S), 0)


class StopTest(Case):
    def test_it_ends_well_and_removes_its_socket(self):
        path = self.folder / "socket"
        for number in (signal.SIGTERM, signal.SIGINT):
            server = self.serve(listen=f"unix:{path}")
            server.client().dot_of_ones()
            server.signal(number)
            self.assertEqual(server.wait(LONG_S), 0)
            self.assertFalse(path.exists())

    def test_a_second_signal_ends_it_at_once(self):
        path = self.folder / "socket"
        for second in (signal.SIGTERM, signal.SIGINT):
            server = self.serve("--drain-delay", "1h", listen=f"unix:{path}")
            server.signal()
            self.assert_logs(server, "draining")
            server.signal(second)
            self.assertEqual(server.wait(LONG_S), 128 + second)
            self.assertFalse(path.exists())

    def test_calls_that_are_cut_off_show_in_its_exit_code(self):
        server = self.serve("--drain-timeout", "0s")
        client = server.client()
        hold = threading.Event()
        self.addCleanup(hold.set)
        first = dict(name="x", spec=o.spec_of(ONES), data=ONES.tobytes()[:4])
        upload = client.begin_upload(hold, first)
        self.assertTrue(o.eventually(lambda: client.names() == ["x"]))
        server.signal()
        self.assertEqual(server.wait(LONG_S), 75)
        self.assertIn("the drain timeout", server.log())
        self.assertEqual(upload.exception().code().name, "UNAVAILABLE")


class LimitTest(Case):
    @unittest.skipIf(o.Program.sanitized(), "a sanitizer takes all addresses")
    def test_too_few_threads_are_refused_in_words(self):
        """The address space is too small for their stacks."""
        for mib in (500, 700, 850):
            command = ["prlimit", f"--as={mib << 20}", o.Program.path, "--device", "cpu"]
            ended = o.run(*command, "--no-warm-up", "--listen", "127.0.0.1:0", "--memory-limit",
                          "64Mi")
            self.assertEqual(ended.returncode, 1, ended.stderr)
            needs = r"the server needs \d+ more threads, but only \d+ can be created"
            self.assertRegex(ended.stderr, needs)

    @unittest.skipIf(os.geteuid(), "needs root to become a user that the limit applies to")
    def test_a_limit_of_processes(self):
        user = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
        for limit in range(1, 45, 6):
            with self.subTest(limit):
                command = [*user, "prlimit", f"--nproc={limit}", o.Program.path, "--device", "cpu"]
                ended = o.run(*command, "--listen", "127.0.0.1:0")
                self.assertEqual(ended.returncode, 1, ended.stderr)
                self.assertRegex(ended.stderr, "more threads|a thread cannot be created")

    def test_too_few_descriptors_are_refused_in_words(self):
        for limit in range(8, 24, 2):
            with self.subTest(limit):
                ended = o.run("prlimit", f"--nofile={limit}", o.Program.path, "--device", "cpu",
                              "--no-warm-up", "--listen", "127.0.0.1:0", "--metrics-listen",
                              "127.0.0.1:0", "--listen", f"unix:{self.folder}/socket")
                self.assertEqual(ended.returncode, 1, ended.stderr)
                needs = r"the server needs \d+ more descriptors, but only \d+ can be opened"
                self.assertRegex(ended.stderr, needs)

    def test_operations_make_no_threads(self):
        """The threads that share the loops of operations exist before the server listens."""
        server = self.serve("--workers", 8, "--no-warm-up")
        clients = [server.client() for _ in range(8)]
        clients[0].put("m", np.ones((512, 512), np.float32))
        x = o.resident("m")

        def rounds(sums):
            def call(number):
                for _ in range(sums):
                    clients[number].call("Reduce", op=o.compute.REDUCE_OP_SUM, x=x)
                    clients[number].call("Matmul", a=x, b=x)

            return call

        for client in clients:  # gRPC makes its threads for the connections
            client.call("GetServerInfo")
        before = server.threads()
        o.in_threads(8, rounds(4))
        # Without the teams, each worker would make one when it runs its first loop.
        self.assertLess(server.threads() - before, 3)

    def test_memory_for_messages_is_none_for_buffers(self):
        server = self.serve("--host-memory", "1Gi", "--memory-limit", "100%")
        device = server.client().device()
        self.assertLess(device.buffer_limit_bytes, device.memory_total_bytes - (1 << 30))
        said = o.refused("--listen", "127.0.0.1:0", "--host-memory", "4096Gi")
        self.assertIn("no memory is left for buffers on device cpu", said)


class StartTest(Case):
    def test_unknown_variables_are_warned_of(self):
        server = self.serve(
            TESSERA_MEMRY_LIMIT="60Gi", TESSERA_TOKEN="secret", TESSERA_CLIENT_TLS_CA="ca.pem",
            TESSERA_QUEUE="7", TESSERA_PORT="tcp://10.0.0.1:50051",
            TESSERA_SERVICE_PORT_GRPC="50051")
        found = re.findall(r"the variable (\w+) has no effect", server.log())
        self.assertEqual(found, ["TESSERA_MEMRY_LIMIT"])

    def test_the_log_begins_with_what_it_serves_by(self):
        tokens = self.folder / "callers"
        replace(tokens, line_of("first") + "\n")
        flags = ("--tokens", tokens, "--import-from", "10.0.0.*:50051", "--insecure")
        line = json.loads(self.serve(*flags, "--log-format", "json").log().splitlines()[0])
        version = self.serve().client().info().version
        self.assertIn(f"tessera-server {version}: TLS off, tokens on, imports from 10.0.0.*:50051",
                      line["message"])

    def test_addresses_in_use_are_refused(self):
        path = self.folder / "socket"
        first = self.serve(listen=f"unix:{path}")
        taken = (f"unix:{path}", self.serve().address)
        for address in taken:
            self.assertIn(f"cannot listen on {address}", o.refused("--listen", address))
        self.assertTrue(path.is_socket())
        first.kill()
        self.assertTrue(path.is_socket())
        self.assertEqual(self.serve(listen=f"unix:{path}").stop(), 0)

    def test_devices_that_cannot_be_are_refused(self):
        flags = ("--listen", "127.0.0.1:0", "--device")
        self.assertIn("named twice", o.refused(*flags, "cpu"))
        said = o.refused(*flags, 'q"uote', "--log-format", "json")
        self.assertIn('"level":"error"', said)
        self.assertIn('q\\"uote', said)

    def test_files_may_begin_with_a_byte_order_mark(self):
        tokens, ring, config = (self.folder / name for name in ("callers", "ring", "config"))
        replace(tokens, BYTE_ORDER_MARK + line_of("first") + "\n")
        replace(ring, BYTE_ORDER_MARK + "here 127.0.0.1:1\r\n")
        replace(config, f'{BYTE_ORDER_MARK}tokens = "{tokens}"\nring-name = "here"\n')
        server = self.serve("--config", config, "--ring", ring)
        self.assertEqual(Caller(server, "first").names(), [])
        self.assertEqual(Caller(server).reason("ListBuffers"), "BAD_TOKEN")

    def test_blanks_around_values_and_empty_lists(self):
        tokens, config, path = (self.folder / name for name in ("callers", "config", "socket"))
        replace(tokens, line_of("first") + "\n")
        replace(config, "import-from = []\n")
        server = self.serve(command=(o.Program.path, "--no-warm-up"), TESSERA_CONFIG=f"{config}\n",
                            TESSERA_LISTEN=f" 127.0.0.1:0, unix:{path}\n", TESSERA_DEVICE="cpu\n",
                            TESSERA_MEMORY_LIMIT="64Mi \n", TESSERA_INSECURE="true\n",
                            TESSERA_QUEUE="7 ", TESSERA_TOKENS=f"{tokens}\n")
        self.assertIn("imports from nowhere", server.log())
        self.assertTrue(path.is_socket())
        self.assertEqual(Caller(server, "first").names(), [])

    def test_a_percent_sign_of_an_address(self):
        path = self.folder / "a b"
        server = self.serve("--listen", f"unix:{self.folder}/a%20b")
        self.assertTrue(path.is_socket())
        client = o.Client(f"unix:{self.folder}/a%20b")
        self.addCleanup(client.close)
        self.assertEqual(client.names(), [])
        self.assertEqual(server.stop(), 0)
        self.assertFalse(path.exists())


if __name__ == "__main__":
    o.main()

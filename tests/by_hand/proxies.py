#!/usr/bin/python3
"""The configurations of deploy/proxy in front of two servers, with the real nginx and HAProxy: TLS,
certificates of clients, affinity, large transfers, a server that stops. Needs the packages nginx and
haproxy; CI does without it.

usage: proxies.py --server build/bin/tessera-server --cli build/bin/tessera [unittest arguments]
"""

import argparse
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import grpc

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import outsider as o  # noqa: E402
from tls_test import Authority  # noqa: E402

PROXY = TESTS.parent / "deploy" / "proxy"
TIMEOUT_S = 60
CLI = None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ProxyCase:
    """A proxy in front of two servers; name, command and configuration are the class's."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.authority = Authority(self.folder, "ca")
        cert, key = self.authority.issue("server")
        self.tls = self.folder / "tls"
        self.tls.mkdir()
        (self.tls / "server.crt").write_bytes(cert.read_bytes())
        (self.tls / "server.key").write_bytes(key.read_bytes())
        (self.tls / "server.pem").write_bytes(cert.read_bytes() + key.read_bytes())
        (self.tls / "ca.crt").write_bytes(self.authority.cert.read_bytes())
        self.tls.chmod(0o755)
        self.folder.chmod(0o755)
        for path in self.tls.iterdir():
            path.chmod(0o644)
        self.servers = [o.Server(self.folder, "--drain-delay", "5s") for _ in range(2)]
        for server in self.servers:
            self.addCleanup(server.process.wait)
            self.addCleanup(server.process.kill)
        self.port = free_port()
        config = self.folder / "config"
        config.write_text(self.configuration())
        self.proxy = subprocess.Popen([*self.command, str(config)], stderr=subprocess.PIPE)
        self.addCleanup(self.proxy.stderr.close)
        self.addCleanup(self.proxy.wait)
        self.addCleanup(self.proxy.terminate)
        self.client_cert = self.authority.issue("alice")
        self.wait_until(lambda: self.cli("health").returncode == 0)

    def wait_until(self, condition):
        give_up = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.proxy.poll() is not None:
                self.fail(self.proxy.stderr.read().decode())
            self.assertLess(time.monotonic(), give_up)
            time.sleep(0.1)

    def cli(self, *words, cert=True, timeout=TIMEOUT_S):
        flags = ["--server", f"127.0.0.1:{self.port}", "--tls-ca", self.authority.cert]
        if cert:
            flags += ["--tls-cert", self.client_cert[0], "--tls-key", self.client_cert[1]]
        return subprocess.run([CLI, *map(str, flags), *words], capture_output=True, text=True,
                              timeout=timeout)  # fmt: skip

    def buffers_of(self, server):
        run = subprocess.run([CLI, "--server", server.address, "ls"], capture_output=True, text=True)
        return {line.split()[0] for line in run.stdout.splitlines()[1:]}

    def test_calls_and_transfers(self):
        # 128 MiB in four streams, with checksums, there and back.
        put = self.cli("put", "--name", "x", "--random", "normal", "--shape", "33554432",
                       "--dtype", "f32", "--streams", "4")  # fmt: skip
        self.assertEqual(put.returncode, 0, put.stderr)
        got = self.cli("get", "x", "-o", str(self.folder / "x.npy"))
        self.assertEqual(got.returncode, 0, got.stderr)
        self.assertGreater((self.folder / "x.npy").stat().st_size, 128 << 20)
        for number in range(20):  # always the same server: the other one does not have it
            self.assertEqual(self.cli("reduce", "sum", "x").returncode, 0, number)
        holders = [server for server in self.servers if "x" in self.buffers_of(server)]
        self.assertEqual(len(holders), 1)
        # Errors arrive as the server wrote them.
        missing = self.cli("reduce", "sum", "nothing")
        self.assertIn("BUFFER_NOT_FOUND", missing.stderr)

    def test_certificates(self):
        self.assertNotEqual(self.cli("health", "--timeout", "2s", cert=False).returncode, 0)
        stranger = Authority(self.folder, "stranger")
        self.client_cert = stranger.issue("alice")
        self.assertNotEqual(self.cli("health", "--timeout", "2s").returncode, 0)

    def dot(self, stub, request):
        """A Dot; 1 if it had to be repeated, which a proxy that watches health spares its clients."""
        try:
            value, again = stub.Dot(request, timeout=TIMEOUT_S).value, 0
        except grpc.RpcError as error:
            self.assertFalse(self.watches_health)
            self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
            time.sleep(0.1)
            value, again = stub.Dot(request, timeout=TIMEOUT_S).value, 1
        self.assertEqual(value.real, 8)
        return again

    def test_a_server_that_stops(self):
        """No call fails while one of two servers is stopped; with both gone it is UNAVAILABLE."""
        self.cli("put", "--name", "x", "--random", "ones", "--shape", "8")
        first = next(s for s in self.servers if "x" in self.buffers_of(s))
        second = next(s for s in self.servers if s is not first)
        for server in self.servers:
            subprocess.run([CLI, "--server", server.address, "put", "--name", "x", "--random", "ones",
                            "--shape", "8", "--replace"], check=True, capture_output=True)  # fmt: skip
        credentials = grpc.ssl_channel_credentials(
            self.authority.cert.read_bytes(), self.client_cert[1].read_bytes(),
            self.client_cert[0].read_bytes())  # fmt: skip
        calls = repeated = 0
        with grpc.secure_channel(f"127.0.0.1:{self.port}", credentials) as channel:
            stub = o.compute_grpc.ComputeServiceStub(channel)
            request = o.compute.DotRequest(
                a=o.compute.Operand(buffer="x"), b=o.compute.Operand(buffer="x"))
            first.process.send_signal(signal.SIGTERM)
            while first.process.poll() is None:
                repeated += self.dot(stub, request)
                calls += 1
            for _ in range(100):
                repeated += self.dot(stub, request)
            self.assertEqual(first.process.returncode, 0)
            second.process.kill()
            second.process.wait()
            with self.assertRaises(grpc.RpcError) as error:
                stub.Dot(request, timeout=TIMEOUT_S)
            self.assertEqual(error.exception.code(), grpc.StatusCode.UNAVAILABLE)
        print(f"{type(self).__name__}: {calls} calls while it stopped, {repeated} of them repeated", file=sys.stderr)


class NginxTest(ProxyCase, unittest.TestCase):
    command = ["nginx", "-g", "daemon off;", "-c"]
    watches_health = False  # nginx learns from calls that fail

    def configuration(self):
        text = (PROXY / "nginx.conf").read_text()
        one = re.search(r"server tessera:50051 (.*);", text)
        both = "\n".join(f"server {s.address} {one[1]};" for s in self.servers)
        text = text.replace(one[0], both).replace("50052", f"127.0.0.1:{self.port}")
        return text.replace("/tmp/", f"{self.folder}/").replace("/etc/nginx/tls", str(self.tls))


class HaproxyTest(ProxyCase, unittest.TestCase):
    command = ["haproxy", "-db", "-f"]
    watches_health = True

    def configuration(self):
        text = (PROXY / "haproxy.cfg").read_text()
        for i, server in enumerate(self.servers):
            text = text.replace(f"tessera-{i}.tessera:50051", server.address)
        text = text.replace(":50053", f"127.0.0.1:{self.port}")
        return text.replace("/etc/haproxy/tls", str(self.tls))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli", required=True)
    programs, rest = parser.parse_known_args()
    o.Program.path, CLI = programs.server, programs.cli
    with tempfile.TemporaryDirectory() as stubs:
        o.make_stubs(stubs)
        unittest.main(argv=[sys.argv[0], *rest])

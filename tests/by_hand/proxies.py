#!/usr/bin/python3
"""The configurations of deploy/proxy in front of two servers, with the real nginx and HAProxy: TLS,
certificates of clients, affinity, large transfers, a server that stops; and in front of three servers
that share names, one of which is killed. Needs the packages nginx and haproxy; CI does without it.

usage: proxies.py --server build/bin/tessera-server --cli build/bin/tessera [unittest arguments]
"""

import argparse
import importlib
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
import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import outsider as o  # noqa: E402
import python_outsider  # noqa: E402, F401  (puts the package on the path)
from authority import Authority  # noqa: E402

PROXY = TESTS.parent / "deploy" / "proxy"
TIMEOUT_S = 60
CLI = None
ts = None  # the package in client/python


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Proxied:
    """A proxy in front of servers; name, command and configuration are the class's."""

    count = 2
    flags = ("--drain-delay", "5s")

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
        self.servers = [o.Server(self.folder, *self.flags) for _ in range(self.count)]
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


class ProxyCase(Proxied):
    """Clients by their address."""

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


class RouteCase(Proxied):
    """Buffers by the routes of their names."""

    count = 3

    def connect(self, route):
        """A client of the package in client/python whose calls have the route of a name."""
        cert, key = self.client_cert
        return ts.connect(
            f"127.0.0.1:{self.port}", tls_ca=str(self.authority.cert), tls_cert=str(cert),
            tls_key=str(key), route=route,
        )  # fmt: skip

    def test_names_have_homes(self):
        routes = [f"run{i}/part" for i in range(24)]
        clients = {route: self.connect(f"{route}/any") for route in routes}
        for client in clients.values():
            self.addCleanup(client.close)
        for i, (route, client) in enumerate(clients.items()):
            client.put(np.full(4, i, np.float32), name=f"{route}/a")
            client.put(np.full(4, i, np.float32), name=f"{route}/b")
        holders = {
            route: [s for s in self.servers if f"{route}/a" in self.buffers_of(s)]
            for route in routes
        }
        for route in routes:
            self.assertEqual(len(holders[route]), 1, route)
            self.assertIn(f"{route}/b", self.buffers_of(holders[route][0]))
        self.assertEqual({id(found[0]) for found in holders.values()}, set(map(id, self.servers)))
        # One is killed: its names are gone, and made anew on the others; all others are where they were.
        victim = self.servers[1]
        victim.process.kill()
        victim.process.wait()
        moved = 0
        for i, (route, client) in enumerate(clients.items()):
            if holders[route][0] is not victim:
                found = client[f"{route}/a"] @ client[f"{route}/b"]
                self.assertEqual(found.item(), 4.0 * i * i)
                continue
            moved += 1
            self.wait_until(lambda: self.missing(client, route))  # noqa: B023
            client.put(np.full(4, i, np.float32), name=f"{route}/a")
            self.assertEqual(client[f"{route}/a"].sum().item(), 4.0 * i)
        left = [s for s in self.servers if s is not victim]
        taken = [sum(f"{r}/a" in self.buffers_of(s) for r in routes
                     if holders[r][0] is victim) for s in left]  # fmt: skip
        self.assertEqual(sum(taken), moved)
        print(f"{type(self).__name__}: {moved} routes of the killed server, {taken} on the others",
              file=sys.stderr)  # fmt: skip

    def missing(self, client, route):
        try:
            client[f"{route}/a"]
        except ts.BufferNotFound:
            return True
        except ts.Error:
            return False
        self.fail(f"{route} is on another server than that which was killed")


class Nginx:
    command = ["nginx", "-g", "daemon off;", "-c"]
    watches_health = False  # nginx learns from calls that fail

    def configuration(self):
        text = (PROXY / "nginx.conf").read_text()
        one = re.search(r"server tessera:50051 (.*);", text)
        all_of_them = "\n".join(f"server {s.address} {one[1]};" for s in self.servers)
        text = text.replace(one[0], all_of_them).replace("50052", f"127.0.0.1:{self.port}")
        return text.replace("/tmp/", f"{self.folder}/").replace("/etc/nginx/tls", str(self.tls))


class Haproxy:
    command = ["haproxy", "-db", "-f"]
    watches_health = True

    def configuration(self):
        text = (PROXY / "haproxy.cfg").read_text()
        text = re.sub(r"    server tessera-.*\n?", "", text)
        for i, server in enumerate(self.servers):
            text += f"    server tessera-{i} {server.address}\n"
        text = text.replace(":50053", f"127.0.0.1:{self.port}")
        return text.replace("/etc/haproxy/tls", str(self.tls))


class NginxTest(Nginx, ProxyCase, unittest.TestCase):
    pass


class HaproxyTest(Haproxy, ProxyCase, unittest.TestCase):
    pass


class NginxRoutesTest(Nginx, RouteCase, unittest.TestCase):
    pass


class HaproxyRoutesTest(Haproxy, RouteCase, unittest.TestCase):
    pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli", required=True)
    programs, rest = parser.parse_known_args()
    o.Program.path, CLI = programs.server, programs.cli
    with tempfile.TemporaryDirectory() as stubs:
        o.make_stubs(stubs)
        ts = importlib.import_module("tessera")
        unittest.main(argv=[sys.argv[0], *rest])

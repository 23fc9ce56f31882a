#!/usr/bin/python3
"""Runs the configurations of deploy/proxy with the real nginx and HAProxy. With two servers, it
tests TLS, client certificates, affinity, large transfers, a server that stops, and a rolling
restart with TLS to the servers too. With three servers that share names, it kills one of them.
Needs the packages nginx and haproxy. CI does not run it.

usage: proxies.py --server build/bin/tessera-server --cli build/bin/tessera [unittest arguments]"""

import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from functools import partial

import grpc
import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import outsider as o  # noqa: E402
import python_outsider  # noqa: E402, F401  (puts the package on the path)
import rolling  # noqa: E402
from authority import Authority, channel  # noqa: E402

o.make_stubs()  # The package finds them only if they are there first.
import tessera as ts  # noqa: E402

PROXY = TESTS.parent / "deploy" / "proxy"
TIMEOUT_S = 60
CLI = o.Program.cli


class Proxied:
    """A proxy in front of servers. Subclasses define the program, the configuration and other
    differences."""

    count = 2
    servers_have_tls = False
    flags = ("--drain-delay", "5s")

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.authority = Authority(self.folder, "ca")
        self.tls = self.folder / "tls"
        self.tls.mkdir()
        for name in ("server", "proxy"):
            cert, key = self.authority.issue(name)
            (self.tls / f"{name}.crt").write_bytes(cert.read_bytes())
            (self.tls / f"{name}.key").write_bytes(key.read_bytes())
            (self.tls / f"{name}.pem").write_bytes(cert.read_bytes() + key.read_bytes())
        (self.tls / "ca.crt").write_bytes(self.authority.cert.read_bytes())
        self.tls.chmod(0o755)
        self.folder.chmod(0o755)
        for path in self.tls.iterdir():
            path.chmod(0o644)
        self.servers = []
        for _ in range(self.count):
            self.servers.append(self.start_server())
            self.addCleanup(self.servers[-1].kill)
        self.port = rolling.lasting_address().split(":")[1]
        (self.folder / "config").write_text(self.configuration())
        self.start_proxy()
        self.client_cert = self.authority.issue("alice")
        self.wait_until(lambda: self.cli("health").returncode == 0)

    def start_server(self):
        return o.Server(self.folder, *self.flags)

    def start_proxy(self):
        self.proxy = subprocess.Popen([*self.program, str(self.folder / "config")],
                                      stderr=subprocess.PIPE)
        self.addCleanup(self.proxy.stderr.close)
        self.addCleanup(self.proxy.wait)
        self.addCleanup(self.proxy.terminate)

    def wait_until(self, condition):
        give_up = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.proxy.poll() is not None:
                self.fail(self.proxy.stderr.read().decode())
            self.assertLess(time.monotonic(), give_up)
            time.sleep(0.1)

    def command(self, address, pair):
        words = [CLI, "--server", address, "--tls-ca", self.authority.cert]
        return list(map(str, words + (["--tls-cert", pair[0], "--tls-key", pair[1]]
                                      if pair else [])))

    def cli(self, *words, cert=True, timeout=TIMEOUT_S):
        command = self.command(f"127.0.0.1:{self.port}", self.client_cert if cert else None)
        return subprocess.run([*command, *words], capture_output=True, text=True, timeout=timeout)

    def channel(self):
        own = channel(f"127.0.0.1:{self.port}", self.authority, self.client_cert)
        return self.enterContext(own)

    def connect(self, route):
        """Returns a client of the package in client/python whose calls carry the route of a
        name."""
        cert, key = self.client_cert
        return self.enterContext(ts.connect(
            f"127.0.0.1:{self.port}", tls_ca=str(self.authority.cert), tls_cert=str(cert),
            tls_key=str(key), route=route))

    def buffers_of(self, server):
        run = subprocess.run([CLI, "--server", server.address, "ls"], capture_output=True,
                             text=True)
        return {line.split()[0] for line in run.stdout.splitlines()[1:]}


class ProxyCase(Proxied):
    """The proxy distinguishes clients by their addresses."""

    def test_calls_and_transfers(self):
        # Transfers 128 MiB in four streams with checksums, in both directions.
        put = self.cli("put", "--name", "x", "--random", "normal", "--shape", "33554432",
                       "--dtype", "f32", "--streams", "4")
        self.assertEqual(put.returncode, 0, put.stderr)
        got = self.cli("get", "x", "-o", str(self.folder / "x.npy"))
        self.assertEqual(got.returncode, 0, got.stderr)
        self.assertGreater((self.folder / "x.npy").stat().st_size, 128 << 20)
        for number in range(20):  # Always the same server, which has it.
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
        """Calls Dot. Returns 1 if the call had to be retried. With a proxy that watches health, a
        client never has to retry."""
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
        """No call fails while one of two servers is stopped. When both are gone, the error is
        UNAVAILABLE."""
        self.cli("put", "--name", "x", "--random", "ones", "--shape", "8")
        first = next(s for s in self.servers if "x" in self.buffers_of(s))
        second = next(s for s in self.servers if s is not first)
        for server in self.servers:
            subprocess.run([CLI, "--server", server.address, "put", "--name", "x", "--random",
                            "ones", "--shape", "8", "--replace"], check=True, capture_output=True)
        calls = repeated = 0
        with self.channel() as channel:
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
        print(f"{type(self).__name__}: {calls} calls while it stopped, {repeated} of them repeated",
              file=sys.stderr)


class RouteCase(Proxied):
    """The routes of names decide where buffers are."""

    count = 3

    def test_names_have_homes(self):
        routes = [f"run{i}/part" for i in range(24)]
        clients = {route: self.connect(f"{route}/any") for route in routes}
        for i, (route, client) in enumerate(clients.items()):
            client.put(np.full(4, i, np.float32), name=f"{route}/a")
            client.put(np.full(4, i, np.float32), name=f"{route}/b")
        holders = {route: [s for s in self.servers if f"{route}/a" in self.buffers_of(s)]
                   for route in routes}
        for route in routes:
            self.assertEqual(len(holders[route]), 1, route)
            self.assertIn(f"{route}/b", self.buffers_of(holders[route][0]))
        self.assertEqual({id(found[0]) for found in holders.values()}, set(map(id, self.servers)))
        # One server is killed, and its buffers are lost. They are put again, on the other servers.
        # All other buffers stay where they were.
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
                     if holders[r][0] is victim) for s in left]
        self.assertEqual(sum(taken), moved)
        print(f"{type(self).__name__}: {moved} routes of the killed server, {taken} on the others",
              file=sys.stderr)

    def missing(self, client, route):
        try:
            client[f"{route}/a"]
        except ts.BufferNotFound:
            return True
        except ts.Error:
            return False
        self.fail(f"{route} is on another server than that which was killed")


class RollingCase(Proxied):
    """Both sides of the proxy use TLS, and both servers are restarted under load."""

    servers_have_tls = True

    def start_server(self):
        """Starts a server with a certificate for a name in the proxy's configuration. It accepts
        only clients with a certificate of the authority."""
        if not self.servers:
            self.pair = self.authority.issue("tessera", names="DNS:tessera")
        return rolling.Restartable(
            self.folder, self.healthy, *self.flags, "--tls-cert", self.pair[0], "--tls-key",
            self.pair[1], "--tls-client-ca", self.authority.cert)

    def healthy(self, address):
        pair = self.tls / "proxy.crt", self.tls / "proxy.key"
        words = [*self.command(address, pair), "--tls-server-name", "tessera", "--timeout", "5s",
                 "health"]
        return subprocess.run(words, capture_output=True, timeout=TIMEOUT_S).returncode == 0

    def test_no_call_is_lost(self):
        makers = [
            rolling.inline_dots(self.channel, [("tessera-route", f"run{i}")]) for i in range(4)]
        for name in ("held1/x", "held2/x"):
            makers.append(rolling.resident_dots(partial(self.connect, name), name))
        command = self.command(f"127.0.0.1:{self.port}", self.client_cert)
        load = rolling.Load([*makers, *[rolling.commands(command, self.folder)] * 2])
        self.addCleanup(load.end)
        rolling.restart_one_after_the_other(self.servers, load, self.notices_s)
        print(f"{type(self).__name__}: {load}", file=sys.stderr)
        self.assertEqual(load.lost, [])

    def test_servers_of_another_authority(self):
        """The proxy, which now trusts only another authority, sends nothing to the servers."""
        self.proxy.terminate()
        self.proxy.wait()
        stranger = Authority(self.folder, "stranger")
        (self.tls / "ca.crt").write_bytes(stranger.cert.read_bytes())
        self.client_cert = stranger.issue("alice")
        self.start_proxy()
        self.wait_until(lambda: self.no_server in self.cli("--timeout", "5s", "ls").stderr)


class Nginx:
    program = ["nginx", "-g", "daemon off;", "-c"]
    watches_health = False  # nginx learns from failing calls.
    notices_s = 2  # fail_timeout and a margin, minus --drain-delay
    no_server = "no server answers"

    def configuration(self):
        text = (PROXY / "nginx.conf").read_text()
        one = re.search(r"server tessera:50051 (.*);", text)
        all_of_them = "\n".join(f"server {s.address} {one[1]};" for s in self.servers)
        text = text.replace(one[0], all_of_them).replace("50052", f"127.0.0.1:{self.port}")
        if self.servers_have_tls:
            text = text.replace("grpc_pass grpc://tessera;", "").replace("#grpc_", "grpc_")
        return text.replace("/tmp/", f"{self.folder}/").replace("/etc/nginx/tls", str(self.tls))


class Haproxy:
    program = ["haproxy", "-db", "-f"]
    watches_health = True
    notices_s = 0  # inter * rise is less than --drain-delay.
    no_server = "503"

    def configuration(self):
        text = (PROXY / "haproxy.cfg").read_text()
        text = re.sub(r"    server tessera-.*\n?", "", text)
        if self.servers_have_tls:
            text = re.sub(r"    default-server .*\n", "", text).replace("#default-server",
                                                                        "default-server")
        for i, server in enumerate(self.servers):
            text += f"    server tessera-{i} {server.address}\n"
        text = text.replace(":50053", f"127.0.0.1:{self.port}")
        return text.replace("/etc/haproxy/tls", str(self.tls))


# NginxTest, HaproxyRoutesTest...
for proxy in (Nginx, Haproxy):
    for kind, case in (("", ProxyCase), ("Rolling", RollingCase), ("Routes", RouteCase)):
        name = f"{proxy.__name__}{kind}Test"
        globals()[name] = type(name, (proxy, case, unittest.TestCase), {})


if __name__ == "__main__":
    o.main()

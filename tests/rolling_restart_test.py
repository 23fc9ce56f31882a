#!/usr/bin/env python3
"""Tests a rolling restart without a proxy, over TLS. Two servers are stopped and restarted one
after the other, while callers that know both addresses continue to call: plain gRPC clients, the
Python client, and the command line with the C++ client.

usage: rolling_restart_test.py --server build/bin/tessera-server --cli build/bin/tessera
"""

import importlib
import json
import sys
import tempfile
import unittest
from functools import partial

import grpc

import outsider as o
import python_outsider  # noqa: F401  (puts the package on the path)
import rolling
from authority import Authority

CLI = None
# gRPC's longest pause between attempts to connect, plus a margin, minus --drain-delay.
RECONNECT_S = 1
ts = None  # The package in client/python.
# The service config in deploy/README.md. With it, gRPC watches the health of both servers, and
# calls a server that is SERVING.
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "tessera.v1.ComputeService"},
}


class RollingRestartTest(o.FreshCase):
    def setUp(self):
        super().setUp()
        self.authority = Authority(self.folder, "ca")
        cert, key = self.authority.issue("tessera", names="IP:127.0.0.1,DNS:tessera")
        self.mine = self.authority.issue("caller")
        flags = (
            "--drain-delay", "1s", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca",
            self.authority.cert,
        )  # fmt: skip
        self.servers = []
        for _ in range(2):
            server = rolling.Restartable(self.folder, self.healthy, *flags)
            self.addCleanup(server.kill)
            self.servers.append(server)

    def command(self, addresses):
        return [
            CLI, "--server", addresses, "--tls-ca", self.authority.cert, "--tls-cert", self.mine[0],
            "--tls-key", self.mine[1],
        ]  # fmt: skip

    def healthy(self, address):
        return o.run(*self.command(address), "--timeout", "5s", "health").returncode == 0

    def target(self, servers):
        """Returns the target in gRPC's syntax."""
        return "ipv4:" + ",".join(server.address for server in servers)

    def channel(self, servers):
        files = (self.authority.cert, self.mine[1], self.mine[0])
        channel = grpc.secure_channel(
            self.target(servers),
            grpc.ssl_channel_credentials(*(path.read_bytes() for path in files)),
            [
                ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
                ("grpc.ssl_target_name_override", "tessera"),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self.addCleanup(channel.close)
        return channel

    def client(self, servers):
        t = ts.connect(
            self.target(servers), tls_ca=str(self.authority.cert), tls_cert=str(self.mine[0]),
            tls_key=str(self.mine[1]), tls_server_name="tessera",
        )  # fmt: skip
        self.addCleanup(t.close)
        return t

    def test_no_call_is_lost(self):
        both, turned = self.servers, self.servers[::-1]
        makers = []
        for servers in (both, turned):
            addresses = ",".join(server.address for server in servers)
            makers += [rolling.inline_dots(partial(self.channel, servers))] * 2
            makers.append(rolling.resident_dots(partial(self.client, servers), addresses[-5:]))
            makers.append(rolling.commands(self.command(addresses), self.folder))
        load = rolling.Load(makers)
        self.addCleanup(load.end)
        rolling.restart_one_after_the_other(self.servers, load, RECONNECT_S)
        print(load, file=sys.stderr)
        self.assertEqual(load.lost, [])


if __name__ == "__main__":
    CLI, rest = o.server_and_cli()
    with tempfile.TemporaryDirectory() as stubs:
        o.make_stubs(stubs)
        ts = importlib.import_module("tessera")
        unittest.main(argv=[sys.argv[0], *rest])

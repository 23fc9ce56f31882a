#!/usr/bin/env python3
"""Tests a rolling restart without a proxy, over TLS. Two servers are stopped and restarted one
after the other, while callers that know both addresses continue to call: plain gRPC clients, the
Python client, and the command line with the C++ client."""

import json
import sys
from functools import partial

import outsider as o
import python_outsider  # noqa: F401  (puts the package on the path)
import rolling
from authority import Authority, channel

o.make_stubs()  # The package finds them only if they are there first.
import tessera as ts  # noqa: E402

# gRPC's longest pause between attempts to connect, plus a margin, minus --drain-delay.
RECONNECT_S = 1
# The service config in deploy/README.md. With it, gRPC watches the health of both servers, and
# calls a server that is SERVING.
SERVICE_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}],
                  "healthCheckConfig": {"serviceName": "tessera.v1.ComputeService"}}


class RollingRestartTest(o.FreshCase):
    def setUp(self):
        super().setUp()
        self.authority = Authority(self.folder, "ca")
        cert, key = self.authority.issue("tessera", names="IP:127.0.0.1,DNS:tessera")
        self.mine = self.authority.issue("caller")
        flags = ("--drain-delay", "1s", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca",
                 self.authority.cert)
        self.servers = []
        for _ in range(2):
            server = rolling.Restartable(self.folder, self.healthy, *flags)
            self.addCleanup(server.kill)
            self.servers.append(server)

    def command(self, addresses):
        pair = ("--tls-cert", self.mine[0], "--tls-key", self.mine[1])
        return [o.Program.cli, "--server", addresses, "--tls-ca", self.authority.cert, *pair]

    def healthy(self, address):
        return o.run(*self.command(address), "--timeout", "5s", "health").returncode == 0

    def target(self, servers):
        """Returns the target in gRPC's syntax."""
        return "ipv4:" + ",".join(server.address for server in servers)

    def channel(self, servers):
        options = {
            "grpc.service_config": json.dumps(SERVICE_CONFIG),
            "grpc.ssl_target_name_override": "tessera", "grpc.max_reconnect_backoff_ms": 1000}
        own = channel(self.target(servers), self.authority, self.mine, *options.items())
        return self.enterContext(own)

    def client(self, servers):
        return self.enterContext(ts.connect(
            self.target(servers), tls_ca=str(self.authority.cert), tls_cert=str(self.mine[0]),
            tls_key=str(self.mine[1]), tls_server_name="tessera"))

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
    o.main()

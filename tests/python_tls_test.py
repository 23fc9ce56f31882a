#!/usr/bin/env python3
"""Tests the Python client over TLS, blocking and asyncio: which servers it trusts, and which
certificate it presents."""

import asyncio

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from authority import Authority

SOON = {"connect_timeout": 0.7}  # No connection is made in this time.


class TlsTest(o.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ca, cls.foreign = (Authority(cls.folder, name) for name in ("home", "foreign"))
        cls.mine = dict(zip(("tls_cert", "tls_key"), map(str, cls.ca.issue("client"))))
        cert, key = cls.ca.issue("server")
        flags = ("--tls-cert", cert, "--tls-key", key)
        cls.server = cls.serve_class(*flags)
        cls.strict = cls.serve_class(*flags, "--tls-client-ca", cls.ca.cert)

    def total(self, server, **options):
        with ts.connect(server.address, **options) as t:
            return float((t.put(np.arange(4.0)) * 2).sum())

    def test_trusted_servers(self):
        self.assertEqual(self.total(self.server, tls_ca=str(self.ca.cert)), 12)
        port = self.server.address.split(":")[1]
        array = np.random.default_rng(1).random(1 << 20)
        with ts.connect(f"localhost:{port}", tls_ca=str(self.ca.cert)) as t:
            np.testing.assert_array_equal(t.put(array).numpy(), array)
        for options in ({"tls_ca": str(self.foreign.cert)}, {"tls": True}):
            with self.subTest(options), self.assertRaisesRegex(ts.Unreachable,
                                                               "certificate .*was refused"):
                self.total(self.server, **SOON, **options)
        with self.assertRaisesRegex(ts.Unreachable, "TLS"):
            self.total(self.server, **SOON)
        cert, key = self.ca.issue("elsewhere", names="DNS:gpu.example")
        server = self.serve("--tls-cert", cert, "--tls-key", key)
        with self.assertRaisesRegex(ts.Unreachable, "certificate .*was refused.*not in peer"):
            self.total(server, **SOON, tls_ca=str(self.ca.cert))
        self.assertEqual(
            self.total(server, tls_ca=str(self.ca.cert), tls_server_name="gpu.example"), 12)

    def test_admitted_clients(self):
        trust = {"tls_ca": str(self.ca.cert)}
        self.assertEqual(self.total(self.strict, **trust, **self.mine), 12)
        pair = map(str, self.foreign.issue("stranger"))
        stranger = dict(zip(("tls_cert", "tls_key"), pair))
        for options in ({}, stranger):
            with self.subTest(options), self.assertRaises(ConnectionError):
                self.total(self.strict, **SOON, **trust, **options)
        with self.assertRaisesRegex(ValueError, "must be given together"):
            ts.connect(self.strict.address, tls_cert=self.mine["tls_cert"])
        with self.assertRaises(FileNotFoundError):
            ts.connect(self.strict.address, tls_ca="/none")

    def test_asyncio(self):
        async def work():
            trust = {"tls_ca": str(self.ca.cert)}
            async with await ts.aio.connect(self.strict.address, **trust, **self.mine) as t:
                x = await t.put(np.arange(4.0))
                self.assertEqual(await x.sum().item(), 6)
            with self.assertRaises(ts.Unreachable):
                await ts.aio.connect(self.server.address, **SOON)

        asyncio.run(work())


if __name__ == "__main__":
    python_outsider.main("__main__")

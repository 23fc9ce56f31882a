#!/usr/bin/env python3
"""Tests TLS from outside: certificates made with openssl, grpcio clients, files replaced while a
server runs, and what is refused at the start."""

import contextlib
import os
import pathlib
import re
import signal
import ssl
import sys

import grpc
import numpy as np

import outsider as o
from authority import Authority, channel, openssl
from callers import Bearer, line_of

DEMO = pathlib.Path(__file__).resolve().parent.parent / "client" / "demo" / "demo.py"


def replace(path, content):
    """Replaces a file as a renewal does: another file gets the same name."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    os.replace(fresh, path)


class TlsTest(o.FreshCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ca, cls.foreign = (Authority(cls.folder, name) for name in ("home", "foreign"))
        cls.pair, cls.client_pair = (cls.ca.issue(name) for name in ("server", "client"))

    def setUp(self):
        super().setUp()
        self.cert, self.key = self.folder / "cert.pem", self.folder / "key.pem"
        self.install(self.pair)

    def install(self, pair):
        replace(self.cert, pair[0].read_bytes())
        replace(self.key, pair[1].read_bytes())

    def serve(self, *flags):
        return super().serve("--tls-cert", self.cert, "--tls-key", self.key, *flags)

    def dot(self, server, ca=None, pair=None):
        """Returns the outcome of a call on a separate connection."""
        one = o.inline(np.ones(1, np.float32))
        request = o.compute.DotRequest(a=one, b=one)
        with channel(server.address, ca or self.ca, pair) as own:
            stub = o.compute_grpc.ComputeServiceStub(own)
            return o.outcome_of(lambda: stub.Dot(request, timeout=20)).code

    def becomes(self, outcome, server, **files):
        """Checks the outcome after the files have changed. A handshake does not wait while another
        thread reads them."""
        last = lambda: self.dot(server, **files) == outcome
        self.assertTrue(o.eventually(last), server.log())

    def test_only_tls_to_the_right_ca_is_served(self):
        server = self.serve()
        self.assertEqual(self.dot(server), "OK")
        self.assertEqual(self.dot(server, ca=self.foreign), "UNAVAILABLE")
        plain = server.client()
        self.assertEqual(plain.attempt("GetServerInfo", timeout=20).code, "UNAVAILABLE")

    def test_clients_need_a_certificate_of_the_client_ca(self):
        server = self.serve("--tls-client-ca", self.ca.cert)
        self.assertEqual(self.dot(server, pair=self.client_pair), "OK")
        self.assertEqual(self.dot(server), "UNAVAILABLE")
        self.assertEqual(self.dot(server, pair=self.foreign.issue("client")), "UNAVAILABLE")
        expired = self.ca.issue("expired", days=-1)
        self.assertEqual(self.dot(server, pair=expired), "UNAVAILABLE")

    def test_chains_of_certificates(self):
        """The server's and the client's own certificate come first, followed by others."""
        between, signed = Authority(self.folder, "between"), self.folder / "signed.pem"
        extensions = self.folder / "extensions"
        extensions.write_text("basicConstraints=critical,CA:TRUE\n")
        openssl("x509", "-in", between.cert, "-CA", self.ca.cert, "-CAkey", self.ca.key,
                "-CAcreateserial", "-days", "2", "-clrext", "-extfile", extensions,
                "-out", signed)

        def joined(name, *files):
            path = self.folder / name
            path.write_bytes(b"".join(file.read_bytes() for file in files))
            return path

        own, other = between.issue("own"), between.issue("other")
        cas = joined("cas.pem", self.foreign.cert, self.ca.cert)
        server = self.serve("--tls-client-ca", cas)
        client = (joined("client.pem", other[0], signed, self.ca.cert), other[1])

        def command_line(pair, ca=self.ca.cert, timeout="20s"):
            flags = ("--tls-ca", ca, "--tls-cert", pair[0], "--tls-key", pair[1])
            at = ("--server", server.address, "--timeout", timeout)
            return o.run(o.Program.cli, *at, *flags, "ls").returncode

        for files in ((own[0], signed), (own[0], signed, self.ca.cert)):
            self.install((joined("chain.pem", *files), own[1]))
            for pair in (client, self.client_pair, self.foreign.issue("of_another")):
                self.becomes("OK", server, pair=pair)
                self.assertEqual(command_line(pair, ca=cas), 0)
        # Without the intermediate certificates, no client finds the CA.
        self.assertEqual(self.dot(server, pair=other), "UNAVAILABLE")
        self.assertEqual(command_line(client), 0)
        self.assertNotEqual(command_line(other, timeout="1s"), 0)
        self.install(own)
        self.becomes("UNAVAILABLE", server, pair=client)
        self.install((joined("pair.pem", self.pair[0], self.ca.cert), self.pair[1]))
        self.becomes("OK", server, pair=client)
        # The first certificate of this chain does not match the key.
        mixed = joined("mixed.pem", signed, own[0])
        said = o.refused("--listen", "127.0.0.1:0", "--tls-cert", mixed, "--tls-key", own[1])
        self.assertIn(f"it is not the key of {mixed}", said)

    def test_changed_files_are_used_without_a_restart(self):
        server = self.serve()
        self.assertEqual(self.dot(server), "OK")
        self.install(self.foreign.issue("renewed"))
        self.becomes("OK", server, ca=self.foreign)
        self.assertEqual(self.dot(server), "UNAVAILABLE")

    def test_connections_stay_when_files_change(self):
        server = self.serve()
        with channel(server.address, self.ca) as own:
            info = o.compute_grpc.ComputeServiceStub(own).GetServerInfo
            info(o.compute.GetServerInfoRequest(), timeout=20)
            self.install(self.foreign.issue("another"))
            self.becomes("OK", server, ca=self.foreign)
            info(o.compute.GetServerInfoRequest(), timeout=20)

    def test_broken_files_leave_the_certificate_in_use(self):
        server = self.serve()
        other_key = self.ca.issue("other")[1].read_bytes()
        for path, content, said in ((self.cert, b"rubbish", "it contains no PEM certificate"),
                                    (self.key, other_key, "it is not the key of"),
                                    (self.key, b"", "it cannot be read, or is empty")):
            with self.subTest(said):
                replace(path, content)
                for _ in range(3):
                    self.assertEqual(self.dot(server), "OK")
                self.assertTrue(o.eventually(lambda: said in server.log()))
                self.assertEqual(server.log().count(said), 1)
                self.install(self.pair)
                self.assertEqual(self.dot(server), "OK")
        path = self.cert
        path.unlink()
        self.assertEqual(self.dot(server), "OK")

    def test_a_certificate_that_is_not_valid_takes_no_valid_ones_place(self):
        server = self.serve("--metrics-listen", "127.0.0.1:0")

        def metric(name):
            return float(re.search(rf"(?m)^{name}(?:{{file=\"tls\"}})? (\S+)$", server.page())[1])

        left = lambda: metric("tessera_certificate_seconds_left")
        self.assertTrue(86400 < left() <= 2 * 86400, left())
        self.assertEqual(metric("tessera_certificate_life_seconds"), 2 * 86400)
        self.install(self.ca.issue("late", days=-1))
        # The server notices the expiry without a connection.
        self.assertTrue(o.eventually(lambda: "it has been invalid since 20" in server.log()))
        self.assertEqual(self.dot(server), "OK")
        self.assertEqual(metric("tessera_file_unusable"), 1)
        self.assertGreater(left(), 86400)
        server.signal(signal.SIGHUP)
        said = lambda: server.log().count("it has been invalid since 20") == 2
        self.assertTrue(o.eventually(said), server.log())
        self.install(self.pair)
        self.assertTrue(o.eventually(lambda: metric("tessera_file_unusable") == 0))
        self.assertEqual(self.dot(server), "OK")

    def test_a_certificate_that_is_not_valid_is_warned_of(self):
        self.install(self.ca.issue("expired_before", days=-1))
        server = self.serve()
        self.assertIn("clients refuse it", server.log())
        self.assertEqual(self.dot(server), "UNAVAILABLE")
        # Any other certificate replaces the expired one, valid or not.
        self.install(self.ca.issue("expired_too", days=-1))
        self.assertTrue(o.eventually(lambda: "are in effect" in server.log()))
        self.assertTrue(o.eventually(lambda: server.log().count("clients refuse it") == 2))
        self.install(self.pair)
        self.assertTrue(o.eventually(lambda: self.dot(server) == "OK"))

    def test_certificates_that_openssl_refuses_are_not_used(self):
        """A key that is too small, in the server's own certificate or in another one of its chain,
        and in a CA of its clients."""
        small, rsa = ("ec", "-pkeyopt", "ec_paramgen_curve:secp160r1"), ("rsa:1024",)
        weak = Authority(self.folder, "weak", newkey=rsa)
        chain = self.folder / "weak_chain.pem"
        chain.write_bytes(self.pair[0].read_bytes() + weak.cert.read_bytes())
        clients = self.folder / "clients.pem"
        replace(clients, self.ca.cert.read_bytes())
        server = self.serve("--tls-client-ca", clients, "--metrics-listen", "127.0.0.1:0")
        for why, (cert, key), ca in (
                ("ee key too small", self.ca.issue("weak_rsa", newkey=rsa), self.ca.cert),
                ("ee key too small", self.ca.issue("weak_ec", newkey=small), self.ca.cert),
                ("ca key too small", (chain, self.pair[1]), self.ca.cert),
                ("ee key too small", self.pair, weak.cert)):
            with self.subTest(why, cert=cert.name, ca=ca):
                bad = clients if ca is weak.cert else self.cert
                said = f"cannot use {bad} for TLS: OpenSSL refuses a certificate in it ({why})"
                before = server.log().count(said)
                replace(clients, ca.read_bytes())
                self.install((cert, key))
                logged = lambda: server.log().count(said) > before
                self.assertTrue(o.eventually(logged), server.log())
                self.assertIn("\ntessera_file_unusable{file=\"tls\"} 1\n", server.page())
                self.assertEqual(self.dot(server, pair=self.client_pair), "OK")
                flags = ("--tls-cert", self.cert, "--tls-key", self.key, "--tls-client-ca", clients)
                self.assertIn(said, o.refused("--listen", "127.0.0.1:0", *flags))
                replace(clients, self.ca.cert.read_bytes())
                self.install(self.pair)
                used = lambda: "\ntessera_file_unusable{file=\"tls\"} 0\n" in server.page()
                self.assertTrue(o.eventually(used), server.log())

    def test_every_connection_proves_the_certificate_of_its_client(self):
        """A resumed session would not: its client's certificate may have expired since."""
        server = self.serve("--tls-client-ca", self.ca.cert)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            with self.subTest(version.name):
                tls = ssl.create_default_context(cafile=self.ca.cert)
                tls.minimum_version = tls.maximum_version = version
                tls.set_alpn_protocols(["h2"])
                tls.load_cert_chain(*self.client_pair)
                session = None
                for _ in range(3):
                    one = o.RawConnection(server, tls=tls, session=session)
                    self.addCleanup(one.close)
                    self.assertIsNotNone(one.find_frame(o.SETTINGS, 20))
                    self.assertFalse(one.socket.session_reused)
                    session = one.socket.session

    def test_imports(self):
        """Imports use the certificate of the importing server, with its caller's token."""
        tokens = self.folder / "tokens"
        tokens.write_text(line_of("secret") + "\n")
        tokens.chmod(0o600)
        ca = self.folder / "ca.pem"
        replace(ca, self.ca.cert.read_bytes())
        far = self.serve("--tls-client-ca", self.ca.cert, "--tokens", tokens)
        near = self.serve("--import-from", "127.0.0.1:*", "--import-tls-ca", ca)

        def stub(server, *metadata):
            own = self.enterContext(channel(server.address, self.ca, self.client_pair))
            intercepted = grpc.intercept_channel(own, Bearer(*metadata))
            return o.buffer_grpc.BufferServiceStub(intercepted)

        token = ("authorization", "Bearer secret")
        x = np.arange(5, dtype=np.float32)
        message = o.buffers.UploadRequest(name="x", spec=o.spec_of(x), data=x.tobytes())
        stub(far, token).Upload(iter([message]), timeout=20)
        ask = o.buffers.ImportBufferRequest(source=far.address, source_name="x", name="y")

        def outcome(*metadata, timeout=20):
            return o.outcome_of(lambda: stub(near, *metadata).ImportBuffer(ask, timeout=timeout))

        end = outcome()
        self.assertEqual((end.reason, end.metadata.get("reason")), ("SOURCE_REFUSED", "BAD_TOKEN"))
        self.assertTrue(outcome(token).ok)
        get = o.buffers.DownloadRequest(name="y")
        got = b"".join(part.data for part in stub(near).Download(get, timeout=20))
        self.assertEqual(got, x.tobytes())
        # The file is read for each import.
        ask.name = "z"
        ca.unlink()
        end = outcome(token)
        self.assertEqual((end.code, end.reason), ("FAILED_PRECONDITION", "BAD_CERTIFICATE"))
        self.assertEqual(end.metadata["file"], str(ca))
        weak = Authority(self.folder, "weak_source", newkey=("rsa:1024",))
        for content in (b"rubbish", weak.cert.read_bytes()):
            replace(ca, content)
            self.assertEqual(outcome(token, timeout=20).reason, "BAD_CERTIFICATE")
        replace(ca, self.foreign.cert.read_bytes())
        self.assertEqual(outcome(token, timeout=2).code, "DEADLINE_EXCEEDED")

    def test_a_changed_client_ca_is_used_without_a_restart(self):
        clients = self.folder / "clients.pem"
        home, foreign = self.ca.cert.read_bytes(), self.foreign.cert.read_bytes()
        stranger = self.foreign.issue("stranger")
        replace(clients, home)
        server = self.serve("--tls-client-ca", clients)
        self.assertEqual(self.dot(server, pair=self.client_pair), "OK")
        self.assertEqual(self.dot(server, pair=stranger), "UNAVAILABLE")
        replace(clients, b"# both\n" + home + b"\nforeign\n=======\n" + foreign + b"# the end")
        for pair in (self.client_pair, stranger):
            self.assertEqual(self.dot(server, pair=pair), "OK")
        replace(clients, foreign)
        self.assertEqual(self.dot(server, pair=self.client_pair), "UNAVAILABLE")
        self.assertEqual(self.dot(server, pair=stranger), "OK")

    def test_a_bundle_that_is_not_whole_is_not_used(self):
        clients = self.folder / "clients.pem"
        home, foreign = self.ca.cert.read_bytes(), self.foreign.cert.read_bytes()
        lines = foreign.splitlines(keepends=True)
        damaged = foreign[:200] + b"!!!!" + foreign[204:]
        cut = {"in a block": home + foreign[: len(foreign) // 2],
               "at a line": home + b"".join(lines[:3]),
               "in the first line": home + foreign[:9],
               "after dashes": home + foreign[:3],
               "in the last line": home + foreign[:-9],
               "and goes on": home + foreign[: len(foreign) // 2] + b"\n" + foreign,
               "damaged": home + damaged}
        stranger = self.foreign.issue("cut")
        replace(clients, home + foreign)
        server = self.serve("--tls-client-ca", clients)
        self.assertEqual(self.dot(server, pair=stranger), "OK")
        for count, (what, bundle) in enumerate(cut.items(), 1):
            with self.subTest(what):
                replace(clients, bundle)
                self.assertEqual(self.dot(server, pair=stranger), "OK")
                said = f"cannot use {clients} for TLS"
                self.assertTrue(o.eventually(lambda: server.log().count(said) == count))
        # This includes certificates in the server's own chain.
        replace(self.cert, self.pair[0].read_bytes() + foreign[: len(foreign) // 2])
        self.assertEqual(self.dot(server, pair=stranger), "OK")
        self.assertTrue(o.eventually(lambda: f"cannot use {self.cert}" in server.log()))
        start = ("--listen", "127.0.0.1:0", "--tls-cert", self.cert, "--tls-key", self.key)
        self.assertIn("cut off or damaged", o.refused(*start))

    def test_clients_that_ignore_settings_have_no_more_streams(self):
        headers = o.request_headers("/tessera.v1.ComputeService/Dot")
        calls = [o.frame(o.HEADERS, o.END_HEADERS, 2 * i + 1, headers) for i in range(1024)]
        for pair in (None, self.client_pair):
            with self.subTest("with certificates of clients" if pair else "without"):
                client_ca = ("--tls-client-ca", self.ca.cert) if pair else ()
                server = self.serve("--max-streams", 16, *client_ca)
                tls = ssl.create_default_context(cafile=self.ca.cert)
                tls.set_alpn_protocols(["h2"])
                if pair:
                    tls.load_cert_chain(*pair)
                few, many = (o.RawConnection(server, tls=tls) for _ in range(2))
                self.addCleanup(few.close)
                self.addCleanup(many.close)
                few.send(*calls[:16])
                many.send(*calls)
                many.socket.settimeout(60)
                # The server's settings arrive, but no responses. The connection does not end with
                # an orderly TLS shutdown.
                with contextlib.suppress(ssl.SSLEOFError):
                    while many.socket.recv(65536):
                        pass
                said = "because they had more than 288 calls: ipv4:127.0.0.1:"
                self.assertTrue(o.eventually(lambda: said in server.log()), server.log())
                self.assertEqual(self.dot(server, pair=pair), "OK")
                few.send(o.frame(o.PING, 0, 0, b"answered"))
                self.assertIsNotNone(few.find_frame(o.PING, 60), "it has also ended")

    def test_keys_stay_out_of_the_log(self):
        server = self.serve()
        body = self.key.read_text().splitlines()[1]
        replace(self.key, self.ca.issue("log")[1].read_bytes())
        self.dot(server)
        server.stop()
        self.assertNotIn(body, server.log())
        self.assertNotIn("BEGIN", server.log())

    def test_what_is_refused_at_the_start(self):
        missing, other_key = self.folder / "missing", self.ca.issue("start")[1]
        for said, *flags in (
                (f"cannot use {missing} for TLS: there is no such file", "--tls-cert", missing,
                 "--tls-key", self.key),
                ("it is not the key of", "--tls-cert", self.cert, "--tls-key", other_key),
                ("--tls-cert and --tls-key go together", "--tls-cert", self.cert),
                ("--tls-cert and --tls-key go together", "--tls-client-ca", self.cert),
                ("other hosts could connect to 0.0.0.0:0 without TLS", "--listen", "0.0.0.0:0"),
                ("--insecure", "--listen", "0.0.0.0:0")):
            self.assertIn(said, o.refused("--listen", "127.0.0.1:0", *flags))

    def test_the_command_line_speaks_tls(self):
        server = self.serve("--tls-client-ca", self.ca.cert)
        cert, key = self.client_pair
        whole = ["--tls-ca", self.ca.cert, "--tls-cert", cert, "--tls-key", key]
        for flags, served in ((whole, True),
                              ([*whole, "--tls-server-name", "localhost"], True),
                              ([*whole, "--tls-server-name", "elsewhere"], False),
                              (whole[:2], False),
                              (["--tls-ca", self.folder / "missing"], False),
                              (whole[2:], False)):
            with self.subTest(flags):
                at = ("--server", server.address, "--timeout", "20s" if served else "1s")
                ended = o.run(o.Program.cli, *at, *flags, "ls")
                self.assertEqual(ended.returncode == 0, served, ended.stderr)
        cert, key = self.ca.issue("weak_client", newkey=("rsa:1024",))
        pair = ("--tls-ca", self.ca.cert, "--tls-cert", cert, "--tls-key", key)
        ended = o.run(o.Program.cli, "--server", server.address, *pair, "ls")
        self.assertIn(f"OpenSSL refuses the certificate in {cert} (ee key too small)", ended.stderr)

    def test_a_client_without_the_right_certificate_is_told_what_may_be_wrong(self):
        server = self.serve("--tls-client-ca", self.ca.cert)
        cert, key = self.ca.issue("expired", days=-1)
        for flags in ((), ("--tls-cert", cert, "--tls-key", key)):
            ended = o.run(o.Program.cli, "--server", server.address, "--tls-ca", self.ca.cert,
                          *flags, "ls")
            self.assertEqual(ended.returncode, 7, ended.stderr)
            self.assertIn("it may require a client certificate that it trusts", ended.stderr)
            self.assertIn("\n  --tls-cert and --tls-key ", ended.stderr)

    def test_a_client_ends_well_while_threads_of_grpc_use_openssl(self):
        server = self.serve()
        # gRPC polls so often that its threads, instead of the caller, perform some of the TLS
        # handshakes. AddressSanitizer reports what such a thread still holds when OpenSSL has freed
        # its state.
        often = o.environment(GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS="1")
        command = [o.Program.cli, "--server", server.address, "--tls-ca", self.ca.cert, "ls"]
        for _ in range(20):
            ended = o.run(*command, env=often)
            self.assertEqual((ended.returncode, ended.stderr), (0, "no buffers\n"))

    def test_the_demo_of_a_server_that_knows_its_callers(self):
        tokens, mine = self.folder / "tokens", self.folder / "mine"
        replace(tokens, f"{line_of('secret')}\n".encode())
        mine.write_text("secret\n")
        server = self.serve("--tls-client-ca", self.ca.cert, "--tokens", tokens)
        cert, key = self.client_pair
        wrong, ca = {"TESSERA_TOKEN": "wrong"}, {"TESSERA_CLIENT_TLS_CA": str(self.ca.cert)}
        pair = ("--tls-cert", cert, "--tls-key", key)
        for flags, environment, said in (((*pair, "--token-file", mine), wrong | ca, "PASSED"),
                                         (("--tls-ca", self.ca.cert, *pair), wrong, "BAD_TOKEN"),
                                         (("--token-file", mine), ca, "UNREACHABLE")):
            with self.subTest(flags=flags, environment=environment):
                command = (sys.executable, DEMO, "--cli", o.Program.cli, "--server", server.address)
                ended = o.run(*command, *flags, timeout=300, env=o.environment(**environment))
                self.assertIn(said, ended.stdout + ended.stderr)
                self.assertEqual(ended.returncode == 0, said == "PASSED")


if __name__ == "__main__":
    o.main()

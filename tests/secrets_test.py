#!/usr/bin/env python3
"""Checks that secrets stay where they belong. Marked tokens and keys go through every method,
command and client at the most verbose level, and then everything that others could read is searched
for them."""

import base64
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import textwrap

import numpy as np

import outsider as o
from authority import Authority
from callers import PIECE, Caller, every_method, line_of, replace
from python_outsider import PACKAGE


def forms(secret):
    """Returns the forms in which a secret, or only its beginning, may have been written."""
    raw = secret.encode()
    digest = hashlib.sha256(raw)
    found = {secret, secret[:16], raw.hex(), digest.hexdigest(), digest.hexdigest()[:16]}
    found.add(base64.b64encode(digest.digest()).decode()[:24])
    # The secret may be at any position of a longer string.
    for before in range(3):
        encoded = base64.b64encode(b"x" * before + raw).decode()
        found.add(encoded[4:20])
    return found


class SecretsTest(o.FreshCase):
    def setUp(self):
        super().setUp()
        self.said = {}  # Everything that was read, by its source.

    def say(self, where, text):
        self.said.setdefault(where, []).append(text)

    def serve(self, token, *flags):
        replace(self.folder / "tokens", line_of(token, "admin", "one") + "\n")
        return super().serve(
            "--tokens", self.folder / "tokens", "--log-level", "trace", "--slow-call", "1us",
            "--metrics-listen", "127.0.0.1:0", "--spans", self.folder / "spans",
            "--shared-memory", self.folder / "shared", *flags, GRPC_VERBOSITY="debug")

    def command(self, *arguments, token=None, token_file=None, where="command line"):
        """Runs the command line, and inspects it with ps, as other users can."""
        given = {"TESSERA_TOKEN": token, "TESSERA_TOKEN_FILE": token_file}
        given = {name: str(value) for name, value in given.items() if value is not None}
        process = subprocess.Popen(
            [o.Program.cli, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
            stderr=subprocess.STDOUT, env=o.environment(GRPC_VERBOSITY="debug", **given))
        self.say_what_ps_shows(process)
        out, _ = process.communicate(timeout=120)
        self.say(where, out)
        return process.returncode, out

    def say_what_ps_shows(self, process):
        self.say("ps", o.run("ps", "-ww", "-o", "args=", "-p", process.pid).stdout)

    def assert_kept(self, *kept):
        for where, texts in self.said.items():
            text = "\n".join(texts)
            self.assertTrue(text, f"nothing was read of {where}")
            for secret in kept:
                for form in forms(secret):
                    # The failure does not show the text, because that would print the secret.
                    self.assertFalse(form in text, f"{where} holds a form of {secret[:4]}...")

    def test_tokens_stay_out_of_all_that_can_be_read(self):
        right, wrong = (f"{mark}-{secrets.token_urlsafe(32)}" for mark in ("right", "wrong"))
        for flags in ((), ("--log-format", "json")):
            server = self.serve(right, *flags)
            self.say_what_ps_shows(server)
            for token in (right, wrong):
                self.call_everything(server, token)
                self.run_everything(server, token)
                self.run_python(server, token)
            # A token in place of its hash, and a malformed token.
            replace(self.folder / "tokens", f"{right} write one\n")
            self.assertTrue(o.eventually(lambda: "cannot use" in server.log()))
            for path in ("", "metrics", "healthz"):
                self.say("http", server.page(path))
            self.assertEqual(server.stop(), 0)
            self.say("log", server.log())
            self.say("spans", (self.folder / "spans").read_text())
        self.assertIn("BAD_TOKEN", "\n".join(self.said["log"]))
        self.assertIn("Dot", "\n".join(self.said["spans"]))
        for word in ("computed", "BufferNotFound", "BadToken", "in the clear"):
            self.assertIn(word, "\n".join(self.said["Python"]))
        self.assert_kept(right, wrong)

    def call_everything(self, server, token):
        trace = ("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
        caller = Caller(server, token, metadata=[trace])
        caller.try_upload([dict(name="x", spec=o.spec_of(PIECE, replace=True),
                                data=PIECE.tobytes())])
        for rpc, end in every_method(caller).items():
            answer = "" if end.answer is None else str(end.answer)
            self.say("answers", f"{rpc} {end.code} {end.reason} {end.metadata} {end.text} {answer}")
        # Returns all response metadata, as bytes.
        request = o.compute.DotRequest(a=o.resident("x"), b=o.resident("nothing"))
        call = caller.c.Dot.future(request, timeout=20)
        call.exception()
        for key, value in (*call.initial_metadata(), *call.trailing_metadata()):
            self.say("metadata", f"{key} {value}")

    def run_everything(self, server, token):
        at = ("--server", server.address, "--timeout", "20s")
        np.save(self.folder / "x.npy", PIECE)
        path = self.folder / "token"
        path.write_text(token + "\n")
        program = self.folder / "program.json"
        program.write_text(json.dumps({"steps": [{"dot": {"a": "x", "b": "x"}}]}))
        for arguments in (
            ("put", self.folder / "x.npy", "--name", "x", "--replace"),
            ("get", "x", "-o", self.folder / "y.npy"),
            ("ls",), ("--json", "ls"), ("info",), ("info", "x"), ("info", "nothing"),
            ("dot", "x", "x"), ("reduce", "sum", "x"), ("map", "a + 1", "x"),
            ("cp", "x", "y"), ("rm", "y"), ("run", program), ("strategies", "dot"), ("health",),
        ):
            self.command(*at, *arguments, token=token)
        self.command(*at, "ls", token_file=path)
        for arguments in (("--help",), ("ls", "--help"), ("token", "--help"), ("complete", "ls")):
            self.command(*arguments, token=token, where="help")
        # A refusal of the token does not reveal it either.
        self.command("--server", "gpu.example.org:1", "ls", token=token, where="refused")
        self.command(*at, "ls", token=token + " \u00e9", where="refused")

    def run_python(self, server, token):
        script = textwrap.dedent("""
            import sys, logging, traceback
            logging.basicConfig(level=logging.DEBUG)
            import numpy as np, tessera as ts
            for make in (lambda: ts.connect(sys.argv[1]),
                         lambda: ts.connect("gpu.example.org:1")):
                try:
                    with make() as t:
                        print(t, repr(t), vars(t))
                        x = t.put(np.ones(3, np.float32))
                        print(x, repr(x), (x @ x).numpy(), "computed")
                        t["nothing"]
                except BaseException as error:
                    traceback.print_exc()
                    print(repr(error), vars(error))
        """)
        environment = o.environment(
            PYTHONPATH=str(PACKAGE), TESSERA_TOKEN=token, GRPC_VERBOSITY="debug")
        ended = o.run(sys.executable, "-c", script, server.address, env=environment)
        self.say("Python", ended.stdout + ended.stderr)

    def test_keys_stay_out_of_all_that_can_be_read(self):
        ca = Authority(self.folder, "home")
        cert, key = ca.issue("server")
        client_cert, client_key = ca.issue("client")
        server = self.serve("t", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.cert)
        at = ("--server", server.address, "--timeout", "5s", "--tls-ca", ca.cert)
        for cert_shown, key_shown, served in (
                (client_cert, client_key, True),
                (client_key, client_cert, False)):
            shown = ("--tls-cert", cert_shown, "--tls-key", key_shown)
            ended, _ = self.command(*at, *shown, "ls", token="t")
            self.assertEqual(ended == 0, served)
        self.assertNotEqual(self.command(*at, "ls", token="t")[0], 0)
        body = key.read_text().splitlines()[1]
        # A key in place of a certificate.
        os.replace(key, cert)
        peer = socket.create_connection(tuple(server.address.rsplit(":", 1)), timeout=20)
        peer.close()
        self.command(*at, "--tls-cert", client_cert, "--tls-key", client_key, "ls", token="t")
        self.assertTrue(o.eventually(lambda: "cannot use" in server.log()))
        self.assertEqual(server.stop(), 0)
        self.say("log", server.log())
        self.assert_kept(body, client_key.read_text().splitlines()[1])


if __name__ == "__main__":
    o.main()

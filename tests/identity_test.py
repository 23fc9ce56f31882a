#!/usr/bin/env python3
"""Callers without a token, from outside: clients known by their certificate, processes of other
users known by the unix socket that they come by, and who may connect to one at all.

To be other users it has to be root.

usage: identity_test.py --server build/bin/tessera-server --cli build/bin/tessera [test ...]
"""

import grp
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import unittest

import grpc
import numpy as np

import outsider as o
from authority import Authority
from callers import PIECE, Bearer, Caller, Region, line_of, replace

CLI = None
ANNA, BERT, CARL, GROUP = 54321, 54322, 54323, 54330

needs_root = unittest.skipUnless(os.geteuid() == 0, "needs root, to be other users")


class Holder(Caller):
    """A client with a certificate, and a token if there is one."""

    def __init__(self, server, ca, pair, token=None, address=None):
        self.plain = grpc.secure_channel(
            address or server.address,
            grpc.ssl_channel_credentials(
                ca.cert.read_bytes(), pair[1].read_bytes(), pair[0].read_bytes()
            ),
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.ssl_target_name_override", "localhost"),
            ],
        )
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        self.channel = grpc.intercept_channel(self.plain, Bearer(*metadata))
        self.b = o.buffer_grpc.BufferServiceStub(self.channel)
        self.c = o.compute_grpc.ComputeServiceStub(self.channel)
        server.clients.append(self)


class IdentityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.TemporaryDirectory()
        os.chmod(cls.root.name, 0o755)
        o.make_stubs(cls.root.name)
        cls.ca = Authority(cls.root.name, "home")
        cls.pair = cls.ca.issue("server")
        # Where all users can run it.
        cls.cli = pathlib.Path(cls.root.name) / "command"
        shutil.copy(CLI, cls.cli)
        cls.cli.chmod(0o755)

    @classmethod
    def tearDownClass(cls):
        cls.root.cleanup()

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.root.name))
        self.folder.chmod(0o755)
        self.file = self.folder / "tokens"
        self.path = self.folder / "socket"

    def start(self, *flags):
        server = o.Server(self.folder, "--no-warm-up", *map(str, flags))
        self.addCleanup(server.kill)
        return server

    def write(self, *lines):
        replace(self.file, "".join(line + "\n" for line in lines))
        return "--tokens", self.file

    def assert_unknown(self, end):
        self.assertEqual((end.code, end.reason), ("UNAUTHENTICATED", "BAD_TOKEN"), end)
        return end.text

    # --- Certificates ---

    def serve_tls(self, *lines, flags=()):
        cert, key = self.pair
        tls = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", self.ca.cert)
        return self.start(*tls, *self.write(*lines), *flags)

    def holder(self, server, name, names="DNS:localhost", **more):
        pair = self.ca.issue(f"{name}{len(list(self.ca.folder.iterdir()))}", names=names)
        return Holder(server, self.ca, pair, **more)

    def test_a_certificate_says_who_calls(self):
        pairs = {
            name: self.ca.issue(name, names=names)
            for name, names in (
                ("trainer", "DNS:localhost"),
                ("a", "DNS:Trainer.Example.org,DNS:other.example.org"),
                ("b", "URI:spiffe://example.org/reader"),
                ("c", "DNS:trainer"),
                ("d", "URI:spiffe://example.org/Reader"),
            )
        }
        server = self.serve_tls(
            "cn:trainer admin one",
            "dns:trainer.example.org write two",
            "uri:spiffe://example.org/reader read two",
        )
        callers = {name: Holder(server, self.ca, pair) for name, pair in pairs.items()}
        callers["trainer"].put("x", PIECE)
        callers["a"].put("y", PIECE)
        self.assertEqual(callers["trainer"].names(), ["x"])
        self.assertEqual(callers["a"].names(), ["y"])
        self.assertEqual(callers["b"].names(), ["y"])
        end = callers["b"].attempt("DeleteBuffer", name="y")
        self.assertEqual((end.code, end.reason), ("PERMISSION_DENIED", "ROLE_TOO_SMALL"))
        # A name of another kind, and one that differs by its case, are not those of the lines.
        said = {self.assert_unknown(callers[name].attempt("ListBuffers")) for name in "cd"}
        self.assertEqual(len(said), 1, said)
        self.assertEqual(callers["c"].health(), 1)

    def test_the_first_line_that_fits_counts(self):
        pair = self.ca.issue("first", names="DNS:a.example.org,DNS:b.example.org")
        lines = [
            "dns:b.example.org read two", "cn:first write one", "dns:a.example.org write three"
        ]
        server = self.serve_tls(*lines)
        caller = Holder(server, self.ca, pair)
        self.assertEqual(caller.attempt("DeleteBuffer", name="x").reason, "ROLE_TOO_SMALL")
        self.write(*lines[1:], lines[0])
        gone = lambda: caller.attempt("DeleteBuffer", name="x").reason == "BUFFER_NOT_FOUND"
        self.assertTrue(o.eventually(gone, 10))

    def test_a_token_counts_more_than_a_certificate(self):
        pair = self.ca.issue("both")
        server = self.serve_tls("cn:both write one", line_of("t", "read", "two"))
        certified = Holder(server, self.ca, pair)
        certified.put("x", PIECE)
        both = Holder(server, self.ca, pair, token="t")
        self.assertEqual(both.names(), [])
        self.assertEqual(both.attempt("DeleteBuffer", name="x").reason, "ROLE_TOO_SMALL")
        # What is wrong is refused, rather than left aside for a certificate that is right.
        for token in ("u", ""):
            self.assert_unknown(Holder(server, self.ca, pair, token=token).attempt("ListBuffers"))

    def test_a_changed_file_counts_on_open_connections(self):
        pair = self.ca.issue("leaver")
        server = self.serve_tls("cn:leaver write one", "cn:other write one")
        caller = Holder(server, self.ca, pair)
        caller.put("x", PIECE)
        self.write("cn:other write one")
        left = lambda: caller.attempt("ListBuffers").reason == "BAD_TOKEN"
        self.assertTrue(o.eventually(left, 10))
        self.write("cn:leaver read one")
        self.assertTrue(o.eventually(lambda: caller.attempt("ListBuffers").ok, 10))
        self.assertEqual(caller.names(), ["x"])

    def test_tenants_of_certificates_are_blind_to_each_other(self):
        pairs = [self.ca.issue(name) for name in ("anna", "bert")]
        server = self.serve_tls("cn:anna write anna", "cn:bert write bert")
        anna, bert = (Holder(server, self.ca, pair) for pair in pairs)
        made = anna.put("secret", PIECE)
        for rpc, fields in (
            ("GetBuffer", {}),
            ("GetBuffer", {"version": made.version}),
            ("UpdateBuffer", {}),
            ("DeleteBuffer", {}),
            ("SealBuffer", {"version": made.version}),
        ):
            theirs = bert.attempt(rpc, name="secret", **fields)
            none = bert.attempt(rpc, name="nothing", **fields)
            self.assertEqual(
                repr(theirs).replace("secret", "nothing"), repr(none), (rpc, fields)
            )
        self.assertEqual(bert.names(), [])
        self.assertEqual(anna.names(), ["secret"])

    def test_lines_for_certificates_that_nobody_is_asked_for_are_warned_of(self):
        server = self.start(*self.write("cn:trainer write one"))
        self.assertIn("without --tls-client-ca", server.log())
        self.assert_unknown(Caller(server).attempt("ListBuffers"))

    # --- Who may connect to a unix socket ---

    def serve_unix(self, *flags, listen=None):
        shared = self.folder / "shared"
        return self.start(
            "--listen", f"unix:{listen or self.path}", "--shared-memory", shared, *flags
        )

    def permissions(self):
        """Of both sockets, which are the same."""
        found = {
            (stat.S_IMODE(status.st_mode), status.st_gid)
            for status in ((self.folder / name).stat() for name in ("socket", "shared"))
        }
        self.assertEqual(len(found), 1)
        return found.pop()

    def run_as(self, user, *arguments, groups=(), token=None, address=None):
        environment = {"TESSERA_TOKEN": token} if token else {}
        command = [
            self.cli, "--server", address or f"unix:{self.path}", "--timeout", "20s", *arguments
        ]
        return subprocess.run(
            list(map(str, command)), user=user, group=user, extra_groups=list(groups),
            capture_output=True, text=True, timeout=120, env=environment, cwd="/",
        )

    def may_connect(self, user, groups=()):
        """Whether each of the sockets lets a user connect: the same for both."""
        script = (
            "import socket, sys\n"
            "for path, kind in zip(sys.argv[1:], (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)):\n"
            "  try: socket.socket(socket.AF_UNIX, kind).connect(path); print(True)\n"
            "  except PermissionError: print(False)\n"
        )
        said = subprocess.run(
            [sys.executable, "-c", script, self.path, self.folder / "shared"],
            user=user, group=user, extra_groups=list(groups), capture_output=True, text=True,
            timeout=60, check=True, cwd="/",
        ).stdout.split()
        self.assertEqual(said[0], said[1])
        return said[0] == "True"

    def test_sockets_are_the_owners_alone(self):
        before = os.umask(0)
        try:
            self.serve_unix()
        finally:
            os.umask(before)
        self.assertEqual(self.permissions(), (0o600, os.getegid()))

    @needs_root
    def test_flags_say_whose_the_sockets_are(self):
        before = os.umask(0o077)
        try:
            for flags, expected in (
                ((), (0o600, os.getegid())),
                (("--socket-group", GROUP), (0o660, GROUP)),
                (("--socket-group", "games"), (0o660, grp.getgrnam("games").gr_gid)),
                (("--socket-mode", "666"), (0o666, os.getegid())),
                (("--socket-group", GROUP, "--socket-mode", "0600"), (0o600, GROUP)),
            ):
                with self.subTest(flags):
                    server = self.serve_unix(*flags)
                    self.assertEqual(self.permissions(), expected)
                    self.assertEqual(server.stop(), 0)
                    self.assertEqual(os.listdir(self.folder)[1:], [], "the files are removed")
                    for log in self.folder.glob("*.log"):
                        log.unlink()
        finally:
            os.umask(before)

    @needs_root
    def test_others_connect_as_the_file_says(self):
        self.serve_unix("--socket-group", GROUP)
        self.assertTrue(self.may_connect(ANNA, groups=[GROUP]))
        self.assertFalse(self.may_connect(BERT))
        ended = self.run_as(ANNA, "ls", groups=[GROUP])
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertNotEqual(self.run_as(BERT, "--timeout", "3s", "ls").returncode, 0)

    def test_flags_that_cannot_be_are_refused(self):
        listen = ("--listen", f"unix:{self.path}")
        self.assertIn(
            "there is no group no-such-group", o.refused(*listen, "--socket-group", "no-such-group")
        )
        self.assertFalse(self.path.exists())
        for mode in ("8", "rw", "1777", "0060", "00600", "-1", ""):
            self.assertIn("--socket-mode", o.refused(*listen, f"--socket-mode={mode}"))

    # --- Users ---

    @needs_root
    def test_a_user_is_known_by_the_socket(self):
        lines = [f"uid:{ANNA} write anna", f"uid:{BERT} read bert", line_of("t", "write", "bert")]
        server = self.serve_unix("--socket-mode", "0666", *self.write(*lines))
        np.save(self.folder / "x.npy", PIECE)
        (self.folder / "x.npy").chmod(0o644)
        put = ("put", self.folder / "x.npy", "--name", "x")
        self.assertEqual(self.run_as(ANNA, *put).returncode, 0)
        self.assertIn("ROLE_TOO_SMALL", self.run_as(BERT, *put).stderr)
        self.assertIn("x", self.run_as(ANNA, "ls").stdout)
        theirs, none = (self.run_as(BERT, "info", name) for name in ("x", "y"))
        self.assertEqual(theirs.stderr.replace("'x'", "'y'"), none.stderr)
        self.assertIn("BUFFER_NOT_FOUND", none.stderr)
        # A token counts more, and a wrong one is refused.
        self.assertEqual(self.run_as(ANNA, *put, token="t").returncode, 0)
        self.assertIn("x", self.run_as(BERT, "ls").stdout)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls", token="u").stderr)
        # Users without a line, root among them, and those who come by TCP, are nobody.
        self.assertIn("BAD_TOKEN", self.run_as(CARL, "ls").stderr)
        self.assertIn("BAD_TOKEN", self.run_as(0, "ls").stderr)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls", address=server.address).stderr)
        self.write(f"uid:{CARL} read anna")
        self.assertTrue(o.eventually(lambda: self.run_as(CARL, "ls").returncode == 0, 20))
        self.assertIn("x", self.run_as(CARL, "ls").stdout)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls").stderr)

    @needs_root
    def test_calls_of_two_users_at_once_are_not_mixed_up(self):
        self.serve_unix(
            "--socket-mode", "0666", *self.write(f"uid:{ANNA} write anna", f"uid:{BERT} read bert")
        )

        def call(i):
            for _ in range(5):
                if i % 2:
                    ended = self.run_as(ANNA, "put", "--name", f"x{i}", "--random", "ones",
                                        "--shape", "4", "--replace")
                    self.assertEqual(ended.returncode, 0, ended.stderr)
                else:
                    ended = self.run_as(BERT, "ls")
                    self.assertEqual(ended.returncode, 0, ended.stderr)
                    self.assertNotIn("x", ended.stdout.replace("expires", ""))

        o.in_threads(4, call)

    @needs_root
    def test_users_who_are_too_many_to_be_known_are_nobody(self):
        first, last = 60000, 60064
        server = self.serve_unix(
            "--socket-mode", "0666",
            *self.write(*(f"uid:{user} read one" for user in range(first, last + 1))),
        )
        for user in range(first, last):
            self.connect_as(user)
        self.assertEqual(self.run_as(first, "ls").returncode, 0)
        self.assertIn("BAD_TOKEN", self.run_as(last, "ls").stderr)
        said = "more than 64 users with a line have connected"
        self.assertTrue(o.eventually(lambda: said in server.log(), 10), server.log())

    @needs_root
    def test_strangers_take_nothing_from_users_with_a_line(self):
        self.serve_unix("--socket-mode", "0666", *self.write(f"uid:{ANNA} read one"))
        for user in range(60000, 60070):
            self.connect_as(user)
        self.assertIn("BAD_TOKEN", self.run_as(60000, "ls").stderr)
        ended = self.run_as(ANNA, "ls")
        self.assertEqual(ended.returncode, 0, ended.stderr)

    @needs_root
    def test_a_user_has_half_of_the_connections(self):
        self.serve_unix("--socket-mode", "0666", "--max-connections", "16")
        # Of those that a user asks for, how many are served: gRPC greets whom it serves.
        script = (
            "import socket, sys\n"
            "made = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]\n"
            "for one in made: one.settimeout(60), one.connect(sys.argv[1])\n"
            "def served(one):\n"
            "  try: return len(one.recv(1))\n"
            "  except ConnectionError: return 0\n"
            "print(sum(map(served, made)), flush=True), sys.stdin.read()\n"
        )

        def ask(user, count):
            process = subprocess.Popen(
                [sys.executable, "-c", script, self.path, str(count)], user=user, group=user,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            )
            self.addCleanup(process.communicate)
            return int(process.stdout.readline())

        self.assertEqual(ask(ANNA, 12), 8)
        self.assertEqual(ask(BERT, 4), 4)
        self.assertEqual(ask(ANNA, 1), 0)
        # Nor is the server's own user bound by a share.
        self.assertEqual(ask(os.geteuid(), 4), 4)

    def connect_as(self, user):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setresuid(user, user, user)
                socket.socket(socket.AF_UNIX).connect(str(self.path))
                code = 0
            finally:
                os._exit(code)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    @needs_root
    def test_a_user_is_known_through_tls(self):
        cert, key = self.pair
        tls = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", self.ca.cert)
        lines = (f"uid:{os.geteuid()} write one", "cn:named read two")
        server = self.serve_unix(*tls, *self.write(*lines))
        address = f"unix:{self.path}"
        by_user = Holder(server, self.ca, self.ca.issue("unnamed"), address=address)
        by_user.put("x", PIECE)
        pair = self.ca.issue("named")
        self.assertEqual(Holder(server, self.ca, pair, address=address).names(), ["x"])
        self.assertEqual(Holder(server, self.ca, pair).names(), [])

    @needs_root
    def test_a_user_has_half_of_shared_memory(self):
        lines = [f"uid:{ANNA} write anna", f"uid:{BERT} write bert"]
        self.serve_unix(
            "--socket-mode", "0666", "--shared-memory-limit", "8192", *self.write(*lines)
        )
        script = (
            "import os, sys; from callers import Region, o\n"
            "o.make_stubs(sys.argv[2]); os.setresuid(*[int(sys.argv[3])] * 3)\n"
            "regions = [Region(sys.argv[1]) for _ in range(2)]\n"
            "print([region.answer.reason for region in regions])\n"
        )
        for user in (ANNA, BERT):
            said = self.run_script(script, self.folder / "shared", user)
            self.assertEqual(said, "['', 'SHARED_MEMORY_EXHAUSTED']")

    @needs_root
    def test_silent_strangers_leave_room_at_the_socket_of_regions(self):
        self.serve_unix("--socket-mode", "0666", *self.write(f"uid:{ANNA} write anna"))
        shared = self.folder / "shared"
        script = (
            "import socket, sys\n"
            "made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]\n"
            "for one in made: one.connect(sys.argv[1])\n"
            "print('connected', flush=True), sys.stdin.read()\n"
        )
        stranger = subprocess.Popen(
            [sys.executable, "-c", script, shared], user=BERT, group=BERT, cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.addCleanup(stranger.communicate)
        self.assertEqual(stranger.stdout.readline(), "connected\n")
        own = Region(shared)
        self.addCleanup(own.connection.close)
        self.assertEqual(len(own.token), 16)

    def run_script(self, script, path, user):
        said = subprocess.run(
            [sys.executable, "-c", script, path, tempfile.mkdtemp(dir=self.folder), str(user)],
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent)},
            capture_output=True, text=True, timeout=120, check=True,
        )
        self.assertEqual(said.stderr, "")
        return said.stdout.strip()

    @needs_root
    def test_regions_are_for_users_with_a_line(self):
        self.serve_unix("--socket-mode", "0666", *self.write(f"uid:{ANNA} write anna"))
        shared = self.folder / "shared"
        own = Region(shared)
        self.addCleanup(own.connection.close)
        self.assertEqual(len(own.token), 16)
        script = (
            "import os, sys; from access_test import Region, o\n"
            "o.make_stubs(sys.argv[2]); os.setresuid(*[int(sys.argv[3])] * 3)\n"
            "print(len(Region(sys.argv[1]).token))\n"
        )
        for user, size in ((ANNA, "16"), (BERT, "0")):
            self.assertEqual(self.run_script(script, shared, user), size)


if __name__ == "__main__":
    CLI, rest = o.server_and_cli()
    unittest.main(argv=[sys.argv[0], *rest])

#!/usr/bin/env python3
"""Tests callers without a token from outside: clients that are known by their certificate,
processes of other users that are known by the unix socket that they connect to, and which users may
connect to such a socket.

The tests must run as root to act as other users."""

import ast
import grp
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import unittest

import grpc
import numpy as np

import outsider as o
from authority import Authority, channel
from callers import PIECE, Bearer, Caller, Region, line_of, replace

ANNA, BERT, CARL, GROUP = 54321, 54322, 54323, 54330


class Holder(Caller):
    """A client with a certificate, and with a token if one is given."""

    def __init__(self, server, ca, pair, token=None, address=None):
        name = ("grpc.ssl_target_name_override", "localhost")
        self.plain = channel(address or server.address, ca, pair, name)
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        self.channel = grpc.intercept_channel(self.plain, Bearer(*metadata))
        self.b = o.buffer_grpc.BufferServiceStub(self.channel)
        self.c = o.compute_grpc.ComputeServiceStub(self.channel)
        server.clients.append(self)


class IdentityCase(o.FreshCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder.chmod(0o755)
        cls.ca = Authority(cls.folder, "home")
        cls.pair = cls.ca.issue("server")

    def setUp(self):
        super().setUp()
        self.folder.chmod(0o755)
        self.file = self.folder / "tokens"
        self.path = self.folder / "socket"

    def write(self, *lines):
        replace(self.file, "".join(line + "\n" for line in lines))
        return "--tokens", self.file

    def assert_unknown(self, end):
        return o.check_refusal(end, "UNAUTHENTICATED", "BAD_TOKEN").text

    def tls(self):
        cert, key = self.pair
        return "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", self.ca.cert

    def serve_unix(self, *flags):
        shared = self.folder / "shared"
        listen = ("--listen", f"unix:{self.path}", "--shared-memory", shared)
        return self.serve(*listen, *flags)


class CertificateTest(IdentityCase):
    def serve_tls(self, *lines):
        return self.serve(*self.tls(), *self.write(*lines))

    def test_a_certificate_identifies_its_caller(self):
        pairs = {name: self.ca.issue(name, names=names)
                 for name, names in (("trainer", "DNS:localhost"),
                                     ("a", "DNS:Trainer.Example.org,DNS:other.example.org"),
                                     ("b", "URI:spiffe://example.org/reader"),
                                     ("c", "DNS:trainer"),
                                     ("d", "URI:spiffe://example.org/Reader"))}
        server = self.serve_tls("cn:trainer admin one",
                                "dns:trainer.example.org write two",
                                "uri:spiffe://example.org/reader read two")
        callers = {name: Holder(server, self.ca, pair) for name, pair in pairs.items()}
        callers["trainer"].put("x", PIECE)
        callers["a"].put("y", PIECE)
        self.assertEqual(callers["trainer"].names(), ["x"])
        self.assertEqual(callers["a"].names(), ["y"])
        self.assertEqual(callers["b"].names(), ["y"])
        end = callers["b"].attempt("DeleteBuffer", name="y")
        self.assertEqual((end.code, end.reason), ("PERMISSION_DENIED", "ROLE_TOO_SMALL"))
        # A name of another kind, and a name that differs only in case, do not match the lines.
        said = {self.assert_unknown(callers[name].attempt("ListBuffers")) for name in "cd"}
        self.assertEqual(len(said), 1, said)
        self.assertEqual(callers["c"].health(), 1)

    def test_the_first_line_that_fits_counts(self):
        pair = self.ca.issue("first", names="DNS:a.example.org,DNS:b.example.org")
        lines = [
            "dns:b.example.org read two", "cn:first write one", "dns:a.example.org write three"]
        server = self.serve_tls(*lines)
        caller = Holder(server, self.ca, pair)
        self.assertEqual(caller.attempt("DeleteBuffer", name="x").reason, "ROLE_TOO_SMALL")
        self.write(*lines[1:], lines[0])
        gone = lambda: caller.attempt("DeleteBuffer", name="x").reason == "BUFFER_NOT_FOUND"
        self.assertTrue(o.eventually(gone))

    def test_a_token_counts_more_than_a_certificate(self):
        pair = self.ca.issue("both")
        server = self.serve_tls("cn:both write one", line_of("t", "read", "two"))
        certified = Holder(server, self.ca, pair)
        certified.put("x", PIECE)
        both = Holder(server, self.ca, pair, token="t")
        self.assertEqual(both.names(), [])
        self.assertEqual(both.attempt("DeleteBuffer", name="x").reason, "ROLE_TOO_SMALL")
        # A wrong token is refused even if the certificate is right.
        for token in ("u", ""):
            self.assert_unknown(Holder(server, self.ca, pair, token=token).attempt("ListBuffers"))

    def test_a_changed_file_counts_on_open_connections(self):
        pair = self.ca.issue("leaver")
        server = self.serve_tls("cn:leaver write one", "cn:other write one")
        caller = Holder(server, self.ca, pair)
        caller.put("x", PIECE)
        self.write("cn:other write one")
        left = lambda: caller.attempt("ListBuffers").reason == "BAD_TOKEN"
        self.assertTrue(o.eventually(left))
        self.write("cn:leaver read one")
        self.assertTrue(o.eventually(lambda: caller.attempt("ListBuffers").ok))
        self.assertEqual(caller.names(), ["x"])

    def test_lines_for_certificates_that_are_never_requested_are_warned_of(self):
        server = self.serve(*self.write("cn:trainer write one"))
        self.assertIn("without --tls-client-ca", server.log())
        self.assert_unknown(Caller(server).attempt("ListBuffers"))


class SocketTest(IdentityCase):
    """Tests which users may connect to a unix socket."""

    def permissions(self):
        """Returns the permissions of both sockets, which are equal."""
        found = {(stat.S_IMODE(status.st_mode), status.st_gid)
                 for status in ((self.folder / name).stat() for name in ("socket", "shared"))}
        self.assertEqual(len(found), 1)
        return found.pop()

    def test_sockets_are_the_owners_alone(self):
        before = os.umask(0)
        try:
            self.serve_unix()
        finally:
            os.umask(before)
        self.assertEqual(self.permissions(), (0o600, os.getegid()))

    @unittest.skipIf(os.geteuid(), "needs root to give files to other groups")
    def test_flags_say_whose_the_sockets_are(self):
        before = os.umask(0o077)
        try:
            for flags, expected in (
                    ((), (0o600, os.getegid())),
                    (("--socket-group", GROUP), (0o660, GROUP)),
                    (("--socket-group", "games"), (0o660, grp.getgrnam("games").gr_gid)),
                    (("--socket-group", "*"), (0o666, os.getegid()))):
                with self.subTest(flags):
                    server = self.serve_unix(*flags)
                    self.assertEqual(self.permissions(), expected)
                    self.assertEqual(server.stop(), 0)
                    self.assertEqual(os.listdir(self.folder)[1:], [], "the files are removed")
                    for log in self.folder.glob("*.log"):
                        log.unlink()
        finally:
            os.umask(before)

    def test_flags_that_cannot_be_are_refused(self):
        listen = ("--listen", f"unix:{self.path}")
        for group in ("no-such-group", "4294967295"):
            said = o.refused(*listen, "--socket-group", group)
            self.assertIn(f"there is no group {group}", said)
        self.assertFalse(self.path.exists())


class UsersTest(IdentityCase):
    """Processes of other users."""

    @classmethod
    def setUpClass(cls):
        if os.geteuid() != 0:
            raise unittest.SkipTest("needs root to act as other users")
        super().setUpClass()
        # The copy is in a folder where all users can run it.
        cls.cli = cls.folder / "command"
        shutil.copy(o.Program.cli, cls.cli)
        cls.cli.chmod(0o755)

    def run_as(self, user, *arguments, groups=(), token=None, address=None):
        return o.run(
            self.cli, "--server", address or f"unix:{self.path}", "--timeout", "20s", *arguments,
            user=user, group=user, extra_groups=list(groups), cwd="/",
            env={"TESSERA_TOKEN": token} if token else {})

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

    def ask(self, script, *arguments, **more):
        """Returns what the script prints. The script then waits for the end of the test."""
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os, socket, sys\n{script}\nsys.stdin.read()"]
            + list(map(str, arguments)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", **more)
        self.addCleanup(process.communicate)
        return process.stdout.readline().strip()

    def regions(self, user):
        """Returns what the server says to a user about two regions: the sizes of their tokens, and
        the reasons."""
        script = ("from callers import Region, o\n"
                  "o.make_stubs(); os.setresuid(*[int(sys.argv[1])] * 3)\n"
                  "regions = [Region(sys.argv[2]) for _ in range(2)]\n"
                  "print([(len(one.token), one.answer.reason) for one in regions], flush=True)")
        here = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent)}
        return ast.literal_eval(self.ask(
            script, user, self.folder / "shared", "--server", o.Program.path, env=here))

    def test_others_connect_as_the_file_says(self):
        self.serve_unix("--socket-group", GROUP)
        script = (
            "for path, kind in zip(sys.argv[1:], (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)):\n"
            "  try: socket.socket(socket.AF_UNIX, kind).connect(path); print('in', end=' ')\n"
            "  except PermissionError: print('out', end=' ')\n"
            "print(flush=True)")
        for user, groups, said in ((ANNA, [GROUP], "in in"), (BERT, [], "out out")):
            who = dict(user=user, group=user, extra_groups=groups)
            self.assertEqual(self.ask(script, self.path, self.folder / "shared", **who), said)
        ended = self.run_as(ANNA, "ls", groups=[GROUP])
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertNotEqual(self.run_as(BERT, "--timeout", "500ms", "ls").returncode, 0)

    def test_a_user_is_known_by_the_socket(self):
        lines = [f"uid:{ANNA} write anna", f"uid:{BERT} read bert", line_of("t", "write", "bert")]
        server = self.serve_unix("--socket-group", "*", *self.write(*lines))
        np.save(self.folder / "x.npy", PIECE)
        (self.folder / "x.npy").chmod(0o644)
        put = ("put", self.folder / "x.npy", "--name", "x")
        self.assertEqual(self.run_as(ANNA, *put).returncode, 0)
        self.assertIn("ROLE_TOO_SMALL", self.run_as(BERT, *put).stderr)
        self.assertIn("x", self.run_as(ANNA, "ls").stdout)
        theirs, none = (self.run_as(BERT, "info", name) for name in ("x", "y"))
        self.assertEqual(theirs.stderr.replace("'x'", "'y'"), none.stderr)
        self.assertIn("BUFFER_NOT_FOUND", none.stderr)
        # A token takes precedence, and a wrong token is refused.
        self.assertEqual(self.run_as(ANNA, *put, token="t").returncode, 0)
        self.assertIn("x", self.run_as(BERT, "ls").stdout)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls", token="u").stderr)
        # Users without a line, including root, and TCP callers are unknown.
        self.assertIn("BAD_TOKEN", self.run_as(CARL, "ls").stderr)
        self.assertIn("BAD_TOKEN", self.run_as(0, "ls").stderr)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls", address=server.address).stderr)
        self.write(f"uid:{CARL} read anna")
        self.assertTrue(o.eventually(lambda: self.run_as(CARL, "ls").returncode == 0))
        self.assertIn("x", self.run_as(CARL, "ls").stdout)
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls").stderr)

    def test_calls_of_two_users_at_once_are_not_mixed_up(self):
        self.serve_unix(
            "--socket-group", "*", *self.write(f"uid:{ANNA} write anna", f"uid:{BERT} read bert"))

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

    def test_users_beyond_the_limit_are_unknown(self):
        first, last = 60000, 60064
        server = self.serve_unix(
            "--socket-group", "*",
            *self.write(*(f"uid:{user} read one" for user in range(first, last + 1))))
        for user in range(first, last):
            self.connect_as(user)
        self.assertEqual(self.run_as(first, "ls").returncode, 0)
        self.assertIn("BAD_TOKEN", self.run_as(last, "ls").stderr)
        said = "more than 64 users of the token file have connected"
        self.assertTrue(o.eventually(lambda: said in server.log()), server.log())

    def test_strangers_take_nothing_from_users_with_a_line(self):
        self.serve_unix("--socket-group", "*", *self.write(f"uid:{ANNA} read one"))
        for user in range(60000, 60070):
            self.connect_as(user)
        self.assertIn("BAD_TOKEN", self.run_as(60000, "ls").stderr)
        ended = self.run_as(ANNA, "ls")
        self.assertEqual(ended.returncode, 0, ended.stderr)

    def test_a_user_has_half_of_the_connections(self):
        self.serve_unix("--socket-group", "*", "--max-connections", "16")
        # Prints how many of a user's connections are served. gRPC greets the connections that it
        # serves.
        script = ("made = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]\n"
                  "for one in made: one.settimeout(60), one.connect(sys.argv[1])\n"
                  "def served(one):\n"
                  "  try: return len(one.recv(1))\n"
                  "  except ConnectionError: return 0\n"
                  "print(sum(map(served, made)), flush=True)")

        def ask(user, count):
            return int(self.ask(script, self.path, count, user=user, group=user))

        self.assertEqual(ask(ANNA, 12), 8)
        self.assertEqual(ask(BERT, 4), 4)
        self.assertEqual(ask(ANNA, 1), 0)
        # The limit per user does not apply to the server's own user either.
        self.assertEqual(ask(os.geteuid(), 4), 4)

    def test_a_user_is_known_through_tls(self):
        lines = (f"uid:{os.geteuid()} write one", "cn:named read two")
        server = self.serve_unix(*self.tls(), *self.write(*lines))
        address = f"unix:{self.path}"
        by_user = Holder(server, self.ca, self.ca.issue("unnamed"), address=address)
        by_user.put("x", PIECE)
        pair = self.ca.issue("named")
        self.assertEqual(Holder(server, self.ca, pair, address=address).names(), ["x"])
        self.assertEqual(Holder(server, self.ca, pair).names(), [])

    def test_the_user_that_stands_for_all_others_has_no_line(self):
        """The kernel reports this number for users outside the server's user namespace."""
        flags = self.write("uid:65534 write anna")
        said = o.refused("--listen", f"unix:{self.path}", *flags)
        self.assertIn("line 1: the kernel shows this user's number for every user", said)
        server = self.serve_unix("--socket-group", "*", *self.write(f"uid:{ANNA} write anna"))
        self.write("uid:65534 write anna", f"uid:{ANNA} write anna")
        self.assertTrue(o.eventually(lambda: "line 1: the kernel" in server.log()))
        self.assertIn("BAD_TOKEN", self.run_as(65534, "ls").stderr)
        self.assertEqual(self.run_as(ANNA, "ls").returncode, 0)

    def test_lines_of_users_whom_a_namespace_does_not_have_are_warned_of(self):
        unshare = ("unshare", "--user", "--map-root-user")
        if o.run(*unshare, "true").returncode != 0:
            self.skipTest("needs user namespaces")
        flags = ("--socket-group", "*", *self.write(f"uid:{ANNA} write anna", "uid:0 read anna"))
        server = self.serve("--listen", f"unix:{self.path}", *flags, prefix=unshare)
        self.assertIn(f"uid:{ANNA} admits no callers", server.log())
        self.assertNotIn("uid:0 admits", server.log())
        self.assertIn("BAD_TOKEN", self.run_as(ANNA, "ls").stderr)
        self.assertEqual(self.run_as(0, "ls").returncode, 0)

    def test_a_user_with_a_line_has_half_of_shared_memory(self):
        lines = [f"uid:{ANNA} write anna", f"uid:{BERT} write bert"]
        self.serve_unix("--socket-group", "*", "--shared-memory-limit", "8192", *self.write(*lines))
        self.assertEqual({size for size, _ in self.regions(CARL)}, {0})
        for user in (ANNA, BERT):
            self.assertEqual(self.regions(user), [(16, ""), (0, "SHARED_MEMORY_EXHAUSTED")])

    def test_silent_strangers_leave_room_at_the_socket_of_regions(self):
        self.serve_unix("--socket-group", "*", *self.write(f"uid:{ANNA} write anna"))
        shared = self.folder / "shared"
        script = (
            "made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]\n"
            "for one in made: one.connect(sys.argv[1])\n"
            "print('connected', flush=True)")
        self.assertEqual(self.ask(script, shared, user=BERT, group=BERT), "connected")
        own = Region(shared)
        self.addCleanup(own.connection.close)
        self.assertEqual(len(own.token), 16)


if __name__ == "__main__":
    o.main()

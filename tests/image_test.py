#!/usr/bin/env python3
"""Runs, without a container, what the image starts: the entry point, the variables and the health
check that deploy/Dockerfile names, with the programs that were built."""

import json
import os
import re
import signal
import socket
import subprocess

import outsider as o
from rolling import lasting_address


class ImageTest(o.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        text = (o.ROOT / "deploy" / "Dockerfile").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        joined = "\n".join(lines).replace("\\\n", " ")
        every = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
        last = max(i for i, (name, _) in enumerate(every) if name == "FROM")
        cls.instructions = every[last:]  # Pairs (name, rest of the line) of the last stage.
        # The folder of programs in the image.
        programs = cls.folder / "bin"
        programs.mkdir()
        (programs / "tessera-server").symlink_to(o.Program.path)
        (programs / "tessera").symlink_to(o.Program.cli)
        cls.variables = {}
        for name, rest in cls.instructions:
            if name == "ENV":
                cls.variables.update(pair.split("=", 1) for pair in rest.split())
        path = f"{programs}:{os.environ['PATH']}"
        cls.environment = {**cls.variables, "TESSERA_DEVICE": "cpu", "PATH": path}

    def only(self, instruction):
        found = [rest for name, rest in self.instructions if name == instruction]
        self.assertEqual(len(found), 1, instruction)
        return found[0]

    def start(self, *flags, **variables):
        """Starts the image's entry point with flags, as docker run does. Returns the server and its
        addresses."""
        # The flags of a CMD would be lost with the first flag that is given to docker run.
        self.assertNotIn("CMD", [name for name, _ in self.instructions])
        entry = json.loads(self.only("ENTRYPOINT"))
        server = self.serve(*flags, command=entry, **{**self.environment, **variables})
        return server, re.findall(r"listening on (\S+)", server.log())

    def healthy(self, server, **variables):
        command = json.loads(self.only("HEALTHCHECK").split("CMD", 1)[1])
        self.assertEqual(command[-2:], ["--process", "1"])  # The server in a container.
        variables = o.environment(**{**self.environment, **variables})
        return o.run(*command[:-1], server.pid, env=variables).returncode == 0

    def test_every_interface_unless_told_otherwise(self):
        self.assertEqual(self.variables["TESSERA_LISTEN"], "[::]:50051")
        self.assertIn("50051", self.only("EXPOSE"))

    def test_other_flags_leave_the_address_alone(self):
        socket = f"unix:{self.folder}/a"
        server, addresses = self.start("--queue", "8", TESSERA_LISTEN=socket)
        self.assertEqual(addresses, [socket])
        self.assertTrue(self.healthy(server))

    def test_health_follows_the_flag(self):
        forms = (["--listen", "{}"], ["--listen={}"], ["--listen", "{},{}x"])
        for number, form in enumerate(forms):
            with self.subTest(form):
                # A check of the variable's address would find no server.
                unused = f"unix:{self.folder}/unused"
                socket = f"unix:{self.folder}/{number}"
                flags = [part.format(socket, socket) for part in form]
                server, addresses = self.start(*flags, TESSERA_LISTEN=unused)
                self.assertEqual(addresses[0], socket)
                self.assertTrue(self.healthy(server))

    def test_a_port_is_followed_too(self):
        address = lasting_address()
        # 0.0.0.0 itself would expose the test's server to the network.
        server, addresses = self.start(TESSERA_LISTEN=address)
        self.assertEqual(addresses, [address])
        # The server's environment counts, not the environment of the check.
        self.assertTrue(self.healthy(server, TESSERA_LISTEN="127.0.0.1:1"))

    def test_every_address_is_asked_by_ipv4(self):
        """IPv4 is available on every kernel."""
        server, (address,) = self.start(TESSERA_LISTEN="127.0.0.1:0")
        every = o.environment(TESSERA_LISTEN=address.replace("127.0.0.1", "[::]"))
        with subprocess.Popen(["sleep", "1h"], env=every) as other:
            self.addCleanup(other.kill)
            command = json.loads(self.only("HEALTHCHECK").split("CMD", 1)[1])
            asked = o.run(*command[:-1], other.pid, env=o.environment(**self.environment))
            other.kill()
        self.assertEqual(asked.returncode, 0, asked.stderr)

    def test_systemd_is_told(self):
        for number, path in enumerate((f"{self.folder}/notify", f"@tessera-{os.getpid()}")):
            with self.subTest(path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
                systemd.bind(path.replace("@", "\0"))
                systemd.settimeout(o.START_TIMEOUT_S)
                server, _ = self.start(
                    TESSERA_LISTEN=f"unix:{self.folder}/{number}", NOTIFY_SOCKET=path)
                self.assertEqual(systemd.recv(100), b"READY=1")
                server.signal(signal.SIGTERM)
                self.assertEqual(systemd.recv(100), b"STOPPING=1")

    def test_what_is_no_server_is_not_healthy(self):
        elsewhere = o.environment(TESSERA_LISTEN=f"unix:{self.folder}/other")
        with subprocess.Popen(["sleep", "1h"], env=elsewhere) as other:
            self.addCleanup(other.kill)
            self.assertFalse(self.healthy(other))
            other.kill()
        self.assertFalse(self.healthy(other))  # The server is gone.

    def test_a_stopping_server_says_so_before_it_goes(self):
        self.assertGreaterEqual(float(self.variables["TESSERA_DRAIN_DELAY"].rstrip("s")), 2)
        server, _ = self.start(
            TESSERA_LISTEN=f"unix:{self.folder}/stopping", TESSERA_DRAIN_DELAY="1h")
        self.assertTrue(self.healthy(server))
        server.signal(signal.SIGTERM)
        self.assertTrue(o.eventually(lambda: not self.healthy(server)))
        self.assertTrue(server.alive())
        server.signal(signal.SIGTERM)
        self.assertEqual(server.wait(o.START_TIMEOUT_S), 128 + signal.SIGTERM)


if __name__ == "__main__":
    o.main()

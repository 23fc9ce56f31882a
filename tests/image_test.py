#!/usr/bin/env python3
"""What the container image starts and how it is asked for its health, by hand: the entry point,
the variables and the health check that deploy/Dockerfile names, with the programs that were built.

usage: image_test.py --server build/bin/tessera-server --cli build/bin/tessera [unittest arguments]
"""

import argparse
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60  # A sanitized server on a busy machine takes its time.

programs = None  # --server and --cli


def run_stage():
    """The instructions of the Dockerfile's last stage as pairs (name, rest of the line)."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    instructions = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    last = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
    return instructions[last:]


class ImageTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.instructions = run_stage()
        # The image's folder of programs.
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "tessera-server").symlink_to(pathlib.Path(programs.server).resolve())
        (bin_folder / "tessera").symlink_to(pathlib.Path(programs.cli).resolve())
        self.variables = {}
        for name, rest in self.instructions:
            if name == "ENV":
                self.variables.update(pair.split("=", 1) for pair in rest.split())
        outside = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
        self.environment = {**outside, **self.variables, "TESSERA_DEVICE": "cpu"}
        self.environment["PATH"] = f"{bin_folder}:{os.environ['PATH']}"

    def only(self, instruction):
        found = [rest for name, rest in self.instructions if name == instruction]
        self.assertEqual(len(found), 1, instruction)
        return found[0]

    def start(self, *flags, **variables):
        """The image's entry point with flags, as docker run does it; waits until it listens."""
        environment = {**self.environment, **variables}
        log = self.folder / "server.log"
        with open(log, "wb") as out:
            # What docker would hand over if nobody gave flags would get lost with the first flag.
            self.assertNotIn("CMD", [name for name, _ in self.instructions])
            server = subprocess.Popen(
                [*json.loads(self.only("ENTRYPOINT")), *flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.addCleanup(server.wait, START_TIMEOUT_S)
        self.addCleanup(server.kill)
        give_up = time.monotonic() + START_TIMEOUT_S
        while "listening on" not in log.read_text():
            self.assertIsNone(server.poll(), log.read_text())
            self.assertLess(time.monotonic(), give_up, log.read_text())
            time.sleep(0.05)
        return server, re.findall(r"listening on (\S+)", log.read_text()), environment

    def healthy(self, server, environment):
        command = json.loads(self.only("HEALTHCHECK").split("CMD", 1)[1])
        self.assertEqual(command[-2:], ["--process", "1"])  # in a container
        check = subprocess.run(
            [*command[:-1], str(server.pid)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_TIMEOUT_S,
        )
        return check.returncode == 0

    def test_every_interface_unless_told_otherwise(self):
        self.assertEqual(self.variables["TESSERA_LISTEN"], "0.0.0.0:50051")
        self.assertIn("50051", self.only("EXPOSE"))

    def test_other_flags_leave_the_address_alone(self):
        socket = f"unix:{self.folder}/a"
        server, addresses, environment = self.start("--queue", "8", TESSERA_LISTEN=socket)
        self.assertEqual(addresses, [socket])
        self.assertTrue(self.healthy(server, environment))

    def test_health_follows_the_flag(self):
        for number, form in enumerate((["--listen", "{}"], ["--listen={}"], ["--listen", "{},{}x"])):
            with self.subTest(form):
                # Were the variable's address asked, nobody would answer.
                unused = f"unix:{self.folder}/unused"
                socket = f"unix:{self.folder}/{number}"
                flags = [part.format(socket, socket) for part in form]
                server, addresses, environment = self.start(*flags, TESSERA_LISTEN=unused)
                self.assertEqual(addresses[0], socket)
                self.assertTrue(self.healthy(server, environment))

    def test_a_port_is_followed_too(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        # 0.0.0.0 itself would open the test's server to the network.
        server, addresses, environment = self.start(TESSERA_LISTEN=address)
        self.assertEqual(addresses, [address])
        # The server's environment counts, not that of the check.
        self.assertTrue(self.healthy(server, {**environment, "TESSERA_LISTEN": "127.0.0.1:1"}))

    def test_systemd_is_told(self):
        for number, path in enumerate((f"{self.folder}/notify", f"@tessera-{os.getpid()}")):
            with self.subTest(path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
                systemd.bind(path.replace("@", "\0"))
                systemd.settimeout(START_TIMEOUT_S)
                server, _, _ = self.start(
                    TESSERA_LISTEN=f"unix:{self.folder}/{number}", NOTIFY_SOCKET=path)
                self.assertEqual(systemd.recv(100), b"READY=1")
                server.send_signal(signal.SIGTERM)
                self.assertEqual(systemd.recv(100), b"STOPPING=1")

    def test_what_is_no_server_is_not_healthy(self):
        elsewhere = {**self.environment, "TESSERA_LISTEN": f"unix:{self.folder}/nobody"}
        with subprocess.Popen(["sleep", "1h"], env=elsewhere) as nobody:
            self.addCleanup(nobody.kill)
            self.assertFalse(self.healthy(nobody, self.environment))
            nobody.kill()
        self.assertFalse(self.healthy(nobody, self.environment))  # gone

    def test_a_stopping_server_says_so_before_it_goes(self):
        self.assertGreaterEqual(float(self.variables["TESSERA_DRAIN_DELAY"].rstrip("s")), 2)
        server, _, environment = self.start(
            TESSERA_LISTEN=f"unix:{self.folder}/a", TESSERA_DRAIN_DELAY="1h"
        )
        self.assertTrue(self.healthy(server, environment))
        server.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + START_TIMEOUT_S
        while self.healthy(server, environment):
            self.assertLess(time.monotonic(), give_up)
        self.assertIsNone(server.poll())
        server.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(START_TIMEOUT_S), 128 + signal.SIGTERM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli", required=True)
    programs, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])

#!/usr/bin/env python3
"""Clients that are killed at random points of an upload leave nothing behind: no buffer, no draft, no
byte of a device or of the host's memory, no thread and no descriptor.

usage: killed_clients.py --server build/bin/tessera-server --cli build/bin/tessera [--device cuda:0]
       [--kills N] [--seed S] [unittest arguments]
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import outsider  # noqa: E402

MIB = 1 << 20
BYTES = 24 * MIB
# A draft that several streams fill outlives them for so long.
UPLOAD_TIMEOUT_S = 2

options = None  # filled by main()


class KilledClientsTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.array = f"{self.folder}/array.npy"
        np.save(self.array, np.arange(BYTES // 4, dtype=np.float32))

    def start(self, *flags):
        self.server = outsider.Server(
            self.folder, "--memory-limit", "2Gi", "--upload-timeout", f"{UPLOAD_TIMEOUT_S}s", *flags
        )
        self.addCleanup(self.server.kill)

    def command(self, *arguments):
        return [options.cli, "--server", self.server.address, *arguments]

    def put(self, name, *flags):
        return subprocess.Popen(
            self.command("put", "--name", name, "--replace", *flags, self.array),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def used(self):
        """What a client could leave behind, in the server's own words."""
        done = subprocess.run(
            self.command("info", "--json"), capture_output=True, text=True, timeout=60, check=True
        )
        info = json.loads(done.stdout)
        used = {budget["name"]: budget["used"] for budget in info["budgets"]}
        for device in info["devices"]:
            used[device["name"]] = device["buffer_used_bytes"]
        return used

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))

    def kill_clients(self, *ways):
        """Of uploads that are made in one of the ways, each the flags of `tessera put`."""
        shortest = float("inf")
        for flags in ways * 3:  # until all threads, slots and pools are there
            begin = time.monotonic()
            self.assertEqual(self.put("warm", *flags).wait(120), 0)
            shortest = min(shortest, time.monotonic() - begin)
        subprocess.run(self.command("rm", "warm"), check=True, timeout=60, capture_output=True)
        time.sleep(2)
        before, memory = self.used(), self.server.rss()
        descriptors, threads = self.descriptors(), self.server.threads()

        chance = random.Random(options.seed)
        ended = 0
        for kill in range(options.kills):
            process = self.put(f"killed{kill % 7}", *chance.choice(ways))
            time.sleep(chance.uniform(0, shortest))
            ended += process.poll() is not None
            process.kill()
            process.wait()
        self.assertLess(ended, options.kills)
        for number in range(7):
            subprocess.run(self.command("rm", f"killed{number}"), timeout=60, capture_output=True)

        outsider.eventually(lambda: self.used() == before, 30 + UPLOAD_TIMEOUT_S, pause=0.5)
        self.assertEqual(self.used(), before)
        # gRPC's own come and go by a few.
        self.assertLess(self.descriptors(), descriptors + 5)
        self.assertLess(self.server.threads(), threads + 20)
        grown = self.server.rss() - memory
        print(
            f"{options.kills} clients, {options.kills - ended} of them killed in mid-upload; resident"
            f" memory grew by {grown / MIB:.1f} MiB",
            flush=True,
        )
        self.assertLess(grown, 2 * BYTES)  # however many were killed: what a heap keeps
        self.assertEqual(self.put("after").wait(120), 0)

    def test_streams(self):
        self.start()
        self.kill_clients(("--streams", "1"), ("--streams", "4"))

    def test_shared_memory(self):
        self.start("--shared-memory", f"{self.folder}/memory")
        self.kill_clients(())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    global options  # pylint: disable=global-statement
    options, rest = parser.parse_known_args()
    outsider.Program.path = options.server
    outsider.Program.device = options.device
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()

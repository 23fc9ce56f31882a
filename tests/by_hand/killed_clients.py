#!/usr/bin/env python3
"""Clients that are killed at random points of an upload leave nothing behind: no buffer, no draft, no
byte of a device or of the host's memory, no thread and no descriptor.

usage: killed_clients.py --server build/bin/tessera-server --cli build/bin/tessera [--device cuda:0]
       [--kills N] [--seed S] [unittest arguments]
"""

import json
import pathlib
import random
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import outsider as o  # noqa: E402

MIB = 1 << 20
BYTES = 24 * MIB
# A draft that several streams fill outlives them for so long.
UPLOAD_TIMEOUT_S = 2


def number(flag, default):
    return int(sys.argv.pop(sys.argv.index(flag) + 1)) if flag in sys.argv else default


KILLS, SEED = number("--kills", 500), number("--seed", 1)
sys.argv = [word for word in sys.argv if word not in ("--kills", "--seed")]


class KilledClientsTest(o.Case):
    def start(self, *flags):
        self.server = self.serve("--memory-limit", "2Gi", "--upload-timeout",
                                 f"{UPLOAD_TIMEOUT_S}s", *flags)
        np.save(self.folder / "array.npy", np.arange(BYTES // 4, dtype=np.float32))

    def cli(self, *words):
        return o.run(o.Program.cli, "--server", self.server.address, *words)

    def put(self, name, *flags):
        command = (o.Program.cli, "--server", self.server.address, "put", "--name", name,
                   "--replace", *flags, self.folder / "array.npy")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    def used(self):
        """What a client could leave behind, in the server's own words."""
        info = json.loads(self.cli("info", "--json").stdout)
        used = {budget["name"]: budget["used"] for budget in info["budgets"]}
        for device in info["devices"]:
            used[device["name"]] = device["buffer_used_bytes"]
        return used

    def kill_clients(self, *ways):
        """Of uploads that are made in one of the ways, each the flags of `tessera put`."""
        shortest = float("inf")
        for flags in ways * 3:  # until all threads, slots and pools are there
            begin = time.monotonic()
            self.assertEqual(self.put("warm", *flags).wait(120), 0)
            shortest = min(shortest, time.monotonic() - begin)
        self.assertEqual(self.cli("rm", "warm").returncode, 0)
        o.eventually(self.server.asleep, 5)
        before, memory = self.used(), self.server.rss()
        descriptors, threads = o.descriptors(self.server), self.server.threads()

        chance = random.Random(SEED)
        ended = 0
        for kill in range(KILLS):
            process = self.put(f"killed{kill % 7}", *chance.choice(ways))
            time.sleep(chance.uniform(0, shortest))
            ended += process.poll() is not None
            process.kill()
            process.wait()
        self.assertLess(ended, KILLS)
        for name in range(7):
            self.cli("rm", f"killed{name}")

        o.eventually(lambda: self.used() == before, 30 + UPLOAD_TIMEOUT_S, pause=0.5)
        self.assertEqual(self.used(), before)
        # gRPC's own come and go by a few.
        self.assertLess(o.descriptors(self.server), descriptors + 5)
        self.assertLess(self.server.threads(), threads + 20)
        grown = self.server.rss() - memory
        print(f"{KILLS} clients, {KILLS - ended} of them killed in mid-upload; resident memory "
              f"grew by {grown / MIB:.1f} MiB", flush=True)
        self.assertLess(grown, 2 * BYTES)  # however many were killed: what a heap keeps
        self.assertEqual(self.put("after").wait(120), 0)

    def test_streams(self):
        self.start()
        self.kill_clients(("--streams", "1"), ("--streams", "4"))

    def test_shared_memory(self):
        self.start("--shared-memory", f"{self.folder}/memory")
        self.kill_clients(())


if __name__ == "__main__":
    o.main()

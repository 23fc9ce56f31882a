#!/usr/bin/env python3
"""Counts, with callgrind, the instructions of a call and how many of them update the metrics. Other
programs do not affect these numbers. Needs a build folder with tessera-server, and valgrind. CI
does not run it.

usage: metrics_cost.py --build build/release"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import grpc
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import outsider as o  # noqa: E402

CALLERS, ELEMENTS = 16, 4096


def count_instructions(build, folder):
    """Counts the instructions of a Dot, and how many of them update the metrics. 16 Dots
    are always in flight."""
    address, out, rounds = f"unix:{folder}/counted", f"{folder}/callgrind", 100
    server = subprocess.Popen(
        ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}",
         build / "bin" / "tessera-server", "--listen", address, "--device", "cpu", "--no-warm-up",
         "--memory-limit", "64Mi"],
        stderr=subprocess.DEVNULL)
    try:
        client = o.Client(address)
        grpc.channel_ready_future(client.channel).result(300)
        client.put("x", np.ones(ELEMENTS, np.float32))
        x = o.resident("x")

        def calls(count):
            for _ in range(count):
                for call in [client.future("Dot", a=x, b=x) for _ in range(CALLERS)]:
                    call.result(timeout=300)

        def switch(state):
            subprocess.run(["callgrind_control", "-i", state, str(server.pid)], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        calls(5)
        switch("on")
        calls(rounds)
        switch("off")
        client.close()
        server.terminate()
        server.wait(300)
    finally:
        server.kill()
    text = subprocess.run(["callgrind_annotate", "--inclusive=yes", "--threshold=100", out],
                          check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        for name, pattern in (("all", "PROGRAM TOTALS"),
                              ("counting", r":tessera::Metrics::Count\(")):
            if re.search(pattern, line):
                found[name] = int(line.split()[0].replace(",", "")) / (rounds * CALLERS)
    print(f"{found['all']:.0f} instructions a call, {found['counting']:.0f} of them to count it: "
          f"{100 * found['counting'] / found['all']:.2f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    with tempfile.TemporaryDirectory() as place:
        o.make_stubs(place)
        count_instructions(parser.parse_args().build.resolve(), place)

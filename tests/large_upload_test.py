#!/usr/bin/python3
"""Uploads one large array with one command and watches what the server's memory does meanwhile.

The array is a block of random floats repeated to the size asked for, with one larger value planted
near the end. The checks: SUM agrees with NumPy's in double precision, ARGMAX finds the planted
value, and the server's peak resident memory grew by the buffer plus --slack-mib (CPU device) or by
less than --slack-mib alone (GPU).
"""

import argparse
import json
import os
import sys
import tempfile
import time

import numpy as np

import outsider as o


def write_array(path, elements, block_elements=1 << 22):
    """Returns the exact sum (in double) and the index of the planted maximum."""
    block = np.random.default_rng(7).standard_normal(block_elements, dtype=np.float32)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(elements,))
    total = 0.0
    for begin in range(0, elements, block_elements):
        part = block[: min(block_elements, elements - begin)]
        array[begin : begin + len(part)] = part
        total += part.sum(dtype=np.float64)
    planted = elements - 12345
    total += 1000.0 - float(array[planted])
    array[planted] = 1000.0
    array.flush()
    del array
    return total, planted, float(np.abs(block).mean()) * elements


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="folder of tessera-server and tessera")
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--slack-mib", type=int, default=256)
    parser.add_argument("--tmp", default=None, help="where the .npy is made")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.tmp) as folder:
        elements = int(options.gib * (1 << 30)) // 4
        path = os.path.join(folder, "large.npy")
        want_sum, want_index, magnitude = write_array(path, elements)
        o.Program.path = os.path.join(options.bin, "tessera-server")
        server = o.Server(folder, listen=f"unix:{folder}/socket", device=options.device)
        cli = [os.path.join(options.bin, "tessera"), "--server", server.address]

        def run(*arguments):
            done = o.run(*cli, "--timeout", "600", "--json", *arguments, timeout=None)
            if done.returncode != 0:
                sys.exit(f"tessera {' '.join(arguments)} exited {done.returncode}: {done.stderr}")
            return json.loads(done.stdout)

        try:
            info = run("info")
            device = info["devices"][0]["name"]
            before = server.peak_rss()
            start = time.monotonic()
            run("put", path, "--name", "large", "--streams", str(options.streams))
            seconds = time.monotonic() - start
            grown = server.peak_rss() - before
            total = run("reduce", "sum", "large")
            top = run("reduce", "argmax", "large")
        finally:
            ended = server.stop()
            server.kill()

        slack = options.slack_mib << 20
        allowed = slack + (elements * 4 if device == "cpu" else 0)
        print(
            f"{elements * 4 / 2**30:.2f} GiB on {device} over {options.streams} stream(s) in"
            f" {seconds:.1f} s, {elements * 4 / seconds / 1e9:.2f} GB/s; server peak memory grew"
            f" {grown / 2**20:.0f} MiB"
            f" (allowed {allowed / 2**20:.0f})"
        )
        problems = []
        if abs(total["value"] - want_sum) > 1e-5 * magnitude:
            problems.append(f"SUM is {total['value']}, NumPy has {want_sum}")
        if top["index"] != want_index:
            problems.append(f"ARGMAX is {top['index']}, planted at {want_index}")
        if grown > allowed:
            problems.append("server memory grew too much")
        if ended != 0:
            problems.append(f"the server ended with {ended}")
        for problem in problems:
            print("wrong:", problem)
        sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

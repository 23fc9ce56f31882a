#!/usr/bin/python3
"""Uploads one large array with one command and watches the server's memory in the meantime.

The array is a block of random floats that is repeated up to the requested size, with one larger
value near the end. The server's peak memory may grow by --slack-mib, and on the CPU also by the
size of the buffer."""

import argparse
import json
import os
import tempfile
import time

import numpy as np

import outsider as o


def write_array(path, elements, block_elements=1 << 22):
    """Returns the exact sum (in double) and the index of the maximum."""
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
            assert done.returncode == 0, f"{arguments} exited {done.returncode}: {done.stderr}"
            return json.loads(done.stdout)

        try:
            device = run("info")["devices"][0]["name"]
            before, start = server.peak_rss(), time.monotonic()
            run("put", path, "--name", "large", "--streams", options.streams)
            seconds, grown = time.monotonic() - start, server.peak_rss() - before
            total = run("reduce", "sum", "large")["value"]
            top = run("reduce", "argmax", "large")["index"]
            ended = server.stop()
        finally:
            server.kill()

    allowed = (options.slack_mib << 20) + (elements * 4 if device == "cpu" else 0)
    print(f"{elements * 4 / 2**30:.2f} GiB on {device} over {options.streams} stream(s) in "
          f"{seconds:.1f} s, {elements * 4 / seconds / 1e9:.2f} GB/s; server peak memory grew "
          f"{grown / 2**20:.0f} MiB (allowed {allowed / 2**20:.0f})")
    assert abs(total - want_sum) <= 1e-5 * magnitude, f"SUM is {total}, NumPy has {want_sum}"
    assert top == want_index, f"ARGMAX is {top}, planted at {want_index}"
    assert grown <= allowed, "server memory grew too much"
    assert ended == 0, f"the server ended with {ended}"


if __name__ == "__main__":
    main()

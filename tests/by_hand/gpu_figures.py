#!/usr/bin/env python3
"""What the metrics say of GPUs beside what nvidia-smi says, idle and while products are computed.
Needs a GPU and Python alone; CI does without it.

usage: gpu_figures.py --server bin/tessera-server --cli bin/tessera
"""

import argparse
import re
import subprocess
import tempfile
import time
import urllib.request

# The metric, nvidia-smi's field and its unit, how far they may be apart from one moment to the
# next.
FIGURES = [
    ("memory_used_bytes", "memory.used", 2**20, 256 * 2**20),
    ("temperature_celsius", "temperature.gpu", 1, 5),
    ("power_watts", "power.draw.instant", 1, 150),
    ("power_limit_watts", "enforced.power.limit", 1, 0.5),
    ("sm_clock_hertz", "clocks.sm", 1e6, 400e6),
    ("busy_ratio", "utilization.gpu", 0.01, 0.5),
]
ECC = [("corrected", "ecc.errors.corrected.volatile.total"),
       ("uncorrected", "ecc.errors.uncorrected.volatile.total")]


def nvidia_smi(fields):
    text = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=" + ",".join(fields),
                           "--format=csv,noheader,nounits"],
                          check=True, capture_output=True, text=True).stdout
    return dict(zip(fields, text.strip().split(", ")))


def scrape(address):
    begin = time.monotonic()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.findall(r'^tessera_gpu_(\w+)\{device="cuda:0"(?:,(?:reason|kind)="(\w+)")?\} (\S+)$',
                       text, re.MULTILINE)
    return {(name, label): float(value) for name, label, value in found}, time.monotonic() - begin


def compare(address, what):
    ours, seconds = scrape(address)
    theirs = nvidia_smi([field for _, field, _, _ in FIGURES] + [field for _, field in ECC])
    print(f"{what}: a scrape of {1000 * seconds:.1f} ms")
    wrong = []
    for name, field, unit, apart in FIGURES:
        value, other = ours.get((name, "")), theirs[field]
        print(f"    {name}: {value}, nvidia-smi {field}: {other}")
        if other.replace(".", "").isdigit() and (value is None
                                                 or abs(value - float(other) * unit) > apart):
            wrong.append(name)
    for kind, field in ECC:
        value = ours.get(("memory_errors_total", kind))
        print(f"    memory_errors_total {kind}: {value}, nvidia-smi: {theirs[field]}")
        if theirs[field].isdigit() and value != float(theirs[field]):
            wrong.append(kind)
    print("    slowed down by: " + ", ".join(r for (name, r), v in ours.items()
                                             if name == "slowdown" and v) or "nothing")
    assert not wrong, f"{what}: {wrong}"
    return ours


def main(programs, folder):
    with open(f"{folder}/log", "w", encoding="utf-8") as log:
        server = subprocess.Popen([programs.server, "--device", "cuda", "--listen", "127.0.0.1:0",
                                   "--metrics-listen",
                                   "127.0.0.1:0", "--memory-limit", "8Gi"], stderr=log)
    try:
        while not (found := re.search(r"listening on (\S+)",
                                      open(f"{folder}/log", encoding="utf-8").read())):
            assert server.poll() is None, open(f"{folder}/log", encoding="utf-8").read()
            time.sleep(0.1)
        metrics = re.search(r"metrics at http://([\d.:]+)/",
                            open(f"{folder}/log", encoding="utf-8").read())[1]
        cli = [programs.cli, "--server", found[1]]
        time.sleep(1)
        compare(metrics, "idle")
        subprocess.run([*cli, "put", "--name", "x", "--random", "normal", "--shape", "8192x8192"],
                       check=True)
        load = subprocess.Popen(["sh", "-c", 'while "$@" >/dev/null; do :; done', "-", *cli,
                                 "bench", "matmul", "x", "x",
                                 "--strategy", "warp_tiled_tma"])
        try:
            time.sleep(8)
            busy = compare(metrics, "at work")
            assert busy["busy_ratio", ""] > 0.2, busy
            print(subprocess.run([*cli, "top", "--once", "--metrics", f"http://{metrics}"],
                                 check=True, capture_output=True,
                                 text=True).stdout)
        finally:
            load.kill()
        times = sorted(scrape(metrics)[1] for _ in range(50))
        print(f"50 scrapes: median {1000 * times[25]:.2f} ms, slowest {1000 * times[-1]:.2f} ms")
    finally:
        server.terminate()
        server.wait(60)
    print("as nvidia-smi says")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--cli", required=True)
    with tempfile.TemporaryDirectory() as place:
        main(parser.parse_args(), place)

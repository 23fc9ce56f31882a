#!/usr/bin/env python3
"""Times `threshold` and torch.topk in interleaved rounds, on the same GPU and with the same shapes.

usage: top_k_peers.py BIN/strategy_bench [--rounds 5]

A result is the median of the rounds, and each of torch's rounds is the median of its calls. Both
are timed with CUDA events, from the first to the last kernel, and the device is held until the host
has enqueued all kernels. Operands are normally distributed random f32 values that are not in any
cache. torch sorts its results, as Tessera does. The script prints microseconds, GB/s of x, and the
ratio of torch's time to ours.
"""

import json
import os
import statistics
import subprocess
import tempfile

import torch

import rounds

SHAPES = ("1024x1048576", "8x16777216", "64x4096")
KS = ("10", "100")
HOLD_CYCLES = 400_000  # of the device's clock; longer than the host takes to enqueue one call
CACHES = 256 << 20  # bytes: more than three times the largest L2


def bench_round(binary):
    """Runs the benchmark once. Returns the microseconds of `threshold` by (shape, k)."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "times.json")
        subprocess.run(
            [
                binary,
                f"--benchmark_filter=^top_k_({'|'.join(KS)})/threshold/f32/({'|'.join(SHAPES)})/",
                f"--benchmark_out={path}",
                "--benchmark_out_format=json",
                "--benchmark_min_time=0.05",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with open(path, encoding="utf-8") as file:
            runs = json.load(file)["benchmarks"]
    times = {}
    for run in runs:
        operation, _, _, shape, *_ = run["name"].split("/")
        times[shape, operation.rpartition("_")[2]] = run["real_time"]
    return times


def torch_round(shape, k, calls=20):
    """Returns the microseconds of one call of torch.topk."""
    rows, n = map(int, shape.split("x"))
    count = 1 + CACHES // (4 * rows * n)
    operands = [torch.randn(rows, n, device="cuda") for _ in range(count)]
    times = []
    for call in range(-3, calls):  # the first calls are a warm-up
        us = rounds.torch_us(
            lambda: torch.topk(operands[call % count], int(k), dim=1, sorted=True),
            before=lambda: torch.cuda._sleep(HOLD_CYCLES),
        )
        if call >= 0:
            times.append(us)
    del operands
    torch.cuda.empty_cache()  # leaves the device's memory to the benchmark
    return statistics.median(times)


def main():
    parser = rounds.parser(__doc__)
    parser.add_argument("bench")
    options = parser.parse_args()
    cases = [(shape, k) for shape in SHAPES for k in KS]
    ours, theirs = ({case: [] for case in cases} for _ in range(2))
    for _ in range(options.rounds):
        for case, time in bench_round(options.bench).items():
            ours[case].append(time)
        for case in cases:
            theirs[case].append(torch_round(*case))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'shape':>14} {'k':>5} {'threshold us':>13} {'GB/s':>7} {'torch us':>10} {'ratio':>6}")
    for shape, k in cases:
        rows, n = map(int, shape.split("x"))
        mine, other = statistics.median(ours[shape, k]), statistics.median(theirs[shape, k])
        rate = 4 * rows * n / mine / 1000
        print(f"{shape:>14} {k:>5} {mine:13.1f} {rate:7.0f} {other:10.1f} {other / mine:6.2f}")


if __name__ == "__main__":
    main()

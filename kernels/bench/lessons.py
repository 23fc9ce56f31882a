#!/usr/bin/python3
"""Measures the lessons of kernels/lessons on this machine's GPU, and writes their rates, and what
the hardware counts in their kernels, to a JSON file that report.py reads.

usage: lessons.py FOLDER --out docs/measured/lessons_h200.json --caption "NVIDIA H200, driver 580"

FOLDER has the lessons' programs, for example build/bin. A rate is the median of five runs of a
program. The counters come from Nsight Compute (ncu), for the program's second launch of its first
kernel; the driver must let this user read them.
"""

import argparse
import csv
import json
import pathlib
import re
import statistics
import subprocess

LESSONS = pathlib.Path(__file__).resolve().parents[1] / "lessons"
RUNS = 5
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "sectors": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "threads": "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}


def rate_of(program):
    """Returns the first rate that the program prints, in bytes or operations per second."""
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    number, unit = re.search(r"([\d.]+) (GB/s|TFLOP/s)", text).groups()
    return float(number) * UNITS[unit]


def counters_of(program):
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--launch-skip", "1"]
    command += ["--launch-count", "1", "--metrics", ",".join(METRICS.values()), program]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # After the program's own output come a line of names, a line of units and a line of values.
    names, _, values = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    found = dict(zip(names, values))
    row = {key: float(found[name].replace(",", "")) for key, name in METRICS.items()}
    row["us"] /= 1000  # ncu counts nanoseconds
    return {key: float(f"{value:.6g}") for key, value in row.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--out", required=True)
    parser.add_argument("--caption", required=True)
    options = parser.parse_args()
    rows = []
    for source in sorted(LESSONS.glob("*_*.cu")):
        program = str(pathlib.Path(options.folder).resolve() / source.stem)
        rate = statistics.median(rate_of(program) for _ in range(RUNS))
        rows.append({"lesson": source.stem, "rate": rate} | counters_of(program))
        print(rows[-1])
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{{\n "caption": {json.dumps(options.caption)},\n "rows": [\n{lines}\n ]\n}}\n'
    pathlib.Path(options.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

#!/bin/bash
# Prints a table of hardware counters for the kernel of each lesson, as Nsight Compute (ncu) counts
# them in the lesson's second launch. The driver must let this user read counters.
#
#   kernels/bench/lesson_counters.sh [FOLDER]     FOLDER has the lessons' programs; default: build/bin
set -euo pipefail
cd "$(dirname "$0")/../lessons"
folder=$(cd ../.. && realpath "${1:-build/bin}")

metrics=(
  "sectors per request" l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio
  "bank conflicts" l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum
  "occupancy, %" sm__warps_active.avg.pct_of_peak_sustained_active
  "DRAM, % of peak" dram__throughput.avg.pct_of_peak_sustained_elapsed
  "L2, % of peak" lts__throughput.avg.pct_of_peak_sustained_elapsed
)
heading="| lesson |" line="|---|" names=()
for ((i = 0; i < ${#metrics[@]}; i += 2)); do
  heading+=" ${metrics[i]} |" line+="---|"
  names+=("${metrics[i + 1]}")
done
printf '%s\n' "$heading" "$line"
for file in sum_*.cu product_*.cu hopper_*.cu; do
  lesson=${file%.cu}
  # After the program's own output come a line of names, a line of units and a line of values.
  ncu --csv --page raw --print-units base --launch-skip 1 --launch-count 1 \
    --metrics "$(IFS=, && echo "${names[*]}")" "$folder/$lesson" | python3 -c '
import csv, sys
rows = list(csv.reader(line for line in sys.stdin if line.startswith("\"")))
values = dict(zip(rows[0], rows[2]))
print("|", " | ".join([sys.argv[1]] + [values[name] for name in sys.argv[2:]]), "|")
' "[$lesson]($file)" "${names[@]}"
done

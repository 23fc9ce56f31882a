#!/usr/bin/env bash
# Checks with the real profilers what docs/traces.md says about them. Nsight Compute sees only the
# kernels of the selected range (NVTX), and none outside the window that SIGUSR1 opens. Nsight
# Systems has the same window. Needs a GPU whose counters the user may read, and at least one of the
# two profilers. CI does not run it.
#
# usage: profilers.sh SERVER CLI [FOLDER]     the programs, and where reports go
set -euo pipefail

readonly server=$1 cli=$2 out=${3:-$(mktemp -d)}
readonly address=unix:$out/socket
PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$out"
say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'profilers.sh: %s\n' "$*" >&2
  tail -n 30 "$out"/*.log >&2 || true
  exit 1
}
tessera() { "$cli" --server "$address" "$@"; }

profiler='' pid=''
finish() {
  if [[ -n $pid ]]; then kill "$pid" 2>/dev/null || true; fi
  if [[ -n $profiler ]]; then kill "$profiler" 2>/dev/null || true; fi
  rm -f "$out/socket"
}
trap finish EXIT

# start NAME PROFILER...: starts the server under a profiler, with two arrays.
start() {
  local name=$1
  shift
  rm -f "$out/socket" "$out/pid"
  # The shell becomes the server, so that its pid is known.
  # shellcheck disable=SC2016
  "$@" sh -c 'echo $$ >"$1"; shift; exec "$@"' - "$out/pid" "$server" --listen "$address" --device cuda \
    --memory-limit 1Gi --no-warm-up >"$out/$name.log" 2>&1 &
  profiler=$!
  for _ in {1..600}; do
    if [[ -S $out/socket ]] && tessera health >/dev/null 2>&1; then break; fi
    kill -0 "$profiler" 2>/dev/null || fail "$name: no server"
    sleep 0.1
  done
  pid=$(<"$out/pid")
  tessera put --name x --random ones --shape 100000 >/dev/null
  tessera put --name m --random ones --shape 64x64 >/dev/null
}
stop() {
  kill "$pid"
  wait "$profiler" || fail "$1: ended with $?"
  pid='' profiler=''
}
# These calls run three kernels with distinct names.
dot() { tessera dot x x --strategy warp_shuffle >/dev/null; }           # DotWarpShuffle
reduce() { tessera reduce sum x --strategy atomic >/dev/null; }         # ReduceAtomic
matmul() { tessera matmul m m --strategy shared_tiled >/dev/null; }     # MatmulSharedTiled
# window: opens a window and waits for it, or closes it.
window() {
  local before
  before=$(grep -c 'profilers' "$out/$1.log" || true)
  kill -USR1 "$pid"
  for _ in {1..100}; do
    if (($(grep -c 'profilers' "$out/$1.log" || true) > before)); then return; fi
    sleep 0.1
  done
  fail "$1: SIGUSR1 did nothing"
}
# kernels NAME: prints which of the three kernels ncu has seen.
kernels() { grep -oE '==PROF== Profiling "(Dot|Reduce|Matmul)[A-Za-z]*' "$out/$1.log" | sed 's/.*"//' | sort -u | paste -sd ' '; }
# saw NAME KERNELS: checks what `kernels` prints.
saw() {
  echo "    $(kernels "$1")"
  [[ $(kernels "$1") == "$2" ]] || fail "$1: not $2"
}

if command -v ncu >/dev/null; then
  ncu --version | sed -n '$s/^/    /p'
  say "Ranges: only the kernels of a Reduce"
  start ncu-range ncu --nvtx --nvtx-include "tessera@Reduce/" --section LaunchStats
  dot
  reduce
  matmul
  stop ncu-range
  saw ncu-range ReduceAtomic

  say "A window: only what is called in it"
  start ncu-window ncu --profile-from-start off --nvtx --section LaunchStats
  dot
  window ncu-window
  reduce
  window ncu-window
  matmul
  stop ncu-window
  saw ncu-window ReduceAtomic
else
  say "no ncu here"
fi

if command -v nsys >/dev/null; then
  nsys --version | sed 's/^/    /'
  say "Nsight Systems: a report of the window, with ranges and kernels"
  start nsys nsys profile --trace cuda,nvtx --capture-range cudaProfilerApi --capture-range-end repeat \
    --force-overwrite true -o "$out/window"
  dot
  window nsys
  reduce
  window nsys
  stop nsys
  report=$(find "$out" -name 'window*.nsys-rep' | sort | head -n 1)
  [[ -n $report ]] || fail "no report"
  nsys stats --force-export true -r nvtx_sum,cuda_gpu_kern_sum "$report" >"$out/nsys-stats.log" 2>&1 || true
  grep -E 'tessera:Reduce|ReduceAtomic' "$out/nsys-stats.log" | cut -c 1-150 || fail "no ranges in the report"
else
  say "no nsys here"
fi
say "As documented"

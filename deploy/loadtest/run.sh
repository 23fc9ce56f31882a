#!/usr/bin/env bash
# Drives a running server with ghz, one case after the other, and fails when any call failed. `./dev
# loadtest` calls it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly root
readonly here=deploy/loadtest

usage() {
  cat <<'END'
usage: run.sh --target HOST:PORT --cli PATH [--seconds N] [--cases "dot reduce ..."] [--out DIR]
       run.sh --check        only look whether ghz is there

  --target    the server
  --cli       the program `tessera`, which puts the operands on the server
  --seconds   how long each case runs; 10 unless told
  --cases     names of the JSON files beside this script; all four unless told
  --out       where ghz's reports go; build/loadtest unless told
END
}

die() {
  printf 'loadtest: %s\n' "$*" >&2
  exit 1
}

target='' cli='' seconds=10 cases='dot reduce matmul upload' out=build/loadtest check=false
while (($#)); do
  case $1 in
    --check)
      check=true
      shift
      continue
      ;;
    --help)
      usage
      exit
      ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  (($# > 1)) || die "$1 needs a value"
  case $1 in
    --target) target=$2 ;;
    --cli) cli=$2 ;;
    --seconds) seconds=$2 ;;
    --cases) cases=$2 ;;
    --out) out=$2 ;;
    *)
      usage >&2
      die "unknown flag $1"
      ;;
  esac
  shift 2
done

cd "$root"
ghz=$(type -P "${GHZ:-ghz}") ||
  die "no ghz on the PATH or in GHZ: releases are at github.com/bojand/ghz (0.121 or newer)"
if $check; then exit; fi
[[ -n $target && -n $cli ]] || die "--target and --cli are needed; see --help"
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--seconds takes whole seconds, not \"$seconds\""

echo "==> Put operands on $target"
put=("$cli" --server "$target" put --random normal --dtype f32 --replace --ttl 1h)
"${put[@]}" --seed 1 --shape 4096 --name load/x
"${put[@]}" --seed 2 --shape 4096 --name load/y
"${put[@]}" --seed 3 --shape 512x512 --name load/matrix

mkdir -p "$out"
reports=()
for case in $cases; do
  [[ -f $here/$case.json ]] || die "no case \"$case\" in $here"
  echo "==> $case for $seconds s"
  reports+=("$out/$case.json")
  rm -f "$out/$case.json"
  # --duration-stop wait: calls under way when the time is up still count, instead of failing with
  # their connection. timeout: a server that no longer answers must not hold the test for ever.
  timeout $((seconds + 60)) "$ghz" --config "$here/$case.json" --duration "${seconds}s" \
    --duration-stop wait --format json --output "$out/$case.json" "$target" ||
    die "ghz ended with exit code $? in case \"$case\""
done
/usr/bin/python3 "$here/report.py" "${reports[@]}"

#!/usr/bin/env bash
# Drives a running server with ghz, one case of slo.toml after the other, and fails if an objective
# is missed. `./dev loadtest` calls it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

usage() {
  cat <<'END'
usage: run.sh --target HOST:PORT --cli PATH [FLAG...]
       run.sh --check        only check that ghz is available

  --target    the server
  --cli       the program `tessera`, which puts the operands on the server
  --seconds   how long each case runs; default: 10
  --cases     names of cases, as in "dot-latency mixed"; default: all except the optional ones
  --slo       the file with patterns, cases and objectives; default: slo.toml next to this script
  --out       where reports go; default: build/loadtest
  --compare   the folder of an earlier report: a result that is worse by more than slo.toml allows
              is a failure

As for `tessera`, TESSERA_CLIENT_TLS_CA, _CERT, _KEY and _SERVER_NAME turn TLS on, and TESSERA_TOKEN
or TESSERA_TOKEN_FILE gives the caller's token, whose role must allow writing. The token is sent to
another host only over TLS. Reports do not contain it.
END
}

die() {
  printf 'loadtest: %s\n' "$*" >&2
  exit 1
}

target='' cli='' seconds=10 cases='' slo=$here/slo.toml out=build/loadtest compare=() check=false
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
    --slo) slo=$2 ;;
    --out) out=$2 ;;
    --compare) compare=(--compare "$2") ;;
    *)
      usage >&2
      die "unknown flag $1"
      ;;
  esac
  shift 2
done

ghz=$(type -P "${GHZ:-ghz}") ||
  die "there is no ghz on the PATH or in GHZ: get 0.121 or newer from github.com/bojand/ghz"
if $check; then exit; fi
[[ -n $target && -n $cli ]] || die "--target and --cli are required; see --help"
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--seconds takes whole seconds, not \"$seconds\""
if ((${#compare[@]})) && [[ ! -f ${compare[1]}/summary.json ]]; then
  die "${compare[1]} has no summary.json of an earlier report"
fi
[[ ! $out -ef ${compare[1]:-} ]] || die "--out and --compare are the same folder"

# This folder has files with the token, because ghz repeats its metadata in its report.
private=$(mktemp -d)
trap 'rm -rf "$private"' EXIT
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.svg "$out"/report.md
planned=$(/usr/bin/python3 "$here/plan.py" --slo "$slo" --out "$out" --private "$private" \
  --seconds "$seconds" --cases "$cases")

"$cli" --server "$target" --json info >"$out/server.json"
echo "==> Put operands on $target"
put=("$cli" --server "$target" put --random normal --dtype f32 --replace --ttl 24h)
"${put[@]}" --seed 1 --shape 4096 --name load/x
"${put[@]}" --seed 2 --shape 4096 --name load/y
"${put[@]}" --seed 3 --shape 512x512 --name load/matrix

# run_ghz NAME: uses timeout, because a server that stops answering must not hang the test.
run_ghz() {
  timeout $((seconds + 60)) "$ghz" --config "$private/$1.config.json" --output "$private/$1.json" \
    "$target" || die "ghz ended with exit code $? in $1"
  /usr/bin/python3 -c 'import json, sys
report = json.load(open(sys.argv[1]))
report["options"].pop("metadata", None)
json.dump(report, open(sys.argv[2], "w"))' "$private/$1.json" "$out/$1.json" ||
    die "ghz wrote no report of $1"
  rm "$private/$1.json"
}

while read -r -a names; do
  echo "==> ${names[0]} for $seconds s"
  pids=()
  for name in "${names[@]:1}"; do
    run_ghz "$name" </dev/null &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
done <<<"$planned"
/usr/bin/python3 "$here/report.py" "$out" --slo "$slo" "${compare[@]}"

#!/usr/bin/env bash
# Runs a container image as an operator does, and checks its promises: size, labels, user,
# capabilities, read-only root, health, variables and flags, stop under load, kill, restart. Needs a
# container engine and an image that ./dev image has built. CI does not run it. Containers use the
# host's network, so an engine without bridges suffices.
#
# usage: image.sh [IMAGE] [DEVICE]     default: tessera:cpu and cpu; docker reads DOCKER_HOST
#        image.sh layers [FLAG...]     which steps of the build a changed .cc file repeats; FLAGs go
#                                      to docker build, as for ./dev image
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

name=tessera-by-hand-$$
folder=
finish() {
  docker rm -f "$name" >/dev/null 2>&1 || true
  if [[ -n $folder ]]; then rm -rf "$folder"; fi
}
trap finish EXIT

say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'image.sh: %s\n' "$*" >&2
  docker logs "$name" 2>&1 | tail -n 20 >&2 || true
  exit 1
}

layers() {
  folder=$(mktemp -d)
  git archive HEAD | tar -xf - -C "$folder"
  local file
  for file in server/clock.cc kernels/choose/pace.cc; do
    echo "// changed at $(date +%s)" >>"$folder/$file"
    say "$file is changed; repeated steps:"
    (cd "$folder" && DOCKER_BUILDKIT=0 docker build -f deploy/Dockerfile -t tessera:by-hand "$@" .) \
      >"$folder/build.log" 2>&1 || fail "$(tail -n 20 "$folder/build.log")"
    awk '/^Step /{ step = $0 }
      /^ ---> (Running in|[0-9a-f]+$)/ && !/cache/ { if (step ~ /: (RUN|COPY)/ && step != last) ran[step] = 1 }
      /^ ---> Using cache/ { delete ran[step]; last = step }
      END { for (step in ran) print "    " substr(step, 1, 100) }' "$folder/build.log" | sort -V
  done
  docker rmi tessera:by-hand >/dev/null
}

if [[ ${1:-} == layers ]]; then
  shift
  layers "$@"
  exit
fi

image=${1:-tessera:cpu}
device=${2:-cpu}
port=$(python3 -c 'import socket
with socket.socket() as s: s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
server=127.0.0.1:$port
restricted=(--read-only --cap-drop ALL --security-opt no-new-privileges --network host)
if [[ $device != cpu ]]; then restricted+=(--gpus all); fi

# run [DOCKER FLAG...] -- [SERVER FLAG...]
run() {
  local docker_flags=()
  while [[ $1 != -- ]]; do
    docker_flags+=("$1")
    shift
  done
  shift
  docker rm -f "$name" >/dev/null 2>&1 || true
  docker run -d --name "$name" "${restricted[@]}" -e "TESSERA_DEVICE=$device" "${docker_flags[@]}" \
    --health-interval 1s --health-start-period 60s "$image" "$@" >/dev/null
}
of_container() { docker inspect -f "$1" "$name"; }
wait_healthy() {
  for _ in {1..600}; do
    if [[ $(of_container '{{.State.Health.Status}}') == healthy ]]; then return; fi
    [[ $(of_container '{{.State.Running}}') == true ]] || fail "it ended with $(of_container '{{.State.ExitCode}}')"
    sleep 0.1
  done
  fail "not healthy: $(of_container '{{json .State.Health}}')"
}
cli() { docker run --rm "${restricted[@]}" --entrypoint tessera "$image" --server "$server" "$@"; }

say "Size and labels"
size=$(docker image inspect -f '{{.Size}}' "$image")
echo "    $((size / 1000000)) MB"
((size < 300000000)) || fail "larger than 300 MB"
docker image inspect -f '{{range $k, $v := .Config.Labels}}{{printf "    %s=%s\n" $k $v}}{{end}}' "$image"
[[ $(docker image inspect -f '{{index .Config.Labels "org.opencontainers.image.version"}}' "$image") == \
  $(sed -nE 's/^project\(tessera VERSION ([0-9.]+).*/\1/p' CMakeLists.txt) ]] || fail "another version"

say "A variable says where it listens; flags of the user leave that alone"
run -e "TESSERA_LISTEN=$server" -- --queue 64
wait_healthy
[[ $(docker logs "$name" 2>&1) == *"queue of 64"*"listening on $server"* ]] || fail "not as told"
pid=$(of_container '{{.State.Pid}}')
status=$(</proc/"$pid"/status)
[[ $status == *"Uid:"$'\t'"65532"* && $status == *"CapEff:"$'\t'"0000000000000000"* &&
  $status == *"NoNewPrivs:"$'\t'"1"* ]] || fail "privileges: $status"
[[ $(awk '$5 == "/" { print $6 }' /proc/"$pid"/mountinfo) == ro* ]] || fail "a writable root"
echo "    user 65532, no capabilities, read-only root"
cli put --name x --random ones --shape 1000
[[ $(cli dot x x) == 1000 ]] || fail "a wrong answer"

say "A flag says where it listens; the health check follows"
run -e TESSERA_LISTEN=127.0.0.1:1 -- --listen "$server"
wait_healthy

say "No shell is needed"
run -e "TESSERA_LISTEN=$server" -v /dev/null:/usr/bin/sh:ro -v /dev/null:/usr/bin/dash:ro \
  -v /dev/null:/usr/bin/bash:ro --
wait_healthy

say "Stopped under load"
folder=$(mktemp -d)
cli put --name x --random ones --shape 1000 >/dev/null
docker run --rm --network host --entrypoint sh "$image" -c \
  "while tessera --server $server dot x x >/dev/null; do echo; done" >"$folder/answers" 2>"$folder/load" &
load=$!
while [[ $(wc -l <"$folder/answers") -lt 20 ]]; do sleep 0.1; done
start=$(date +%s%N)
docker stop -t 45 "$name" >/dev/null
echo "    after $((($(date +%s%N) - start) / 1000000)) ms, exit code $(of_container '{{.State.ExitCode}}')," \
  "$(wc -l <"$folder/answers") calls answered"
[[ $(of_container '{{.State.ExitCode}}') == 0 ]] || fail "not stopped in order"
wait "$load" || true
grep -q "UNREACHABLE\|DRAINING\|UNAVAILABLE" "$folder/load" || fail "the last call: $(<"$folder/load")"

say "Killed and restarted"
docker start "$name" >/dev/null
wait_healthy
docker kill "$name" >/dev/null
[[ $(of_container '{{.State.ExitCode}}') == 137 ]] || fail "killed: $(of_container '{{.State.ExitCode}}')"
docker start "$name" >/dev/null
wait_healthy
if cli info x >/dev/null 2>&1; then fail "a buffer survived"; fi

say "A mistake is said at once"
run -- --queue none
[[ $(docker wait "$name") == 1 ]] || fail "not exit code 1"
docker logs "$name" 2>&1 | sed 's/^/    /'
say "As promised"

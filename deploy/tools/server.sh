# shellcheck shell=bash disable=SC2034,SC2154
# Commands that run a server: demo and loadtest. Sourced by ./dev.

# Starts a server on a free loopback port, and sets $server. The server is stopped when the script
# ends, for whatever reason.
start_server() {
  find_cublas
  work=$(mktemp -d)
  local log=$work/server.log give_up=$((SECONDS + 60))
  "$built/bin/tessera-server" --listen 127.0.0.1:0 --device auto >"$log" 2>&1 &
  server_pid=$!
  while true; do
    server=$(grep -oE '127\.0\.0\.1:[1-9][0-9]*' "$log" | head -n 1) || true
    if [[ -n $server ]] && "$built/bin/tessera" --server "$server" health >/dev/null 2>&1; then break; fi
    if ! kill -0 "$server_pid" 2>/dev/null; then
      tail -n 20 "$log" | sed 's/^/    | /'
      server_pid=
      die "the server exited during startup"
    fi
    ((SECONDS < give_up)) || die "the server was not ready within 60 s: $(tail -n 1 "$log")"
    sleep 0.1
  done
}

stop_server() {
  local status=0
  kill "$server_pid"
  wait "$server_pid" || status=$?
  server_pid=
  if ((status != 0)); then
    tail -n 20 "$work/server.log" | sed 's/^/    | /'
    die "the server ended with exit code $status"
  fi
}

# Prints which device a server with --device auto uses, and why.
describe_device() {
  local devices
  devices=$(<"$built/devices.txt")
  if ! has_gpu; then
    echo "there is no GPU here, so it uses the CPU device"
  elif [[ $devices == CUDA* ]]; then
    echo "it uses the CUDA device"
  else
    echo "it was built for the $devices, so it uses the CPU device"
  fi
}

demo() {
  local python status=0
  need tessera-server tessera
  python=$(find_python)
  start_server
  say "Server at $server; $(describe_device)"
  "$python" client/demo/demo.py --cli "$built/bin/tessera" --server "$server" "$@" || status=$?
  stop_server
  if ((status != 0)); then die "the demo failed with exit code $status"; fi
}

loadtest() {
  local flag target=""
  for flag in "$@"; do
    if [[ $flag == --target* ]]; then target=$flag; fi
  done
  if [[ -n $target ]]; then
    need tessera
    deploy/loadtest/run.sh --cli "$built/bin/tessera" "$@"
  else
    deploy/loadtest/run.sh --check
    need tessera-server tessera
    start_server
    say "Server at $server; $(describe_device)"
    deploy/loadtest/run.sh --cli "$built/bin/tessera" --target "$server" "$@"
    stop_server
  fi
}

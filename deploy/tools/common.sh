# shellcheck shell=bash disable=SC2034,SC2154
# What every command of ./dev needs: messages, steps with a log, and packages. Sourced by ./dev.

# Debian 12 and Ubuntu 24.04 have all of these, in versions with which the same source builds.
readonly packages=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  libspdlog-dev libcli11-dev nlohmann-json3-dev libopenblas-dev libisal-dev libssl-dev
  libgtest-dev libgmock-dev
  python3 python3-numpy python3-grpcio python3-protobuf python3-yaml openssl
  python3-dask python3-distributed python3-build python3-installer python3-setuptools python3-wheel python3-venv mypy
)
# $built is the folder with bin/, gpu_tests.txt and devices.txt. Outside a bundle, build() sets it.
if [[ -f CMakeLists.txt ]]; then
  readonly bundled=false logs=$root/build/logs
  built=''
else
  readonly bundled=true logs=$root/logs
  built=$root
fi
jobs=$(nproc)
readonly jobs

# These settings let ccache share results between checkouts in different folders, also for files
# with a precompiled header.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime

say() { printf '==> %s\n' "$*"; }

die() {
  printf 'dev: %s\n' "$*" >&2
  exit 1
}

step_pid=
server_pid=
work=

cleanup() {
  if [[ -n $step_pid ]]; then kill -- "-$step_pid" 2>/dev/null || true; fi
  if [[ -n $server_pid ]]; then kill "$server_pid" 2>/dev/null || true; fi
  if [[ -n $work ]]; then rm -rf "$work"; fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step LOG TITLE COMMAND...: runs the command with its output in a log, shows where the log is, and
# says how long it took. A failure ends the script with the log's last lines and the reason.
step() {
  local log=$logs/$1.log title=$2 start=$SECONDS next=$((SECONDS + 30)) status=0
  shift 2
  mkdir -p "$logs"
  say "$title"
  # The command gets its own process group, so that an interrupted build also stops its compilers.
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  step_pid=$!
  set +m
  while kill -0 "$step_pid" 2>/dev/null; do
    if [[ -t 1 ]]; then
      printf '\r\033[K    %.90s' "$(tail -n 1 "$log")"
    elif ((SECONDS >= next)); then
      printf '    %d s: %.90s\n' $((SECONDS - start)) "$(tail -n 1 "$log")"
      next=$((SECONDS + 30))
    fi
    sleep 0.2
  done
  wait "$step_pid" || status=$?
  step_pid=
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
  if ((status != 0)); then
    printf '    failed after %d s. The end of its log:\n' $((SECONDS - start))
    tail -n 40 "$log" | sed 's/^/    | /'
    die "\"$title\" failed with exit code $status; whole log: $log"
  fi
  printf '    %d s\n' $((SECONDS - start))
}

# Installs those of the named packages that are missing. On systems other than Debian and Ubuntu, it
# does nothing, and CMake reports what is missing.
install_packages() {
  command -v dpkg-query >/dev/null || return 0
  local installed missing=() package sudo=() lock
  # One process at a time: apt-get waits for another apt-get that installs, but not for one that
  # updates its lists.
  mkdir -p "$logs"
  exec {lock}>"$logs/apt.lock"
  flock "$lock"
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
  for package in "$@"; do
    [[ $'\n'$installed$'\n' == *$'\n'"$package installed"$'\n'* ]] || missing+=("$package")
  done
  if ((${#missing[@]})); then install_missing; fi
  exec {lock}>&-
}

# Part of install_packages, whose variables it uses.
install_missing() {
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "these packages are missing, and installing them needs root or sudo: ${missing[*]}"
    # This asks for a password in the foreground.
    sudo true
    sudo=(sudo)
  fi
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
  step apt-update "Update the package lists" "${apt[@]}" update
  step apt-install "Install ${#missing[@]} packages: ${missing[*]}" \
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
}

# Prints the path of a Python that has NumPy, preferably the distribution's, not a version
# manager's.
find_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
      printf '%s\n' "$python"
      return
    fi
  done
  die "there is no python3 with NumPy; on Debian and Ubuntu, run apt-get install python3-numpy"
}

has_gpu() { [[ -e /dev/nvidiactl || -e /dev/dxg ]]; }

# Adds the folder of cuBLAS, which is loaded at run time, to LD_LIBRARY_PATH.
find_cublas() {
  local folder=${CUDA_HOME:-/usr/local/cuda}/lib64
  if [[ -e $folder/libcublas.so.13 ]]; then
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
  fi
}

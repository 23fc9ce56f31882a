# shellcheck shell=bash disable=SC2034,SC2154
# Configures and builds, for the devices of this machine or for all devices. Sourced by ./dev.

# Whether to build without CUDA even where nvcc is installed.
only_cpu=false

# choose_devices COMMAND [cpu]: sets only_cpu.
choose_devices() {
  case ${2:-} in
    cpu) only_cpu=true ;;
    '') ;;
    *) die "$1 takes cpu or nothing, not \"$2\"" ;;
  esac
}

# Prints the path of the nvcc to build with, or nothing if there is no CUDA 13 or newer.
find_nvcc() {
  local nvcc release
  nvcc=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin type -P nvcc) || return 0
  release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  if ((${release:-0} >= 13)); then printf '%s\n' "$nvcc"; fi
}

# Prints the architectures of the GPUs here in CMake's form ("90-real"), or nothing without
# nvidia-smi.
gpu_architectures() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    sed -nE 's/^([0-9]+)\.([0-9])$/\1\2-real/p' | sort -u | paste -sd ';' || true
}

# Prints the preset for programs that run here: native, for the devices of this machine, or release
# if other devices were requested. Each preset has its own folder, so builds do not undo each other.
preset_here() {
  if [[ ${CI:-} == true || -n ${TESSERA_CUDA_ARCHITECTURES:-} ]]; then
    echo release
  else
    echo native
  fi
}

# configure PRESET
configure() {
  local preset=$1 nvcc devices
  local options=(-DTESSERA_CUDA=OFF -DTESSERA_LONG="${TESSERA_LONG:-OFF}"
    -DCMAKE_UNITY_BUILD="${TESSERA_UNITY:-ON}")
  local architectures=${TESSERA_CUDA_ARCHITECTURES:-}
  nvcc=$(find_nvcc)
  if [[ $preset == asan || $preset == tsan || $preset == fuzz ]]; then
    devices="CPU only, with $preset"
  elif $only_cpu; then
    devices="CPU only"
  elif [[ -z $nvcc ]]; then
    devices="CPU only, because there is no nvcc 13 or newer"
  elif [[ $preset == native ]] && ! has_gpu; then
    devices="CPU only"
    say "There is no GPU here, so only the CPU device is built;" \
      "set TESSERA_CUDA_ARCHITECTURES or use ./dev build all to build more"
  else
    if [[ $preset == native ]]; then
      architectures=$(gpu_architectures)
    elif [[ -z $architectures && ${CI:-} == true ]]; then
      architectures=90
    fi
    options+=(-DTESSERA_CUDA=ON -DTESSERA_CUDA_CHECK="${TESSERA_CUDA_CHECK:-OFF}")
    export CUDACXX=$nvcc
    if [[ -n $architectures ]]; then
      options+=("-DCMAKE_CUDA_ARCHITECTURES=$architectures")
    else
      options+=(-U CMAKE_CUDA_ARCHITECTURES)
    fi
    devices="CUDA (${architectures:-80-real;90}) and CPU"
  fi
  step "configure-$preset" "Configure build/$preset; devices: $devices" \
    cmake --preset "$preset" "${options[@]}"
  printf '%s\n' "$devices" >"build/$preset/devices.txt"
}

# build PRESET [TARGET...]: builds the targets, or everything if none is named.
build() {
  local preset=$1 targets=()
  shift
  install_packages "${packages[@]}"
  configure "$preset"
  if (($#)); then targets=(--target "$@"); fi
  step "build-$preset" "Build ${*:-everything}" \
    cmake --build "build/$preset" -j "$jobs" "${targets[@]}"
  built=$root/build/$preset
  if [[ $preset == release || $preset == native ]]; then ln -sfn "$preset/bin" build/bin; fi
}

# Builds the targets that a command is about to run, except in a bundle, which has them.
need() { if ! $bundled; then build "$(preset_here)" "$@"; fi; }

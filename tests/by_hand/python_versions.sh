#!/usr/bin/env bash
# Runs the Python client with another host's Python, NumPy, grpcio and protobuf, as on a bare GPU
# host: its suites, the lines of README with the wheel, the examples, bench.py and peers.py. Needs
# no network and no protoc there.
#
# usage: python_versions.sh pack             makes build/python: the wheel
#        python_versions.sh run BIN [DEVICE [OUT]]
#          BIN: the folder of tessera-server and tessera, or build/bundle; OUT: for figures and pages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  sed -n 's/^# \(usage.*\)/\1/p' "$0" >&2
  exit 2
}
say() { printf '==> %s\n' "$*"; }

pack() {
  local out=build/python copy
  copy=$(mktemp -d)
  rm -rf "$out"
  mkdir -p "$out" "$copy/client"
  cp -R client/python "$copy/client/"
  cp -R proto "$copy/"
  rm -rf "$copy/client/python"/{build,dist,*.egg-info}
  /usr/bin/python3 -m build --wheel --no-isolation --outdir "$out" "$copy/client/python" \
    >/dev/null 2>&1
  rm -rf "$copy"
  say "$(du -sh "$out")"
}

work=
server=
finish() {
  if [[ -n $server ]]; then kill "$server" 2>/dev/null || true; fi
  if [[ -n $work ]]; then rm -rf "$work"; fi
}

# suite BIN NAME DEVICE: leaves NAME.log, and NAME.ok if the suite passes.
suite() {
  local bin=$1 name=$2 device=$3 only=()
  # The other cases need protoc and the tools that build wheels.
  if [[ $name == package ]]; then only=(-k tutorial -k examples -k peers -k reference); fi
  if timeout 300 python3 "tests/python_${name}_test.py" --server "$bin/tessera-server" \
    --device "$device" "${only[@]}" >"$work/$name.log" 2>&1; then
    touch "$work/$name.ok"
  fi
}

suites() {
  local bin=$1 device=$2 name failed=0
  # Suites that wait for products of several CPU seconds, or that test a CPU's errors, run in
  # parallel.
  local by_cpu=(lost_server misuse errors aio package)
  local by_device=(arrays elementwise masks programs array_api differences transfers tls)
  if python3 -c 'import distributed' 2>/dev/null; then by_cpu+=(dask); fi
  for name in "${by_cpu[@]}"; do suite "$bin" "$name" cpu & done
  for name in "${by_device[@]}"; do suite "$bin" "$name" "$device"; done
  wait
  for name in "${by_device[@]}" "${by_cpu[@]}"; do
    if [[ -e $work/$name.ok ]]; then
      printf '%-12s %s\n' "$name" "$(grep -E '^(Ran|OK|.* passed, )' "$work/$name.log" | tr '\n' ' ')"
    else
      failed=1
      printf '%-12s FAILED\n' "$name"
      tail -n 60 "$work/$name.log"
    fi
  done
  return $failed
}

# prepare VENV: makes an environment with the wheel. All further packages come from the host,
# possibly from an environment there.
prepare() {
  local venv=$1 hosts site
  hosts=$(python3 -c 'import sys; print([path for path in sys.path if path.endswith("-packages")])')
  python3 -m venv --system-site-packages --without-pip "$venv"
  site=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cat >"$site/sitecustomize.py" <<END
import sys
sys.path += [path for path in $hosts if path not in sys.path]
END
  if "$venv/bin/python3" -c 'import pip' 2>/dev/null; then
    "$venv/bin/python3" -m pip install --quiet --no-deps --no-index --disable-pip-version-check \
      build/python/*.whl
  else
    say "No pip here: the wheel is unpacked"
    python3 -m zipfile -e build/python/*.whl "$site"
  fi
  cp "$site/tessera/protocol.binpb" client/python/tessera/
}

run() {
  local bin=$1 device=${2:-cpu} out=${3:-} address give_up status=0
  work=$(mktemp -d)
  trap finish EXIT
  out=${out:-$work/out}
  mkdir -p "$out"
  if [[ -f $bin/programs.tar.xz ]]; then
    mkdir "$work/bundle"
    python3 -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as packed: packed.extractall(sys.argv[2])' "$bin/programs.tar.xz" "$work/bundle"
    bin=$work/bundle/bin
  fi
  bin=$(cd "$bin" && pwd)
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${CUDA_HOME:-/usr/local/cuda}/lib64
  prepare "$work/venv"
  export PATH=$work/venv/bin:$PATH

  say "Versions"
  python3 -c 'import pathlib, platform, google.protobuf, grpc, numpy, tessera
try:
    from ml_dtypes import __version__ as ml_dtypes
except ImportError:
    ml_dtypes = "is not here"
print("Python", platform.python_version(), "NumPy", numpy.__version__, "protobuf",
      google.protobuf.__version__, "grpcio", grpc.__version__, "ml_dtypes", ml_dtypes)
print("tessera", tessera.__version__, "in", pathlib.Path(tessera.__file__).parent)'

  say "Suites"
  suites "$bin" "$device" || status=1

  say "README's lines, from the wheel"
  "$bin/tessera-server" --listen 127.0.0.1:0 --device "$device" --shared-memory "$work/socket" \
    >"$work/server.log" 2>&1 &
  server=$!
  give_up=$((SECONDS + 60))
  until address=$(grep -oE '127\.0\.0\.1:[1-9][0-9]*' "$work/server.log" | head -n 1) && [[ -n $address ]]; do
    if ! kill -0 "$server" || ((SECONDS > give_up)); then
      tail "$work/server.log"
      exit 1
    fi
    sleep 0.1
  done
  python3 - "$address" <<'END' || status=1
import re, sys
code = re.search(r"```python\n(import numpy.*?)```", open("README.md").read(), re.S)[1]
exec(code.replace("127.0.0.1:50051", sys.argv[1]))
END

  say "DLPack with PyTorch"
  python3 - "$address" <<'END' || status=1
import sys
try:
    import torch
except ImportError:
    sys.exit(print("PyTorch is not here"))
import tessera as ts
with ts.connect(sys.argv[1]) as t:
    a = torch.arange(6.0).reshape(2, 3)
    x = t.put(a.T)
    assert torch.equal(torch.from_dlpack(x), a.T) and torch.equal(torch.from_dlpack(x + 1), a.T + 1)
    if torch.cuda.is_available():
        try:
            t.put(a.cuda())
        except TypeError as error:
            print("of a GPU:", error)
    print("PyTorch", torch.__version__, "on the host: both ways")
END

  say "Examples"
  if python3 -c 'import matplotlib' 2>/dev/null; then
    python3 client/python/render_examples.py "$address" \
      --caption "$(uname -m), $device, $(date +%F)" || status=1
    tar -czf "$out/pages.tar.gz" docs/examples
    # shellcheck disable=SC2016  # The backticks belong to Markdown.
    for page in docs/examples/*.md; do sed -n '/^```text/,/^```$/p' "$page"; done
  else
    for example in client/python/examples/*.py; do python3 "$example" "$address" || status=1; done
  fi

  say "bench.py"
  python3 client/python/bench.py "$address" --cli "$bin/tessera" --rounds 5 || status=1

  say "peers.py"
  # CPUs take minutes for the largest arrays.
  local peer=(--peer numpy --elements "4096,1048576")
  if python3 -c 'import cupy' 2>/dev/null && [[ $device != cpu ]]; then peer=(--peer cupy); fi
  python3 client/python/peers.py "$address" "${peer[@]}" --rounds 3 --json "$out/peers.json" || status=1
  return $status
}

case ${1:-} in
  pack) pack ;;
  run)
    (($# >= 2)) || usage
    run "${@:2}"
    ;;
  *) usage ;;
esac

#!/usr/bin/env bash
# Builds the bundle of the CPU device twice and compares every byte, mode and time. The two clones
# are in folders of different depths, and each has an empty cache of compiled files, and another
# umask, time zone and language. ccache keeps the folder's path out of the compiler's output
# (CCACHE_BASEDIR).
#
# usage: tests/by_hand/reproducible.sh     (two whole builds)
set -euo pipefail

root=$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build FOLDER UMASK TIME_ZONE LANGUAGE: lists the contents of the bundle, one line per file.
build() {
  git clone -q "$root" "$work/$1"
  (
    cd "$work/$1"
    umask "$2"
    env -u TESSERA_CUDA_ARCHITECTURES -u SOURCE_DATE_EPOCH CI=true \
      PATH=/usr/bin:/bin CCACHE_DIR="$work/cache/$1" TZ="$3" LC_ALL="$4" ./dev bundle cpu >&2
    cd build/bundle
    find . -printf '%m %T@ %p\n' | LC_ALL=C sort
    find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  )
}

build one 022 UTC C >"$work/first"
build another/folder 077 Asia/Tokyo C.UTF-8 >"$work/second"
if ! diff "$work/first" "$work/second"; then
  echo "the two bundles differ" >&2
  exit 1
fi
echo "the same bytes: $(sha256sum <"$work/first" | cut -c 1-16)"

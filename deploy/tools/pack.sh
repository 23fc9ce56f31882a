# shellcheck shell=bash disable=SC2034,SC2154
# Commands that pack programs: bundle, image and package. Sourced by ./dev.

# A bundle is copied to hosts without a package registry, so it must stay small.
readonly bundle_limit_mib=47

# Prints the shared libraries of the given programs that a bundle includes: all except those of
# glibc, gcc's C++ runtime and the GPU driver, which must be the host's own.
libraries_of() {
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/(lib(c|m|dl|rt|pthread|resolv|util|stdc\+\+|gcc_s|cuda)|ld-linux[^/]*)\.so'
}

# Prints the components of the given programs as an SPDX document: libraries in the bundle,
# libraries that the host must have, and the packages of the build.
bill_of_materials() {
  local owners host='libc6|libstdc\+\+6|libgcc-s1'
  owners=$(deploy/sbom.sh owners "$@")
  {
    grep -vxE "$host" <<<"$owners" | xargs deploy/sbom.sh rows CONTAINS
    grep -xE "$host" <<<"$owners" | xargs deploy/sbom.sh rows DEPENDS_ON
    deploy/sbom.sh rows BUILD_DEPENDENCY_OF "${packages[@]}"
    if [[ $(<"$built/devices.txt") == CUDA* ]]; then
      printf 'STATIC_LINK\tcuda-cudart\t%s\n' "$("$(find_nvcc)" --version | sed -n 's/.*, V//p')"
    fi
  } | deploy/sbom.sh document tessera-bundle "$(version)"
}

# bundle [cpu]: the same sources and packages give the same bytes, in any folder and for any user.
bundle() {
  if $bundled; then die "this is a bundle"; fi
  choose_devices bundle "$@"
  install_packages xz-utils
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
  export SOURCE_DATE_EPOCH
  build release
  local out=build/bundle packed=build/bundle-packed program library size programs=(tessera-server tessera)
  mapfile -t -O "${#programs[@]}" programs < <(cd build/release && cat gpu_tests.txt lessons.txt)
  for program in lost_device_test strategy_bench service_bench; do
    if [[ -x $built/bin/$program ]]; then programs+=("$program"); fi
  done
  say "Pack $out"
  rm -rf "$out" "$packed"
  mkdir -p "$out/client" "$packed/bin" "$packed/lib"
  # A suite is a link to the program that holds it.
  for program in "${programs[@]}"; do
    if [[ -L $built/bin/$program ]]; then
      cp -P "$built/bin/$program" "$packed/bin/"
      program=$(readlink "$built/bin/$program")
    fi
    [[ -e $packed/bin/$program ]] || strip -o "$packed/bin/$program" "$built/bin/$program"
  done
  while read -r library; do
    strip --strip-unneeded -o "$packed/lib/${library##*/}" "$library"
  done < <(libraries_of "${programs[@]/#/$built/bin/}")
  # The programs are compressed, because OpenBLAS alone, with its kernels for every processor, takes
  # 35 MiB uncompressed, 10 MiB with gzip and 4 MiB with xz. xz's output is the same for any number
  # of threads from two on.
  tar -C "$packed" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --mode=u=rwX,go=rX -cf - bin lib | xz -T$((jobs > 2 ? jobs : 2)) -6 >"$out/programs.tar.xz"
  cp -R client/demo "$out/client/"
  rm -rf "$out/client/demo/__pycache__" "$packed"
  cp dev build/release/gpu_tests.txt build/release/devices.txt "$out/"
  cp --parents deploy/tools/*.sh tests/tools/*.sh tests/tools/sanitize.txt "$out/"
  bill_of_materials "${programs[@]/#/$built/bin/}" >"$out/sbom.spdx.json"
  chmod -R u=rwX,go=rX "$out"
  find "$out" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  size=$(du -sm "$out" | cut -f 1)
  printf '    %s MiB: %s\n' "$size" "${programs[*]}"
  ((size <= bundle_limit_mib)) ||
    die "the bundle exceeds $bundle_limit_mib MiB: set fewer TESSERA_CUDA_ARCHITECTURES"
  say "Copy $out to a GPU host and run there: ./dev demo, ./dev gpu-test"
}

version() { sed -nE 's/^project\(tessera VERSION ([0-9.]+).*/\1/p' CMakeLists.txt; }

# image [cpu] [DOCKER FLAG...]
image() {
  command -v docker >/dev/null || die "docker is not installed"
  local tag=tessera toolchain=()
  if [[ ${1:-} == cpu ]]; then
    tag=tessera:cpu toolchain=(--build-arg TOOLCHAIN=ubuntu:24.04 --build-arg VISIBLE_GPUS=void)
    shift
  elif [[ ${1:-} == [!-]* ]]; then
    die "image takes cpu or nothing, then flags of docker build, but not \"$1\""
  fi
  docker build -f deploy/Dockerfile "${toolchain[@]}" \
    --build-arg "CUDA_ARCHITECTURES=${TESSERA_CUDA_ARCHITECTURES:-}" \
    --build-arg "VERSION=$(version)" \
    --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
    --build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
    -t "$tag" "$@" .
}

# package [cpu]: Debian packages of the server, the command line and the client library. Their
# version ends in +cuda or +cpu.
package() {
  if $bundled; then die "this is a bundle"; fi
  choose_devices package "$@"
  install_packages debhelper dpkg-dev lintian
  local tree name version
  build release tessera-server tessera manual
  version=$(version)+cpu
  if [[ $(<"$built/devices.txt") == CUDA* ]]; then version=$(version)+cuda; fi
  tree=$root/build/package/tessera-$version
  rm -rf "${tree%/*}"
  mkdir -p "$tree"
  cp -R deploy/debian "$tree/"
  for name in service sysusers; do
    cp "deploy/systemd/tessera-server.$name" "$tree/debian/"
  done
  cp deploy/systemd/server.toml "$tree/debian/"
  printf 'tessera (%s) unstable; urgency=medium\n\n  * CHANGELOG.md of the sources lists the changes.\n\n -- %s  %s\n' \
    "$version" "$(sed -n 's/^Maintainer: //p' deploy/debian/control)" \
    "$(git log -1 --format=%cD 2>/dev/null || date -R)" >"$tree/debian/changelog"
  TESSERA_BUILD=$built step package "Pack" \
    env -C "$tree" dpkg-buildpackage -b -us -uc
  # A publisher of the packages replaces the maintainers' address, which is an example.
  step lintian "Check the packages" \
    lintian --allow-root --fail-on error,warning --suppress-tags \
    bogus-mail-host,bogus-mail-host-in-debian-changelog "${tree%/*}"/*.changes
  say "Packages for $(<"$built/devices.txt"):"
  (cd build/package && ls -sh1 ./*.deb)
}

# Unpacks the programs of a bundle. A bare host may lack xz, but has Python to run the demo.
unpack() {
  local unpacked
  unpacked=$(mktemp -d -p "$root")
  if command -v xz >/dev/null; then
    xz -dc programs.tar.xz
  else
    python3 -c 'import lzma, shutil, sys
with lzma.open("programs.tar.xz") as packed: shutil.copyfileobj(packed, sys.stdout.buffer)'
  fi | tar -xf - -C "$unpacked" || die "neither xz nor python3 could unpack programs.tar.xz"
  mv "$unpacked/lib" "$unpacked/bin" .
  rmdir "$unpacked"
}

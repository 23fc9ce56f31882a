#!/usr/bin/env bash
# Installs the Debian packages in a Debian or Ubuntu tree, runs the server and the command line
# there, builds a program with the library, and removes everything again. Needs root and a network.
# CI does not run it.
#
# usage: package.sh TREE     after ./dev package; works on a copy of TREE, which is deleted again
#        debootstrap --variant=minbase bookworm TREE makes one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

(($# == 1)) || {
  sed -n 's/^# \(usage.*\)/\1/p' "$0" >&2
  exit 2
}
tree=$(mktemp -d /var/tmp/tessera-package.XXXXXX)
server=
finish() {
  if [[ -n $server ]]; then kill "$server" 2>/dev/null || true; fi
  umount "$tree/proc" "$tree/dev" 2>/dev/null || true
  rm -rf --one-file-system "$tree"
}
trap finish EXIT

say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'package.sh: %s\n' "$*" >&2
  exit 1
}
inside() { chroot "$tree" env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "$@"; }
# Lists the files of the packages outside the folders that every package changes.
files() { (cd "$tree" && find . -xdev -path ./proc -prune -o -path ./dev -prune -o -path ./tmp -prune \
  -o -path ./var -prune -o -type f -print | grep -i tessera | sort) || true; }

say "Copy the tree"
cp -a "$1/." "$tree"
mount -t proc proc "$tree/proc"
mount --bind /dev "$tree/dev"
cp /etc/resolv.conf "$tree/etc/"
cp build/package/*.deb "$tree/tmp/"
inside apt-get update -qq

say "Install server and command line"
inside bash -c 'apt-get install -qqy --no-install-recommends /tmp/tessera-server_*.deb /tmp/tessera_*.deb' \
  >"$tree/tmp/install.log" 2>&1 || fail "$(tail -n 20 "$tree/tmp/install.log")"
files | sed 's/^/    /' | grep -v man1/tessera-
inside id tessera >/dev/null || fail "there is no user tessera"
inside sh -c 'ldd /usr/bin/tessera-server /usr/bin/tessera | grep "not found"' && fail "missing libraries"
inside systemd-analyze --version >/dev/null 2>&1 &&
  inside systemd-analyze --man=no verify /lib/systemd/system/tessera-server.service

say "Run the server as its unit does, and call it"
inside install -d -o tessera -g tessera -m 700 /var/lib/tessera  # as StateDirectory= does
chroot --userspec=tessera "$tree" /usr/bin/tessera-server --config /etc/tessera/server.toml \
  >"$tree/tmp/server.log" 2>&1 &
server=$!
for _ in {1..300}; do
  if inside tessera health >/dev/null 2>&1; then break; fi
  kill -0 "$server" 2>/dev/null || fail "$(<"$tree/tmp/server.log")"
  sleep 0.1
done
inside tessera health
inside tessera put --name x --random normal --shape 1000x1000
inside tessera reduce sum_squares x
[[ $(ps -o user= -p "$server") != root ]] || fail "the server runs as root"
inside bash -c 'source /usr/share/bash-completion/completions/tessera; complete -p tessera'
kill "$server"
wait "$server" || fail "the server ended with $?"
server=

say "Build a program with the library"
inside bash -c 'apt-get install -qqy --no-install-recommends cmake g++ make pkg-config protobuf-compiler-grpc \
  /tmp/libtessera-dev_*.deb' >"$tree/tmp/install.log" 2>&1 || fail "$(tail -n 20 "$tree/tmp/install.log")"
mkdir "$tree/tmp/consumer"
cp tests/consumer/CMakeLists.txt "$tree/tmp/consumer/"
# shellcheck disable=SC2016
sed -n '/^```cpp$/,/^```$/{/^```/d;p}' docs/cpp.md >"$tree/tmp/consumer/main.cc"
inside bash -c 'cd /tmp/consumer && cmake -DMAIN=main.cc . && cmake --build . && ls -l consumer' \
  >"$tree/tmp/build.log" 2>&1 || fail "$(tail -n 20 "$tree/tmp/build.log")"
tail -n 1 "$tree/tmp/build.log"

say "Remove them"
inside apt-get remove -qqy tessera tessera-server libtessera-dev >/dev/null 2>&1
left=$(files)
[[ $left == ./etc/tessera/server.toml ]] || fail "left after remove: $left"
inside apt-get purge -qqy tessera-server >/dev/null 2>&1
left=$(files)
[[ -z $left ]] || fail "left after purge: $left"
say "Installed, run and removed"

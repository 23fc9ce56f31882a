# shellcheck shell=bash disable=SC2154
# ./dev fuzz: libFuzzer on one target. Sourced by ./dev.

# Inputs that reach new code are kept in build/fuzz/corpus/TARGET, and inputs that fail in
# build/fuzz/found/TARGET. A change that fixes a failure adds one of its inputs to
# tests/fuzz/corpus/TARGET.
fuzz() {
  local target=${1:-} seconds=${2:-60} corpus found
  [[ -f tests/fuzz/${target}_fuzz.cc ]] ||
    die "fuzz takes one of: $(basename -s _fuzz.cc -a tests/fuzz/*_fuzz.cc | paste -sd ' ')"
  install_packages clang-14 libclang-rt-14-dev
  build fuzz "${target}_fuzz"
  corpus=build/fuzz/corpus/$target
  found=build/fuzz/found/$target
  mkdir -p "$corpus" "$found"
  ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
    LSAN_OPTIONS=suppressions=$root/tests/lsan.supp:print_suppressions=0 \
    "build/fuzz/bin/${target}_fuzz" "$corpus" "tests/fuzz/corpus/$target" \
    -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 -artifact_prefix="$found/"
}

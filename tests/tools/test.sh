# shellcheck shell=bash disable=SC2034,SC2154
# ./dev test: every suite, optionally under a sanitizer. Sourced by ./dev.

# read_outcomes: reads ctest's report in JUnit format and prints a line "suite status tests failed
# skipped" for each suite. The numbers are those that a Python suite printed last, or 0.
read_outcomes() {
  awk '
    function figure(key) {
      if (!match($0, "(\\(|, )" key "=[0-9]+")) return 0
      key = substr($0, RSTART, RLENGTH)
      return substr(key, index(key, "=") + 1) + 0
    }
    match($0, /<testcase name="[^"]*"/) {
      suite = substr($0, RSTART + 16, RLENGTH - 17)
      status = match($0, / status="[^"]*"/) ? substr($0, RSTART + 9, RLENGTH - 10) : "other"
      tests = failed = skipped = 0
    }
    { sub(/^[ \t]*<system-out>/, "") }
    /^Ran [0-9]+ tests? in / { tests = $2 }
    /^(OK|FAILED|NO TESTS RAN)( \(.*\))?$/ {
      failed = figure("failures") + figure("errors") + figure("unexpected successes")
      skipped = figure("skipped")
    }
    /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ {
      failed = $3; skipped = $5; tests = $1 + failed + skipped
    }
    /<\/testcase>/ { print suite, status, tests, failed, skipped }'
}

# count_tests RESULTS: reads lines "suite run|fail|other [tests failed skipped]" and prints "N
# passed, N failed, N skipped", preceded by the Python suites that have skipped tests. A suite that
# left a GoogleTest report in RESULTS counts by its tests, a suite with numbers counts by its
# numbers, and any other suite counts as one.
count_tests() {
  awk -v results="$1" '
    function figure(line, name) {
      if (!match(line, " " name "=\"[0-9]+\"")) return 0
      return substr(line, RSTART + length(name) + 3, RLENGTH - length(name) - 4) + 0
    }
    {
      tests = bad = idle = 0
      file = results "/" $1 ".xml"
      while ((getline line < file) > 0) {
        if (line !~ /<testsuite /) continue
        tests += figure(line, "tests")
        bad += figure(line, "failures") + figure(line, "errors")
        idle += figure(line, "skipped") + figure(line, "disabled")
      }
      close(file)
      if (tests == 0 && $3 + $4 + $5 > 0) {
        tests = $3
        bad = $4
        idle = $5
        if (bad + idle > tests) tests = bad + idle  # A class failed or was skipped as a whole.
        if (idle > 0) printf "%s: %d of %d skipped\n", $1, idle, tests
      }
      if (tests == 0) tests = 1
      if ($2 == "fail" && bad == 0) { tests += (tests > 1); bad = 1 }
      if ($2 != "fail" && $2 != "run") idle = tests
      passed += tests - bad - idle
      failed += bad
      skipped += idle
    }
    END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }'
}

# failures_of: reads ctest's report in JUnit format. For each suite that failed, it prints the lines
# that say why, with the lines after them, up to 60 lines.
failures_of() {
  awk '
    match($0, /<testcase name="[^"]*"/) {
      suite = substr($0, RSTART + 16, RLENGTH - 17)
      failed = / status="fail"/
      shown = following = 0
      if (failed) print "== " suite
    }
    /<\/testcase>/ { failed = 0 }
    /Failure$|FAILED|^FAIL|^ERROR|ERROR: |Error: |Traceback|WARNING: ThreadSanitizer|runtime error/ {
      following = 8
    }
    failed && following-- > 0 && shown++ < 60' | sed 's/&lt;/</g; s/&gt;/>/g; s/&quot;/"/g; s/&amp;/\&/g'
}

# to_run_again LOG: reads ctest's list of failures, lines "number:suite", and prints the suites if
# there are only a few and timing may be the reason. That is the case if ctest's LOG has no crash
# and no sanitizer finding, and if no suite draws new inputs each time, because another run would
# try other inputs.
to_run_again() {
  local names crash='\*\*\*Exception|is gone: exit code|terminate called|Segmentation fault'
  mapfile -t names < <(cut -d: -f2)
  if grep -qE "$crash|Sanitizer|runtime error: " "$1" || ((${#names[@]} > 4)) ||
    [[ "${names[*]/%/ }" =~ fuzz|_replay" " ]]; then
    return
  fi
  printf '%s\n' "${names[@]}"
}

# run_ctest REPORT ARGUMENT...: runs ctest with the environment that suites need, into REPORT.junit
# and REPORT.log. Uses the variables preset, results and launcher of run_suites.
run_ctest() {
  # Libraries without instrumentation are ignored; see tests/tools/grpc_under_tsan.cc.
  local tsan_options=allocator_may_return_null=1:ignore_noninstrumented_modules=1
  tsan_options+=:suppressions=$root/tests/tsan.supp
  # Suites that run in parallel have more threads than there are cores, and large arrays. Waiting
  # threads therefore sleep, and arrays use huge pages, which reduces the time by a third.
  OMP_WAIT_POLICY=passive GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    GTEST_OUTPUT="xml:$results/" GTEST_BRIEF=1 \
    ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1 \
    LSAN_OPTIONS=suppressions=$root/tests/lsan.supp:print_suppressions=0 \
    UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=$tsan_options \
    "${launcher[@]}" ctest --test-dir "build/$preset" --output-on-failure \
    --test-output-truncation head --output-junit "$1.junit" --output-log "$1.log" "${@:2}"
}

# run_suites [asan|tsan]
run_suites() {
  local preset=${1:-$(preset_here)} results status=0 launcher=() again=() second_tries=0
  # Sanitizers check paths, not the errors of long sums.
  if (($#)); then
    export TESSERA_LARGEST=70001
    if [[ ${TESSERA_LONG:-} != ON ]]; then export TESSERA_FEW_TYPES=ON; fi
  fi
  if ((! $#)); then say "On two cores a first build takes about 15 minutes, and the suites about 8"; fi
  # Elsewhere, the cases that need Prometheus are skipped, because its package starts a service.
  if [[ ${CI:-} == true ]]; then install_packages prometheus; fi
  build "$preset"
  results=$root/build/$preset/results
  rm -rf "$results"
  mkdir -p "$results"
  if [[ $preset == tsan ]]; then
    # ThreadSanitizer reports races in the handwritten synchronisation of OpenBLAS's threads.
    export OPENBLAS_NUM_THREADS=1
    # Sanitizers of gcc 12 cannot place their shadow memory if the kernel randomises more than 28
    # bits.
    if setarch -R true 2>/dev/null; then launcher=(setarch -R); fi
  fi
  say "Test"
  # Suites spend part of their time waiting, so one more suite than there are cores runs at a time.
  run_ctest "$results/ctest" -j $((jobs + 1)) --no-tests=error || status=$?
  failures_of <"$results/ctest.junit" >"$results/failures"
  read_outcomes <"$results/ctest.junit" >"$results/outcomes"
  if ((status != 0)); then
    mapfile -t again < <(
      to_run_again "$results/ctest.log" <"build/$preset/Testing/Temporary/LastTestsFailed.log"
    )
  fi
  if ((${#again[@]} > 0)); then
    say "Test once more, alone: ${again[*]}"
    (cd "$results" && rm -f "${again[@]/%/.xml}")
    status=0
    run_ctest "$results/again" -j 1 -R "^($(IFS="|" && echo "${again[*]}"))\$" || status=$?
    failures_of <"$results/again.junit" >>"$results/failures"
    read_outcomes <"$results/again.junit" >>"$results/outcomes"
    if ((status == 0)); then second_tries=${#again[@]}; fi
  fi
  if ! has_gpu; then say "No GPU here: the tests of the CUDA device were not run"; fi
  if ((second_tries > 0)); then
    say "FAILURE OF THE TESTS: passed only on the second try: ${again[*]}"
    printf '%s\n' "${again[@]}" >>"$root/build/second_tries"
  fi
  say "Suites that passed only on the second try: $second_tries"
  awk '{ last[$1] = $0 } END { for (suite in last) print last[suite] }' "$results/outcomes" |
    count_tests "$results"
  return "$status"
}

# long_checks: runs the checks that take too long for each change: every suite under the sanitizers
# that can run it, random inputs for minutes, clang-tidy's slow checks, and a separate compilation of
# each source file. All of them run, even if some fail.
long_checks() {
  local name status=0
  export TESSERA_LONG=ON TESSERA_UNITY=OFF
  for name in "$(preset_here)" asan tsan; do (run_suites "$name") || status=1; done
  (lint) || status=1
  for name in tests/fuzz/*_fuzz.cc; do
    (fuzz "$(basename "$name" _fuzz.cc)" 300) || status=1
  done
  return "$status"
}

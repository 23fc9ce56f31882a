# shellcheck shell=bash disable=SC2034,SC2154
# ./dev gpu-test and gpu-sanitize: the device suites on a GPU. Sourced by ./dev.

# A GoogleTest filter for the tests that take much of a GPU's memory.
readonly large_tests='*LargeTest.*:*LargestTest.*'

# gpu_shard FOLDER SUITE SHARD SHARDS TURN [ARG...]: runs the tests of a suite that belong to SHARD
# of SHARDS, with the devices in a different order for each TURN. The large tests belong to the
# shard "large" and to no other. Adds "SUITE.SHARD run" or "... fail" to FOLDER/outcomes.
gpu_shard() {
  local folder=$1 suite=$2 shard=$3 shards=$4 turn=$5 devices verdict=run start=$SECONDS
  local index=$shard filter=-$large_tests
  if [[ $shard == large ]]; then index=0 filter=$large_tests; fi
  IFS=, read -r -a devices <<<"$visible_devices"
  turn=$((turn % ${#devices[@]}))
  devices=("${devices[@]:turn}" "${devices[@]:0:turn}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${devices[*]}") TESSERA_REQUIRE_GPU=1 GTEST_BRIEF=1 \
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$index GTEST_FILTER=$filter \
    GTEST_OUTPUT="xml:$folder/$suite.$shard.xml" \
    "$built/bin/$suite" "${@:6}" >"$folder/$suite.$shard.log" 2>&1 </dev/null || verdict=fail
  echo "$suite.$shard $verdict" >>"$folder/outcomes"
  say "$suite, part $shard of $shards: $verdict, $((SECONDS - start)) s"
  if [[ $verdict == fail ]]; then tail -n 60 "$folder/$suite.$shard.log"; fi
}

# gpu_large FOLDER [ARG...]: runs the large tests of all suites, one after another.
gpu_large() {
  local folder=$1 suite
  while read -r suite; do
    if "$built/bin/$suite" --gtest_list_tests | grep -qE 'Larg(e|est)Test\.'; then
      gpu_shard "$folder" "$suite" large 1 0 "${@:2}"
    fi
  done <"$built/gpu_tests.txt"
}

# Most of a suite's time is spent on references that the host computes, so parts of all suites run
# in parallel, ten per GPU. They share the GPU's memory.
gpu_test() {
  local suite shard turn=0 shards=8 lanes visible_devices=${CUDA_VISIBLE_DEVICES:-}
  local folder=$logs/gpu-test gpus=(/dev/nvidia[0-9]*)
  has_gpu || die "no GPU here: gpu-test runs where skips are forbidden"
  need all
  find_cublas
  rm -rf "$folder"
  mkdir -p "$folder"
  if [[ -z $visible_devices ]]; then visible_devices=$(seq -s , 0 $((${#gpus[@]} - 1))); fi
  lanes=$((10 * ${#gpus[@]} < jobs ? 10 * ${#gpus[@]} : jobs))
  if ((jobs < 8)); then shards=1 lanes=1; fi
  gpu_large "$folder" "$@" &
  if ((lanes == 1)); then wait; fi
  while read -r suite; do
    for ((shard = 0; shard < shards; shard++)); do
      while (($(jobs -pr | wc -l) >= lanes)); do wait -n; done
      gpu_shard "$folder" "$suite" "$shard" "$shards" "$turn" "$@" &
      turn=$((turn + 1))
    done
  done < <(
    echo matmul_test # Takes longest.
    grep -vxE "matmul_test|memory_test" "$built/gpu_tests.txt"
  )
  wait
  gpu_shard "$folder" memory_test 0 1 0 "$@" # Takes all memory.
  count_tests "$folder" <"$folder/outcomes"
  ! grep -q " fail$" "$folder/outcomes"
}

# Prints the parameters of a suite's tests that name a CUDA device, and "-" for the tests without a
# parameter.
device_cases() {
  "$built/bin/$1" --gtest_list_tests | sed -nE 's|^  [^/]*/(cuda[a-z0-9_]*).*|\1|p' | sort -u
  echo -
}

# left_out TOOL SUITE CASE: prints "all", or the tests that tests/tools/sanitize.txt leaves out.
left_out() {
  local tool suite case tests out=
  while read -r tool suite case tests; do
    [[ $1 =~ ^($tool)$ && $2 =~ ^($suite)$ && $3 =~ ^($case)$ ]] || continue
    if [[ $tests == keep ]]; then break; fi
    if [[ $tests == all ]]; then out=all && break; fi
    out+=:$tests
  done < <(sed -E 's/#.*//; /^ *$/d' tests/tools/sanitize.txt)
  echo "${out#:}"
}

# Checks that all tests named in the rules of sanitize.txt exist. Reads the suites from standard
# input.
check_rules() {
  local suite tests names='' pattern patterns
  while read -r suite; do names+=$("$built/bin/$suite" --gtest_list_tests)$'\n'; done
  while read -r _ _ _ tests; do
    if [[ $tests == all || $tests == keep ]]; then continue; fi
    IFS=: read -r -a patterns <<<"$tests"
    for pattern in "${patterns[@]}"; do
      # shellcheck disable=SC2053
      [[ $names == $pattern ]] || die "tests/tools/sanitize.txt: no test is called $pattern"
    done
  done < <(sed -E 's/#.*//; /^ *$/d' tests/tools/sanitize.txt)
}

# sanitize_case TOOL SUITE CASE: runs the tests of a suite under one of compute-sanitizer's tools.
# CASE is a parameter, such as "cuda_tree_global_f32", or "-" for tests without a parameter. Each
# case has its own process, because the tools spend most of their time rewriting the kernels that a
# process launches.
sanitize_case() {
  local tool=$1 suite=$2 case=$3 log=$logs/gpu-sanitize/$1.$2.$3.log status=0 options=() filter out
  local start=$SECONDS
  filter="*/$case-*Large*"
  if [[ $case == - ]]; then filter="-*/cuda*:*/cpu*:*Large*"; fi
  out=$(left_out "$tool" "$suite" "$case")
  if [[ -n $out ]]; then filter+=:$out; fi
  export TESSERA_LARGEST=70001
  # racecheck records every access to shared memory and is a hundred times slower.
  if [[ $tool == racecheck ]]; then TESSERA_LARGEST=5000; fi
  # An error of the runtime is not a finding. A test may deliberately request too much memory.
  if [[ $tool == memcheck ]]; then options=(--report-api-errors no); fi
  TESSERA_REQUIRE_GPU=1 GTEST_BRIEF=1 \
    compute-sanitizer --tool "$tool" "${options[@]}" --require-cuda-init no --error-exitcode 9 \
    "$built/bin/$suite" --gtest_filter="$filter" >"$log" 2>&1 </dev/null || status=$?
  local verdict=clean
  if ((status != 0)); then verdict="FAILED with exit code $status: $log"; fi
  echo "$((SECONDS - start)) s $tool $suite $case $verdict" >>"$logs/gpu-sanitize/results"
}

gpu_sanitize() {
  local suites suite tool case tools=(memcheck initcheck synccheck racecheck) pattern=${2:-.}
  local results=$logs/gpu-sanitize/results
  if (($#)); then tools=("$1"); fi
  has_gpu || die "no GPU here"
  need all
  suites=$built/gpu_tests.txt
  find_cublas
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  command -v compute-sanitizer >/dev/null || die "compute-sanitizer is not installed"
  rm -rf "$logs/gpu-sanitize"
  mkdir -p "$logs/gpu-sanitize"
  export -f sanitize_case left_out
  export built logs PATH
  check_rules <"$suites"
  for tool in "${tools[@]}"; do
    while read -r suite; do
      while read -r case; do
        if [[ $(left_out "$tool" "$suite" "$case") != all ]]; then echo "$tool $suite $case"; fi
      done < <(device_cases "$suite")
    done <"$suites"
  done | grep -E -- "$pattern" | tac | # The last suites take longest.
    xargs -r -P "$jobs" -n 3 bash -c 'sanitize_case "$@"' sanitize_case
  grep FAILED "$results" || true
  awk '{ print $3, $4, $6 }' "$results" | sort | uniq -c
  echo "longest: $(sort -rn "$results" | head -n 3 | cut -d ' ' -f 1-5 | paste -sd ,)"
  ! grep -q FAILED "$results"
}

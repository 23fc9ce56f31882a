# shellcheck shell=bash disable=SC2034,SC2154
# ./dev format and lint. Sourced by ./dev.

readonly lint_packages=(clang-format clang-tidy shellcheck)
readonly buf_version=1.75.0
# These checks read every declaration of every header and take more than half of clang-tidy's time.
# Only ./dev test long runs them.
readonly slow_checks=(
  bugprone-assert-side-effect bugprone-forward-declaration-namespace bugprone-infinite-loop
  bugprone-misplaced-widening-cast bugprone-multiple-statement-macro
  bugprone-not-null-terminated-result bugprone-reserved-identifier bugprone-sizeof-expression
  bugprone-stringview-nullptr bugprone-suspicious-semicolon bugprone-suspicious-string-compare
  bugprone-undelegated-constructor modernize-use-nullptr performance-type-promotion-in-math-fn
  performance-unnecessary-value-param
)

# Prints files of the project with these endings, without files that were built or installed.
sources() {
  local expression=() ending
  for ending in "$@"; do expression+=(-o -name "*.$ending"); done
  find . -type d \( -name .git -o -path ./build -o -path ./.cache \) -prune -o \
    -type f \( "${expression[@]:1}" \) -print | sort
}

format() {
  install_packages clang-format
  local files
  mapfile -t files < <(sources cc h cu cuh)
  step format "Format ${#files[@]} files" clang-format -i "${files[@]}"
}

# Prints lines of more than 100 columns, except in tables, generated pages and other projects'
# protocols.
long_lines() {
  local files
  mapfile -t files < <(
    sources cc h cu cuh proto py md | grep -vE '^\./(proto/g|docs/(python_api|examples/))'
  )
  ! LC_ALL=C.UTF-8 grep -nE '^.{101}' "${files[@]}" | grep -vE '^[^:]+:[0-9]+: *\|'
}

# Finds buf on the PATH, otherwise the pinned release from its npm package.
find_buf() {
  buf=$(type -P buf) && return
  buf=$root/.cache/buf/node_modules/.bin/buf
  if [[ ! -x $buf || $("$buf" --version 2>&1) != "$buf_version" ]]; then
    if ! command -v npm >/dev/null; then install_packages npm ca-certificates; fi
    step buf-install "Install buf $buf_version" \
      npm install --no-audit --no-fund --prefix .cache/buf "@bufbuild/buf@$buf_version"
  fi
}

# tidy "FILE FLAG...": checks one file, for xargs. ccache knows which files were clean (.ci/tidy).
tidy() {
  local words
  read -r -a words <<<"$1"
  echo "${words[0]}"
  ccache .ci/tidy "${words[@]:1}" -o "build/lint/tidy/${words[0]//\//_}" -c "${words[0]}"
}
export -f tidy

lint() {
  local cpp scripts python buf
  install_packages "${packages[@]}" "${lint_packages[@]}"
  mapfile -t cpp < <(sources cc h cu cuh)
  mapfile -t scripts < <(sources sh)
  mapfile -t python < <(sources py)
  step clang-format "Style of ${#cpp[@]} files" clang-format --dry-run -Werror "${cpp[@]}"
  step long-lines "Lines of at most 100 columns" long_lines
  step includes "Includes between folders" /usr/bin/python3 tests/tools/includes.py
  step shellcheck "Shell scripts" shellcheck dev .ci/* "${scripts[@]}"
  step python-syntax "Syntax of Python files" /usr/bin/python3 -c \
    'import ast, sys; [ast.parse(open(name).read(), name) for name in sys.argv[1:]]' "${python[@]}"
  step mypy "Types of the Python client" \
    bash -c 'cd client/python &&
      /usr/bin/python3 -m mypy --cache-dir ../../.cache/mypy &&
      /usr/bin/python3 -m mypy --cache-dir ../../.cache/mypy ../../tests/typed_example.py'
  find_buf
  step buf-lint "Protocol (buf lint)" "$buf" lint proto
  configure lint
  step lint-generated "Generate code" \
    cmake --build build/lint -j "$jobs" --target tessera_generated
  mkdir -p build/lint/tidy
  # clang-tidy 14 cannot parse CUDA 13, and misjudges the many macros in tests. It reads the groups
  # of files that the build compiles, because most of its time is spent on their common headers.
  /usr/bin/python3 -c 'import json, os, sys
for entry in json.load(open(sys.argv[1])):
    name = os.path.relpath(entry["file"])
    words = entry["command"].split()[1:]
    if name.endswith((".cc", ".cxx")) and name.startswith(("client/", "kernels/", "server/", "build/lint/CMakeFiles/")):
        print(name, *words[: words.index("-o")])' \
    build/lint/compile_commands.json >"$logs/clang-tidy.files"
  export TESSERA_TIDY_CHECKS=
  if [[ ${TESSERA_LONG:-} != ON ]]; then
    TESSERA_TIDY_CHECKS=$(printf -- ',-%s' "${slow_checks[@]}")
  fi
  # Everything besides the sources that affects a verdict.
  CCACHE_COMPILERCHECK="string:$(clang-tidy --version; cat .clang-tidy .ci/tidy)$TESSERA_TIDY_CHECKS" \
    CCACHE_COMPILERTYPE=gcc CCACHE_COMMENTS=1 \
    step clang-tidy "clang-tidy on $(wc -l <"$logs/clang-tidy.files") groups of files" \
    xargs -a "$logs/clang-tidy.files" -P "$jobs" -d '\n' -n 1 bash -c 'tidy "$@"' tidy
  say "Lint is clean"
}

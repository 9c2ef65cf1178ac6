#!/bin/bash
# Installs what is missing, builds strata, runs every test, then tools/lint.sh.
#
# usage: tools/test.sh [--full] [BAZEL_FLAG...]
#   --full   runs the tests a second time under AddressSanitizer and UBSan, and those tagged "tsan" under
#            ThreadSanitizer (a test tagged "no-asan" is left out); runs the variant of the kernels that AMD's
#            GPUs get; builds for NVIDIA's and for AMD's GPUs where nvcc and hipcc are, and says where not
#
# Its last line reads "N passed, N failed, N skipped" and counts test targets; a build or lint that fails counts
# as one. The status is 0 when nothing failed and something passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

full=false
if [[ ${1:-} == --full ]]; then
  full=true
  shift
fi
flags=("$@")
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
failed=0

fail() {
  echo "FAILED: $1" >&2
  failed=$((failed + 1))
}

# run_tests NAME [BAZEL_FLAG...] TARGET...
run_tests() {
  local name=$1 status=0
  shift
  bazel test --keep_going --build_event_json_file="$results/$name.json" "$@" "${flags[@]}" || status=$?
  # 3: a test failed, counted by the summary; 4: no test in this configuration.
  case $status in 0 | 3 | 4) ;; *) fail "the $name build" ;; esac
}

# build_for CONFIG COMPILER...: the program, if one of these compilers is there.
build_for() {
  local config=$1 compiler
  shift
  for compiler in "$@"; do
    if command -v "$compiler" >/dev/null; then
      bazel build --config="$config" //tools:strata "${flags[@]}" || fail "the $config build"
      return
    fi
  done
  echo "left out: the $config build, which needs $1"
}

bash tools/setup.sh || exit 1
run_tests plain //...
run_tests emulated --config=emulated //parallel:gpu_communicator_test //tools:gpu_plan_test
if $full; then
  run_tests asan --config=asan --build_tests_only --test_tag_filters=-no-asan //...
  run_tests tsan --config=tsan --build_tests_only --test_tag_filters=tsan //...
  run_tests portable //kernels/cuda:op_table_portable_test
  build_for cuda /usr/local/cuda/bin/nvcc
  build_for hip hipcc /opt/rocm/bin/hipcc
fi
bash tools/lint.sh || fail "lint"

counts=$(python3 tools/test_summary.py "$results"/*.json) || counts="0 1 0"
read -r passed failed_tests skipped <<<"$counts"
failed=$((failed + failed_tests))
if ((passed + failed == 0)); then fail "no test ran"; fi
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))

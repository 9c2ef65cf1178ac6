#!/bin/bash
# mpi_failure_test.sh PROGRAM: failing_job under mpirun. Whatever a rank does, the job ends by itself, with a
# status other than 0, says which rank and operation it was, and leaves no process.
program=$1
export TMPDIR=/tmp  # Bazel's own is too long for Open MPI's sockets
export ASAN_OPTIONS="detect_leaks=0:$ASAN_OPTIONS"  # Open MPI's plugins leak
failed=0

# expect MODE STATUS PATTERN...: runs MODE on three ranks; every pattern must be in the output.
expect() {
  local mode=$1 expected=$2 output status pattern
  shift 2
  output=$(timeout -k 1 10 mpirun --allow-run-as-root --oversubscribe --bind-to none -n 3 "$program" "$mode" 2>&1)
  status=$?
  for pattern in "$@"; do
    if ! grep -qE -- "$pattern" <<<"$output"; then
      echo "FAILED: $mode: no '$pattern' in:" && echo "$output"
      failed=1
    fi
  done
  if [[ $status -ne $expected ]]; then
    echo "FAILED: $mode: status $status, not $expected:" && echo "$output"
    failed=1
  fi
  # mpirun does not wait for those that it killed.
  if ! timeout 10 sh -c 'while pgrep -f "^$0 $1"; do sleep 0.1; done' "$program" "$mode" >/dev/null; then
    echo "FAILED: $mode: processes are left"
    failed=1
  fi
}

expect well 0
expect throw 3 'rank 2: error: tokens.bin: byte 12: bad header'
expect kill 137 'rank 2 .*on signal 9'
# Which rank sees it first is open.
expect skip 3 'all_gather #2 on axis dp, called at .*failing_job.cc:[0-9]+, on rank [01]: rank 2 is in reduce_scatter #2|reduce_scatter #2 on axis dp.* on rank 2: rank [01] is in all_gather #2'
expect size 3 'all_reduce #1 on axis dp, .*: rank [0-2] is in all_reduce #1 with [0-9]+ bytes for this rank, which expects [0-9]+'
expect absent 3 'reduce_scatter #3 on axis dp, called at .*failing_job.cc:[0-9]+, on rank [01]: nothing from rank 2 within 1 s'
((failed == 0)) && echo "all as expected"
exit $failed

#!/bin/sh
# mpi_test.sh RANKS PROGRAM [ARGUMENT...]: runs a test program as several ranks of this machine.
ranks=$1
shift
# Open MPI puts its sockets under TMPDIR; Bazel's own test folder is too long a path for a socket.
export TMPDIR=/tmp
# Under --config=asan: Open MPI's plugins leak, and are unloaded before the report.
export ASAN_OPTIONS="detect_leaks=0:$ASAN_OPTIONS"
exec mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$ranks" "$@"

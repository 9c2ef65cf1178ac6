# What tests of the program as a user meets it share. Sourced from the root of the sources, with the path of
# strata as $1; what follows runs in a folder of its own, which goes when the test ends.
strata=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export TMPDIR=/tmp                                  # Bazel's own is too long for Open MPI's sockets
export ASAN_OPTIONS="detect_leaks=0:$ASAN_OPTIONS"  # Open MPI's plugins leak
failed=0

# fail MESSAGE: the test fails, and goes on; `output` is that of the last command.
fail() {
  echo "FAILED: ${round:+round $round: }$*"
  tail -n 20 output
  failed=1
}

# mpi RANKS: the command that starts strata on them.
mpi() {
  echo mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$1" "$strata"
}

# expect STATUS PATTERN COMMAND...: the exit status, and an extended regular expression within what is printed.
expect() {
  local expected=$1 pattern=$2 status
  shift 2
  timeout -k 1 60 "$@" >output 2>&1
  status=$?
  if [[ $status -ne $expected ]]; then
    fail "status $status, not $expected: ${*//$strata/strata}"
  fi
  if ! grep -qE -- "$pattern" output; then
    fail "no '$pattern' from: ${*//$strata/strata}"
  fi
}

same() {
  cmp "$1" "$2" || fail "$1 and $2 differ"
}

# A quarter of a megabyte of text: words after words, the same every time.
words() {
  awk 'BEGIN {
    n = split("the of and to in was her she had that with his for not as be it you he but on my have so at", w, " ")
    for (s = i = 0; i < 60000; ++i) {
      s = (s * 1103515245 + 12345) % 2147483648
      printf "%s%s", w[int(s / 65536) % n + 1], s % 11 == 0 ? ".\n" : " "
    }
  }'
}

finish() {
  ((failed == 0)) && echo "all as expected"
  exit $failed
}

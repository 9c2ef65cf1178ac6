#!/bin/bash
# Checks the format of the sources (clang-format) and reads them for faults (clang-tidy, see .clang-tidy).
#
# usage: tools/lint.sh [BAZEL_TARGET...]     what clang-tidy reads; all by default
#
# What did not change since the last time is not read again.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
bash tools/setup.sh clang-format-14 clang-tidy-16 git || exit

status=0
git ls-files -z --cached --others --exclude-standard '*.cc' '*.h' '*.cu' '*.cuh' |
  xargs -0 -r clang-format-14 --dry-run -Werror --ferror-limit=1 || {
  echo "mend the format with: clang-format-14 -i FILE" >&2
  status=1
}
if (($# == 0)); then set -- //...; fi
bazel build --config=lint --keep_going -- "$@" || status=1
exit $status

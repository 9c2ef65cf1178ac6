#!/bin/bash
# clang_tidy.sh STAMP SOURCE -- FLAG...: prints what clang-tidy finds, paths as the workspace has them, or
# makes STAMP when that is nothing.
stamp=$1
shift
found=$(clang-tidy-16 --quiet --config-file=.clang-tidy "$@" 2>/dev/null) && exec touch "$stamp"
echo "${found//$PWD\//}"
exit 1

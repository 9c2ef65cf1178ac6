#!/bin/bash
# isa_symbols_test.sh ARCHIVE...
#
# Objects compiled for more than the baseline must not define weak functions (inline functions and templates that were
# emitted out of line): the linker keeps one copy of each for the whole program, perhaps the one that a lesser
# processor cannot run.
status=0
for archive in "$@"; do
  [[ $archive == *.a ]] || continue
  symbols=$(nm -C "$archive") || exit 1
  if grep -q -e ' __asan_' -e ' __tsan_' <<<"$symbols"; then
    echo "SKIPPED all: $archive is instrumented, which adds weak functions of its own"
    exit 0
  fi
  if grep ' [WV] ' <<<"$symbols" | grep -v 'DW.ref.'; then
    echo "$archive defines the weak symbols above: inline them always, or compile them once (support.h)"
    status=1
  fi
done
exit $status

#!/bin/bash
# moe_vs_dense.py on made-up runs: dense losses fall by 0.1 with each doubling of compute, so that a mixture's equal
# can be worked out by hand.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

fail() {
  echo "moe_vs_dense_test: $*" >&2
  exit 1
}

# run NAME FLOPS_A_TOKEN LOSS [TOKENS]
run() {
  mkdir -p "$work/$1"
  echo "parameters      2000000 (2.0M)${1/#moe-*/, active 1000000 (1.0M)}" >"$work/$1/plan.txt"
  # 100 tokens at 10 a second, the rest at 100.
  for line in "100 10" "${4:-1100} 100"; do
    echo "{\"tokens\":${line% *},\"tokens_per_s\":${line#* },\"flops_per_s\":$(($2 * ${line#* })),\"valid_loss\":$3}"
  done >"$work/$1/metrics.jsonl"
}
table() { python3 tools/report/moe_vs_dense.py "$work"; }
expect() { grep -qF "$1" <<<"$page" || fail "no '$1' in: $page"; }

run dense-1x 1000000 3.0
run dense-2x 2000000 2.9
run dense-8x 8000000 2.7
run moe-8 1000000 2.85   # sqrt(2 x 2 x 2) = 2^1.5 of the base
run moe-16 1250000 2.8   # 2^2 of the base, at 5/4 of its compute
run moe-32 1000000 2.6   # beyond
run moe-64 1000000 3.1   # worse than the base
run moe-128 1000000 2.9  # the very loss of a dense run
run moe-4 2000000 3.0    # the base's, at twice its compute
page=$(table)
expect "| moe-8 | 2.83x |"
expect "| moe-16 | 3.20x |"
expect "| moe-32 | > 8.00x |"
expect "| moe-64 | < 1.00x |"
expect "| moe-128 | 2.00x |"
expect "| moe-4 | 0.50x |"
expect "| dense-8x | 2.00M | 2.00M | 8.00M (8.00x) | 8.8e+09 | 2.7000 | 20 |"
expect "| moe-16 | 2.00M | 1.00M | 1.25M (1.25x) | 1.38e+09 | 2.8000 | 20 |"

run moe-8 1000000 2.85 900
if table 2>"$work/error"; then fail "runs of unequal tokens are compared"; fi
grep -q "same number of tokens" "$work/error" || fail "$(<"$work/error")"

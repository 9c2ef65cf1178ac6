#!/bin/bash
# data_efficiency.py on made-up runs: whole budgets cost twice the half ones, so that shares can be worked out by hand.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

fail() {
  echo "data_efficiency_test: $*" >&2
  exit 1
}

python3 - "$work" <<'PY'
import json, os, sys

def run(name, loss, millions, seconds, layer_millions):
    """A tenth of the tokens at half of the others' speed."""
    folder = os.path.join(sys.argv[1], name)
    os.mkdir(folder)
    rate = millions * 1.1e6 / seconds
    with open(os.path.join(folder, "metrics.jsonl"), "w") as metrics:
        for done, speed, valid in [(0.1, rate / 2, {"valid_loss": 9}), (0.5, rate, {}), (1, rate, {"valid_loss": loss})]:
            line = {"tokens": done * millions * 1e6, "tokens_per_s": speed} | valid
            print(json.dumps(line | {"data": {"consumed_layer_tokens": done * layer_millions * 1e6}}), file=metrics)

for seed, off, seconds in [(1, -0.01, 90), (2, 0, 100), (3, 0.01, 170)]:  # deviation 0.01; median of seconds 100
    run(f"baseline-half-{seed}", 3.2 + off, 0.5, seconds / 2, 4)
    run(f"baseline-whole-{seed}", 3.0 + off, 1, seconds, 8)
    # The baseline's loss lies halfway between these: at 2^(-1/2) of the whole budget.
    run(f"curriculum-half-{seed}", 3.1 + off, 0.5, 40, 4)
    run(f"curriculum-whole-{seed}", 2.9 + off, 1, 80, 8)
    # Not even with the whole budget.
    run(f"drop-half-{seed}", 3.3 + off, 0.5, 30, 3)
    run(f"drop-whole-{seed}", 3.1 + off, 1, 60, 6)
    # The half is enough. Differences to the baseline's: -0.21, -0.2, -0.19.
    run(f"both-half-{seed}", 2.95 + off, 0.5, 20, 3)
    run(f"both-whole-{seed}", 2.8 + 2 * off, 1, 40, 6)
PY
table() { python3 tools/report/data_efficiency.py "$work"; }
expect() { grep -qF "$1" <<<"$page" || fail "no '$1' in: $page"; }

page=$(table)
expect "over seeds 1, 2, 3."
expect "| baseline, whole | 3.0000 ± 0.0100 | 100 | 1.00M | 8.00M |"
expect "| drop, half | 3.3000 ± 0.0100 | 30 | 0.50M | 3.00M |"
expect "| curriculum | 57% | 71% | 71% | -0.1000 ± 0.0000 |" # 0.8 / √2, 1 / √2
expect "| drop | > 60% | > 100% | > 75% | +0.1000 ± 0.0000 |"
expect "| both | < 20% | < 50% | < 38% | -0.2000 ± 0.0100 |"

rm -r "$work/drop-half-2"
if table 2>"$work/error"; then fail "a run is missing, and it does not say so"; fi
grep -q "all with the same seeds" "$work/error" || fail "$(<"$work/error")"
rm -r "$work"/*-[23]
page=$(table)
expect "| baseline, whole | 2.9900 | 90 | 1.00M | 8.00M |"

#!/bin/bash
# GPT-2 124M's training step in strata and in PyTorch, in turns on the same machine, and the ratio of their speeds.
#
# usage: PYTHON=~/torch/bin/python tools/bench/peers/compare.sh [--batch N] [--seq N] [--threads N] [--steps N]
#
# PYTHON is a Python with torch (pytorch_step.py says how to get one). The options are given to both programs. ROUNDS
# (3) is how often each program is started, MODES ("eager compile") how PyTorch runs, STRATA the binary. The best step
# of all rounds counts for everyone: other load on the machine slows a step, nothing makes it faster.
set -euo pipefail
cd "$(dirname "$0")/../../.."

python=${PYTHON:-python3} strata=${STRATA:-bazel-bin/tools/strata} rounds=${ROUNDS:-3}
read -ra modes <<<"${MODES:-eager compile}"
"$python" -c 'import torch' 2>/dev/null || {
  echo "$python has no torch; name one that has: PYTHON=... (tools/bench/peers/pytorch_step.py says how)" >&2
  exit 1
}
[[ -x $strata ]] || {
  echo "$strata is not there: bazel build //tools:strata, or name another: STRATA=..." >&2
  exit 1
}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

for ((round = 1; round <= rounds; ++round)); do
  for precision in fp32 bf16; do
    echo "round $round of $rounds, $precision" >&2
    "$strata" bench step --model gpt2-124m "$@" --precision $precision --json "$results/strata-$precision-$round" >&2
    for mode in "${modes[@]}"; do
      options=(--precision "$precision")
      if [[ $mode == compile ]]; then options+=(--compile); fi
      "$python" tools/bench/peers/pytorch_step.py "$@" "${options[@]}" | tee "$results/$mode-$precision-$round" >&2
    done
  done
done

"$python" - "$results" "${modes[@]}" <<'PY'
import json, pathlib, sys

folder, modes = pathlib.Path(sys.argv[1]), sys.argv[2:]
def best(name, rate):
    return max(rate(json.loads(path.read_text())) for path in folder.glob(name + "-*"))

print(f"{'tokens/s, best step':24}{'fp32':>10}{'bf16':>10}")
rates = {}
for who in ["strata", *modes]:
    rate = (lambda r: r["rows"][0]["value"]) if who == "strata" else (lambda r: r["tokens_per_s_best"])
    rates[who] = [best(f"{who}-{precision}", rate) for precision in ("fp32", "bf16")]
    print(f"{who if who == 'strata' else 'PyTorch ' + who:24}{rates[who][0]:10.1f}{rates[who][1]:10.1f}")
for mode in modes:
    # bf16 is judged by the faster of PyTorch's two: on some processors its bf16 is the slower one.
    fp32, bf16 = rates["strata"][0] / rates[mode][0], rates["strata"][1] / max(rates[mode])
    print(f"{'strata / PyTorch ' + mode:24}{fp32:10.2f}{bf16:10.2f}")
PY

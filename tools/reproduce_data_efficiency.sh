#!/bin/bash
# A curriculum and random layer-wise token drop against plain training: what share of its time and tokens do they need
# to reach its validation loss? DeepSpeed Data Efficiency (Li et al., 2022, arXiv 2212.03597) has the same quality of a
# GPT-3 1.3B in less than half of the time and data, or a better one of the same data.
#
# usage: tools/reproduce_data_efficiency.sh [--tokens N] [--seeds N] [--out DIR]
#   --tokens N   of the whole budget: 2500000
#   --seeds N    3
#   --out DIR    runs/data-efficiency
#
# One GPT (configs/data-efficiency-reproduction.yaml) in four ways: baseline; curriculum, of length and of vocabulary
# rarity; drop, of tokens; both. Each at half of the budget and at the whole, its rate falling to the end of either, and
# with every seed. Runs are one-threaded, one a core; all take about 20 minutes on two free cores. Writes
# DIR/table.md and DIR/report.html. Repeated after an interruption it goes on where it was; remove DIR to begin anew.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
  echo "reproduce_data_efficiency: $*" >&2
  exit 1
}

usage="usage: tools/reproduce_data_efficiency.sh [--tokens N] [--seeds N] [--out DIR]"
tokens=2500000 seeds=3 out=runs/data-efficiency
while (($# > 0)); do
  (($# > 1)) || die "$usage"
  case $1 in
    --tokens) tokens=$2 ;;
    --seeds) seeds=$2 ;;
    --out) out=$2 ;;
    *) die "$usage" ;;
  esac
  shift 2
done
[[ $tokens =~ ^[1-9][0-9]{5,14}$ ]] || die "--tokens wants a number of at least 100000, not '$tokens'"
[[ $seeds =~ ^[1-9][0-9]?$ ]] || die "--seeds wants a number from 1 to 99, not '$seeds'"

config=configs/data-efficiency-reproduction.yaml strata=${STRATA:-bazel-bin/tools/strata}
if [[ ! ${STRATA:-} ]]; then
  bash tools/setup.sh
  bazel build //tools:strata
fi
bash tools/mixed_corpus.sh "$strata" runs/corpus
mkdir -p "$out"
[[ ! -e $out/settings || $(<"$out/settings") == "$tokens tokens" ]] ||
  die "$out was made with $(<"$out/settings"): remove it, or give another --out"
echo "$tokens tokens" >"$out/settings"
if [[ ! -e $out/difficulty/vocab_rarity.difficulty ]]; then
  "$strata" analyze "$config" --metric vocab_rarity --out "$out/difficulty"
fi

# The settings. docs/data-efficiency.md has the trials that they are from (half of the budget, another seed).
batch=1 length=1024 # sequences a step, of so many tokens
lr=6e-3
lengths="64:20 128:26 256:20 512:16" # tokens of a sequence, and the percent of all tokens that are trained so
first_percent=80 rarity_share=25     # percent of the samples, the easiest; percent of the steps
first_kept=128 drop_share=50         # tokens; percent of the steps
kept_share=75                        # percent of the tokens, with the curriculum, while its sequences are short

# plan BUDGET: sets `count` to the curriculum's steps, `stages` to where its lengths end in them, and `kept` to the
# tokens that are kept meanwhile. The run ends by its tokens.
plan() {
  local stage tokens left=$1
  count=0 stages="" kept=""
  for stage in $lengths; do
    tokens=$(($1 * ${stage#*:} / 100)) left=$((left - tokens))
    count=$((count + tokens / ${stage%:*}))
    stages+="${stages:+,}[$count,${stage%:*}]"
    kept+="${kept:+,}[$count,$((${stage%:*} * kept_share / 100))]"
  done
  count=$((count + (left - 1) / length + 1)) stages="[$stages]" kept="[$kept]"
}

# overrides METHOD BUDGET SEED: sets `words` to what sets a run apart.
overrides() {
  local count stages kept
  plan "$2"
  words=("optimizer.lr=$lr")
  if [[ $1 == curriculum || $1 == both ]]; then
    words+=(
      "data.curriculum.index=$out/difficulty"
      "data.curriculum.length.pacing=discrete"
      "data.curriculum.length.stages=$stages"
      "data.curriculum.vocab_rarity.pacing=root"
      "data.curriculum.vocab_rarity.min=$first_percent"
      "data.curriculum.vocab_rarity.steps=$((count * rarity_share / 100))"
    )
  else
    count=$((($2 - 1) / length + 1))
  fi
  case $1 in
    drop)
      words+=(
        "data.random_ltd.min=$first_kept"
        "data.random_ltd.difficulty_step=8"
        "data.random_ltd.steps=$((count * drop_share / 100))"
      )
      ;;
    both) words+=("data.random_ltd.pacing=discrete" "data.random_ltd.stages=$kept") ;;
  esac
  words+=(
    "run.seed=$3"
    "train.global_batch_size=$batch"
    "train.max_tokens=$2"
    "train.max_steps=$((count * 5 / 4))"
    "train.eval_interval=$(((count + 4) / 5))"
    "schedule.warmup_tokens=$(($2 / 10))"
    "checkpoint.interval=$(((count + 4) / 5))"
    "device.threads=1"
  )
}

# finished NAME BUDGET
finished() {
  local last
  last=$(tail -n 1 "$out/$1/metrics.jsonl" 2>/dev/null) &&
    [[ $last =~ \"tokens\":([0-9]+),.*\"valid_loss\": ]] && ((BASH_REMATCH[1] >= $2))
}

# train METHOD SIZE SEED: in the background, once a core is free. SIZE: half or whole.
train() {
  local name=$1-$2-$3 budget=$tokens words=()
  if [[ $2 == half ]]; then budget=$((tokens / 2)); fi
  names+=("$name")
  budgets+=("$budget")
  if finished "$name" "$budget"; then return; fi
  overrides "$1" "$budget" "$3"
  while (($(jobs -rp | wc -l) >= cores)); do wait -n || true; done
  echo "$(date +%T) $name"
  mkdir -p "$out/$name"
  "$strata" train "$config" --resume=auto "run.dir=$out/$name" "${words[@]}" >"$out/$name/console.log" 2>&1 &
}

cores=$(nproc) names=() budgets=()
trap 'kill $(jobs -rp) 2>/dev/null || true; wait' EXIT
# The longest first, so that no core is left with much to do alone.
for size in whole half; do
  for method in baseline curriculum drop both; do
    for ((seed = 1; seed <= seeds; ++seed)); do train "$method" "$size" "$seed"; done
  done
done
wait
for i in "${!names[@]}"; do
  finished "${names[i]}" "${budgets[i]}" || die "${names[i]} did not finish: see $out/${names[i]}/console.log"
done

python3 tools/report/data_efficiency.py "$out" | tee "$out/table.md"
# A curve for each way and budget: those of the first seed.
"$strata" report "$out"/{baseline,curriculum,drop,both}-{half,whole}-1 --out "$out/report.html"

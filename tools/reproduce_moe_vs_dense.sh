#!/bin/bash
# Mixtures of experts against dense models at the same number of tokens: how much more compute does a dense model need
# to reach a mixture's validation loss? DeepSpeed-MoE (Rajbhandari et al., 2022) has 5x for a 1.3B base and 128 experts.
#
# usage: tools/reproduce_moe_vs_dense.sh [--tokens N] [--large] [--out DIR]
#   --tokens N   that each model is trained on: 10000000; with --large 24000000, nearly all of the corpus
#   --large      a base of twice the width: a night instead of well under an hour on two cores
#   --out DIR    runs/moe-vs-dense, or runs/moe-vs-dense-large
#
# Eight GPTs (configs/moe-vs-dense.yaml): a dense base; the base with 8, 16, 32 and 64 experts in every second layer;
# dense models of about 2, 4 and 8 times its compute. They are one-threaded, one run a core. Writes DIR/table.md and
# DIR/report.html. Repeated after an interruption it goes on where it was; remove DIR to begin anew.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
  echo "reproduce_moe_vs_dense: $*" >&2
  exit 1
}

usage="usage: tools/reproduce_moe_vs_dense.sh [--tokens N] [--large] [--out DIR]"
tokens='' large='' out=''
while (($# > 0)); do
  case $1 in
    --tokens | --out)
      (($# > 1)) || die "$1 wants a value; $usage"
      if [[ $1 == --out ]]; then out=$2; else tokens=$2; fi
      shift
      ;;
    --large) large=1 ;;
    *) die "$usage" ;;
  esac
  shift
done
# layers x width of the dense models, about 1, 2, 4 and 8 times the first's FLOPs a token; heads are 32 wide.
if [[ $large ]]; then
  sizes=(4x128 6x160 6x224 8x288)
  : "${tokens:=24000000}" "${out:=runs/moe-vs-dense-large}"
else
  sizes=(4x64 4x96 5x128 7x160)
  : "${tokens:=10000000}" "${out:=runs/moe-vs-dense}"
fi
batch=2048 # tokens; of the configuration
[[ $tokens =~ ^[1-9][0-9]{4,14}$ ]] || die "--tokens wants a number of at least 10000, not '$tokens'"
steps=$(((tokens + batch - 1) / batch))

strata=${STRATA:-bazel-bin/tools/strata}
if [[ ! ${STRATA:-} ]]; then
  bash tools/setup.sh
  bazel build //tools:strata
fi
bash tools/mixed_corpus.sh "$strata" runs/corpus

mkdir -p "$out"
settings="steps $steps of $batch tokens, sizes ${sizes[*]}"
[[ ! -e $out/settings || $(<"$out/settings") == "$settings" ]] ||
  die "$out was made with other settings ($(<"$out/settings")): remove it, or give another --out"
echo "$settings" >"$out/settings"

# overrides NAME SIZE [EXPERTS]: what sets a run apart. The rate falls as width^-3/4, which joins the best rates of
# trials over 400 steps, 80 of them warmup (validation losses). Base: 8e-3 (4.419) before 4e-3 (4.467). With 32 experts:
# 8e-3 (4.320) before 4e-3 (4.355) and 2.8e-3 (4.441), so that a mixture takes its base's. 7x160: 4e-3 (4.194) before
# 2.8e-3 (4.214). Runs of more steps take three quarters of that. A warmup of 20 steps cost each of them 0.16 or more.
overrides() {
  local layers=${2%x*} width=${2#*x}
  echo "run.dir=$out/$1" "model.num_layers=$layers" "model.hidden_size=$width" "model.num_heads=$((width / 32))" \
    "optimizer.lr=$(awk -v w="$width" 'BEGIN { print 6e-3 * (64 / w) ^ 0.75 }')" \
    "schedule.warmup_steps=$((steps / 10))" "train.max_steps=$steps" "train.eval_interval=$(((steps + 4) / 5))" \
    "checkpoint.interval=$(((steps + 9) / 10))" device.threads=1 ${3:+moe.num_experts=$3}
}

finished() { grep -qs "^{\"step\":$steps,.*\"valid_loss\":" "$out/$1/metrics.jsonl"; }

# train NAME SIZE [EXPERTS]: in the background, once a core is free.
train() {
  local name=$1 words
  if finished "$name"; then return; fi
  read -ra words <<<"$(overrides "$@")"
  while (($(jobs -rp | wc -l) >= cores)); do wait -n || true; done
  echo "$(date +%T) $name"
  mkdir -p "$out/$name"
  "$strata" plan configs/moe-vs-dense.yaml --flops 1e11 "${words[@]}" >"$out/$name/plan.txt"
  "$strata" train configs/moe-vs-dense.yaml --resume=auto "${words[@]}" >"$out/$name/console.log" 2>&1 &
}

cores=$(nproc)
trap 'kill $(jobs -rp) 2>/dev/null || true; wait' EXIT
# The longest first, so that no core is left with much to do alone.
train dense-8x "${sizes[3]}"
train dense-4x "${sizes[2]}"
for experts in 64 32 16 8; do train "moe-$experts" "${sizes[0]}" "$experts"; done
train dense-2x "${sizes[1]}"
train dense-1x "${sizes[0]}"
wait
runs=()
for name in dense-{1,2,4,8}x moe-{8,16,32,64}; do
  finished "$name" || die "$name did not finish: see $out/$name/console.log"
  runs+=("$out/$name")
done

python3 tools/report/moe_vs_dense.py "$out" | tee "$out/table.md"
"$strata" report "${runs[@]}" --out "$out/report.html"

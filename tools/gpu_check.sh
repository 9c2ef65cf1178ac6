#!/bin/bash
# Proves strata on a GPU and measures it there, in six minutes at most.
#
# usage: gpu_check.sh [--tiny] [OUT]      in a folder that tools/gpu_package.sh made
#   --tiny  sizes that the emulated GPU computes in a few minutes: to try this script, not to measure anything
#   OUT     a folder for the results, gpu_check by default: gpu_check.json, gpu_check.txt, each part's log
#
# The parts, each within a time limit; none stops the others:
#   device     what the GPU is, and does at best: large products, copies within its memory
#   ops        every row of the op table against the reference kernels in double
#   models     tiny published models in fp32 against PyTorch's losses, gradients and AdamW steps
#   train      GPT-2 124M in bf16, 30 steps on a text: the loss falls
#   step       its step's tokens a second, and the share of the GPU's rate of bf16 products
#   attention  forward and backward, against that rate; adamw, norm: against the bandwidth of the GPU's memory
#   offload    losses with all state in host memory, and on disk, are those without
#
# The status is 0 when every part passed. A goal of speed that is missed is shown, and is no failure.
set -uo pipefail
export LC_ALL=C
here=$(realpath "$(dirname "$0")")

tiny=false patience=1
if [[ ${1:-} == --tiny ]]; then
  tiny=true patience=8
  shift
fi
out=$(realpath -m "${1:-gpu_check}")
mkdir -p "$out" || exit
# Where cuBLASLt and NCCL lie if nobody told the loader.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64

# ---- What the parts share ----

# within COMMAND...: in what is left of the part's time.
within() { timeout -k 2 $((deadline > SECONDS ? deadline - SECONDS : 1)) "$@"; }

# bench NAME ARGUMENT...: its figures go to $out/NAME.json.
bench() { within "$here/bin/strata" bench "$1" --json "$out/$1.json" "${@:2}" device.type=cuda; }

tiny_model=(model.{num_layers=1,hidden_size=32,num_heads=2,max_seq_len=32,vocab_size=320})

# train_gpt2 NAME KEY=VALUE...: trains under $out/NAME; its losses, and the last step's tokens a second, come to
# `losses` and `speed`.
train_gpt2() {
  local run=$out/$1 settings=("${@:2}") line
  if $tiny; then settings+=("${tiny_model[@]}" data.seq_len=16 optimizer.lr=1e-2); fi
  rm -rf "$run"
  within "$here/bin/strata" train "$out/gpt2.yaml" run.dir="$run" device.type=cuda "${settings[@]}" || return
  losses=()
  while read -r line; do
    if [[ $line =~ \"loss\":([0-9.]+) ]]; then losses+=("${BASH_REMATCH[1]}"); fi
    if [[ $line =~ \"tokens_per_s\":([0-9]+) ]]; then speed=${BASH_REMATCH[1]}; fi
  done <"$run/metrics.jsonl"
}
cat >"$out/gpt2.yaml" <<YAML
model: {preset: gpt2-124m, vocab_size: 50304, dropout: 0.0}   # 50257, padded to a multiple of 64
data: {train: [$here/data/text.txt], tokenizer: byte, valid_split: 0, seq_len: 1024}
train: {micro_batch_size: 4, global_batch_size: 4, max_steps: 30, log_interval: 1, precision: bf16}
optimizer: {lr: 6e-4}
schedule: {warmup_steps: 2}
checkpoint: {interval: never}
YAML

# billionths NUMBER: as an integer, to calculate with.
billionths() { printf '%.0f' "${1}e9"; }

# ---- The parts ----

device() { bench device; }
ops() { within "$here/bin/op_table_gpu_test"; }
models() { cd "$here/data" && within "$here/bin/golden_gpu_test"; }

train() {
  train_gpt2 run train.micro_batch_size=16 train.global_batch_size=16 || return
  printf 'loss %.4f at first, %.4f in step %d; %d tokens/s\n' "${losses[0]}" "${losses[-1]}" ${#losses[@]} "$speed"
  ((${#losses[@]} == 30 && $(billionths "${losses[-1]}") < $(billionths "${losses[0]}") * 9 / 10))
}

step() {
  if $tiny; then
    bench step --batch 2 --seq 16 --precision bf16 --steps 3 "${tiny_model[@]}"
  else
    bench step --batch 16 --seq 1024 --precision bf16 --steps 20
  fi
}
attention() { if $tiny; then bench attention --batch 1 --seq 32; else bench attention --batch 8 --seq 2048; fi; }
adamw() { if $tiny; then bench adamw --elements 10000; else bench adamw --elements 134217728; fi; }
norm() { if $tiny; then bench norm --rows 16 --hidden 96; else bench norm; fi; }

# The host updates what lies there, and rounds as the GPU does but for the last bits: 1e-5 of a loss is the bound of
# tests/emulated_gpu_test.cc.
offload() {
  local tier i loss without=() said=
  for tier in none host nvme; do
    train_gpt2 run train.max_steps=4 train.precision=fp32 zero.stage=3 \
      zero.offload.{optimizer,parameters,gradients}=$tier zero.offload.nvme.path="$out/state" || return
    if ((${#without[@]} == 0)); then without=("${losses[@]}"); fi
    for i in "${!without[@]}"; do
      loss=$(billionths "${without[i]}")
      if ((($(billionths "${losses[i]}") - loss) * 100000 / loss != 0)); then
        echo "step $((i + 1)): loss ${losses[i]} with state on $tier, ${without[i]} without"
        return 1
      fi
    done
    said+=" $tier $speed"
  done
  echo "the same losses; tokens/s:$said"
}

# goal PART CASE: the share of its ceiling that a case is to reach, in percent.
goal() {
  case "$1 $2" in
    "adamw "* | "norm "*) echo 85 ;;
    "attention bf16 forward"*) echo 60 ;;
    "step its multiply-adds") echo 45 ;;
  esac
}

# ---- The results ----

json_string() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//[[:cntrl:]]/ }"
}

# show FORMAT ARGUMENT...: on the terminal and in the table.
show() {
  # shellcheck disable=SC2059
  printf "$@" | tee -a "$out/gpu_check.txt"
}

# figures PART: the rows of its bench, one key a line, for the table; with its goals as JSON in `goals`.
figures() {
  local line name value unit percent wanted met
  while read -r line; do
    [[ $line =~ ^\"(case|value|unit|ratio)\":\ \"?(.*[^\",])\"?,?$ ]] || continue
    case ${BASH_REMATCH[1]} in
      case) name=${BASH_REMATCH[2]} ;;
      value) value=${BASH_REMATCH[2]} ;;
      unit) unit=${BASH_REMATCH[2]} ;;
      ratio)
        percent=${BASH_REMATCH[2]}
        if [[ $percent == *e* ]]; then percent=0; fi # below a ten-thousandth
        percent=$(printf '%.1f' "${percent}e2")
        wanted=$(goal "$1" "$name")
        show '%-10s %-44.44s %12.6g %-9s %7s%%  %s\n' "$1" "$name" "$value" "$unit" "$percent" "${wanted:+$wanted%}"
        if [[ -n $wanted ]]; then
          met=$( ((${percent%.*} >= wanted)) && echo true || echo false)
          goals+=("{\"part\": \"$1\", \"case\": $(json_string "$name"), \"percent\": $percent, \"goal\": $wanted, \"met\": $met}")
        fi
        ;;
    esac
  done <"$out/$1.json"
}

# machine: what the device's bench says of it.
machine() {
  local line
  while read -r line; do
    if [[ $line == \"rows\"* ]]; then break; fi
    if [[ $line =~ ^\"([a-z_]+)\":\ \"?([^\"{]*[^\",{])\"?,?$ && ${BASH_REMATCH[1]} != @(bench|ceiling) ]]; then
      show '%-20s %s\n' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    fi
  done <"$out/device.json"
  show '%-20s %s\n\n' driver "$driver"
}

json_list() {
  local IFS=,
  printf '[%s]' "${*/#/$'\n'  }"
}

: >"$out/gpu_check.txt"
driver=none
if [[ -r /proc/driver/nvidia/version ]]; then read -r driver </proc/driver/nvidia/version; fi
show '%-10s %-12s %7s  %s\n' part outcome seconds said

parts=() goals=() failed=0
# Limits in seconds: 360 together.
for part in device:20 ops:100 models:30 train:50 step:40 attention:20 adamw:15 norm:15 offload:70; do
  name=${part%:*} begin=$SECONDS outcome=passed said=
  deadline=$((begin + ${part#*:} * patience))
  rm -f "$out/$name.json"
  ("$name") >"$out/$name.log" 2>&1
  case $? in
    0) ;;
    124 | 137) outcome="out of time" ;;
    *) outcome=failed ;;
  esac
  if [[ $outcome != passed ]]; then failed=$((failed + 1)); fi
  if [[ $outcome != passed || ! -e $out/$name.json ]]; then
    # The last line, or the error, which its advice follows.
    while read -r line; do
      if [[ $said != error:* ]]; then said=${line:-$said}; fi
    done <"$out/$name.log"
  fi
  show '%-10s %-12s %7d  %s\n' "$name" "$outcome" $((SECONDS - begin)) "$said"
  parts+=("{\"part\": \"$name\", \"outcome\": \"$outcome\", \"seconds\": $((SECONDS - begin)), \"said\": $(json_string "$said"),
   \"figures\": $(cat "$out/$name.json" 2>/dev/null || echo null)}")
done

show '\n'
if [[ -e $out/device.json ]]; then machine; fi
show '%-10s %-44s %12s %-9s %8s  %s\n' bench case measured unit ceiling goal
for name in device step attention adamw norm; do
  if [[ -e $out/$name.json ]]; then figures "$name"; fi
done
show '\n%d of %d parts passed in %d s; figures and logs: %s\n' $((${#parts[@]} - failed)) ${#parts[@]} $SECONDS "$out"

cat >"$out/gpu_check.json" <<JSON
{
 "driver": $(json_string "$driver"), "tiny": $tiny, "seconds": $SECONDS, "failed": $failed,
 "parts": $(json_list "${parts[@]}"),
 "goals": $(json_list "${goals[@]}")
}
JSON
((failed == 0))

#!/bin/bash
# kill_test.sh STRATA: a run that saves after every step is killed, twenty times, at different moments of a
# save. Each time `latest` names a complete checkpoint, and the run continues from it.
source tests/whole_program.sh
checkpoints=run/checkpoints

yes 'It is a truth universally acknowledged.' | head -n 200 >text.txt
# 30 MiB a save, a moment a step.
cat >large.yaml <<'YAML'
run: {dir: run}
model: {num_layers: 3, hidden_size: 256, num_heads: 4, max_seq_len: 8}
data: {train: [text.txt], tokenizer: byte}
train: {global_batch_size: 2, micro_batch_size: 1, max_steps: 100000, log_interval: 1}
schedule: {type: constant}
zero: {stage: 1}
checkpoint: {interval: 1, keep: 2}
device: {threads: 1}
YAML

# Whether the moment of kind $1 has come, in a save of this round's run.
moment() {
  local folder
  if [[ $1 -eq 5 ]]; then  # older ones are being removed
    for folder in $checkpoints/step-*.old; do
      [[ -e $folder && ! -e $folder/stale ]] && return 0
    done
    return 1
  fi
  folder=$(echo $checkpoints/step-*.partial)
  [[ -e $folder && ! -e $folder/stale ]] || return 1
  case $1 in
    0) ;;                                                       # nothing is written yet
    1) (($(stat -c %s "$folder/rank-00000.safetensors") > size)) ;;  # amid a shard
    2) [[ -e $folder/tokenizer ]] ;;                            # the shards are written
    3) [[ -e $folder/manifest.json ]] ;;                        # about to be published
    4) [[ $(<$checkpoints/latest) != "$before" ]] ;;            # the one after a published one
  esac 2>/dev/null
}

"$strata" train large.yaml train.max_steps=1 >output 2>&1 || fail "does not train"
seed=1
for round in {1..20}; do
  before=$(<$checkpoints/latest)
  for folder in $checkpoints/step-*.partial $checkpoints/step-*.old; do
    [[ -e $folder ]] && touch "$folder/stale"
  done
  seed=$(((seed * 1103515245 + 12345) % 2147483648))
  size=$((seed % 15000000))  # of a shard of 15 MB
  launch=("$strata")
  backend=(parallel.backend=threads parallel.ranks=2)
  if ((round % 5 == 0)); then  # one rank of two is killed, and takes the job with it
    launch=($(mpi 2))
    backend=()
  fi
  "${launch[@]}" train large.yaml "${backend[@]}" --resume >output 2>&1 &
  job=$!
  until moment $((round % 6)) || ! kill -0 $job 2>/dev/null; do :; done
  victim=$job
  ((round % 5 == 0)) && victim=$(pgrep -P $job | tail -n 1)
  kill -9 "$victim" || fail "the run ended before it was killed"
  wait $job 2>/dev/null
  grep -q "resumed from $checkpoints/$before" output || fail "not resumed from $before"
  latest=$(<$checkpoints/latest)
  [[ -e $checkpoints/$latest/manifest.json ]] || fail "latest names '$latest', which is not complete"
  [[ ! $latest < $before ]] || fail "latest went back from $before to $latest"
done

round=
before=$(<$checkpoints/latest)
echo "killed 20 times, $before stands"
steps=$((10#${before#step-} + 2))
((steps > 5)) || fail "only $steps steps in all"
"$strata" train large.yaml parallel.backend=threads parallel.ranks=2 train.max_steps=$steps --resume >output 2>&1 ||
  fail "does not continue"
grep -q "resumed from $checkpoints/$before at" output || fail "not resumed from $before"
left=$(ls $checkpoints | tr '\n' ' ')
[[ $left == "$(printf 'latest step-%08d step-%08d ' $((steps - 1)) $steps)" ]] || fail "left behind: $left"

finish

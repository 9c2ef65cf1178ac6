#!/bin/bash
# resume_test.sh STRATA: configs/zero-*.yaml under mpirun, saved and resumed over other numbers of ranks, stages, places
# of state and ranks that share layers: the losses that follow are the unbroken run's.
configs=$PWD/configs
source tests/whole_program.sh
words >text.txt

# run RANKS CONFIG DIR STEPS OVERRIDE...: trains to a step.
run() {
  local ranks=$1 config=$2 dir=$3 steps=$4
  shift 4
  expect 0 "saved $dir/" $(mpi "$ranks") train "$configs/$config.yaml" "run.dir=$dir" "train.max_steps=$steps" \
    data.train=[text.txt] train.precision=fp32 train.log_interval=1 train.eval_batches=2 schedule.total_steps=9 \
    schedule.warmup_steps=2 model.num_layers=2 model.hidden_size=64 model.dropout=0.1 device.threads=1 \
    zero.offload.nvme.path=state "$@"
}

# losses DIR: a step and its loss a line.
losses() {
  sed -E 's/.*"step":([0-9]+),.*"loss":([^,]*),.*/\1 \2/' "$1/metrics.jsonl"
}

# agrees DIR UNBROKEN BOUND: the losses of all of the former's steps, by how much of themselves they may differ.
agrees() {
  awk -v bound="$3" 'NR == FNR { of[$1] = $2; next }
    { ++n; d = of[$1] - $2; if (d < 0) d = -d; if (!($1 in of) || d > bound * of[$1]) bad = 1 }
    END { exit bad || n == 0 }' <(losses "$2") <(losses "$1") ||
    fail "the losses of $1 ($(losses "$1" | tr '\n' ';')) are not those of $2 ($(losses "$2" | tr '\n' ';'))"
}

# --- 4 ranks, then 2, then 3 ---
run 4 zero-3 four 9
run 4 zero-3 start 3
run 2 zero-nvme two 6 --resume=start
run 3 zero-host three 9 --resume=two
agrees start four 0
agrees two four 1e-6
agrees three four 1e-6
run 1 zero-nvme one 6 --resume=start
agrees one four 1e-6
run 4 zero-host back 9 --resume=one zero.stage=0 zero.reduce=micro_batch zero.offload.parameters=nvme
agrees back four 1e-6

# --- the same ranks: the same bits, wherever state rests ---
run 2 zero-nvme unbroken 9
run 2 zero-host first 3 zero.stage=1 zero.reduce=micro_batch
run 2 zero-nvme second 6 --resume=first
run 2 zero-3 third 9 --resume=second zero.persistence_threshold=0  # which lays shards out otherwise
for leg in first second third; do
  agrees $leg unbroken 0
done
for rank in 0 1; do
  same {unbroken,third}/checkpoints/step-00000009/rank-0000$rank.safetensors
done
[[ -d state && -z $(ls -A state) ]] || fail "files of state are left: $(ls -A state)"

# --- ranks that share layers, then none that do, then all of them ---
run 4 zero-3 shared 3 parallel.tensor=2 parallel.sequence_parallel=true
run 2 zero-nvme alone 6 --resume=shared
run 4 zero-host all 9 --resume=alone parallel.tensor=4 zero.stage=1
agrees shared four 1e-6
agrees alone four 1e-6
agrees all four 1e-6

# --- experts that four ranks share, then two, then none, then with layers shared too ---
# A micro-batch routes on its own: of one sequence each, they are the same in every layout.
run 4 moe-gpt mixed 9 parallel.expert=4
run 4 moe-gpt quarters 3 parallel.expert=4 zero.stage=3
run 2 moe-gpt halves 5 --resume=quarters parallel.expert=2 zero.stage=1
run 1 moe-gpt whole 7 --resume=halves
run 4 moe-gpt both 9 --resume=whole parallel.expert=2 parallel.tensor=2 zero.stage=3
for leg in quarters halves whole both; do
  agrees $leg mixed 1e-6
done

# --- and out of any of them ---
expect 0 'wrote one-hf' "$strata" export one one-hf
expect 0 'imported' "$strata" import one-hf imported
expect 0 'wrote again' "$strata" export imported again
same {one-hf,again}/model.safetensors
expect 0 'wrote half' "$strata" export two half --dtype bf16
expect 0 'wrote shared-hf' "$strata" export shared shared-hf
(($(stat -c %s half/model.safetensors) < $(stat -c %s one-hf/model.safetensors) * 6 / 10)) || fail "bf16 takes more than half"
run 2 zero-nvme warm 1 model.init_from=half

finish

#!/bin/bash
# train_test.sh STRATA: the program as a user meets it: training on 1, 2 and 4 ranks, interrupts, resuming,
# the other commands, exit statuses, and what damaged inputs lead to.
source tests/whole_program.sh

# The metrics without what depends on time, on memory and on the number of ranks.
timeless() {
  sed -E 's/"(step_time_s|tokens_per_s|flops_per_s)":[^,]*,//g; s/"(memory|traffic)":\{[^}]*\},//g' "$1"
}

words >text.txt

cat >tiny.yaml <<'YAML'
run: {dir: one, seed: 7}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, max_seq_len: 32, dropout: 0.1}
data: {train: [text.txt], valid_split: 0.1, tokenizer: char}
train: {global_batch_size: 8, micro_batch_size: 1, max_steps: 40, log_interval: 1, eval_interval: 20, eval_batches: 4}
optimizer: {lr: 1e-2}
schedule: {warmup_steps: 2}
device: {threads: 1}
YAML

# --- training ---
expect 0 'step +40/40 .* valid loss [12]\.' "$strata" train tiny.yaml
grep -q '^step-00000040$' one/checkpoints/latest || fail "latest names $(cat one/checkpoints/latest)"
[[ $(wc -l <one/metrics.jsonl) -eq 40 ]] || fail "$(wc -l <one/metrics.jsonl) lines of metrics"
[[ -s one/config.resolved.yaml && -s one/train.log ]] || fail "no resolved configuration or no log"
expect 0 'step +40/40' "$strata" train one/config.resolved.yaml run.dir=again
same one/checkpoints/step-00000040/rank-00000.safetensors again/checkpoints/step-00000040/rank-00000.safetensors
# Other ranks, stages and backends train the same within rounding: the last loss agrees to four digits.
loss() {
  tail -n 1 "$1/metrics.jsonl" | sed -E 's/.*"loss":([0-9]+\.[0-9]{3}).*/\1/'
}
expect 0 'saved two/' $(mpi 2) train tiny.yaml run.dir=two zero.stage=2
expect 0 'saved four/' $(mpi 4) train tiny.yaml run.dir=four zero.stage=3 train.precision=fp32
expect 0 'saved threads/' "$strata" train tiny.yaml run.dir=threads zero.stage=2 parallel.backend=threads parallel.ranks=2
for run in two four threads; do
  [[ $(loss $run) == "$(loss one)" ]] || fail "loss of $run is $(loss $run), of one rank $(loss one)"
done
for rank in 0 1; do  # MPI and threads: the same bits
  same {two,threads}/checkpoints/step-00000040/rank-0000$rank.safetensors
done

# --- resuming ---
expect 1 'none/checkpoints holds no complete checkpoint' "$strata" train tiny.yaml run.dir=none --resume
expect 1 'train without --resume, or with --resume=auto' "$strata" train tiny.yaml run.dir=none --resume
expect 0 'step +3/3' "$strata" train tiny.yaml run.dir=none train.max_steps=3 --resume=auto
expect 0 'resumed from none/checkpoints/step-00000003 at step 3' "$strata" train tiny.yaml run.dir=none train.max_steps=4 --resume=auto
expect 0 'resumed from one/checkpoints/step-00000040' "$strata" train tiny.yaml run.dir=more train.max_steps=41 --resume=one
expect 0 'resumed from two/checkpoints/step-00000040' $(mpi 4) train tiny.yaml run.dir=two zero.stage=1 train.max_steps=42 --resume
expect 1 'nowhere is no checkpoint' "$strata" train tiny.yaml run.dir=more --resume=nowhere
expect 1 'of another shape: .*embedding.tokens.weight \(saved \[' "$strata" train tiny.yaml run.dir=more model.hidden_size=64 --resume=one

# interrupt SIGNAL LAUNCH RUN OVERRIDE...: a run that gets the signal once it has logged a step saves and ends with
# 130; resumed, it is the unbroken one.
interrupt() {
  local signal=$1 launch=$2 run=$3 pid status
  shift 3
  $launch train tiny.yaml "run.dir=$run" train.max_steps=150 "$@" >output 2>&1 &
  pid=$!
  until [[ -s $run/metrics.jsonl ]] || ! kill -0 $pid 2>/dev/null; do :; done
  kill "-$signal" $pid
  wait $pid
  status=$?
  [[ $status -eq 130 ]] || fail "status $status of an interrupted run"
  grep -q 'interrupted after step [0-9]*; continue with --resume' output || fail "no word of the interrupt"
  expect 0 "resumed from $run/checkpoints/step-" $launch train tiny.yaml "run.dir=$run" train.max_steps=150 "$@" --resume
  expect 0 'step +150/150' $launch train tiny.yaml "run.dir=$run-whole" train.max_steps=150 "$@"
  same {"$run","$run-whole"}/checkpoints/step-00000150/rank-00000.safetensors
  [[ $(timeless "$run/metrics.jsonl") == "$(timeless "$run-whole/metrics.jsonl")" ]] || fail "the metrics of $run differ"
}
interrupt INT "$strata" stopped
interrupt INT "$strata" stopped-threads parallel.backend=threads parallel.ranks=2 zero.stage=3
interrupt USR1 "$(mpi 2)" stopped-mpi zero.stage=2  # mpirun hands it on to every rank

# --- a model that sees both ways: masked tokens instead of the next ones ---
bert=(model.type=bert model.num_layers=3 data.random_ltd.min=16 data.random_ltd.steps=10)
expect 0 'step +40/40 .* valid loss' "$strata" train tiny.yaml run.dir=bert "${bert[@]}"
expect 0 'saved bert-two/' $(mpi 2) train tiny.yaml run.dir=bert-two parallel.tensor=2 zero.stage=3 recompute.policy=full "${bert[@]}"
[[ $(loss bert-two) == "$(loss bert)" ]] || fail "loss of a bert on two ranks is $(loss bert-two), on one $(loss bert)"
interrupt INT "$strata" bert-stopped "${bert[@]}"
expect 0 'perplexity +[0-9.]+' "$strata" eval bert text.txt --batches 8
expect 2 'continues no text' "$strata" generate bert --prompt "the "
expect 0 'wrote bert-hf' "$strata" export bert bert-hf
expect 0 'imported' "$strata" import bert-hf bert-again --tokenizer byte
expect 0 'wrote bert-hf2' "$strata" export bert-again bert-hf2
same {bert-hf,bert-hf2}/model.safetensors

# --- the other commands ---
expect 0 'perplexity +[0-9.]+' "$strata" eval one text.txt --batches 8
expect 0 'bits a byte [0-9.]+' "$strata" eval one text.txt
expect 0 '^the [a-z. ]+$' "$strata" generate one --prompt "the " --max-tokens 60 --temperature 0.5
cp output first && "$strata" generate one --prompt "the " --max-tokens 60 --temperature 0.5 >second && same first second
expect 0 'wrote hf' "$strata" export one hf
expect 0 'imported' "$strata" import hf imported
expect 0 'wrote hf2' "$strata" export imported hf2
same {hf,hf2}/model.safetensors
expect 0 'step +2/2' "$strata" train tiny.yaml run.dir=warm model.init_from=hf train.max_steps=2
expect 0 'parameters +[0-9]+' "$strata" plan tiny.yaml --ranks 4 zero.stage=3
expect 0 'fits device +yes: a rank needs .*, device.memory_limit is 78.6' "$strata" plan tiny.yaml --gpu h100-80gb
expect 0 'at 9.89e\+05 GFLOP/s a rank .bf16 products of a h100-80gb' "$strata" plan tiny.yaml --gpu h100-80gb train.precision=bf16
expect 0 'fits device +not known.* give --gpu or device.memory_limit' "$strata" plan tiny.yaml device.type=cuda
expect 2 "knows no 'h100', but a100-40gb, " "$strata" plan tiny.yaml --gpu h100
expect 0 'dp.all_gather' "$strata" plan tiny.yaml --ranks 4 zero.stage=3
expect 0 'layout .* differ by at most' "$strata" check tiny.yaml --ranks 2 zero.stage=3
expect 0 'wrote bytes.bin: [0-9]+ tokens' "$strata" tokenize --tokenizer byte --out bytes.bin text.txt
expect 0 'step +2/2' "$strata" train tiny.yaml run.dir=bytes data.train=[bytes.bin] data.tokenizer=byte train.max_steps=2
expect 0 'wrote report.html' "$strata" report one two stopped --out report.html
grep -q '<svg' report.html && ! grep -qE 'https?://[^w]' report.html || fail "the report is not one page of its own"
expect 0 'wrote the profile trace.json' "$strata" train tiny.yaml run.dir=traced train.max_steps=6 --profile=trace.json
grep -q '"ph": *"X"' trace.json || fail "no events in the profile"
expect 0 'usage: strata' "$strata" --help
for command in train plan check tokenize eval generate import export bench report; do
  expect 0 "usage: strata $command" "$strata" $command --help
done

# --- wrong usage and contradictions: 2, before anything starts ---
expect 2 "no command is called 'trian'" "$strata" trian tiny.yaml
expect 2 'no command given' "$strata"
expect 2 'unknown option --bogus' "$strata" train tiny.yaml --bogus
expect 2 'gradient_clipp1ng.*clip_grad_norm' "$strata" train tiny.yaml run.dir=typo train.gradient_clipp1ng=1
echo 'optimizer: {learning_rat: 1}' >typo.yaml
expect 2 'typo.yaml:1:13' "$strata" train typo.yaml run.dir=typo
expect 2 'global_batch_size 10 is no multiple of micro_batch_size 4 × 2 ranks' $(mpi 2) train tiny.yaml run.dir=typo \
  train.global_batch_size=10 train.micro_batch_size=4
[[ -e typo/checkpoints || -e typo/metrics.jsonl ]] && fail "a refused run left something behind"
expect 2 'no-such.yaml' "$strata" train no-such.yaml

# --- damaged inputs: 1 or 2 and the path, no crash ---
# damaged PATTERN COMMAND...
damaged() {
  local pattern=$1 status
  shift
  timeout -k 1 60 "$@" >output 2>&1
  status=$?
  [[ $status -eq 1 || $status -eq 2 ]] || fail "status $status of a damaged input: ${*//$strata/strata}"
  grep -qF -- "$pattern" output || fail "no '$pattern' from: ${*//$strata/strata}"
}
# flip FILE BYTE: inverts a byte in place.
flip() {
  local value
  value=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf "\\x$(printf %x $((255 - value)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
cp -r one hurt
shard=hurt/checkpoints/step-00000040/rank-00000.safetensors
flip $shard $(($(stat -c %s $shard) / 2))
damaged $shard "$strata" train tiny.yaml run.dir=hurt train.max_steps=41 --resume
truncate -s -100 $shard
damaged $shard "$strata" eval hurt text.txt --batches 1
rm $shard
damaged rank-00000.safetensors "$strata" export hurt hurt-hf
flip hurt/checkpoints/step-00000040/manifest.json 200
damaged hurt/checkpoints/step-00000040/manifest.json "$strata" train tiny.yaml run.dir=hurt --resume
echo step-00000099 >hurt/checkpoints/latest
damaged hurt/checkpoints/latest "$strata" train tiny.yaml run.dir=hurt --resume
for size in 0 7 100 5000; do
  head -c $size bytes.bin >short.bin
  damaged short.bin "$strata" train tiny.yaml run.dir=short data.train=[short.bin] data.tokenizer=byte
done
cp bytes.bin bad.bin && flip bad.bin 9
damaged bad.bin "$strata" train tiny.yaml run.dir=short data.train=[bad.bin] data.tokenizer=byte
echo '{"model": ' >tokenizer.json
damaged tokenizer.json "$strata" tokenize --tokenizer hf:tokenizer.json --out out.bin text.txt
head -c 300 /dev/urandom >junk.model
damaged junk.model "$strata" tokenize --tokenizer sentencepiece:junk.model --out out.bin text.txt
damaged nothing "$strata" tokenize --tokenizer gpt2:nothing --out out.bin text.txt
damaged nothing.txt "$strata" train tiny.yaml run.dir=short data.train=[nothing.txt]
head -c 20 text.txt >little.txt
damaged little "$strata" train tiny.yaml run.dir=short data.train=[little.txt] data.valid_split=0
cp -r hf hf3 && flip hf3/config.json 0
damaged hf3/config.json "$strata" import hf3 imported3
damaged notes.txt "$strata" report one notes.txt --out r.html

finish

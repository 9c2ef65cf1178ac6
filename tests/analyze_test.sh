#!/bin/bash
# analyze_test.sh STRATA: difficulty files as a user makes them: by one process and by several, interrupted,
# under a model, of metrics and data that do not fit.
source tests/whole_program.sh

words >text.txt
cat >tiny.yaml <<'YAML'
run: {dir: run}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, max_seq_len: 32}
data: {train: [text.txt], valid_split: 0.1, tokenizer: char}
train: {global_batch_size: 4, micro_batch_size: 4, max_steps: 2}
device: {threads: 1}
YAML

# --- the same files for any number of workers ---
expect 0 'vocab_rarity +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+  run/difficulty/vocab_rarity.difficulty' "$strata" analyze tiny.yaml
grep -qE '^seqlen +32 +32 +32 +32 ' output || fail "no line of seqlen"
grep -qE '^measuring total_rarity .* MB/s of token file' output || fail "no rate"
[[ $(ls run/difficulty | tr '\n' ' ') == "seqlen.difficulty total_rarity.difficulty vocab_rarity.difficulty " ]] ||
  fail "files: $(ls run/difficulty)"
expect 0 '3 workers' $(mpi 3) analyze tiny.yaml --out three parallel.tensor=3 train.global_batch_size=4
expect 0 '2 workers' "$strata" analyze tiny.yaml --out threads parallel.backend=threads parallel.ranks=2
for metric in seqlen vocab_rarity total_rarity; do
  same {run/difficulty,three}/$metric.difficulty
  same {run/difficulty,threads}/$metric.difficulty
done

# --- against a plain script: the order of total_rarity, and both values of the first sample ---
python3 - <<'PYTHON' || fail "the files are not what a plain script makes"
import collections, math, struct
text = open("text.txt", "rb").read()
train = text[:math.floor(len(text) * 0.9)]
samples = [train[i:i + 32] for i in range(0, len(train) - 32, 32)]
counts = collections.Counter(b"".join(samples))
total = sum(counts.values())
sums = [math.fsum(-math.log(counts[t] / total) for t in s) for s in samples]
for name, resolution, values in [("total_rarity", 1, sums), ("vocab_rarity", 1e-3, [s / 32 for s in sums])]:
    data = open(f"run/difficulty/{name}.difficulty", "rb").read()
    n, = struct.unpack_from("<Q", data, 16)
    order_at, = struct.unpack_from("<Q", data, 48)
    kept = struct.unpack_from(f"<{n}I", data, 128)
    order = struct.unpack_from(f"<{n}I", data, order_at)
    assert n == len(samples), (n, len(samples))
    for value, k in zip(values, kept):
        assert abs(value / resolution - k) < 0.5 + 1e-6, (value, k)
    assert list(order) == sorted(range(n), key=lambda i: (kept[i], i))
PYTHON

# --- under a model; taken up again after a fault ---
expect 0 'saved run/' "$strata" train tiny.yaml
expect 0 'loss +[0-9.]+ .* run/difficulty/loss.difficulty' "$strata" analyze tiny.yaml --metric loss --checkpoint run
expect 0 'loss +[0-9.]+ ' $(mpi 2) analyze tiny.yaml --metric loss --checkpoint run --out two
same {run/difficulty,two}/loss.difficulty
mkdir -p broken/loss.blocks/40.tmp  # so that this block cannot be written
expect 1 'broken/loss.blocks/40.tmp' "$strata" analyze tiny.yaml --metric loss --checkpoint run --out broken
[[ -e broken/loss.blocks/39 && ! -e broken/loss.difficulty ]] || fail "nothing is left to take up"
rmdir broken/loss.blocks/40.tmp
expect 0 'loss +[0-9.]+ ' $(mpi 2) analyze tiny.yaml --metric loss --checkpoint run --out broken
same {run/difficulty,broken}/loss.difficulty
[[ $(ls broken) == loss.difficulty ]] || fail "left behind: $(ls broken)"

# --- what does not fit ---
expect 2 "no metric is called 'rarity'" "$strata" analyze tiny.yaml --metric seqlen,rarity
expect 2 'the metric loss needs --checkpoint' "$strata" analyze tiny.yaml --metric loss
expect 2 'missing CONFIG.yaml' "$strata" analyze
expect 1 'nowhere is no checkpoint' "$strata" analyze tiny.yaml --checkpoint nowhere
expect 1 'sees at most 32 tokens; the data need [0-9]+ and 64' "$strata" analyze tiny.yaml --checkpoint run model.max_seq_len=64
tr a-m n-z <text.txt >other.txt
expect 1 'another tokenizer' "$strata" analyze tiny.yaml --checkpoint run data.train=[other.txt]

finish

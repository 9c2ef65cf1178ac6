#!/bin/bash
# From a fresh machine to a trained language model: installs packages, builds strata, trains a small GPT on Jane
# Austen's novels as two MPI ranks, and has it write.
#
# usage: tools/quickstart.sh
#
# Under ten minutes on two idle cores once the packages are there. What is done already is not done again: an
# interrupted training continues from its last checkpoint. Everything lies under runs/; remove runs/quickstart to
# train anew.
set -euo pipefail
cd "$(dirname "$0")/.."

corpus=runs/corpus run=runs/quickstart
strata=bazel-bin/tools/strata
launch=(mpirun --oversubscribe --bind-to none -n 2)
if ((EUID == 0)); then launch+=(--allow-run-as-root); fi

step=0
say() {
  step=$((step + 1))
  printf '\n[%d/6] %s\n' "$step" "$*"
}

say "Packages: what is missing is installed with apt"
bash tools/setup.sh

say "Build: bazel build //tools:strata (a few minutes the first time)"
bazel build //tools:strata

say "Text: Jane Austen's novels, and a vocabulary of 4096 SentencePiece tokens trained on them"
bash tools/corpus.sh $corpus --novels
if [[ ! -e $corpus/novels.bin ]]; then
  $strata tokenize --tokenizer sentencepiece:$corpus/novels.model --train-vocab 4096 --out $corpus/novels.bin \
    $corpus/novels.txt
fi

say "Training: configs/quickstart.yaml as two ranks, a few minutes"
"${launch[@]}" $strata train configs/quickstart.yaml parallel.expert=2 --resume=auto

say "What it learned"
# The unigram entropy is the loss of a model that knows how frequent each token is, and nothing else.
python3 - $corpus/novels.bin $run/metrics.jsonl <<'PY'
import array, collections, json, math, struct, sys

content = open(sys.argv[1], "rb").read()
tokens = struct.unpack_from("<Q", content, 32)[0]  # the header is described in data/token_file.h
counts = collections.Counter(array.array("H", content[128:128 + 2 * tokens])).values()
entropy = math.log(tokens) - sum(n * math.log(n) for n in counts) / tokens
loss = [line["valid_loss"] for line in map(json.loads, open(sys.argv[2])) if "valid_loss" in line][-1]
print(f"unigram entropy of the text  {entropy:.3f} nats a token")
print(f"validation loss at the end   {loss:.3f} nats a token")
if not loss < entropy - 1:
    sys.exit("the model learned next to nothing: remove runs/quickstart and train again")
PY
echo
$strata generate $run --prompt "It is a truth universally acknowledged" --max-tokens 120 --temperature 0.8 --top-k 50

say "Report: curves, throughput, memory and traffic on one page"
$strata report $run --out $run/report.html
echo "open $run/report.html; the run's other files lie beside it"

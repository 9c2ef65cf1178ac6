#!/bin/bash
# The token file of the reproductions: six kinds of English text in a vocabulary of 1024 tokens, 27 million in all.
#
# usage: tools/mixed_corpus.sh STRATA DIR
#
# STRATA is the program that tokenizes. Writes DIR/mixed-1024.bin, the texts of tools/corpus.sh that it is made of, and
# its tokenizer. Files that are there already are kept.
set -euo pipefail
(($# == 2)) || { echo "usage: tools/mixed_corpus.sh STRATA DIR" >&2 && exit 1; }
strata=$1 corpus=$2

bash "$(dirname "$0")/corpus.sh" "$corpus" >/dev/null
if [[ -e $corpus/mixed-1024.bin ]]; then exit; fi

# The vocabulary is trained on the first megabyte of each text.
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
for text in "$corpus"/*.txt; do head -c 1000000 "$text" | sed '$d' >"$work/${text##*/}"; done
tokenizer=sentencepiece:$corpus/mixed-1024.model
"$strata" tokenize --tokenizer "$tokenizer" --train-vocab 1024 --out "$work/part.bin" "$work"/*.txt
"$strata" tokenize --tokenizer "$tokenizer" --out "$corpus/mixed-1024.bin" "$corpus"/*.txt

#!/bin/bash
# Runs a fuzz target, X_fuzz.cc, under libFuzzer with AddressSanitizer and UBSan, from its seeds in
# tests/data/fuzz/X. What it finds new stays in /tmp/strata-fuzz/X/corpus; an input that ends the process is
# written beside it.
#
# usage: tools/fuzz.sh NAME [SECONDS]     NAME: safetensors, config ...; 60 seconds unless told otherwise
#        tools/fuzz.sh                    lists the names
set -euo pipefail
cd "$(dirname "$0")/.."

if (($# == 0)); then
  find . -name '*_fuzz.cc' -not -path './bazel-*' | sed 's|.*/||; s|_fuzz.cc$||' | sort
  exit
fi
name=$1
seconds=${2:-60}
source=$(find . -name "${name}_fuzz.cc" -not -path './bazel-*' | head -n 1)
if [[ -z $source ]]; then
  echo "there is no ${name}_fuzz.cc; the names are: $(bash "$0" | xargs)" >&2
  exit 2
fi
bash tools/setup.sh clang-16 libclang-rt-16-dev libopenmpi-dev llvm-16

target=/${source#.}  # //data/safetensors_fuzz.cc
target=${target%/*}:${name}_fuzz
work=/tmp/strata-fuzz/$name
mkdir -p "$work/corpus" "$work/objects"
rm -f "$work"/objects/*

# Sources as the build knows them; libFuzzer has a main of its own.
mapfile -t sources < <(bazel query --noshow_progress "kind('source file', deps($target))" |
  sed -n 's|^//\([^@]*\):\(.*\.cc\)$|\1/\2|p' | grep -vxF tests/fuzz_main.cc)
flags=(-std=c++20 -O1 -g -gline-tables-only -fno-omit-frame-pointer -ffp-contract=off -I.
  -DSPDLOG_COMPILED_LIB -DSPDLOG_FMT_EXTERNAL -DOMPI_SKIP_MPICXX)
read -ra mpi < <(mpicxx --showme:compile)
echo "compiling ${#sources[@]} files" >&2
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I '{}' bash -c '
  clang++-16 "${@:3}" -c "$1" -o "$2/objects/${1//\//_}.o"' - '{}' "$work" \
  "${flags[@]}" "${mpi[@]}" -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
clang++-16 -fsanitize=fuzzer,address,undefined -o "$work/${name}_fuzz" "$work"/objects/*.o -pthread \
  -Wl,--as-needed -lspdlog -lfmt -lyaml-cpp -lpcre2-8 -lutf8proc -lsentencepiece_train -lsentencepiece \
  -lxxhash -lz -luring -lmpi

export ASAN_SYMBOLIZER_PATH=/usr/lib/llvm-16/bin/llvm-symbolizer
export ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS:-}  # those of the libraries, at a refused input
seeds=$PWD/tests/data/fuzz/$name
cd "$work"
exec "./${name}_fuzz" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=20 corpus "$seeds"

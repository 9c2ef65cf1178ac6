#!/bin/bash
# Builds what tools/gpu_check.sh runs, and puts it into a folder that can be carried to a machine with a GPU. There it
# needs the GPU's driver and glibc: no compiler, bazel, Python, MPI or CUDA toolkit (cuBLASLt is used if it is there).
#
# usage: tools/gpu_package.sh FOLDER [BAZEL_FLAG...]
#   FOLDER      made anew:
#                 bin/   strata, and the tests of every op and of tiny published models on GPU 0
#                 lib/   the shared libraries that these load, but for glibc's
#                 data/  what they read: reference numbers (tests/data/golden), a text
#                 gpu_check.sh
#   BAZEL_FLAG  in place of --config=cuda. With --config=emulated GPU 0 is the emulated one, so that the folder runs
#               on any machine: gpu_check.sh --tiny
#
# $BAZEL is the command to build with, with its startup options. patchelf is installed if it is missing.
set -euo pipefail
if (($# == 0)); then
  echo "usage: tools/gpu_package.sh FOLDER [BAZEL_FLAG...]" >&2
  exit 2
fi
folder=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
if [[ -e $folder && ! -d $folder/bin ]]; then
  echo "$folder is there, and no folder that this script made" >&2
  exit 1
fi

read -ra bazel <<<"${BAZEL:-bazel}"
flags=("${@:---config=cuda}")
programs=(tools:strata kernels/cuda:op_table_gpu_test tests:golden_gpu_test)

bash tools/setup.sh patchelf
"${bazel[@]}" build "${flags[@]}" "${programs[@]/#/"//"}"
built=$("${bazel[@]}" info "${flags[@]}" bazel-bin)

rm -rf "$folder"
mkdir -p "$folder"/{bin,lib,data/tests/data}
for program in "${programs[@]}"; do
  strip -o "$folder/bin/${program#*:}" "$built/${program/://}"
done

# Those of glibc stay out: the driver needs its own machine's. ldd's lines: NAME => PATH (ADDRESS).
loaded=$(ldd "$folder"/bin/*)
while read -r name arrow path _; do
  if [[ $arrow != "=>" || $name =~ ^lib(c|m|dl|rt|pthread|resolv|util|mvec|anl)\.so ]]; then continue; fi
  if [[ ! -e $folder/lib/$name ]]; then cp -L "$path" "$folder/lib/$name"; fi
done <<<"$loaded"
# shellcheck disable=SC2016  # the loader knows what $ORIGIN is
patchelf --set-rpath '$ORIGIN/../lib' "$folder"/bin/* "$folder"/lib/*

cp -RL tests/data/golden "$folder/data/tests/data/"
cat README.md docs/*.md >"$folder/data/text.txt"
cp tools/gpu_check.sh "$folder/"
du -sh "$folder"

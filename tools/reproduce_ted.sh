#!/bin/bash
# What tensor x expert x data parallelism gains from dropping duplicate tokens and from stashing collectives for
# recomputation (Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach", ICS 2023), by layout: traffic and
# time of `strata bench ted`, with neither switch and with both, first as processes of this machine, then on hosts
# whose links are so slow that they double the time of a step. Prints Markdown.
#
# usage: tools/reproduce_ted.sh [--hosts N] [--rounds N] [--strata FILE] [key.path=value ...]
#   --hosts N      network namespaces that stand for hosts (4), with one rank each, then with two
#   --rounds N     the best of how many steps counts (5)
#   --strata FILE  instead of building //tools:strata
#   key=value      changes the model, as `strata bench ted` takes them
#
# A few minutes. The hosts need root and iproute2; without them only the first part runs.
set -euo pipefail
cd "$(dirname "$0")/.."

hosts=4 rounds=5 strata=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --hosts) hosts=$2 ;;
    --rounds) rounds=$2 ;;
    --strata) strata=$2 ;;
    *) echo "reproduce_ted.sh: no option is called '$1'" >&2 && exit 1 ;;
  esac
  shift 2
done
keys=(device.threads=1 "$@")
if [[ -z $strata ]]; then
  bazel build //tools:strata
  strata=$PWD/bazel-bin/tools/strata
fi

folder=$(mktemp -d)
cluster=ted$$
clean() {
  if [[ -e $folder/cluster ]]; then bash tools/cluster.sh down $cluster; fi
  rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM

# bench ROUNDS TENSOR EXPERT LAUNCHER...: the figures, in $folder/ted.json.
bench() {
  local count=$1 tensor=$2 expert=$3
  shift 3
  "$@" "$strata" bench ted --rounds "$count" --tensor "$tensor" --expert "$expert" --json "$folder/ted.json" \
    "${keys[@]}" >"$folder/log" 2>&1 || {
    cat "$folder/log" >&2
    return 1
  }
}

# figures step: milliseconds of a step with neither switch; figures share: what part of it collectives take, in
# percent; figures rows LABEL: two rows of the table.
figures() {
  python3 - "$folder/ted.json" "$@" <<'PY'
import json, sys

rows = {row["case"]: row for row in json.load(open(sys.argv[1]))["rows"]}
collectives = rows["neither: all collectives, time"]
if sys.argv[2] == "step":
    print(round(collectives["ceiling"]))
elif sys.argv[2] == "share":
    print(round(100 * collectives["ratio"]))
else:
    def change(what, switches):
        row = rows[f"{switches}: {what}"]
        more = f" ({100 * (row['ratio'] - 1):+.0f} %)" if switches == "both" and row["ceiling"] else ""
        return f"{row['value']:.1f}{more}"
    def bytes_of(what, switches):
        now, before = (rows[f"{s}: {what}"]["value"] for s in (switches, "neither"))
        return f"{now:.2f}" + (f" ({100 * (now / before - 1):+.0f} %)" if switches == "both" and before else "")
    for switches in ("neither", "both"):
        gather = rows.get(f"{switches}: gather of shares, time", {"value": 0})["value"]
        step = rows[f"{switches}: step"]
        print("| " + " | ".join([
            sys.argv[3], switches, bytes_of("all-to-all bytes", switches), change("all-to-all time", switches),
            f"{gather:.1f}", bytes_of("all-reduce count", switches).replace(".00", ""),
            change("all-reduce time", switches), f"{rows[f'{switches}: all collectives, time']['ceiling']:.0f}",
            f"{step['ratio']:.2f}"]) + " |")
PY
}

header() {
  printf '\n### %s\n\n' "$1"
  echo "| layout | switches | all-to-all, MB a rank | all-to-all, ms | gather of shares, ms | all-reduces |" \
    "all-reduce, ms | step, ms | speed-up |"
  echo "|-|-|-|-|-|-|-|-|-|"
}
published() { echo "| published: 40B, 128 GPUs | both | | -64 % | | | -33 % | | 1.26 (21 % less time) |"; }

# table LAUNCHER... -- TENSORxEXPERT...
table() {
  local launcher=() layout
  while [[ $1 != -- ]]; do
    launcher+=("$1")
    shift
  done
  shift
  for layout in "$@"; do
    bench "$rounds" "${layout%x*}" "${layout#*x}" "${launcher[@]}"
    figures rows "tensor ${layout%x*}, expert ${layout#*x}"
  done
  published
}

# limited RANKS_A_HOST TENSOR EXPERT: limits the links until a step takes twice as long as it does without limits.
limited() {
  local rate=500 free step try
  bash tools/cluster.sh rate $cluster none
  bench 4 "$2" "$3" bash tools/cluster.sh run $cluster "$1"
  free=$(figures step)
  for try in 1 2 3 4; do
    bash tools/cluster.sh rate $cluster "${rate}mbit"
    bench 4 "$2" "$3" bash tools/cluster.sh run $cluster "$1"
    step=$(figures step)
    if ((10 * step >= 17 * free && 10 * step <= 23 * free || try == 4)); then break; fi
    # What the links add goes with 1 / rate.
    rate=$((rate * (step > free ? step - free : 1) / free))
    rate=$((rate < 20 ? 20 : rate > 5000 ? 5000 : rate))
  done
  header "$hosts hosts, $1 rank(s) each, links of $rate Mbit/s: with tensor $2, expert $3 and neither switch a step \
takes $step ms, $free ms without limits; collectives take $(figures share) % of it"
}

launch=(mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 4)
if ((EUID == 0)); then launch+=(--allow-run-as-root); fi
header "4 ranks on one machine"
table "${launch[@]}" -- 1x4 2x2 4x1

if ((EUID != 0)); then
  echo "hosts with slow links: left out, network namespaces need root" >&2
  exit 0
fi
bash tools/setup.sh iproute2 || exit 0
touch "$folder/cluster"
if ! bash tools/cluster.sh up $cluster "$hosts"; then
  echo "hosts with slow links: left out, this machine allows no network namespaces" >&2
  exit 0
fi
limited 1 2 $((hosts / 2))
table bash tools/cluster.sh run $cluster 1 -- "1x$hosts" "2x$((hosts / 2))" "4x$((hosts / 4))"
limited 2 2 "$hosts"
table bash tools/cluster.sh run $cluster 2 -- "1x$((2 * hosts))" "2x$hosts" "4x$((hosts / 2))"

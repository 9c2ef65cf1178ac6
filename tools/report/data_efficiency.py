#!/usr/bin/env python3
"""The tables of tools/reproduce_data_efficiency.sh: what share of plain training's cost others need for its loss.

usage: tools/report/data_efficiency.py FOLDER

FOLDER holds runs named METHOD-half-SEED and METHOD-whole-SEED, baseline among the methods, each with metrics.jsonl.
Prints Markdown to stdout. A share is that of the cost (time, tokens, layer-tokens) at which a method reaches the
baseline's final loss in that of the baseline: losses are means over seeds, and between a method's two budgets the loss
is linear in the logarithm of the cost. There is no extrapolation: beyond its budgets the share is a bound.
"""

import json
import math
import os
import re
import statistics
import sys

PUBLISHED = (
    "Published: the same quality in less than 50 % of the time and of the data, or a better one of the same data, for "
    "a GPT-3 1.3B (Li et al., DeepSpeed Data Efficiency, 2022)."
)
METHODS = ["baseline", "curriculum", "drop", "both"]
SIZES = ["half", "whole"]
COSTS = {"time": "seconds", "tokens": "tokens", "layer-tokens": "layer_tokens"}


def read_run(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as metrics:
        lines = [json.loads(line) for line in metrics]
    seconds = tokens = 0
    for line in lines:  # a logged step stands for the steps since the line before
        seconds += (line["tokens"] - tokens) / line["tokens_per_s"]
        tokens = line["tokens"]
    return {
        "loss": lines[-1]["valid_loss"],
        "seconds": seconds,
        "tokens": tokens,
        "layer_tokens": lines[-1]["data"]["consumed_layer_tokens"],
    }


def read_runs(folder):
    """{(method, size): {seed: run}}; every one has the same seeds."""
    runs = {(method, size): {} for method in METHODS for size in SIZES}
    for name in os.listdir(folder):
        parts = re.fullmatch(r"(\w+)-(\w+)-(\d+)", name)
        if parts and (parts[1], parts[2]) in runs:
            runs[parts[1], parts[2]][int(parts[3])] = read_run(os.path.join(folder, name))
    if not runs["baseline", "whole"] or len({tuple(sorted(seeds)) for seeds in runs.values()}) != 1:
        sys.exit(f"{folder}: wants runs of {', '.join(METHODS)} at {' and '.join(SIZES)}, all with the same seeds")
    return runs


def spread(values, digits=".4f"):
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{digits}}{deviation}"


def mean_run(seeds):
    """Means; of seconds the median, which a busy moment of the machine does not move."""
    mean = {key: statistics.mean(run[key] for run in seeds.values()) for key in ("loss", "tokens", "layer_tokens")}
    return mean | {"seconds": statistics.median(run["seconds"] for run in seeds.values())}


def share(half, whole, baseline, cost):
    """The share of the baseline's cost at which runs reach its loss, as text."""
    if half["loss"] <= baseline["loss"]:
        return f"< {half[cost] / baseline[cost]:.0%}"
    if whole["loss"] > baseline["loss"]:
        return f"> {whole[cost] / baseline[cost]:.0%}"
    part = (half["loss"] - baseline["loss"]) / (half["loss"] - whole["loss"])
    return f"{half[cost] ** (1 - part) * whole[cost] ** part / baseline[cost]:.0%}"


def table(rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["-"] * len(rows[0])] + rows[1:])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.split("\n\n")[1])
    runs = read_runs(sys.argv[1])
    means = {key: mean_run(seeds) for key, seeds in runs.items()}
    seeds = sorted(runs["baseline", "whole"])

    rows = [["run", "validation loss", "seconds (median)", "tokens", "layer-tokens"]]
    for method in METHODS:
        for size in SIZES:
            mean = means[method, size]
            rows.append(
                [
                    f"{method}, {size}",
                    spread([run["loss"] for run in runs[method, size].values()]),
                    f"{mean['seconds']:.0f}",
                    f"{mean['tokens'] / 1e6:.2f}M",
                    f"{mean['layer_tokens'] / 1e6:.2f}M",
                ]
            )
    print(f"Means and standard deviations over seeds {', '.join(map(str, seeds))}.\n")
    print(table(rows))

    baseline = means["baseline", "whole"]
    rows = [["", *COSTS, "loss at the same tokens"]]
    for method in METHODS[1:]:
        half, whole = means[method, "half"], means[method, "whole"]
        gains = [runs[method, "whole"][s]["loss"] - runs["baseline", "whole"][s]["loss"] for s in seeds]
        rows.append([method, *(share(half, whole, baseline, key) for key in COSTS.values()), spread(gains, "+.4f")])
    print("\nThe baseline's loss is reached in this share of its\n")
    print(table(rows))
    print(f"\n{PUBLISHED}")


if __name__ == "__main__":
    main()

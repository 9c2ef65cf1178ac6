#!/usr/bin/env python3
"""The table of tools/reproduce_moe_vs_dense.sh: how much more compute a dense model needs to equal a mixture.

usage: tools/report/moe_vs_dense.py FOLDER

FOLDER holds runs named dense-* and moe-*, each with metrics.jsonl and plan.txt (what `strata plan` printed). Prints
Markdown to stdout. The ratio is that of the FLOPs of a dense model that reaches the mixture's validation loss to the
mixture's own; the dense model's are interpolated between its two neighbours among the dense runs, the loss linear in
log FLOPs. There is no extrapolation: beyond the dense runs the ratio is a bound.
"""

import json
import math
import os
import re
import sys

PUBLISHED = (
    "Published: 5x, a 1.3B base with 128 experts in every second layer that equals a dense 6.7B "
    "(Rajbhandari et al., DeepSpeed-MoE, 2022)."
)


def read_run(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as metrics:
        lines = [json.loads(line) for line in metrics]
    with open(os.path.join(folder, "plan.txt")) as plan:
        counts = re.search(r"^parameters +(\d+) [^,\n]*(?:, active (\d+))?", plan.read(), re.MULTILINE)
    last = lines[-1]
    seconds = tokens = 0
    for line in lines:  # a logged step stands for the steps since the line before
        seconds += (line["tokens"] - tokens) / line["tokens_per_s"]
        tokens = line["tokens"]
    flops = last["flops_per_s"] / last["tokens_per_s"]
    return {
        "name": os.path.basename(folder),
        "parameters": int(counts[1]),
        "active": int(counts[2] or counts[1]),
        "tokens": tokens,
        "flops_per_token": flops,
        "flops": flops * tokens,
        "loss": last["valid_loss"],
        "seconds": seconds,
    }


def dense_flops(dense, loss):
    """(lowest, highest) FLOPs at which the dense curve, ordered by FLOPs, has this loss; equal where it is known."""
    if loss > dense[0]["loss"]:
        return 0, dense[0]["flops"]
    for a, b in zip(dense, dense[1:]):
        if a["loss"] >= loss > b["loss"]:
            part = (a["loss"] - loss) / (a["loss"] - b["loss"])
            flops = math.exp(math.log(a["flops"]) * (1 - part) + math.log(b["flops"]) * part)
            return flops, flops
    return dense[-1]["flops"], math.inf


def ratio(dense, mixture):
    low, high = (flops / mixture["flops"] for flops in dense_flops(dense, mixture["loss"]))
    if low == 0:
        return f"< {high:.2f}x"
    return f"{low:.2f}x" if low == high else f"> {low:.2f}x"


def table(rows):
    width = len(rows[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["-"] * width] + rows[1:])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.split("\n\n")[1])
    folder = sys.argv[1]
    names = [name for name in os.listdir(folder) if re.match(r"(dense|moe)-", name)]
    runs = [read_run(os.path.join(folder, name)) for name in names]
    dense = sorted((run for run in runs if run["name"].startswith("dense-")), key=lambda run: run["flops"])
    mixtures = sorted((run for run in runs if run["name"].startswith("moe-")), key=lambda run: run["parameters"])
    if not dense or len({run["tokens"] for run in runs}) != 1:
        sys.exit(f"{folder}: wants dense runs, and all runs at the same number of tokens")

    rows = [["model", "parameters", "active", "FLOPs a token", "training FLOPs", "validation loss", "seconds"]]
    for run in dense + mixtures:
        rows.append(
            [
                run["name"],
                f"{run['parameters'] / 1e6:.2f}M",
                f"{run['active'] / 1e6:.2f}M",
                f"{run['flops_per_token'] / 1e6:.2f}M ({run['flops_per_token'] / dense[0]['flops_per_token']:.2f}x)",
                f"{run['flops']:.3g}",
                f"{run['loss']:.4f}",
                f"{run['seconds']:.0f}",
            ]
        )
    print(f"Each model was trained on {dense[0]['tokens']:,} tokens.\n")
    print(table(rows))
    print("\nA dense model reaches the same validation loss with\n")
    print(table([["model", "compute of the dense model"]] + [[run["name"], ratio(dense, run)] for run in mixtures]))
    print(f"\n{PUBLISHED}")


if __name__ == "__main__":
    main()

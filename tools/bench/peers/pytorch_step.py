#!/usr/bin/env python3
"""One training step of GPT-2 124M in PyTorch on the CPU: the other side of `strata bench step`.

  python3 -m venv ~/torch && ~/torch/bin/pip install torch==2.15.0 numpy
  ~/torch/bin/python tools/bench/peers/pytorch_step.py --batch 4 --seq 256 --threads 2 [--precision bf16] [--compile]

tools/bench/peers/compare.sh runs it in turns with strata. The step is the same as strata's: random weights, no
dropout, tied head of 50304 rows, forward, cross-entropy, backward, clipping at 1, AdamW. PyTorch gets what it is fastest
with: fused AdamW, scaled_dot_product_attention, gradients set to None, and an allocator that keeps large blocks on huge
pages (TUNABLES; page faults are most of the time of a step without them, --allocator default shows that).

Prints one JSON object: tokens/s (median and best of --steps), page faults a step, peak resident memory, the loss.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import time

# Of glibc's malloc: transparent huge pages; everything from one heap, which is never given back.
TUNABLES = ":".join(f"glibc.malloc.{tunable}" for tunable in (
    "hugetlb=1", "mmap_max=0", "arena_max=1", f"trim_threshold={1 << 40}", f"top_pad={64 << 20}"))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7, help="measured, after three to warm up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--allocator", choices=["tuned", "default"], default="tuned")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    return parser.parse_args()


def make_model(torch, layers, hidden, heads, vocab=50304, max_len=1024):
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = (part.view(batch, length, heads, hidden // heads).transpose(1, 2)
                       for part in self.qkv(self.attention_norm(x)).split(hidden, dim=2))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, hidden))
            return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(max_len, hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(hidden)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids, targets):
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.tokens.weight)
            return functional.cross_entropy(logits.view(-1, vocab), targets.view(-1))

    return GPT()


def main():
    args = parse_arguments()
    if args.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": TUNABLES})

    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = make_model(torch, args.layers, args.hidden, args.heads)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if args.compile else model
    text = torch.randint(50257, (args.batch, args.seq + 1))
    ids, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(3):
        loss = step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - begin)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    tokens = args.batch * args.seq
    print(json.dumps({
        "torch": torch.__version__,
        "case": f"{args.precision} {'compile' if args.compile else 'eager'} B {args.batch} T {args.seq}",
        "threads": args.threads,
        "allocator": args.allocator,
        "tokens_per_s_median": round(tokens / statistics.median(seconds), 1),
        "tokens_per_s_best": round(tokens / min(seconds), 1),
        "page_faults_a_step": (usage.ru_minflt - faults) // args.steps,
        "peak_rss_mib": usage.ru_maxrss // 1024,
        "loss": round(loss, 4),
    }))


main()

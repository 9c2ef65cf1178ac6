#!/usr/bin/env python3
"""Makes GPT-2 token vectors with tiktoken, and times it: the other side of strata's byte-level BPE.

  pip install tiktoken
  python3 tests/tiktoken_compare.py vectors FOLDER OUT.jsonl [--count 50000] [--seed 1]
  STRATA_BPE_VECTORS=OUT.jsonl bazel test //data:bpe_tokenizer_test --test_env=STRATA_BPE_VECTORS
  python3 tests/tiktoken_compare.py time FOLDER TEXT...

FOLDER holds OpenAI's encoder.json and vocab.bpe; nothing is downloaded. `vectors` writes random strings with their
ids, one JSON object a line, in the form of tests/data/golden/gpt2_bpe.jsonl. `time` prints the best of seven runs over
each whole text, on one thread, by processor time; compare with `strata bench tokenize`.
"""
import argparse
import json
import pathlib
import random
import time

import tiktoken

# The pattern of tiktoken_ext.openai_public.gpt2.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

WORDS = """the of and a to in is that it was for on are as with his they I at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if Will UP other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part don't I'll they're we've it's I'd
I'm DON'T o'clock 'tis naïve café Straße Ελληνικά русский 中文 日本語 한국어 العربية עברית हिन्दी ไทย""".split()
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u2003", "\u3000", "\u180e", "\u200b", "\u0085",
          "\u1680", "\u2028", "\x1c", "\x0b", "\x0c"]
SCRIPTS = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0xEFF),
           (0x1100, 0x11FF), (0x1E00, 0x20CF), (0x2100, 0x2BFF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
           (0xE000, 0xE0FF), (0xFE00, 0xFFFF), (0x10000, 0x1FFFF), (0x1F300, 0x1FAFF), (0x20000, 0x323AF), (0, 0x1F),
           (0, 0x10FFFF)]


def code_point(rng, low, high):
    while True:
        c = rng.randint(low, high)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def random_string(rng):
    parts = []
    for _ in range(rng.randint(0, 25)):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(WORDS))
        elif kind < 0.6:
            parts.append(rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 5]))
        elif kind < 0.7:
            parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
        elif kind < 0.8:
            parts.append("".join(rng.choice("!?.,;:'\"-_()[]{}<>|/\\@#$%^&*+=~`") for _ in range(rng.randint(1, 6))))
        elif kind < 0.83:
            parts.append(rng.choice(["<|endoftext|>", "'s", "'LL", "'ve", "’s", "a" * rng.randint(1, 60)]))
        else:
            low, high = rng.choice(SCRIPTS)
            parts.append("".join(code_point(rng, low, high) for _ in range(rng.randint(1, 8))))
    return "".join(parts)


def open_gpt2(folder):
    """tiktoken's GPT-2 from the two published files: a token's rank is its id."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    end = vocabulary.pop("<|endoftext|>")
    ranks = {bytes(byte_of[c] for c in token): i for token, i in vocabulary.items()}
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["vectors", "time"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--count", type=int, default=50000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    gpt2 = open_gpt2(args.folder)
    if args.mode == "vectors":
        rng = random.Random(args.seed)
        with open(args.files[0], "w", encoding="utf-8") as out:
            for _ in range(args.count):
                text = random_string(rng)
                print(json.dumps({"text": text, "ids": gpt2.encode_ordinary(text)}), file=out)
        return
    for path in args.files:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        best = float("inf")
        for _ in range(7):
            start = time.process_time()
            ids = gpt2.encode_ordinary(text)
            best = min(best, time.process_time() - start)
        size = len(text.encode())
        print(f"{path}: {size} bytes, {len(ids)} tokens, {size / best / 1e6:.1f} MB/s")


if __name__ == "__main__":
    main()

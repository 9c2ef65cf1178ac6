#!/usr/bin/env python3
"""Writes compile_commands.json, for clangd and clang-tidy, from what bazel would run.

usage: tools/compile_commands.py [BAZEL_FLAG...]     such as --config=cuda
"""

import json
import os
import subprocess
import sys


def bazel(*args):
    return subprocess.run(["bazel", *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    root = os.getcwd()
    external = bazel("info", "output_base").strip() + "/external/"
    actions = json.loads(bazel("aquery", *sys.argv[1:], "--output=jsonproto",
                               'mnemonic("CppCompile|CudaCompile", //...)'))["actions"]
    entries = []
    for action in actions:
        # Without -f flags: gcc has words for code generation that clang does not know.
        arguments = [external + a[len("external/"):] if a.startswith("external/") else a
                     for a in action["arguments"] if not a.startswith("-f")]
        entries.append({
            "directory": root,
            "file": arguments[arguments.index("-c") + 1],
            "arguments": arguments,
        })
    with open("compile_commands.json", "w") as out:
        json.dump(entries, out, indent=1)
    print(f"compile_commands.json: {len(entries)} commands")


main()

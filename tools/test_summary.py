#!/usr/bin/env python3
"""Counts test targets in the event files of `bazel test`, and says what was skipped and why.

usage: tools/test_summary.py EVENTS.json...

Prints "PASSED FAILED SKIPPED" to stdout, reasons to stderr. A target counts as skipped when bazel left it out
as incompatible, or when none of its cases could run (tests/catch_main.cc says so in the log).
"""

import json
import sys
import urllib.parse


def read_log(outputs):
    for output in outputs:
        if output["name"] == "test.log":
            with open(urllib.parse.urlparse(output["uri"]).path, errors="replace") as log:
                return log.read().splitlines()
    return []


def outcomes(path, reasons):
    """Label -> "passed", "failed" or "skipped" of each test target that bazel was to run; adds to reasons."""
    result, skip_lines = {}, {}
    with open(path) as events:
        for event in map(json.loads, events):
            ident = event["id"]
            if "targetConfigured" in ident:
                if event.get("configured", {}).get("targetKind", "").endswith("_test rule"):
                    result[ident["targetConfigured"]["label"]] = "failed"  # until it is seen to pass
            elif "testResult" in ident:
                lines = read_log(event["testResult"].get("testActionOutput", []))
                skip_lines[ident["testResult"]["label"]] = [l for l in lines if l.startswith("SKIPPED ")]
            elif "testSummary" in ident and event["testSummary"]["overallStatus"] in ("PASSED", "FLAKY"):
                result[ident["testSummary"]["label"]] = "passed"
            elif event.get("aborted", {}).get("reason") == "SKIPPED":
                label = ident["targetCompleted"]["label"]
                if label in result:
                    result[label] = "skipped"
                    reasons.add(f"{label}: SKIPPED all: not for this configuration")
    for label, lines in skip_lines.items():
        reasons.update(f"{label}: {line}" for line in lines)
        if "SKIPPED all" in lines and result[label] == "passed":
            result[label] = "skipped"
    return result


def main():
    reasons = set()
    found = [outcome for path in sys.argv[1:] for outcome in outcomes(path, reasons).values()]
    for reason in sorted(reasons):
        print(reason, file=sys.stderr)
    print(*(found.count(outcome) for outcome in ("passed", "failed", "skipped")))


main()

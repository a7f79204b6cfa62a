"""Run transformers' and torch's own tests on relpos and on their own classes, and count both by one rule.

    python tests/peers/run.py [--transformers CHECKOUT] [--torch CHECKOUT] [--only NAME]

Prints the counts and every failure of ours; exits 1 if one has no written reason. docs/peers.md has the rule.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from counting import Difference, Records, count, differences, parts, stale, table
from suites import BUILD, HERE, Suite, run, torch_suites, transformers_suites


def main() -> int:
    """Run the suites that can be had; 0 if every failure has its reason."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transformers", type=Path, help="a checkout of transformers' repository")
    parser.add_argument("--torch", type=Path, help="a checkout of torch's repository")
    parser.add_argument("--only", default="", help="the beginning of the names of suites to run")
    parser.add_argument("--out", type=Path, default=BUILD / "counts.jsonl", help="for counts as JSON lines")
    arguments = parser.parse_args()
    suites = transformers_suites(arguments.transformers)
    if arguments.torch is not None:
        suites += torch_suites(arguments.torch)
    all_ours: list[Records] = []
    listed: list[Difference] = []
    lines = []
    for suite in (suite for suite in suites if suite.name.startswith(arguments.only)):
        records = {side: run(suite, side) for side in suite.sides}
        lines += report_counts(suite, records)
        peer, *ours = suite.sides
        for side in ours:
            found = differences(records[side], records[peer])
            show(side, found)
            listed += found
            all_ours.append(records[side])
    arguments.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return judge(all_ours, listed)


def report_counts(suite: Suite, records: dict[str, Records]) -> list[dict[str, Any]]:
    """Print a table for each part of the suite; the same as records."""
    by_part: dict[str, dict[str, dict[str, int]]] = {}
    for side in suite.sides:
        for part, those in parts(suite.name, records[side]).items():
            by_part.setdefault(part, {})[side] = count(those)
    for part, counts in by_part.items():
        print(f"\n{part}\n\n{table(counts)}")
    return [
        circumstances(part, side) | numbers
        for part, counts in by_part.items()
        for side, numbers in counts.items()
    ]


def show(side: str, found: list[Difference]) -> None:
    """Print the differences, those of one kind and reason together."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in found:
        groups.setdefault((difference.kinds, difference.reason or difference.said), []).append(difference)
    for (kinds, _), those in groups.items():
        print(f"\n{side}: {kinds}: {', '.join(difference.test for difference in those)}")
        print(f"  said: {those[0].said}\n  reason: {those[0].reason or 'NONE'}")


def judge(ours: list[Records], found: list[Difference]) -> int:
    """1 if a reason is missing, or stands for nothing."""
    missing = sorted({difference.test for difference in found if not difference.reason})
    unneeded = stale(ours, found)
    if missing:
        print(f"\n{len(missing)} tests have no reason in tests/peers/reasons.py: {', '.join(missing)}")
    if unneeded:
        print(f"\nreasons that no test needs: {', '.join(unneeded)}")
    return 1 if missing or unneeded else 0


def circumstances(part: str, side: str) -> dict[str, str]:
    """What was counted, with which versions."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "what": "peers",
        "suite": part,
        "side": side,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    sys.exit(main())

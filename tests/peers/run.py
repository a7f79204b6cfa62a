"""Run transformers' and torch's own tests on relpos and on their own classes, and count both by one rule.

    python tests/peers/run.py [--transformers CHECKOUT] [--torch CHECKOUT]

Prints the counts and every failure of ours; exits 1 if one has no written reason. docs/peers.md has the rule.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from counting import Records, count, differences, stale, table
from suites import BUILD, HERE, Suite, run, torch_suites, transformers_suites


def main() -> int:
    """Run the suites that can be had; 0 if every failure has its reason."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transformers", type=Path, help="a checkout of transformers' repository")
    parser.add_argument("--torch", type=Path, help="a checkout of torch's repository")
    parser.add_argument("--out", type=Path, default=BUILD / "counts.jsonl", help="the counts as lines of JSON")
    arguments = parser.parse_args()
    suites = transformers_suites(arguments.transformers)
    if arguments.torch is not None:
        suites += torch_suites(arguments.torch)
    all_ours: list[Records] = []
    listed: list[tuple[str, str, str, str]] = []
    lines = []
    for suite in suites:
        records = {side: run(suite, side) for side in suite.sides}
        peer, *ours = suite.sides
        counts = {side: count(records[side]) for side in suite.sides}
        print(f"\n{suite.name}\n\n{table(counts)}")
        for side in ours:
            found = differences(records[side], records[peer])
            show(side, found)
            listed += found
            all_ours.append(records[side])
        lines += [circumstances(suite, side) | counts[side] for side in suite.sides]
    arguments.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return judge(all_ours, listed)


def show(side: str, found: list[tuple[str, str, str, str]]) -> None:
    """Print each failure, and each test that tests nothing here alone."""
    for name, kinds, said, reason in found:
        print(f"\n{side}: {name.split('::')[-1]}: {kinds}\n  {said}\n  reason: {reason or 'NONE'}")


def judge(ours: list[Records], listed: list[tuple[str, str, str, str]]) -> int:
    """1 if a reason is missing, or stands for nothing."""
    missing = sorted({name.split("::")[-1] for name, _, _, reason in listed if not reason})
    unneeded = stale(ours, listed)
    if missing:
        print(f"\n{len(missing)} tests have no reason in tests/peers/reasons.py: {', '.join(missing)}")
    if unneeded:
        print(f"\nreasons that no test needs any more: {', '.join(unneeded)}")
    return 1 if missing or unneeded else 0


def circumstances(suite: Suite, side: str) -> dict[str, str]:
    """What was counted, with which versions."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "what": "peers",
        "suite": suite.name,
        "side": side,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    sys.exit(main())

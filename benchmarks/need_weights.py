"""Attention modules that return their weights: relpos's beside `torch.nn.MultiheadAttention`, in turns.

    python benchmarks/need_weights.py --threads 2 --json benchmarks/results/need_weights.jsonl

It takes less than 3 minutes on two quiet cores. The bound is 1.5 times torch's time. "forward and backward"
has a gradient of the output only, "of both" one of the weights too.
"""

from collections.abc import Callable

import torch
from torch import nn

from harness import Plan, measure_steps
from records import append, count, make_parser, parse
from relpos.nn import RelativeMultiheadAttention
from table import head, show

LENGTHS = (128, 512, 2048)
WIDTH, HEADS, DISTANCE = 512, 8, 16
BOUND = 1.5
PASSES = ("no gradient", "forward", "forward and backward", "forward and backward of both")
COLUMNS = ("side", "length", "pass", "is_met")


def main(arguments: list[str] | None = None) -> None:
    """Print each length and pass, and append them to --json."""
    parser = make_parser(__doc__, turns=15)
    parser.add_argument("--lengths", type=count, nargs="+", default=LENGTHS, help="tokens")
    options = parse(parser, arguments)
    plan = Plan(options.turns, options.seconds, threads=options.threads)
    print(*head(COLUMNS), sep="\n", flush=True)
    for length in options.lengths:
        for name in PASSES:
            start = {"what": "need_weights", "length": length, "pass": name}
            start |= {"width": WIDTH, "heads": HEADS, "max_distance": DISTANCE}
            for record in measure_steps(steps(length, name), plan, start, against="torch"):
                record["is_met"] = (
                    record["ratio_to"]["torch"] <= BOUND if record["side"] == "relpos" else None
                )
                append(options.json, record)
                print(show(record, COLUMNS), flush=True)


def steps(length: int, name: str) -> dict[str, Callable[[], None]]:
    """One call of each module, with float32 tokens [1, length, width]."""
    torch.manual_seed(0)
    x = torch.randn(1, length, WIDTH)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = RelativeMultiheadAttention(WIDTH, HEADS, batch_first=True, max_distance=DISTANCE)

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(name != "no gradient"):
                out, weights = module(x, x, x)
            if name.endswith("backward"):
                out.sum().backward()
            elif name.endswith("both"):
                (out.sum() + weights.square().sum()).backward()

        return run

    return {"torch": step(theirs), "relpos": step(ours)}


if __name__ == "__main__":
    main()

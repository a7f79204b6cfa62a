"""The aims of the backend `triton` on a GPU, and whether a run of gpu_check.sh meets them.

An aim is met if every cell that it names was measured and holds, and the conformance suite passed; it is
missed if one cell does not hold. If all hold and the suite did not pass or finish, the aim is "measured", and
the table says so.
"""

from typing import NamedTuple

from cells import LENGTHS
from forms import PASSES
from records import Record

# of the GPUs that the aims are about
CAPABILITY = "9.0"
# a record of an aim
AIMED = {"dtype": "bfloat16", "d_k": 64, "max_distance": 16, "side": "triton"}
LONG = tuple(sorted(length for length in LENGTHS if length >= 2048))


class Aim(NamedTuple):
    """The highest value of a ratio, or of memory, for some passes and lengths.

    Args:
        field: the side of a ratio, or "peak_mib".
        is_spread: the bound is for the largest value over the smallest of a pass.
    """

    name: str
    field: str
    bound: float
    passes: tuple[str, ...]
    lengths: tuple[int, ...]
    is_spread: bool = False


AIMS = (
    Aim("forward, at most 1.10 times flash from n 2,048 on", "sdpa_flash", 1.10, ("forward",), LONG),
    Aim("both, at most 1.25 times flash from n 2,048 on", "sdpa_flash", 1.25, ("both",), LONG),
    Aim("at most an eighth of gather's time at n 4,096", "gather", 1 / 8, PASSES, (4096,)),
    # the tokens in a batch are constant, and so is memory that is linear in them
    Aim("memory the same from n 2,048 to 16,384, within a quarter", "peak_mib", 1.25, PASSES, LONG, True),
)


class Verdict(NamedTuple):
    """Whether an aim is met, and the numbers."""

    aim: Aim
    is_causal: bool
    word: str  # met, missed, not measured; or measured, and the state of the suite
    why: str


def verdicts(records: list[Record]) -> list[Verdict]:
    """Each aim, without and with a causal mask."""
    measured = [x for x in records if x["what"] == "attention"]
    aimed = [x for x in measured if AIMED.items() <= x.items()]
    doubt, suite = _doubt(measured), suite_doubt(records)
    return [
        Verdict(aim, is_causal, *_judge(aim, [x for x in aimed if x["is_causal"] == is_causal], doubt, suite))
        for aim in AIMS
        for is_causal in (False, True)
    ]


def counts(suite: Record) -> str:
    """The outcomes of the cases of each backend, in words."""
    words = (
        f"{name} {', '.join(f'{number} {outcome}' for outcome, number in found.items())}"
        for name, found in suite["counts"].items()
    )
    return "; ".join(words) or "no case ran"


def suite_doubt(records: list[Record]) -> str | None:
    """The state of the suite if no aim can be met, with its counts; None if it passed."""
    suites = [x for x in records if x["what"] == "conformance"]
    if any(x["is_passed"] for x in suites):
        return None
    if not suites or not suites[-1]["counts"]:
        return "conformance not run; no case ran"
    has_failed = any(x["failed"] for x in suites[-1]["counts"].values())
    word = "passed" if has_failed or suites[-1]["is_finished"] else "finished"
    return f"conformance not {word}; {counts(suites[-1])}"


def _doubt(measured: list[Record]) -> str | None:
    """Why nothing in this run is a measurement for an aim; None if it is."""
    if not measured:
        return "nothing was measured"
    x = measured[0]
    if x["rehearsal"]:
        return "a rehearsal measures nothing"
    if x["capability"] != CAPABILITY:
        return f"{x['device_name']} has capability {x['capability']}, and the aims are for {CAPABILITY}"
    return None


def _judge(aim: Aim, aimed: list[Record], doubt: str | None, suite: str | None) -> tuple[str, str]:
    num_cells = len(aim.passes) * len(aim.lengths)
    found = {
        (x["pass"], x["length"]): _value(aim, x)
        for x in aimed
        if x["pass"] in aim.passes and x["length"] in aim.lengths and _value(aim, x) is not None
    }
    if doubt is not None or not found:
        return "not measured", doubt or f"0 of {num_cells} cells"
    worst = _worst(aim, found)
    if worst > aim.bound:
        return "missed", f"{worst:.3f}, above {aim.bound:g}"
    if len(found) < num_cells:
        return "not measured", f"{len(found)} of {num_cells} cells, the highest {worst:.3f}"
    why = f"{worst:.3f}, not above {aim.bound:g}"
    if suite is None:
        return "met", why
    state, _, numbers = suite.partition("; ")
    return f"measured, {state}", f"{why}; {numbers}"


def _value(aim: Aim, record: Record) -> float | None:
    return record["peak_mib"] if aim.field == "peak_mib" else record["ratio_to"].get(aim.field)


def _worst(aim: Aim, found: dict[tuple[str, int], float]) -> float:
    """The highest number of all cells, or of one pass over the lowest of that pass."""
    if not aim.is_spread:
        return max(found.values())
    passes = [[x for (of, _), x in found.items() if of == name] for name in aim.passes]
    return max(max(x) / max(min(x), 1e-9) for x in passes if x)

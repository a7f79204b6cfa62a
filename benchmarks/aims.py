"""The aims of the backend `triton` on a GPU, and whether a run of gpu_check.sh meets them."""

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
    """The highest ratio to a form, or for memory the highest over the lowest of a pass.

    Args:
        field: the form, or "peak_mib".
    """

    name: str
    field: str
    bound: float
    passes: tuple[str, ...]
    lengths: tuple[int, ...]


AIMS = (
    Aim("forward, at most 1.10 times flash from n 2,048 on", "sdpa_flash", 1.10, ("forward",), LONG),
    Aim("both, at most 1.25 times flash from n 2,048 on", "sdpa_flash", 1.25, ("both",), LONG),
    Aim("at most an eighth of gather's time at n 4,096", "gather", 1 / 8, PASSES, (4096,)),
    # the tokens in a batch are constant, and so is memory that is linear in them
    Aim("memory the same from n 2,048 to 16,384, within a quarter", "peak_mib", 1.25, PASSES, LONG),
)


def verdicts(records: list[Record]) -> list[tuple[str, str, str, str]]:
    """(aim, mask, verdict, why) of each aim, without and with a causal mask.

    An aim is met if all its cells were measured and hold and the conformance suite passed, and missed if one
    cell does not hold.
    """
    aimed = [x for x in records if x["what"] == "attention" and AIMED.items() <= x.items()]
    rows = []
    for aim in AIMS:
        for is_causal in (False, True):
            cells = [x for x in aimed if x["is_causal"] == is_causal and x["length"] in aim.lengths]
            verdict, why = _judge(aim, [x for x in cells if x["pass"] in aim.passes], records)
            rows.append((aim.name, "causal" if is_causal else "two-sided", verdict, why))
    return rows


def counts(suite: Record) -> str:
    """The outcomes of the cases of each backend, in words."""
    words = (
        f"{name} {', '.join(f'{number} {outcome}' for outcome, number in found.items())}"
        for name, found in suite["counts"].items()
    )
    return "; ".join(words) or "no case ran"


def _judge(aim: Aim, cells: list[Record], records: list[Record]) -> tuple[str, str]:
    if any(x.get("rehearsal") for x in records):
        return "not measured", "a rehearsal measures nothing"
    if cells and cells[0]["capability"] != CAPABILITY:
        device = f"{cells[0]['device_name']} has capability {cells[0]['capability']}"
        return "not measured", f"{device}, and the aims are for {CAPABILITY}"
    found: dict[str, list[float]] = {}
    for x in cells:
        value = x["peak_mib"] if aim.field == "peak_mib" else x["ratio_to"].get(aim.field)
        if value is not None:
            found.setdefault(x["pass"], []).append(value)
    num_cells, num_found = len(aim.passes) * len(aim.lengths), sum(map(len, found.values()))
    if not found:
        return "not measured", f"0 of {num_cells} cells"
    is_spread = aim.field == "peak_mib"
    worst = max(max(x) / max(min(x), 1e-9) if is_spread else max(x) for x in found.values())
    if worst > aim.bound:
        return "missed", f"{worst:.3f}, above {aim.bound:g}"
    if num_found < num_cells:
        return "not measured", f"{num_found} of {num_cells} cells, the highest {worst:.3f}"
    if not any(x["what"] == "conformance" and x["is_passed"] for x in records):
        return "measured, conformance not passed", f"{worst:.3f}, not above {aim.bound:g}"
    return "met", f"{worst:.3f}, not above {aim.bound:g}"

"""Records as a page of Markdown tables: of attention on a CPU or a GPU, of bounds, and of everything else.

    python benchmarks/table.py benchmarks/results/attention.jsonl benchmarks/results/bounds.jsonl
        --out docs/attention.md --picture docs/attention.png

If a setting was measured several times, the last record counts; of a GPU's records, those of the last run.
"""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from aims import counts, verdicts
from forms import FORMS
from records import Record, plain_parser, read

TITLES = {"forward": "forward", "both": "forward and backward"}
FORM_NAMES = {
    "sdpa": "scaled_dot_product_attention, no positions",
    "sdpa_flash": "SDPA, flash",
    "sdpa_cudnn": "SDPA, cuDNN",
    "flex": "FlexAttention, keys only",
    "gather": "gather, [n, n, d] (tensor2tensor, OpenNMT)",
    "einsum": "einsum, [n, n, d] (Hugging Face)",
    **{name: f"relpos: {name}" for name in ("dense", "merged", "cpu", "triton")},
}
SECONDS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
MEBIBYTES = ((1024, "GiB"), (1, "MiB"), (1 / 1024, "KiB"))
# fields that no table of other benchmarks shows
HIDDEN = ("side", "turns", "has_backward", "commit", "kernel", "run")
# equal in all records of a section
SETTING = ("device", "device_name", "threads", "dtype", "heads", "d_k", "max_distance")
SETTING += ("is_causal", "padding", "dropout", "rehearsal")
REHEARSAL = "REHEARSAL on a CPU, nothing here is a measurement: "
ON_CPU = """\
One call. In brackets the ratio to `scaled_dot_product_attention` without positions, the median over turns
that all forms took in one process. Memory is the most that a call held at one time: inputs and masks
excluded, outputs and gradients included. `gather` and `einsum` are the forms of other libraries, with a
vector for each pair of query and key.

    python benchmarks/attention.py --threads 2 --json benchmarks/results/attention.jsonl"""
ON_GPU = """\
One call. "device" is the device's time with cold caches, the median over turns that all forms took in one
process; in brackets the ratio to torch's flash kernel, which has no positions. "until it is there" is the
time of a program that waits for the result of one call, launches included. FlexAttention has the keys' table
only, so it does less than the others. Memory is the most that a call held beyond its inputs, outputs and
gradients included.

    benchmarks/gpu_check.sh"""
BOUNDS = """\
## The CPU kernel and its bounds

Each row compares one form with another, as the median over turns in one process; unless a row says otherwise
in float32 with 8 heads of 64 and k = 16. `sdpa` is `scaled_dot_product_attention` without positions: for
padding with a bool mask [batch, 1, 1, key], for several new tokens with the mask that hides the keys after
each. Memory is the most that a call held beyond its inputs and outputs, gradients included.

    python benchmarks/bounds.py --threads 2 --json benchmarks/results/bounds.jsonl

A run that ended early goes on where it stopped. `benchmarks/crossover.py` measures all backends over a grid,
and `benchmarks/translator_step.py` a training step."""
FLOAT64 = "On CUDA `merged` has no fused kernel in float64, and skips those cases."


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(names: Iterable[str]) -> tuple[str, str]:
    """The head of a table of `show`."""
    names = tuple(names)
    return line((*names, "time", "ratio to", "memory")), line(["---"] * len(names) + ["--:"] * 3)


def show(record: Record, names: Iterable[str]) -> str:
    """A row for any record: the fields of these names, time, ratios and memory, or why it did not run."""
    start = [str(record.get(name, "-")) for name in names]
    if record["reason"]:
        return line([*start, "not run", record["reason"], "-"])
    time, peak = record["seconds"], record["peak_mib"]
    ratios = [f"{x:.2f} {other}" for other, x in record["ratio_to"].items() if other != record["side"]]
    values = ["-" if time is None else f"{time * 1e3:.3f} ms", ", ".join(ratios) or "-"]
    return line([*start, *values, "-" if peak is None else f"{peak:.1f} MiB"])


BOUNDS_HEAD = (
    line(("row", "pass", "form", "against", "its own", "the other's", "ratio", "bound", "met")),
    line(["---"] * 4 + ["--:"] * 4 + ["---"]),
)


def bounds_row(other: Record, own: Record) -> str:
    """A row of bounds.py, for the records of its two forms."""
    start = [own["row"], own["pass"], own["side"], own["against"]]
    reasons = [f"{x['side']}: {x['reason']}" for x in (other, own) if x["reason"]]
    if reasons:
        return line([*start, *["-"] * 4, "; ".join(reasons)])
    if own["is_memory"]:
        values = [*(f"{x['peak_mib']:.1f} MiB" for x in (own, other)), "-"]
    else:
        ratio = own["ratio_to"][own["against"]]
        values = [*(f"{x['seconds'] * 1e3:.3f} ms" for x in (own, other)), f"{ratio:.2f}"]
    if own["bound"] is None:
        return line([*start, *values, "-", "-"])
    bound = f"{own['bound']:g} MiB" if own["is_memory"] else f"{own['bound']:.2f}"
    return line([*start, *values, bound, "yes" if own["is_met"] else "no"])


def main(arguments: list[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = plain_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files that benchmarks wrote with --json")
    parser.add_argument("--out", type=Path, help="write the page there", metavar="FILE.md")
    parser.add_argument("--picture", type=Path, help="show this picture in the page", metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        folder = options.out.parent if options.out else Path()
        picture = options.picture and Path(os.path.relpath(options.picture, folder)).as_posix()
        text = page(load(options.records), picture)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not options.out:
        print(text, end="")


def load(paths: Iterable[Path]) -> list[Record]:
    """The records of all files, of a GPU's those of the last run.

    Raises:
        ValueError: there is none, or a line is no record.
    """
    records = [x for path in paths for x in read(path)]
    if not records:
        raise ValueError("files must have a record; got none. Run a benchmark with --json.")
    of_gpu = [x["run"] for x in records if x.get("device") == "cuda" or x.get("rehearsal")]
    return [x for x in records if not of_gpu or x["run"] == of_gpu[-1]]


def page(records: list[Record], picture: str | None = None) -> str:
    """Everything as Markdown."""
    sections = group([x for x in records if x["what"] == "attention"])
    is_gpu = any(x["what"] == "conformance" or x.get("device") == "cuda" for x in records)
    title = "Attention on a GPU" if is_gpu else "Time and memory of attention"
    mark = REHEARSAL if any(x.get("rehearsal") for x in records) else ""
    parts = [f"# {mark}{title}"]
    if sections:
        parts.append(ON_GPU if is_gpu else ON_CPU)
    if picture:
        parts.append(f"![Time and memory against length]({picture})")
    if is_gpu:
        parts += _aims(records)
    parts += _bounds([x for x in records if x["what"] == "bounds"])
    for section in sections:
        parts.append(f"## {mark}{sentence(section)}")
        parts += _section(section)
    return "\n\n".join([*parts, *_others(records)]) + "\n"


def group(records: Iterable[Record]) -> list[list[Record]]:
    """The latest records of each setting, in the order in which the settings first appear."""
    latest: dict[tuple, dict[tuple, Record]] = {}
    for x in records:
        # a GPU has as many tokens at each length
        tokens = x["batch"] * x["length"] if x["device"] == "cuda" else x["batch"]
        setting = (tokens, *(x[name] for name in SETTING))
        latest.setdefault(setting, {})[x["pass"], x["length"], x["side"]] = x
    return [list(found.values()) for found in latest.values()]


def sentence(records: list[Record]) -> str:
    """The setting in words, without lengths and pass."""
    x = records[0]
    is_cuda = x["device"] == "cuda"
    parts = [
        x["device_name"],
        "" if is_cuda else f"{x['threads']} thread{'s' * (x['threads'] != 1)}",
        x["dtype"],
        f"{x['batch'] * x['length']:,} tokens" if is_cuda else f"batch {x['batch']}",
        f"{x['heads']} head{'s' * (x['heads'] != 1)} of {x['d_k']}",
        f"k = {x['max_distance']}",
        "causal" if x["is_causal"] else "",
        f"{x['padding']:.0%} padding" if x["padding"] else "",
        f"dropout {x['dropout']:g}" if x["dropout"] else "",
    ]
    return ", ".join(filter(None, parts))


def measured_with(records: list[Record]) -> str:
    """Versions, commits and kernels."""
    names = ("torch", "commit", "kernel", "cuda", "triton", "driver", "capability")
    if all(x["device"] == "cpu" for x in records):
        names = names[:3]
    found = {name: dict.fromkeys(str(x[name]) for x in records if x.get(name)) for name in names}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in found.items() if values) + "."


def forms_in(records: Iterable[Record]) -> list[str]:
    """The names of the forms, the known ones in their order."""
    names = dict.fromkeys(x["side"] for x in records)
    return [name for name in FORM_NAMES if name in names] + [name for name in names if name not in FORMS]


def with_unit(value: float, units: tuple[tuple[float, str], ...] = SECONDS) -> str:
    """A number in the unit in which it is short, to three digits."""
    scale, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    number = value / scale
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _section(records: list[Record]) -> list[str]:
    parts, sides = [], {x["side"] for x in records}
    base = "sdpa_flash" if "sdpa_flash" in sides else "sdpa"

    def time(x: Record) -> str:
        to = "" if x["side"] == base or base not in x["ratio_to"] else f" ({x['ratio_to'][base]:.2f})"
        return with_unit(x["seconds"]) + to

    def memory(x: Record) -> str:
        return "-" if x["peak_mib"] is None else with_unit(x["peak_mib"], MEBIBYTES)

    tables: list[tuple[str, Callable[[Record], str]]] = [("Time", time)]
    if base == "sdpa_flash":
        tables = [("Time, device", time), ("Time, until it is there", lambda x: with_unit(x["wall_seconds"]))]
    if any(x["peak_mib"] is not None for x in records):
        tables.append(("Peak memory", memory))
    for name, title in TITLES.items():
        chosen = [x for x in records if x["pass"] == name]
        for heading, cell in tables if chosen else ():
            parts += [f"### {heading}, {title}", _by_length(chosen, cell)]
    return [*parts, *_not_run(records), measured_with(records)]


def _by_length(records: list[Record], cell: Callable[[Record], str]) -> str:
    """A row for each length, a column for each form."""
    found = {(x["length"], x["side"]): x for x in records if x["seconds"] is not None}
    forms = forms_in(records)
    lines = [["length", *forms], ["--:"] * (len(forms) + 1)]
    for n in sorted({x["length"] for x in records}):
        lines.append([f"{n:,}", *(cell(found[n, form]) if (n, form) in found else "-" for form in forms)])
    return "\n".join(map(line, lines))


def _not_run(records: list[Record]) -> list[str]:
    """Why cells are empty: each reason once, with the lengths."""
    skipped: dict[tuple[str, str, str], list[str]] = {}
    for x in sorted(records, key=lambda x: (list(TITLES).index(x["pass"]), x["length"])):
        if x["reason"]:
            skipped.setdefault((x["side"], x["pass"], x["reason"]), []).append(f"{x['length']:,}")
    notes = [
        f"- {side}, {TITLES[name]}, at {', '.join(n)}: {reason}"
        for (side, name, reason), n in skipped.items()
    ]
    return ["\n".join(["Not run:", "", *notes])] if notes else []


def _aims(records: list[Record]) -> list[str]:
    table = "\n".join(map(line, [("aim", "mask", "verdict", "why"), ["---"] * 4, *verdicts(records)]))
    said = "NOT PASSED, it did not run."
    for suite in (x for x in records if x["what"] == "conformance"):
        said = f"{'passed' if suite['is_passed'] else 'NOT PASSED, ' + suite['reason']}; {counts(suite)}."
    return ["## Aims", table, f"Conformance: {said} {FLOAT64}"]


def _bounds(records: list[Record]) -> list[str]:
    """The section of bounds; of several records of the same row and pass the last ones count."""
    pairs: dict[tuple[str, str], dict[bool, Record]] = {}
    for x in records:
        pairs.setdefault((x["row"], x["pass"]), {})[x["against"] is None] = x
    rows = [bounds_row(pair[True], pair[False]) for pair in pairs.values()]
    return ["\n".join([BOUNDS, "", *BOUNDS_HEAD, *rows]), measured_with(records)] if rows else []


def _others(records: list[Record]) -> list[str]:
    """A table for each other benchmark: the fields that vary in it."""
    parts = []
    known = ("attention", "bounds", "conformance")
    for what in dict.fromkeys(x["what"] for x in records if x["what"] not in known and "side" in x):
        chosen = [x for x in records if x["what"] == what]
        names = [x for x in chosen[0] if isinstance(chosen[0][x], (str, int)) and x not in HIDDEN]
        names = [x for x in names if len({str(y.get(x)) for y in chosen}) > 1]
        rows = [show(x, ["side", *names]) for x in chosen]
        table = "\n".join([*head(["side", *names]), *rows])
        parts += [f"## {what}", table, measured_with(chosen)]
    return parts


if __name__ == "__main__":
    sys.exit(main())

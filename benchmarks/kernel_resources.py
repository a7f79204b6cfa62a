"""What the GPU kernels take of a multiprocessor: registers, spills, shared memory. No GPU is needed.

    python benchmarks/kernel_resources.py --json FILE.jsonl [--markdown FILE.md]

Every kernel is compiled ahead of time for compute capability 8.0 and 9.0, as it would be launched there, and
the assembler's report is printed as a Markdown table, of which --markdown keeps the plain case. Nothing runs,
so nothing here is a measurement. Exit status 1, with a sentence for each, where a kernel does not compile,
spills in bfloat16 at d 64, or needs more shared memory than a program may have; 2 for wrong use.
"""

import argparse
import hashlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import relpos
from machine import commit
from records import append, count, writable
from relpos._inputs import Inputs, check

Record = dict[str, Any]

# of a multiprocessor of every target; each of its four parts gives registers to warps, 256 at a time
REGISTERS, WARPS, PROGRAMS, PARTS = 65_536, 64, 32, 4
KIB = 1024
COLUMNS = ("kernel", "target", "dtype", "d", "compiled in", "blocks", "warps", "stages")
NUMBERS = (
    "registers",
    "spilled bytes",
    "shared bytes",
    "of",
    "programs by registers",
    "warps",
    "shared",
    "all",
)
BATCH, HEADS, LENGTH = 2, 8, 1024


class Target(NamedTuple):
    """A compute capability, and bytes of shared memory: of a multiprocessor, and of a program at most."""

    name: str
    capability: int
    shared: int
    shared_of_program: int


# of those 1 KiB for each program is the system's; sizes of blocks for 8.0 serve 8.6 and 8.9 as well, where a
# program may have the least
TARGETS = {
    "sm_80": Target("sm_80", 80, 164 * KIB, 99 * KIB),
    "sm_90": Target("sm_90", 90, 228 * KIB, 227 * KIB),
}


class Case(NamedTuple):
    """What kernels are compiled for. Options are words of `_inputs` and `compile_case`."""

    dtype: str = "bfloat16"
    width: int = 64
    max_distance: int = 16
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """bfloat16 d 64 k 16 plain, for example."""
        return f"{self.dtype} d {self.width} {self.compiled_in}"

    @property
    def compiled_in(self) -> str:
        """The part of its name that is neither the dtype nor the width of heads."""
        return f"k {self.max_distance} {', '.join(self.options) or 'plain'}"


# at d 64 and k 16 in bfloat16
OPTIONS = (
    (),
    ("causal",),
    ("inference",),
    ("key_lengths",),
    ("bool mask",),
    ("float mask",),
    ("dropout",),
    ("key_lengths", "causal", "dropout"),
    ("key_lengths", "float mask", "dropout"),
    ("relations",),
    ("relations", "deterministic"),
    ("relations", "dropout"),
    ("without rel_v",),
    ("without rel_k",),
    ("without rel_k", "without rel_v"),
    ("grouped",),
    ("grouped", "causal"),
    ("grouped", "key_lengths", "float mask", "dropout", "causal"),
    ("odd length",),
)
# what is read for each pair, and drawn
GENERAL = (("bool mask", "dropout"), ("float mask", "dropout"), ("relations", "dropout"))
CASES = (
    *(Case(options=words) for words in OPTIONS),
    *(Case(width=width) for width in (16, 32, 80, 96, 128, 256)),
    *(Case(width=width, options=("causal",)) for width in (128, 256)),
    Case(max_distance=128),
    Case("float16"),
    *(Case("float32", width) for width in (64, 128, 256)),
    Case("float32", options=("TF32",)),
    *(Case("float64", width) for width in (64, 128)),
    *(
        Case(dtype, width, options=words)
        for dtype, widths in (("bfloat16", (128, 256)), ("float32", (64, 128)), ("float64", (128,)))
        for width in widths
        for words in GENERAL
    ),
)
# what docs/gpu_kernels.md shows, and what of it
PLAIN = Case()
SHOWN = {
    **{name: name for name in ("kernel", "target", "blocks", "warps", "stages")},
    **{name: name for name in ("registers", "spilled bytes", "shared bytes")},
    "all": "programs at once",
}


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        parser.error(
            "TRITON_INTERPRET must not be set: nothing is compiled under Triton's interpreter. Unset it."
        )
    cases = [case for case in CASES if any(text in case.name for text in options.cases)]
    if not cases:
        names = "; ".join(case.name for case in CASES)
        parser.error(
            f"argument --cases: must be part of the name of a case; got {options.cases}. Cases: {names}."
        )
    if options.markdown and PLAIN not in cases:
        parser.error(f"argument --markdown: holds the case {PLAIN.name}, which --cases leaves out. Add it.")
    writable(parser, options.json)
    writable(parser, options.markdown)
    try:
        shared = circumstances()
    except ModuleNotFoundError as error:
        parser.error(f"Triton is needed: {error}. pip install triton.")
    print(*_head(), sep="\n", flush=True)
    records = []
    for record in compiled(cases, [TARGETS[name] for name in options.targets], options.jobs):
        append(options.json, record | shared)
        records.append(record)
        print(_line(_cells(record)), flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(records))
    found = faults(records)
    for sentence in found:
        print(f"error: {sentence}", file=sys.stderr)
    print(f"\nkernels, compiled without a device: {len(records)}; faults: {len(found)}")
    return 1 if found else 0


def circumstances() -> Record:
    """What the numbers depend on beside the case."""
    from triton import knobs

    folder = Path(relpos.__file__).parent / "backends" / "_triton"
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return {
        "device": None,
        "how": "compiled without a device",
        "triton": metadata.version("triton"),
        "ptxas": knobs.nvidia.ptxas.version,
        "torch": torch.__version__,
        "commit": commit(),
        "sources": hashlib.sha256(sources).hexdigest()[:8],
    }


def compiled(cases: Iterable[Case], targets: list[Target], jobs: int) -> Iterator[Record]:
    """The records of every kernel, in the order of the cases; `jobs` processes compile."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [
            (case, target, pool.submit(compile_case, case, target)) for case in cases for target in targets
        ]
        for number, (case, target, task) in enumerate(tasks, 1):
            seconds, records = task.result()
            what = f"{case.name} for {target.name}: {len(records)} kernels, {seconds:.0f} s"
            print(f"{number}/{len(tasks)} {what}", file=sys.stderr, flush=True)
            yield from records


def compile_case(case: Case, target: Target) -> tuple[float, list[Record]]:
    """(seconds, a record for each kernel). From then on Triton takes the target for this process's device."""
    from triton.runtime import driver

    from relpos.backends.triton import backend as triton
    from relpos.backends.triton import launch

    start = time.perf_counter()
    records: list[Record] = []
    driver.set_active(_Device(target.capability))
    torch.set_float32_matmul_precision("high" if "TF32" in case.options else "highest")
    is_deterministic = "deterministic" in case.options

    @torch.no_grad()
    def attend(*given: Any) -> tuple[Tensor, ...]:
        *arguments, keeps_rest = given
        call = launch.Call(*arguments)
        results = launch.attend(call, keeps_rest, is_deterministic)
        if "inference" not in case.options:
            saved = launch.Saved(*results, torch.empty_like(results[0]), None)
            launch.gradients(call, saved, 31, is_deterministic)
        return results

    # where torch has no CUDA the backend has no operators
    with (
        patch.object(launch, "wrap_triton", partial(_Kernel, case, target, records)),
        patch.object(triton, "operators", SimpleNamespace(run=attend), create=True),
    ):
        triton.run(_inputs(case))
    return time.perf_counter() - start, records


class _Device:
    """What Triton asks for before it compiles, told of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        # what was compiled is kept by device
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@dataclass(frozen=True)
class _Kernel:
    """A kernel whose launch compiles it, with the very arguments, and adds a record."""

    case: Case
    target: Target
    records: list[Record]
    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.compile, grid)

    def compile(self, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        """Compile it for these arguments."""
        case, target = self.case, self.target
        record = {
            "case": case.name,
            "kernel": self.kernel.__name__,
            "target": target.name,
            "dtype": case.dtype,
            "d": case.width,
            "compiled_in": case.compiled_in,
            "blocks": {name: x for name, x in named.items() if name.startswith(("BLOCK_", "NEAR_"))},
            "warps": named["num_warps"],
            "stages": named["num_stages"],
        }
        try:
            # on failure the assembler's input is printed, thousands of lines
            with redirect_stdout(io.StringIO()):
                found = self.kernel.warmup(*given, grid=grid, **named)
                report = assembler_report(found)
        # whatever it is, the other kernels are still worth compiling
        except Exception as error:
            record["reason"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        else:
            report["shared"] += found.metadata.shared
            record |= {"warps": found.metadata.num_warps, **report, "shared_limit": target.shared_of_program}
            record["programs"] = programs(report["registers"], record["warps"], report["shared"], target)
            record["reason"] = None
        # both tables may have one kernel
        if record not in self.records:
            self.records.append(record)


def _inputs(case: Case) -> Inputs:
    """Checked arguments on the CPU, in the shapes and dtypes of the case; what they hold is not looked at."""
    length = LENGTH - 1 if "odd length" in case.options else LENGTH
    dtype, k = getattr(torch, case.dtype), case.max_distance
    make = partial(torch.zeros, requires_grad="inference" not in case.options)
    query = make(BATCH, HEADS, length, case.width, dtype=dtype)
    key = make(BATCH, HEADS // 4 if "grouped" in case.options else HEADS, length, case.width, dtype=dtype)
    tables = [
        None if f"without {name}" in case.options else make(2 * k + 1, case.width)
        for name in ("rel_k", "rel_v")
    ]
    pairs = (BATCH, 1, length, length)
    values: dict[str, tuple[str, Any]] = {
        "key_lengths": ("key_lengths", torch.full((BATCH,), length)),
        "bool mask": ("attn_mask", torch.ones(pairs, dtype=torch.bool)),
        "float mask": ("attn_mask", torch.zeros(pairs, dtype=dtype)),
        "dropout": ("dropout_p", 0.1),
    }
    options = dict(values[word] for word in case.options if word in values)
    if "relations" in case.options:
        relations = torch.zeros(pairs, dtype=torch.int64)
        return check(query, key, key, *tables, relations=relations, **options)
    return check(query, key, key, *tables, max_distance=k, is_causal="causal" in case.options, **options)


def assembler_report(found: Any) -> Record:
    """What ptxas says of a kernel, called as Triton calls it, which keeps the kernel on disk and not this."""
    from triton import knobs
    from triton.compiler.compiler import make_backend

    backend = make_backend(found.metadata.target)
    options = backend.parse_options(found.metadata._asdict())
    out = io.StringIO()
    with knobs.nvidia.scope(), redirect_stdout(out):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(found.asm["ptx"], {}, options, found.metadata.target.arch)
    return read_report(out.getvalue())


def read_report(text: str) -> Record:
    """Registers of a thread, and bytes: spilled by stores and loads, of static shared memory.

    Raises:
        ValueError: the text is no report of ptxas -v.
    """
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or not spills:
        raise ValueError(
            f"ptxas must report registers and spills; got {text[:200]!r}. Is it another version?"
        )
    stores, loads = (sum(int(pair[i]) for pair in spills) for i in (0, 1))
    return {
        "registers": max(map(int, registers)),
        "spill_stores": stores,
        "spill_loads": loads,
        "shared": sum(map(int, re.findall(r"(\d+) bytes smem", text))),
    }


def programs(registers: int, warps: int, shared: int, target: Target) -> dict[str, int]:
    """How many programs a multiprocessor holds at once, by each of its resources alone, and by all."""
    of_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = REGISTERS // PARTS // of_warp * PARTS // warps
    by_shared = target.shared // (-(-shared // 128) * 128 + KIB)
    found = {"registers": by_registers, "warps": WARPS // warps, "shared": by_shared}
    return found | {"all": min(*found.values(), PROGRAMS)}


def faults(records: Iterable[Record]) -> list[str]:
    """A sentence for each kernel that must not be as it is."""
    found = []
    for x in records:
        what = f"{x['kernel']} for {x['target']}, {x['case']},"
        if x["reason"] is not None:
            found.append(f"{what} does not compile: {x['reason']}")
            continue
        spilled = x["spill_stores"] + x["spill_loads"]
        if spilled and (x["dtype"], x["d"]) == ("bfloat16", 64):
            found.append(f"{what} must not spill; it spills {spilled} bytes, at {x['registers']} registers.")
        if x["shared"] > x["shared_limit"]:
            limit = f"at most {x['shared_limit']:,} bytes of shared memory"
            found.append(f"{what} may have {limit}; it needs {x['shared']:,}.")
    return found


def markdown(records: Iterable[Record]) -> str:
    """The table of the plain case, with what SHOWN names."""
    names = COLUMNS + NUMBERS
    lines = [_line(SHOWN.values()), _line("---" if name in COLUMNS else "--:" for name in SHOWN)]
    for x in records:
        if x["case"] == PLAIN.name:
            cells = _cells(x)
            # "warps" is the name of two columns, and the first is meant
            lines.append(_line(cells[names.index(name)] for name in SHOWN))
    return "\n".join(lines) + "\n"


def _head() -> tuple[str, str]:
    return _line(COLUMNS + NUMBERS), _line(["---"] * len(COLUMNS) + ["--:"] * len(NUMBERS))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(x: Record) -> list[str]:
    blocks = ", ".join(f"{name} {size}" for name, size in x["blocks"].items())
    start = [x["kernel"], x["target"], x["dtype"], str(x["d"]), x["compiled_in"], blocks]
    start += [str(x["warps"]), str(x["stages"])]
    if x["reason"] is not None:
        return [*start, "does not compile", *["-"] * (len(NUMBERS) - 1)]
    spilled, counts = x["spill_stores"] + x["spill_loads"], x["programs"]
    numbers = [x["registers"], spilled, x["shared"], x["shared_limit"]]
    return [*start, *(f"{number:,}" for number in (*numbers, *counts.values()))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--cases", nargs="+", default=[""], help="those whose name has one of these in it", metavar="TEXT")
    add("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    add("--jobs", type=count, default=2, help="processes that compile")
    add("--json", type=Path, help="append a line for each kernel", metavar="FILE")
    add("--markdown", type=Path, help=f"write a table of {PLAIN.name}", metavar="FILE.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Registers, spills and shared memory of the GPU kernels, compiled without a GPU.

    python benchmarks/kernel_resources.py --cases "bfloat16 d 64" --json FILE

Every kernel is compiled ahead of time for compute capability 8.0 and 9.0, as it would be launched there, and
the assembler's report is printed as a Markdown table. Nothing runs, so nothing here is a measurement. Exit
status 1, with a sentence for each, if a kernel does not compile, spills in bfloat16 at d 64, or needs more
shared memory than a program may have; 2 for wrong use.
"""

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
from records import Record, append, count, plain_parser, writable
from relpos._inputs import Inputs, check
from table import line

# of a multiprocessor of every target; each of its four parts gives registers to warps, 256 at a time
REGISTERS, WARPS, PROGRAMS, PARTS = 65_536, 64, 32, 4
KIB = 1024
COLUMNS = ("kernel", "target", "dtype", "d", "compiled in", "blocks", "warps", "stages")
NUMBERS = ("registers", "spilled bytes", "shared bytes", "programs at once")
BATCH, HEADS, LENGTH = 2, 8, 1024


class Target(NamedTuple):
    """A compute capability, and bytes of shared memory: of a multiprocessor, and of a program at most."""

    name: str
    capability: int
    shared: int
    shared_of_program: int


# sizes of blocks for 8.0 serve 8.6 and 8.9 as well, where a program may have the least
TARGETS = {
    "sm_80": Target("sm_80", 80, 164 * KIB, 99 * KIB),
    "sm_90": Target("sm_90", 90, 228 * KIB, 227 * KIB),
}


class Case(NamedTuple):
    """The shapes and features that kernels are compiled for. Options are words of `_inputs`."""

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
        """The name without the dtype and the width of heads."""
        return f"k {self.max_distance} {', '.join(self.options) or 'plain'}"


# at d 64 and k 16 in bfloat16; a line has several sets of options
OPTIONS = """
plain; causal; inference; key_lengths; bool mask; float mask; dropout
key_lengths, causal, dropout; key_lengths, float mask, dropout
relations; relations, deterministic; relations, dropout
without rel_v; without rel_k; without rel_k, without rel_v
grouped; grouped, causal; grouped, key_lengths, float mask, dropout, causal; odd length
"""
WORDS = [tuple(text.strip().split(", ")) for text in re.split("[;\n]", OPTIONS.strip())]
# read or drawn for each pair
GENERAL = (("bool mask", "dropout"), ("float mask", "dropout"), ("relations", "dropout"))
WIDTHS = (("bfloat16", 128), ("bfloat16", 256), ("float32", 64), ("float32", 128), ("float64", 128))
CASES = (
    *(Case(options=() if words == ("plain",) else words) for words in WORDS),
    *(Case(width=width) for width in (16, 32, 80, 96, 128, 256)),
    *(Case(width=width, options=("causal",)) for width in (128, 256)),
    Case(max_distance=128),
    Case("float16"),
    *(Case("float32", width) for width in (64, 128, 256)),
    Case("float32", options=("TF32",)),
    *(Case("float64", width) for width in (64, 128)),
    *(Case(dtype, width, options=words) for dtype, width in WIDTHS for words in GENERAL),
)


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table, and return the exit status."""
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", default=[""], help="cases whose name contains one of these", metavar="TEXT")
    add("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    add("--jobs", type=count, default=2, help="processes that compile")
    add("--json", type=Path, help="append a line for each kernel", metavar="FILE")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET must not be set: Triton's interpreter compiles nothing. Unset it.")
    cases = [case for case in CASES if any(text in case.name for text in options.cases)]
    if not cases:
        names = "; ".join(case.name for case in CASES)
        parser.error(
            f"argument --cases: must be part of the name of a case; got {options.cases}. Cases: {names}."
        )
    writable(parser, options.json)
    try:
        shared = circumstances()
    except ModuleNotFoundError as error:
        parser.error(f"Triton is needed: {error}. pip install triton.")
    print(line(COLUMNS + NUMBERS), line(["---"] * len(COLUMNS) + ["--:"] * len(NUMBERS)), sep="\n")
    records = []
    for record in compiled(cases, [TARGETS[name] for name in options.targets], options.jobs):
        append(options.json, shared | record)
        records.append(record)
        print(line(_cells(record)), flush=True)
    found = faults(records)
    for sentence in found:
        print(f"error: {sentence}", file=sys.stderr)
    print(f"\nkernels, compiled without a device: {len(records)}; faults: {len(found)}")
    return 1 if found else 0


def circumstances() -> Record:
    """Everything beside the case that the numbers depend on."""
    from triton import knobs

    folder = Path(relpos.__file__).parent / "backends" / "triton"
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    found = {"what": "kernel_resources", "device": None, "how": "compiled without a device"}
    found |= {"triton": metadata.version("triton"), "ptxas": knobs.nvidia.ptxas.version}
    found |= {"torch": torch.__version__, "commit": commit()}
    return found | {"sources": hashlib.sha256(sources).hexdigest()[:8]}


def compiled(cases: Iterable[Case], targets: list[Target], jobs: int) -> Iterator[Record]:
    """The records of every kernel, in the order of the cases; `jobs` processes compile."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [
            (case, target, pool.submit(compile_case, case, target)) for case in cases for target in targets
        ]
        for number, (case, target, task) in enumerate(tasks, 1):
            seconds, records = task.result()
            done = f"{number}/{len(tasks)} {case.name} for {target.name}"
            print(f"{done}: {len(records)} kernels, {seconds:.0f} s", file=sys.stderr, flush=True)
            yield from records


def compile_case(case: Case, target: Target) -> tuple[float, list[Record]]:
    """(seconds, a record for each kernel). From then on Triton takes the target for this process's device."""
    from triton.runtime import driver

    from relpos.backends.triton import backend as triton
    from relpos.backends.triton import launch

    start = time.perf_counter()
    records: list[Record] = []
    driver.set_active(_driver(target.capability))
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


def _driver(capability: int) -> Any:
    """Triton's driver, for a GPU that is not there. Triton caches kernels by device."""
    from triton.backends.compiler import GPUTarget

    return SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )


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
        record: Record = {"case": case.name, "kernel": self.kernel.__name__, "target": target.name}
        record |= {"dtype": case.dtype, "d": case.width, "compiled_in": case.compiled_in}
        record["blocks"] = {name: x for name, x in named.items() if name.startswith(("BLOCK_", "NEAR_"))}
        record |= {"warps": named["num_warps"], "stages": named["num_stages"]}
        try:
            # on failure the assembler's input is printed, thousands of lines
            with redirect_stdout(io.StringIO()):
                found = self.kernel.warmup(*given, grid=grid, **named)
                report = assembler_report(found)
        # the other kernels are still compiled
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
    """Checked arguments on the CPU, in the shapes and dtypes of the case; their values are not read."""
    length = LENGTH - 1 if "odd length" in case.options else LENGTH
    dtype, k = getattr(torch, case.dtype), case.max_distance
    make = partial(torch.zeros, requires_grad="inference" not in case.options)
    query = make(BATCH, HEADS, length, case.width, dtype=dtype)
    key = make(BATCH, HEADS // 4 if "grouped" in case.options else HEADS, length, case.width, dtype=dtype)
    is_left_out = [f"without {name}" in case.options for name in ("rel_k", "rel_v")]
    tables = [None if left_out else make(2 * k + 1, case.width) for left_out in is_left_out]
    pairs = (BATCH, 1, length, length)
    values: dict[str, tuple[str, Any]] = {"key_lengths": ("key_lengths", torch.full((BATCH,), length))}
    values["bool mask"] = ("attn_mask", torch.ones(pairs, dtype=torch.bool))
    values["float mask"] = ("attn_mask", torch.zeros(pairs, dtype=dtype))
    values["dropout"] = ("dropout_p", 0.1)
    options = dict(values[word] for word in case.options if word in values)
    if "relations" in case.options:
        relations = torch.zeros(pairs, dtype=torch.int64)
        return check(query, key, key, *tables, relations=relations, **options)
    return check(query, key, key, *tables, max_distance=k, is_causal="causal" in case.options, **options)


def assembler_report(found: Any) -> Record:
    """The report of ptxas on a kernel, called as Triton calls it."""
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
        raise ValueError(f"ptxas must report registers and spills; got {text[:200]!r}.")
    stores, loads = (sum(int(pair[i]) for pair in spills) for i in (0, 1))
    shared = sum(map(int, re.findall(r"(\d+) bytes smem", text)))
    found = {"registers": max(map(int, registers)), "spill_stores": stores, "spill_loads": loads}
    return found | {"shared": shared}


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


def _cells(x: Record) -> list[str]:
    blocks = ", ".join(f"{name} {size}" for name, size in x["blocks"].items())
    start = [*(str(x[name]) for name in ("kernel", "target", "dtype", "d", "compiled_in")), blocks]
    start += [str(x["warps"]), str(x["stages"])]
    if x["reason"] is not None:
        return [*start, "does not compile", *["-"] * (len(NUMBERS) - 1)]
    numbers = (x["registers"], x["spill_stores"] + x["spill_loads"], x["shared"], x["programs"]["all"])
    return [*start, *(f"{number:,}" for number in numbers)]


if __name__ == "__main__":
    sys.exit(main())

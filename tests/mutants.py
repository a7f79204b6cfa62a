"""Mutants: does the suite find a fault that is put into the source? Seeded, resumable, one JSON line each.

    python tests/mutants.py --count 200 --json mutants.jsonl
    python tests/mutants.py --language c++ --count 40 --json mutants.jsonl

`--only-killed FILE` takes the mutants that another run has killed, so that two sets of tests can be
compared on the same source: `--tests` names the folder of tests, `--src` that of the source. A mutant is a
copy; nothing in either folder is changed.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
# a token of C++ between spaces, and one in its place; templates have no spaces around < and >
TOKENS = {
    **{" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " && ": " || "},
    **{
        " + ": " - ",
        " - ": " + ",
        " * ": " + ",
        " += ": " -= ",
        "std::min": "std::max",
        "std::max": "std::min",
    },
}
# the tests of a module: the first pattern that its path has; {} is the module's own name
ATTENTION = ["test_functional.py", "test_refusals.py", "test_relations.py", "test_laws.py", "conformance"]
TESTS = {
    "relpos/nn/": ["nn"],
    "relpos/inspection/": ["inspection"],
    "relpos/_doctor/": ["test_doctor.py", "test_openmp.py"],
    "relpos/backends/merged/": ["conformance", "backends/test_merged*.py"],
    "relpos/backends/": ["conformance", "backends/test_cpu*.py", "test_laws.py"],
    "relpos/decompose": ["test_decompose.py"],
    "relpos/_masks": ["test_masks.py", "test_refusals.py"],
    "relpos/_positions": ["test_positions.py", "conformance"],
    "relpos/_reference": ["test_reference.py"],
    "relpos/relations": ["test_relations.py", "test_pitfalls_relations.py"],
    "relpos/translation/corpora/": ["translation/corpora"],
    "relpos/translation/": ["translation/test_{}*.py"],
    "relpos/": [*ATTENTION],
    "_relpos_command": ["test_openmp.py"],
}
# modules of the translator whose tests have another name
STRANGERS = ["translation/test_foreign_models.py"]
ELSEWHERE = {
    **{name: STRANGERS for name in ("strict_json", "loading", "model_folders", "generation_settings")},
    **{name: STRANGERS for name in ("validators", "tokenizer_files", "weights")},
    **{name: ["translation/test_recipe.py"] for name in ("recipe_errors", "strict_yaml", "preparation")},
    **{
        name: ["translation/test_ownership.py", "translation/test_training.py"]
        for name in ("run_cleanup", "runs")
    },
    "config": ["translation/test_model.py", *STRANGERS],
    "sentence_splitting": ["translation/test_text.py", "translation/test_generation.py", "test_cli_text.py"],
}
COMMANDS = ("relpos/cli", "relpos/_options", "relpos/_streams", "relpos/_console_tables", "relpos/_e")
# what no test of seconds can see: kernels of Triton are mutated by hand (docs/log.md), data is not code
LEFT_OUT = ("backends/triton/", "__init__", "__main__", "_options", "setting_ranges")


class Mutant(NamedTuple):
    """A change of one place in one file of the source."""

    file: str
    line: int
    change: str
    text: str  # of the whole file


def python_mutants(source: Path) -> Iterator[Callable[[], Mutant]]:
    """Every mutant of a file of Python, not yet written out."""
    text = source.read_text()
    for place, node in enumerate(ast.walk(ast.parse(text))):
        for change in _changes(node):
            yield partial(_changed, text, place, change)


def _changed(text: str, place: int, change: Callable[[Any], None]) -> Mutant:
    tree = ast.parse(text)
    node: Any = next(x for i, x in enumerate(ast.walk(tree)) if i == place)
    before, line = ast.unparse(node), node.lineno
    change(node)
    return Mutant("", line, f"{before} -> {ast.unparse(node)}"[:160], ast.unparse(tree))


def _changes(node: ast.AST) -> Iterator[Callable[[Any], None]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda x: x.ops.__setitem__(0, COMPARISONS[type(x.ops[0])]())
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield lambda x: setattr(x, "op", OPERATORS[type(x.op)]())
    if isinstance(node, ast.BoolOp):
        yield lambda x: setattr(x, "op", ast.Or() if isinstance(x.op, ast.And) else ast.And())
    if isinstance(node, ast.If):
        yield lambda x: setattr(x, "test", ast.UnaryOp(ast.Not(), x.test))
    if isinstance(node, ast.IfExp):
        yield lambda x: setattr(x, "test", ast.UnaryOp(ast.Not(), x.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield lambda x: setattr(x, "value", not x.value if isinstance(x.value, bool) else x.value + 1)
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield lambda x: setattr(x, "value", ast.Constant(None))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda x: setattr(x, "value", ast.Constant(None))


def cpp_mutants(source: Path) -> Iterator[Callable[[], Mutant]]:
    """Every mutant of a file of C++."""
    lines = source.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        code = line.split("//")[0]
        if code.lstrip().startswith(("#", "template")) or '"' in code:
            continue
        for token, other in TOKENS.items():
            for found in re.finditer(re.escape(token), code):
                changed = line[: found.start()] + other + line[found.end() :]
                text = "".join([*lines[:number], changed, *lines[number + 1 :]])
                yield partial(Mutant, "", number + 1, f"{code.strip()} -> {changed.strip()}"[:160], text)


def chosen(src: Path, language: str, seed: int, count: int) -> list[Mutant]:
    """So many mutants, spread over the files by their number of places."""
    pattern, found = ("*.py", python_mutants) if language == "python" else ("csrc/*", cpp_mutants)
    everything = []
    for path in sorted(src.rglob(pattern)):
        name = path.relative_to(src).as_posix()
        if not any(part in name for part in LEFT_OUT):
            everything += [(name, mutant) for mutant in found(path)]
    return [make()._replace(file=name) for name, make in random.Random(seed).sample(everything, count)]


def tests_of(mutant: Mutant, tests: Path) -> list[str]:
    """The files and folders that test what it changes."""
    if mutant.file.endswith((".h", ".cpp")):
        names = ["backends/test_cpu_numbers.py", "conformance", "backends/test_cpu*.py"]
    elif mutant.file.startswith(COMMANDS):
        names = ["test_cli*.py", "test_options.py"]
    else:
        names = next(names for start, names in TESTS.items() if mutant.file.startswith(start))
    own = Path(mutant.file).stem.strip("_")
    if mutant.file.startswith("relpos/translation/") and own in ELSEWHERE:
        names = ELSEWHERE[own]
    found: list[str] = []
    for name in names:
        for path in sorted(tests.glob(name.format(own))):
            if str(path) not in found:
                found.append(str(path))
    return found


def build(work: Path, src: Path, seconds: float) -> bool:
    """Whether the kernel of a mutant could be built; it stands where the package looks for it."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(src.parent / name, work / name)
    environment = {**os.environ, "RELPOS_BUILD_KERNEL": "1", "CXXFLAGS": "-O1"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=seconds)
    return done.returncode == 0


def first_failure(chosen_tests: list[str], work: Path, tests: Path, seconds: float, only: str) -> str | None:
    """The test that fails first, "all" if none can run, or None if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(work / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--timeout",
        "60",
    ]
    command += ["-m", "not slow", "-k", only, *chosen_tests]
    try:
        done = subprocess.run(
            command, cwd=tests.parent, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "no time"
    printed = done.stdout + done.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if failed:
        return failed[0]
    # 0: all passed; 5: there was none, as where a test was dropped
    return None if done.returncode in (0, 5) or "not found: " in printed else "all"


def run(
    mutant: Mutant, src: Path, tests: Path, seconds: float, likely: str | None = None
) -> dict[str, object]:
    """Its record: `killed` names the test that did it, or is None.

    Args:
        likely: a test to try before the others.
    """
    begun, by = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        work = Path(folder)
        shutil.copytree(src, work / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (work / "src" / mutant.file).write_text(mutant.text)
        is_python = mutant.file.endswith(".py")
        only = "not triton" if is_python else "cpu and not triton"
        if is_python or build(work, src, seconds):
            if likely is not None and (tests.parent / likely.split("::")[0]).exists():
                by = first_failure([likely], work, tests, seconds, only)
            by = by or first_failure(tests_of(mutant, tests), work, tests, seconds, only)
        else:
            by = "the compiler"
    outcome = "survived" if by is None else "no time" if by == "no time" else "killed"
    taken = round(time.monotonic() - begun, 1)
    place = {"file": mutant.file, "line": mutant.line, "change": mutant.change}
    return {**place, "outcome": outcome, "killed": by, "seconds": taken}


def read(path: Path | None) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Records by file, line and change."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {(x["file"], x["line"], x["change"]): x for x in map(json.loads, lines)}


def main() -> None:
    """Run them, and print how many were killed."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--language", choices=("python", "c++"), default="python")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--src", type=Path, default=ROOT / "src")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    parser.add_argument("--seconds", type=float, default=300, help="for one mutant")
    parser.add_argument("--json", type=Path, required=True, help="append records; none is run twice")
    parser.add_argument("--only-killed", type=Path, help="mutants killed there", metavar="FILE")
    options = parser.parse_args()
    done, others = read(options.json), read(options.only_killed)
    src, tests = options.src.resolve(), options.tests.resolve()
    with options.json.open("a") as out:
        for mutant in chosen(src, options.language, options.seed, options.count):
            name = (mutant.file, mutant.line, mutant.change)
            killer = others.get(name, {}).get("killed")
            if name in done or (options.only_killed and killer is None):
                continue
            record = run(mutant, src, tests, options.seconds, killer)
            print(json.dumps(record), file=out, flush=True)
            print(f"{mutant.file}:{mutant.line} {record['outcome']}", file=sys.stderr)
    outcomes = [x["outcome"] for x in read(options.json).values()]
    print({x: outcomes.count(x) for x in sorted(set(outcomes))})


if __name__ == "__main__":
    main()

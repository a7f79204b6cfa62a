"""Five hundred hostile inputs: each ends in one sentence or a result, in bounded time and memory.

What is the user's stays as it was. One case alone: RELPOS_HOSTILE=17,203 python -m pytest THIS_FILE.
"""

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostile import make_case
from hostile.case import Case, Material
from small_runs import small_values

# the first run with every other test, the rest with the slow ones
CASES, QUICK, PARTS = 500, 100, 2
CODES = (0, 1, 2, 130, 143)
# seconds of the processor, which other work on the machine does not lengthen; who only waits has more
CPU_SECONDS = 10
WALL_SECONDS = 60 * float(os.environ.get("RELPOS_HOSTILE_PATIENCE", "1"))
MOST_MEMORY = 2 << 30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked, and measured by Linux")


class Worker:
    """A process with everything imported; see hostile/worker.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # caches in the home folder would be something of the user's
        homes = {"HOME": str(folder / "home"), "HF_HOME": str(folder / "cache"), "NO_COLOR": "1"}
        with (folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).parent / "hostile" / "worker.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | quiet | homes,
            )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the worker ended: {(self.folder / 'stderr').read_text()}"
        return json.loads(answer)

    def run(
        self, arguments: list[str], folder: Path, place: Path, stdin: bytes = b"", **more: Any
    ) -> tuple[dict[str, Any], str]:
        """Run a command in `folder`, with its streams and scratch space in `place`; (result, stderr)."""
        (place / "stdin").write_bytes(stdin)
        (place / "scratch").mkdir()
        job = {
            "arguments": [os.fsencode(argument).hex() for argument in arguments],
            "folder": str(folder),
            **{name: str(place / name) for name in ("stdin", "stdout", "stderr", "scratch")},
            **{"site": None, "imported": None, "cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS},
            **more,
        }
        result = self.ask(job)
        return result, (place / "stderr").read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    started = Worker(tmp_path_factory.mktemp("hostile") / "worker")
    yield started
    started.close()


@pytest.fixture(scope="module")
def material(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A run of eight updates; training and translating it tells the worker what to import."""
    folder = tmp_path_factory.mktemp("material")
    values = small_values(max_length=24)
    values["translation"] = {"beams": 2}
    (folder / "small.yaml").write_text(yaml.safe_dump(values))
    (folder / "one.tsv").write_text("one\teins\n")
    for number, arguments in enumerate(
        (
            ["train", "small.yaml", "--out", "run"],
            ["evaluate", "run", "--data", "one.tsv"],
            ["translate", "run", "one.tsv"],
            ["recipe"],
        )
    ):
        place = folder / str(number)
        place.mkdir()
        limits = {"cpu_seconds": 0, "wall_seconds": 300, "imported": str(place / "modules")}
        result, stderr = worker.run(arguments, folder, place, **limits)
        assert result["code"] == 0, stderr
        worker.ask({"modules": str(place / "modules")})
    return Material(folder / "run", folder / "small.yaml")


@pytest.mark.parametrize("part", range(PARTS))
def test_a_hostile_input_ends_in_one_sentence_and_harms_nothing(part, worker, material, tmp_path) -> None:
    chosen = os.environ.get("RELPOS_HOSTILE")
    numbers = range(QUICK) if chosen is None else map(int, chosen.split(","))
    check([number for number in numbers if number % PARTS == part], worker, material, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_rest_of_five_hundred_hostile_inputs_harms_nothing(part, worker, material, tmp_path) -> None:
    check(range(QUICK + part, CASES, PARTS), worker, material, tmp_path)


def check(numbers: Sequence[int], worker: Worker, material: Material, place: Path) -> None:
    """Run the cases; all that went wrong is told at once."""
    faults = [
        fault for number in numbers for fault in run_case(number, worker, material, place / str(number))
    ]
    assert not faults, "\n\n".join(faults)


def run_case(number: int, worker: Worker, material: Material, place: Path) -> list[str]:
    """What went wrong in a case, told in one text."""
    home = place / "home"
    home.mkdir(parents=True)
    case = make_case(number, home, material)
    before, ours = tree(home), tree(material.run)
    site = str(home / case.site) if case.site else None
    result, stderr = worker.run(case.arguments, home, place, case.stdin, site=site)
    found = [
        *faults_of(result, stderr),
        *changes(case, before, tree(home), is_done=result["code"] == 0),
        *(f"the model that was read: {name} changed" for name in differing(ours, tree(material.run))),
        *(f"left in the folder for scratch: {path.name}" for path in (place / "scratch").iterdir()),
    ]
    if not found:
        return []
    shown = " ".join(ascii(argument)[:200] for argument in case.arguments)
    return [
        f"case {number} ({case.kind}; alone: RELPOS_HOSTILE={number}): {'; '.join(found)}\n"
        f"  in {home}: relpos {shown}\n  {result}\n  stderr: {stderr[-1500:]!a}"
    ]


def faults_of(result: dict[str, Any], stderr: str) -> list[str]:
    """What is wrong with how a command ended."""
    found = []
    if result["is_killed"]:
        found.append("it did not end")
    elif result["code"] not in CODES:
        found.append(f"exit code {result['code']}")
    elif result["code"]:
        last = stderr.splitlines()[-1:]
        told = [line for line in stderr.splitlines() if line.startswith("relpos: ")]
        told = [line for line in told if not line.startswith("relpos: warning: ")]
        if told != last or not stderr.endswith("\n"):
            found.append("the end of stderr is not one line that says what is wrong")
    if "Traceback" in stderr or "Exception ignored" in stderr:
        found.append("a traceback")
    if result["peak"] > MOST_MEMORY:
        found.append(f"{result['peak'] >> 20} MiB of memory")
    return found


def tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything in `folder`: its kind, identity, times, and what it holds; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            status = path.lstat()
            value: tuple[Any, ...] = (stat.S_IFMT(status.st_mode), status.st_ino)
            if stat.S_ISLNK(status.st_mode):
                value += (os.readlink(path),)
            elif stat.S_ISREG(status.st_mode):
                value += (status.st_size, status.st_mtime_ns)
                if status.st_size < 1 << 20:
                    value += (hashlib.sha256(path.read_bytes()).hexdigest(),)
            found[os.path.relpath(path, folder)] = value
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def changes(case: Case, before: dict[str, Any], after: dict[str, Any], *, is_done: bool) -> list[str]:
    """Changes in the user's folder that the command had no right to make."""
    found = []
    for name in differing(before, after):
        is_output = any(Path(name).is_relative_to(output) for output in case.outputs)
        is_kept = any(Path(name).is_relative_to(kept) for kept in case.kept)
        is_addition = name not in before and any(Path(name).is_relative_to(each) for each in case.added)
        # a model's folder is replaced with what others put there moved over
        is_moved = is_kept and name in after and _without_place(before[name]) == _without_place(after[name])
        if not is_moved and (is_kept or not (is_output or is_addition)):
            found.append(
                f"{name} {'came' if name not in before else 'was changed' if name in after else 'went'}"
            )
    return found


def _without_place(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, _, *rest = entry
    return (kind, *rest)

"""How the commands choose OpenMP's waiting and threads, before torch loads it."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import _relpos_command as start
from relpos._doctor import openmp

linux_alone = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux torch has GNU's OpenMP")
CHOSEN = {"GOMP_SPINCOUNT": "10000", "RELPOS_CHOSEN": "GOMP_SPINCOUNT"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the machine is said to be: its system, the cores of this process, the quota of its group."""

    def say(cores: int = 8, quota: float | None = None, platform: str = "linux") -> None:
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(start, "num_cores", lambda: cores)
        monkeypatch.setattr(start, "cpu_quota", lambda: quota)

    say()
    return say


def test_threads_wait_for_a_short_while_where_nothing_is_set(machine: Callable[..., None]) -> None:
    assert start.choose({"PATH": "/bin"}) == CHOSEN


@pytest.mark.parametrize("name", start.WAITING)
def test_waiting_that_the_user_has_set_stays(machine: Callable[..., None], name: str) -> None:
    assert start.choose({name: "1"}) == {}


def test_what_was_chosen_once_is_not_chosen_again(machine: Callable[..., None]) -> None:
    machine(quota=2.0)
    assert start.choose(start.choose({})) == {}
    # the variables may be removed on the way; the process must not restart for ever
    assert start.choose({start.CHOSEN: ""}) == {}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_left_alone(machine: Callable[..., None], platform: str) -> None:
    machine(platform=platform, quota=1.0)
    assert start.choose({}) == {}


@pytest.mark.parametrize(
    ("quota", "threads"),
    [(0.5, "1"), (1.0, "1"), (2.5, "3"), (7.9, "8"), (8.0, None), (100.0, None), (None, None)],
)
def test_there_are_no_more_threads_than_the_quota_of_a_container(
    machine: Callable[..., None], quota: float | None, threads: str | None
) -> None:
    machine(cores=8, quota=quota)
    chosen = start.choose({})
    assert chosen.get("OMP_NUM_THREADS") == threads
    names = ["GOMP_SPINCOUNT"] + (["OMP_NUM_THREADS"] if threads else [])
    assert chosen[start.CHOSEN] == ",".join(names)


@pytest.mark.parametrize("name", start.THREADS)
def test_threads_that_the_user_has_set_stay(machine: Callable[..., None], name: str) -> None:
    machine(cores=8, quota=2.0)
    assert start.choose({name: "5"}) == CHOSEN


# the quota of a control group


@pytest.fixture
def quota(tmp_path: Path) -> Callable[..., float | None]:
    """The quota that is read where /proc/self/cgroup holds `groups`, and /sys/fs/cgroup these files."""

    def read(groups: str, **files: str) -> float | None:
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mounted" / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return start.cpu_quota(tmp_path / "groups", tmp_path / "mounted")

    return read


def test_a_quota_of_the_second_version_is_read(quota: Callable[..., float | None]) -> None:
    assert quota("0::/\n", cpuDOTmax="150000 100000\n") == 1.5
    assert quota("0::/\n", cpuDOTmax="max 100000\n") is None


def test_the_least_quota_of_a_group_and_those_above_it_holds(quota: Callable[..., float | None]) -> None:
    files = {"jobs__cpuDOTmax": "300000 100000", "jobs__one__cpuDOTmax": "max 100000"}
    assert quota("0::/jobs/one\n", **files) == 3
    assert quota("0::/jobs/one\n", **(files | {"jobs__one__cpuDOTmax": "200000 100000"})) == 2
    assert quota("0::/jobs/other\n", cpuDOTmax="100000 100000") == 1


def test_a_quota_of_the_first_version_is_read_wherever_its_controllers_are_mounted(
    quota: Callable[..., float | None],
) -> None:
    files = {"cpu__cpuDOTcfs_quota_us": "50000\n", "cpu__cpuDOTcfs_period_us": "100000\n"}
    # in a container the group has another name than outside
    assert quota("5:memory:/x\n3:cpu,cpuacct:/docker/1234\n0::/\n", **files) == 0.5


def test_no_limit_and_no_groups_are_no_quota(quota: Callable[..., float | None], tmp_path: Path) -> None:
    files = {"cpu__cpuDOTcfs_quota_us": "-1", "cpu__cpuDOTcfs_period_us": "100000"}
    assert quota("3:cpu:/\n", **files) is None
    assert quota("", **files) is None
    assert quota("no group\n0::/../..\n") is None
    assert start.cpu_quota(tmp_path / "nowhere", tmp_path) is None


def test_hyperthreads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6}, raising=False)
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    # nothing is told of 6
    assert start.num_cores(tmp_path) == 3


# what is run


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the command did: a list that holds how the process began anew, or "ran" where it did not."""
    found: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *call: found.append(call))
    monkeypatch.setattr(start, "_command", lambda: found.append("ran"))
    for name in (*start.WAITING, *start.THREADS, start.CHOSEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(sys, "argv", ["/src/relpos/__main__.py", "train", "x y"])
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-X", "dev", "-u", "-m", "relpos", "train", "x y"], raising=False
    )
    return found


def test_a_module_begins_anew_as_it_was_called(begun: list[object], machine: Callable[..., None]) -> None:
    start.main_of_module()
    (path, arguments, environment), _ = begun
    assert path == "/bin/python"
    assert arguments == ["/bin/python", "-X", "dev", "-u", "-m", "relpos", "train", "x y"]
    assert environment == {**os.environ, **CHOSEN}


@pytest.mark.parametrize(
    "called",
    [
        ["python", "host.py", "train", "x y"],
        ["python", "-c", "run_module('relpos')", "train", "x y"],
        ["python", "-m", "relpos", "train"],
    ],
)
def test_a_program_that_runs_the_module_inside_itself_does_not_begin_anew(
    begun: list[object], machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, called: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", called, raising=False)
    start.main_of_module()
    assert begun == ["ran"]
    assert start.CHOSEN not in os.environ


def test_where_the_process_cannot_begin_anew_the_command_runs(
    begun: list[object], machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "execve", refused)
    start.main_of_module()
    assert begun == ["ran"]


def test_ctrl_c_while_torch_loads_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "relpos.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "relpos.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        start._command()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "relpos: stopped.\n"


def _shown(*arguments: str, **changes: str) -> list[str]:
    """The spin counts that OpenMP shows, once each time that it is loaded by a command."""
    hidden = (*start.WAITING, *start.THREADS, start.CHOSEN)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, *arguments, "--version"],
        capture_output=True,
        text=True,
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **changes},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("relpos ")
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)


@linux_alone
def test_openmp_sees_what_the_command_or_the_user_has_set() -> None:
    assert _shown("-c", "import _relpos_command; _relpos_command.main()") == ["10000"]
    # the process restarts
    assert _shown("-X", "utf8", "-m", "relpos")[-1] == "10000"
    assert set(_shown("-m", "relpos", GOMP_SPINCOUNT="77")) == {"77"}


@linux_alone
def test_the_library_changes_nothing_of_openmp() -> None:
    code = "import os; before = dict(os.environ); import relpos, relpos.nn; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], check=True)


# what the doctor reports


@pytest.mark.parametrize(
    ("settings", "is_long"),
    [
        ({}, True),
        ({"GOMP_SPINCOUNT": "10000"}, False),
        ({"GOMP_SPINCOUNT": "infinite"}, True),
        ({"GOMP_SPINCOUNT": "300000"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"GOMP_SPINCOUNT": "10000", "RELPOS_CHOSEN": "GOMP_SPINCOUNT"}, False),
    ],
)
def test_how_threads_wait_is_told_and_is_a_problem_on_a_busy_machine_alone(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], is_long: bool
) -> None:
    for name in (*start.WAITING, start.CHOSEN):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(openmp, "_library", lambda: "libgomp")
    monkeypatch.setattr(openmp, "num_cores", lambda: 2)
    for load, is_busy in ((12.0, True), (1.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        advice: dict[str, str] = {}
        found = openmp.check_waiting(advice.__setitem__)
        assert all(f"{name}={settings[name]}" in found.text for name in settings if name != "RELPOS_CHOSEN")
        assert ("set by this command" in found.text) == ("RELPOS_CHOSEN" in settings)
        busy = "The machine is busy (6.0 tasks per core), and waiting threads spin for long."
        assert list(advice) == ([busy] if is_busy and is_long else [])


@linux_alone
def test_the_openmp_that_torch_has_loaded_is_named() -> None:
    assert openmp.check_waiting(lambda *_: None).value["library"] in ("libgomp", "libiomp5", "libomp")


# the benchmark


@linux_alone
def test_the_benchmark_ends_the_busy_processes_that_it_starts_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    benchmark = importlib.import_module("busy_machine")
    started: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(benchmark, "SETTINGS", {"as it is": {"OMP_NUM_THREADS": "1"}})
    monkeypatch.setattr(sys, "argv", ["busy_machine.py", "--busy", "2", "--turns", "1", "--seconds", "0.01"])
    benchmark.main()
    busy = [process for process in started if "while True: pass" in process.args]
    assert len(busy) == 2
    assert all(process.poll() is not None for process in started)

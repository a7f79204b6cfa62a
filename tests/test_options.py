"""Options of the command: near names, keys of a recipe, combinations without effect, help, closed streams."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relpos import cli
from relpos.cli import run
from relpos.translation import experiments
from relpos.translation.errors import Interrupted
from relpos.translation.generation import Search
from relpos.translation.recipe import load_recipe
from relpos.translation.training import train

COMMANDS = [command.callback.__name__ for command in cli.app.registered_commands]


@pytest.fixture
def fault(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with `code`, and return its one line on standard error."""

    def call(code: int, *arguments: object) -> str:
        capsys.readouterr()
        came = run([str(argument) for argument in arguments])
        out, errors = capsys.readouterr()
        assert (came, out) == (code, ""), errors
        (line,) = errors.splitlines()
        return line

    return call


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned nothing yet; its model translates all the same."""
    run = tmp_path_factory.mktemp("small") / "run"
    lines = "lines: 300, longest: 3, largest: 60"
    keys = [
        f"data.train=[{{numbers: {{{lines}}}}}]",
        f"data.validation=[{{numbers: {{{lines}, part: heldout}}}}]",
        *("tokenizer.vocabulary=320", "model.d_model=16", "model.d_ff=16"),
        *("training.updates=2", "training.precision=float32"),
    ]
    return train(load_recipe("numbers", keys), run).parent


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train numbers --ouut x", "no such option: --ouut; did you mean --out?"),
        ("train numbers --out x --resumee", "no such option: --resumee; did you mean --resume?"),
        ("train numbers --out x --updates 3", "no such option: --updates; did you mean --training.updates?"),
        ("train numbers --out x --zzzz 3", "no such option: --zzzz; see relpos train --help."),
        ("train numbers more --out x", "unexpected extra argument(s) (more)"),
        ("train numbers", "Missing option '--out'"),
        ("translate", "Missing argument 'MODEL'"),
        ("trane", "No such command"),
        ("", "see relpos --help"),
        ("train numbers --out x --training.updates", "option --training.updates needs a value"),
        ("train numbers --out x --training.updates --model.d_ff 3", "--training.updates needs a value"),
        ("train numbers --out x --trainin.updates 3", "unknown key 'trainin'; the nearest is 'training'"),
        ("reproduce demo --ouut x", "no such option: --ouut; did you mean --out?"),
        ("recipe numbers --training.updtes 3", "unknown key 'training.updtes'; the nearest is 'updates'"),
        ("translate model --beans 3", "no such option: --beans; did you mean --beams?"),
        ("translate model --training.updates 3", "no such option: --training.updates; "),
        ("evaluate model --length 3", "no such option: --length; did you mean --length"),
        ("doctor --jsn", "no such option: --jsn; did you mean --json?"),
        ("--versoin", "no such option: --versoin; did you mean --version?"),
    ],
)
def test_a_misspelt_option_is_named_with_the_nearest(fault, arguments, told) -> None:
    assert told in fault(2, *arguments.split())


@pytest.mark.parametrize(
    "arguments",
    ["numbers --training.updates 7", "--training.updates 7 numbers", "--training.updates=7 numbers"],
)
def test_keys_of_a_recipe_stand_before_or_behind_its_name(capsys, arguments) -> None:
    assert run(["recipe", *arguments.split()]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    assert "  updates: 7  #" in out
    assert "lines: 20000, longest: 5" in out


def test_a_recipe_is_printed_with_the_keys_that_are_given(capsys) -> None:
    assert run(["recipe", "--model.relative_max_distance", "[2, 3]", "--data.target_language=fr"]) == 0
    out = capsys.readouterr().out
    assert "relative_max_distance: [2, 3]  #" in out
    assert "target_language: fr  #" in out
    # a value may look like an option where it stands behind "="
    assert run(["recipe", "--data.cleaning.drop_matching=--x"]) == 0
    assert "drop_matching: --x  #" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("translate m --temperature 2", "--temperature has no effect without --sample"),
        ("translate m --seed 0", "--seed has no effect without --sample"),
        ("translate m --sample --beams 4", "--sample does not use beams; omit --beams"),
        ("translate m --sample --length-penalty 1", "--length-penalty has no effect with one beam or --s"),
        ("translate m --beams 1 --length-penalty 1", "--length-penalty has no effect with one beam"),
        ("evaluate m --beams 1 --length-penalty 1", "--length-penalty has no effect with one beam"),
        ("translate m --sample --n-best 2", "--n-best gives several translations of a line; add --json."),
        ("translate m --sample --temperature 1e-40", "--temperature must be from 0.001 to 1000; got 1e-40."),
        ("translate m --sample --temperature 0", "--temperature must be from 0.001 to 1000; got 0.0."),
        ("translate m --sample --temperature nan", "--temperature must be from 0.001 to 1000; got nan."),
        ("translate m --length-penalty 1e308", "--length-penalty must be from -5 to 5; got 1e+308."),
        ("translate m --length-penalty nan", "--length-penalty must be from -5 to 5; got nan."),
        ("evaluate m --length-penalty=-5.1", "--length-penalty must be from -5 to 5; got -5.1."),
        ("translate m --sample --seed -1", "'--seed': it must be greater than or equal to 0"),
        ("translate m --temperature warm", "'--temperature': it must be a valid number"),
    ],
)
def test_an_option_without_effect_or_out_of_range_is_refused_before_the_model_is_read(
    fault, arguments, told
) -> None:
    assert told in fault(2, *arguments.split())


@pytest.mark.parametrize(
    "options",
    [
        "--sample --temperature 0.001",
        "--sample --temperature 1e3",
        "--length-penalty 5",
        "--length-penalty -5",
    ],
)
def test_the_ends_of_the_ranges_translate_with_finite_scores(capsys, small_run, tmp_path, options) -> None:
    text = tmp_path / "text"
    text.write_text("; ".join(["twenty-one"] * 30) + "\none\n")
    code = run(["translate", str(small_run), str(text), *options.split(), "--json"])
    out, errors = capsys.readouterr()
    assert code == 0, errors
    for line in out.splitlines():
        score = json.loads(line)["hypotheses"][0]["score"]
        assert -1e38 < score <= 0


def test_a_penalty_without_effect_by_the_models_own_beams_is_refused(capsys, small_run, monkeypatch) -> None:
    search = cli.make_search

    def with_one_beam(translator: object, beams: int | None, *rest: object, **others: object) -> Search:
        return search(translator, beams or 1, *rest, **others)

    monkeypatch.setattr(cli, "make_search", with_one_beam)
    for command in ("translate", "evaluate"):
        assert run([command, str(small_run), "--length-penalty", "1"]) == 2
        assert "--length-penalty has no effect with one beam" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "50"])
def test_help_is_not_cut(capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in ([], *([name] for name in COMMANDS)):
        assert run([*arguments, "--help"]) == 0
        out = capsys.readouterr().out
        assert "..." not in out.replace("[ARGS]...", ""), out
        assert max(map(len, out.splitlines())) <= int(columns)
    assert run(["--help"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    for command in cli.app.registered_commands:
        first = (command.callback.__doc__ or "").splitlines()[0]
        assert first.endswith(".")
        assert f"{command.callback.__name__} {first}" in listed


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "out", "told"),
    [
        (
            "<&-",
            "translate MODEL",
            1,
            "",
            "relpos: standard input is closed; name a file, or redirect one to it.\n",
        ),
        ("<&- >&- 2>&-", "translate MODEL TEXT -o OUT", 0, "", ""),
        (
            ">&-",
            "recipe --help",
            1,
            "",
            "relpos: standard output: cannot be written (Bad file descriptor).\n",
        ),
        ("2>&-", "nothing", 2, "", ""),
    ],
)
def test_a_closed_stream_is_told_where_it_is_needed(
    small_run, tmp_path, closed, arguments, code, out, told
) -> None:
    (tmp_path / "text").write_text("one\n")
    places = {"MODEL": small_run, "TEXT": tmp_path / "text", "OUT": tmp_path / "out"}
    words = [str(places.get(word, word)) for word in arguments.split()]
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "relpos", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout[-1:]) == (code, out), done.stderr
    assert done.stderr.startswith(told)
    assert bool(done.stderr) is bool(told)
    if "OUT" in arguments:
        assert (tmp_path / "out").read_text().count("\n") == 1


SAVED, UNSAVED = "the state is in run/checkpoint-3;", "nothing was saved yet; run the same command again."


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["train", "numbers"], "continue with --resume."),
        (["reproduce", "demo"], "run the same command again."),
    ],
)
def test_who_stops_a_command_is_told_how_it_goes_on(
    fault, monkeypatch, tmp_path, arguments, saved, more
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise Interrupted(signal.SIGTERM, Path("run/checkpoint-3") if saved else None)

    monkeypatch.setattr("relpos.translation.training.train", stop)
    monkeypatch.setattr(experiments, "train", stop)
    monkeypatch.setattr(cli, "say", lambda line: None)
    told = f"{SAVED} {more}" if saved else UNSAVED
    assert fault(143, *arguments, "--out", tmp_path / "out") == f"relpos: stopped; {told}"


def test_an_interrupt_outside_of_training_is_told_too(fault, monkeypatch, tmp_path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_settle", stop)
    assert fault(130, "train", "numbers", "--out", tmp_path / "out") == "relpos: stopped."
    told = "relpos: stopped; run the same command again to continue."
    assert fault(130, "reproduce", "demo", "--out", tmp_path / "out") == told


INTERRUPTS = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize(
    ("module", "arguments", "code", "told"),
    [
        ("relpos._functional", ["-m", "relpos", "--version"], 130, "relpos: stopped.\n"),
        ("yaml", ["-m", "relpos", "recipe"], 130, "relpos: stopped.\n"),
        # who uses the library decides what an interrupt means
        ("torch", ["-c", "try: import relpos\nexcept KeyboardInterrupt: print('mine')"], 0, "mine\n"),
    ],
)
def test_who_stops_a_command_while_it_is_loaded_gets_one_line(
    tmp_path, module, arguments, code, told
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    places = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    environment = os.environ | {"PYTHONPATH": places, "STOP_AT": module}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, env=environment, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (code, told)


def test_an_experiment_without_its_data_says_how_to_name_their_folder(fault, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = "relpos: multi30k needs {} in {}; give the right folder with --data.folder FOLDER."
    first, *others = [f"multi30k.en-de.{part}.tsv.gz" for part in ("train", "val", "test_2016")]
    expected = told.format(f"{first} and 2 more files", tmp_path)
    assert fault(1, "reproduce", "multi30k", "--out", "out") == expected
    (tmp_path / "data").mkdir()
    for name in (first, others[0]):
        (tmp_path / "data" / name).touch()
    line = fault(1, "reproduce", "multi30k", "--out", "out", "--data.folder", "data")
    assert line == told.format(others[1], tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_corpus_of_which_nothing_is_kept_tells_how_many_went_and_why(capsys, tmp_path) -> None:
    (tmp_path / "pairs.tsv").write_text("same\tsame\n12\t13\nSame\tsame\n")
    (tmp_path / "mine.yaml").write_text(f"data: {{folder: '{tmp_path}', train: [{{tsv: pairs.tsv}}]}}\n")
    assert run(["train", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "relpos: the train part of the corpus is empty: 0 of 3 pairs kept; 2 dropped: equal sides; "
        "1 dropped: too few letters; change data.cleaning, or give other text."
    )

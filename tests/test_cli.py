"""The command line: what it prints where, and every wrong input by its message and exit code."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from relpos import cli
from relpos._console_tables import print_comparison
from relpos.cli import run
from relpos.translation.generation import Hypothesis, Translator

Outcome = tuple[int, str, str]


@pytest.fixture
def relpos(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command in this process: exit code, standard output, standard error."""

    def call(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, errors = capsys.readouterr()
        return code, out, errors

    return call


@pytest.fixture
def fault(relpos: Callable[..., Outcome]) -> Callable[..., str]:
    """Run a command that must fail with `code`, and return its one line on standard error."""

    def call(code: int, *arguments: object, stdin: bytes = b"") -> str:
        came, out, errors = relpos(*arguments, stdin=stdin)
        assert came == code, errors
        assert out == ""
        last = errors.splitlines()[-1]
        assert last.startswith("relpos: ")
        assert "Traceback" not in errors
        return last

    return call


def _pairs(folder: Path, text: str | bytes, name: str = "pairs.tsv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_unknown_recipe_lists_those_there_are(fault, tmp_path) -> None:
    line = fault(2, "train", "nope", "--out", tmp_path / "run")
    assert "messages, multi30k, numbers" in line
    assert not (tmp_path / "run").exists()


def test_lengths_that_do_not_rise_are_refused(fault, numbers_run) -> None:
    assert "--lengths must be rising" in fault(2, "evaluate", numbers_run, "--lengths", "5,3")


def test_unknown_experiment_lists_those_there_are(fault, tmp_path) -> None:
    assert "demo, multi30k" in fault(2, "reproduce", "nope", "--out", tmp_path / "out")


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_missing_extra_for_pictures_is_told_before_any_work(command, tmp_path, module) -> None:
    missing = f"import sys; sys.modules[{module!r}] = None"
    process = command("reproduce", "demo", "--out", tmp_path / "out", before=missing)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert errors == f'relpos: relpos.inspection needs {module}: pip install "relpos[plots]"\n'
    assert not (tmp_path / "out").exists()


def test_missing_extra_for_translating_is_told(fault, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "relpos.translation.generation", None)
    assert fault(1, "translate", tmp_path).endswith(': pip install "relpos[translate]"')


@pytest.mark.parametrize("arguments", [("reproduce", "demo"), ("train", "numbers")])
def test_folder_that_cannot_be_made_is_told(fault, tmp_path, arguments) -> None:
    out = _pairs(tmp_path, "text", "file") / "out"
    line = fault(1, *arguments, "--out", out)
    assert str(out) in line
    assert "Not a directory" in line


def test_full_standard_output_is_told() -> None:
    command = [sys.executable, "-m", "relpos", "doctor"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("relpos: ")
    assert "No space left on device" in line


def test_reader_that_left_is_no_failure() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "relpos", "train", "--help"]
    done = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writable)
    assert (done.returncode, done.stderr) == (0, "")


def test_any_failure_of_the_system_is_told_in_one_line(fault, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "version", fail)
    assert fault(1, "--version") == "relpos: No space left on device."


def test_memory_that_is_not_there_is_told(fault, monkeypatch) -> None:
    def fail(name: str) -> str:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(cli, "version", fail)
    told = fault(1, "--version")
    assert told == "relpos: there is not enough memory for this (Cannot allocate memory (os error 12))."


def test_missing_corpus_is_told(fault, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("data: {train: [{tsv: none.tsv}]}")
    line = fault(1, "train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
    assert f"{tmp_path / 'none.tsv'} does not exist" in line


def test_text_goes_in_and_out_line_by_line(relpos, numbers_run) -> None:
    text = "twenty-one\n\nthree; ninety-nine\n   \nseven\n"
    code, out, errors = relpos("translate", numbers_run, stdin=text.encode())
    assert code == 0, errors
    assert out == "einundzwanzig\n\ndrei; neunundneunzig\n\nsieben\n"


def test_no_text_gives_no_text(relpos, numbers_run) -> None:
    assert relpos("translate", numbers_run)[:2] == (0, "")


def test_file_in_and_file_out(relpos, numbers_run, tmp_path) -> None:
    source = tmp_path / "in.gz"
    source.write_bytes(gzip.compress("seven\n".encode("utf-8-sig")))
    code, out, errors = relpos("translate", numbers_run, source, "-o", tmp_path / "out")
    assert (code, out) == (0, ""), errors
    assert (tmp_path / "out").read_text() == "sieben\n"
    assert not list(tmp_path.glob("*.part"))


def test_input_in_another_encoding_is_told_and_leaves_no_file(fault, numbers_run, tmp_path) -> None:
    line = fault(1, "translate", numbers_run, "-o", tmp_path / "out", stdin=b"one\nf\xfcnf\n")
    assert "line 2 has byte 0xfc" in line
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_told(fault, numbers_run, tmp_path) -> None:
    line = fault(1, "translate", numbers_run, "-o", tmp_path / "none" / "out", stdin=b"one\n")
    assert "cannot be written" in line


def test_full_standard_output_is_told_while_translating(command, numbers_run, tmp_path) -> None:
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    process = command("translate", numbers_run, _pairs(tmp_path, "one\n", "in"), before=full)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors == "relpos: standard output: cannot be written (No space left on device).\n"


def test_output_may_be_a_device_or_a_link(relpos, fault, numbers_run, tmp_path) -> None:
    assert relpos("translate", numbers_run, "-o", "/dev/null", stdin=b"one\n")[0] == 0
    assert not Path("/dev/null").is_file()
    line = fault(1, "translate", numbers_run, "-o", "/dev/full", stdin=b"one\n")
    assert line == "relpos: /dev/full: cannot be written (No space left on device)."
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert relpos("translate", numbers_run, "-o", tmp_path / "link", stdin=b"one\n")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "eins\n"


def test_hypotheses_with_scores_come_as_json(relpos, numbers_run) -> None:
    code, out, errors = relpos("translate", numbers_run, "--json", "--n-best", "3", stdin=b"ninety\n\n")
    assert code == 0, errors
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["source"] == "ninety"
    assert first["hypotheses"][0]["text"] == "neunzig"
    scores = [hypothesis["score"] for hypothesis in first["hypotheses"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert second["hypotheses"] == [{"text": "", "score": 0.0}]


def test_reader_that_leaves_ends_the_command_quietly(numbers_run) -> None:
    relpos = f"{sys.executable} -m relpos"
    command = f"yes one | head -20000 | {relpos} translate {numbers_run} --beams 1 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout == "eins\n"
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_evaluation_prints_scores_by_length_with_signatures(relpos, numbers_run) -> None:
    code, out, errors = relpos("evaluate", numbers_run, "--lengths", "1,2")
    assert code == 0, errors
    assert "numbers in the line" in out
    assert "tok:13a" in out
    assert "case:lc" in out


def test_evaluation_of_given_files_comes_as_json(relpos, numbers_run, tmp_path) -> None:
    pairs = _pairs(tmp_path, "one\teins\ntwo; three\tzwei; drei\n")
    options = ("--data", pairs, "--json", "--hypotheses", tmp_path / "hyp")
    code, out, errors = relpos("evaluate", numbers_run, *options)
    assert code == 0, errors
    result = json.loads(out)
    assert result["scores"]["exact"] == 1.0
    assert result["scores"]["segments"] == 2
    assert (tmp_path / "hyp").read_text() == "eins\nzwei; drei\n"
    source, target = _pairs(tmp_path, "one\n", "s"), _pairs(tmp_path, "eins\n", "t")
    _, out, _ = relpos("evaluate", numbers_run, "--data", source, "--data", target, "--json")
    assert json.loads(out)["scores"]["exact"] == 1.0


def test_evaluation_leaves_nothing_behind(relpos, numbers_run, tmp_path, monkeypatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    held = sorted(numbers_run.rglob("*"))
    one = _pairs(tmp_path, "one\teins\n")
    for arguments in ((numbers_run,), (numbers_run / "model",), (numbers_run, "--data", one)):
        code, _, errors = relpos("evaluate", *arguments, "--beams", "1")
        assert code == 0, errors
        assert sorted(numbers_run.rglob("*")) == held
        assert not list((tmp_path / "scratch").iterdir())


def test_hypotheses_that_cannot_be_written_are_told_before_the_work(
    fault, numbers_run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Translator, "load", None)
    out = tmp_path / "none" / "hypotheses"
    line = fault(1, "evaluate", numbers_run, "--hypotheses", out)
    assert line == f"relpos: {out}: cannot be written (No such file or directory)."


def test_line_break_in_a_hypothesis_makes_no_further_line(relpos, numbers_run, tmp_path, monkeypatch) -> None:
    def translate(self: Translator, texts: list[str], *rest: object, **options: object) -> list:
        return [[Hypothesis("eins\nzwei\r\ndrei\u2028", 0.0)] for _ in texts]

    monkeypatch.setattr(Translator, "translate", translate)
    pairs = _pairs(tmp_path, "one\teins\ntwo\tzwei\n")
    assert relpos("evaluate", numbers_run, "--data", pairs, "--hypotheses", tmp_path / "out")[0] == 0
    assert (tmp_path / "out").read_text("utf-8") == "eins zwei drei\n" * 2
    assert relpos("translate", numbers_run, stdin=b"one\n")[1] == "eins zwei drei\n"
    _, text, _ = relpos("translate", numbers_run, "--json", stdin=b"one\n")
    assert json.loads(text)["hypotheses"][0]["text"] == "eins\nzwei\r\ndrei\u2028"


def test_scores_are_computed_where_they_are_printed_alone(relpos, numbers_run, tmp_path, monkeypatch) -> None:
    asked: list[object] = []

    def translate(self: Translator, texts: list[str], *rest: object, **options: object) -> list:
        asked.append(options["with_scores"])
        return [[Hypothesis("eins", -0.5)] for _ in texts]

    monkeypatch.setattr(Translator, "translate", translate)
    relpos("translate", numbers_run, stdin=b"one\n")
    _, out, _ = relpos("translate", numbers_run, "--json", stdin=b"one\n")
    assert json.loads(out)["hypotheses"] == [{"text": "eins", "score": -0.5}]
    relpos("evaluate", numbers_run, "--data", _pairs(tmp_path, "one\teins\n"))
    assert asked == [False, True, False]


def test_evaluation_without_a_test_set_is_wrong_use(fault, numbers_run, tmp_path) -> None:
    model = shutil.copytree(numbers_run / "model", tmp_path / "model")
    (model / "recipe.yaml").unlink()
    (model / "seal.json").unlink()
    assert "give one with --data" in fault(2, "evaluate", model)


def test_corpus_text_is_shown_as_it_is_and_not_as_markup(capsys) -> None:
    scores = {"segments": 1, "bleu": 1.0, "bleu_lowercased": 1.0, "chrf": 1.0, "exact": 0.0}
    record = {"task": "messages", "weights": 1, "updates": 1, "seconds": 1.0, "trained_up_to": None}
    record |= {
        "title": "Messages [b]",
        "variant": "relative [/i]",
        "target_tokens_per_second": None,
        "length_unit": "words [red]",
        "scores": scores | {"signatures": {"bleu": "[b]"}},
        "buckets": [{"shortest": 1, "longest": 1, "scores": scores}],
        "samples": [
            {"source": "a [/b] c", "reference": "[bold]fett[/bold]", "hypothesis": ":smile: [link=x] \\[b]"}
        ],
    }
    print_comparison([record])
    out = capsys.readouterr().out
    for text in ("Messages [b] (1 test segments)", "relative [/i]", "words [red]", "a [/b] c"):
        assert text in out
    for text in ("[bold]fett[/bold]", ":smile: [link=x] \\[b]", "Translations of test segments"):
        assert text in out


def test_experiment_compares_variants_and_writes_a_report(relpos, tmp_path) -> None:
    training = "updates=4 evaluate_every=2 tokens_per_batch=512 validation_pairs=2 precision=float32"
    model = "d_model=16 num_heads=2 encoder_layers=1 decoder_layers=1 d_ff=16"
    options = [f"--training.{each}" for each in training.split()]
    options += [f"--model.{each}" for each in model.split()]
    options += [
        "--tokenizer.vocabulary=340",
        "--data.train=[{numbers: {lines: 300, longest: 3}}]",
        "--data.validation=[{numbers: {lines: 5, longest: 3, part: heldout}}]",
        "--data.test=[{numbers: {lines: 10, longest: 4, seed: 5, part: heldout}}]",
    ]
    out = tmp_path / "out"
    code, text, errors = relpos("reproduce", "demo", "--out", out, *options)
    assert code == 0, errors
    assert "relative" in text
    assert "sinusoidal" in text
    report = (out / "report.html").read_text()
    assert "Numbers in words" in report
    assert report.count("<svg") + report.count("data:image") >= 4
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(record["task"], record["variant"]) for record in records] == [
        (task, variant) for task in ("messages", "numbers") for variant in ("relative", "sinusoidal")
    ]
    # run again: nothing is trained twice
    code, text, errors = relpos("reproduce", "demo", "--out", out, *options, "--json")
    assert code == 0
    assert errors.count("done before") == 4
    assert json.loads(text)["results"] == records


def test_version_help_and_doctor_are_quick_and_on_standard_output() -> None:
    code = (
        "import sys, _relpos_command; from relpos.cli import run; "
        "assert not any(map(run, (['--version'], ['--help'], ['train', '--help'], ['doctor']))); "
        "assert not {'transformers', 'datasets', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("relpos ")


def test_help_has_a_short_name_for_every_command(relpos) -> None:
    for command in ([], ["train"], ["doctor"]):
        code, out, errors = relpos(*command, "-h")
        assert (code, errors) == (0, "")
        assert out == relpos(*command, "--help")[1]

"""`relpos translate` on text as it comes: on pipes, with long lines, with what cannot be seen."""

import gzip
import io
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relpos.cli import run
from relpos.translation.config import RelposConfig
from relpos.translation.generation import Hypothesis, Search, Translator
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.tokenizer import train_tokenizer

LINES = ["red green", "", "blue one two", "cat dog", "three"]
TRAINED = 20  # subwords


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learned nothing: what it says depends on each word of a line."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["red green blue one two three cat dog"] * 20, 290)
    torch.manual_seed(1)
    config = RelposConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, num_heads=2, d_ff=16
    )
    made = RelposForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(f"training: {{max_length: {TRAINED}}}\n")
    return folder


@pytest.fixture
def translate(
    model: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str], str]]:
    """Run `relpos translate` in this process: exit code, lines, standard error."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        greedy = [] if "--sample" in arguments else ["--beams", "1"]
        code = run(["translate", str(model), *greedy, *map(str, arguments)])
        out, errors = capsysbinary.readouterr()
        return code, out.decode().split("\n")[:-1], errors.decode()

    return call


def joined(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def test_white_space_and_invisible_signs_change_no_line(translate) -> None:
    code, true, _ = translate(stdin=joined(LINES))
    assert (code, len(set(true))) == (0, len(LINES))
    changed = [f" {line.replace(' ', '  ')}\u00a0\u200b" for line in LINES]
    assert translate(stdin=b"\xef\xbb\xbf" + joined(changed))[1] == true
    assert translate(stdin=joined(changed).replace(b"\n", b"\r\n"))[1] == true
    assert translate(stdin=joined(changed).replace(b"\n", b"\r"))[1] == true
    prefixed = translate("--prefix", "cat", stdin=joined(LINES))[1]
    assert translate("--prefix", "cat ", stdin=joined(LINES))[1] == prefixed
    assert all(line.startswith("cat") for line in prefixed if line)


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u00ad", "\u2060", "\x00"])
def test_a_line_of_invisible_signs_gives_an_empty_line(translate, sign) -> None:
    code, lines, _ = translate(stdin=joined(["cat", sign, f"{sign} {sign}", "cat"]))
    assert code == 0
    assert lines[1:3] == ["", ""]
    assert lines[0] == lines[3] != ""


def test_a_line_on_a_pipe_is_answered_before_the_next_is_written(translate, model) -> None:
    _, true, _ = translate(stdin=joined(LINES))
    command = [sys.executable, "-m", "relpos", "translate", str(model), "--beams", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes)
    answers: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=lambda: [answers.put(line) for line in process.stdout], daemon=True)
    reader.start()
    with process:
        try:
            for line, answer in zip(LINES, true, strict=True):
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()
                # an answer that does not come fails the test
                assert answers.get(timeout=240).decode() == f"{answer}\n"
            process.stdin.close()
            assert process.wait(timeout=240) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()
            reader.join(timeout=60)


@pytest.mark.parametrize("way", ["argument", "standard input", "gzip"])
def test_a_file_is_translated_in_large_batches(translate, model, tmp_path, monkeypatch, way) -> None:
    path, sizes = tmp_path / "text", []
    text = joined(LINES * 2000)
    path.write_bytes(gzip.compress(text) if way == "gzip" else text)

    def count(self: Translator, texts: list[str], *rest: Any, **options: Any) -> list:
        sizes.append(len(texts))
        return [[Hypothesis("x", 0.0)] for _ in texts]

    monkeypatch.setattr(Translator, "translate", count)
    with path.open() as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", file)
        arguments = [] if way == "standard input" else [str(path)]
        assert run(["translate", str(model), *arguments, "--output", str(tmp_path / "out")]) == 0
    assert sum(sizes) == 2000 * len(LINES)
    assert sizes[0] >= 8192


def test_samples_of_a_seed_do_not_depend_on_when_lines_arrive(translate, model) -> None:
    alone, search = Translator.load(model), Search(sample=True, temperature=2.0)
    torch.manual_seed(3)
    true = [" ".join(alone.translate([line], search)[0][0].text.split()) for line in LINES]
    sampled = ("--sample", "--seed", "3", "--temperature", "2")
    assert translate(*sampled, stdin=joined(LINES))[1] == true
    assert translate("--sample", "--seed", "4", "--temperature", "2", stdin=joined(LINES))[1] != true


def test_long_lines_give_one_warning_for_the_whole_input_with_the_line_in_it(translate, monkeypatch) -> None:
    from relpos.translation.corpora import text_lines

    monkeypatch.setattr(text_lines, "_BLOCK", 200)
    long = " ".join(["cat dog"] * 20)
    code, lines, errors = translate("--sample", stdin=joined(["red", "blue", long, "cat", long, long]))
    assert (code, len(lines)) == (0, 6)
    assert errors.count("relpos: warning: ") == errors.count("warning") == 1
    assert errors.startswith("relpos: warning: line 3 ('cat dog cat dog cat dog")
    assert f"and this model was trained on at most {TRAINED}: " in errors
    assert "--split-long" in errors


def test_split_long_lines_are_one_line_each_and_no_warning(translate) -> None:
    sentences = ["Red green blue one.", "Cat dog two three.", "Blue."]
    alone = translate(stdin=joined(sentences))[1]
    code, lines, errors = translate("--split-long", stdin=joined([" ".join(sentences * 3), "cat"]))
    assert (code, errors) == (0, "")
    assert lines == [" ".join(" ".join(alone * 3).split()), translate(stdin=b"cat\n")[1][0]]


def test_a_word_of_a_million_letters_ends_in_one_sentence(translate) -> None:
    code, lines, errors = translate(stdin=b"cat\n" + b"a" * 1_000_000)
    assert (code, lines) == (1, [])
    assert errors.startswith("relpos: line 2 ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ...') has ")
    assert "at most 4096 are translated at once; split the line, or have it split: --split-long" in errors
    assert errors.count("\n") == 1


def test_endless_lines_end_in_one_sentence_and_the_limit_is_an_option(translate, tmp_path) -> None:
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(5 << 20), compresslevel=1))
    for file in (bomb, "/dev/zero"):
        code, lines, errors = translate(file)
        assert (code, lines) == (1, [])
        assert errors.startswith(f"relpos: {file}: line 1 has more than 1,048,576 bytes; split the line")
        assert errors.count("\n") == 1
    code, lines, _ = translate("--max-line-bytes", 5 << 20, bomb)
    assert (code, lines) == (0, [""])
    code, _, errors = translate("--max-line-bytes", 4, stdin=b"cat\nblue\nthree\n")
    assert code == 1
    assert "line 3 has more than 4 bytes" in errors


def test_evaluate_never_splits(model, tmp_path, capsys) -> None:
    path = tmp_path / "pairs.tsv"
    long = "Red green blue one. " * 9
    path.write_text(f"{long}\tx\n{long}\ty\n")
    whole = Translator.load(model)
    with pytest.warns(UserWarning, match="trained on at most"):
        true = whole.translate([long])[0][0].text
    options = ["--data", str(path), "--json", "--hypotheses", str(tmp_path / "out")]
    assert run(["evaluate", str(model), *options]) == 0
    assert (tmp_path / "out").read_text().split("\n")[:-1] == [true, true]
    out, errors = capsys.readouterr()
    assert json.loads(out)["scores"]["segments"] == 2
    assert errors.count("relpos: warning: ") == 1

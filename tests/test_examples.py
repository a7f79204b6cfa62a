"""The worked example: what it hides is hidden, what is held out is unseen, and it runs to the end."""

import ast
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"
SOURCE = textwrap.dedent(
    """
    def total(rows, key):
        "Add them up."
        result = 0
        for row in rows:
            result += row.get(key, default=other)
        return result
    """
)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/syntax_trees.py as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("syntax_trees")


@pytest.fixture
def example(trees: ModuleType) -> ModuleType:
    """examples/ast_identifiers.py as a module."""
    return importlib.import_module("ast_identifiers")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of thirty modules and packages with four functions each."""
    for number in range(30):
        name = f"module{number}.py" if number % 2 else f"package{number}/inner.py"
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        functions = (
            SOURCE.replace("total", f"total{number}_{i}").replace("row.get", f"row.get{i}") for i in range(4)
        )
        path.write_text("\n".join(functions))
    return tmp_path / "library"


def function_of(trees: ModuleType, source: str = SOURCE):
    return trees.tree_of(ast.parse(source).body[0], "module")


def encoder(example: ModuleType, vocabulary: Any, num_labels: int) -> Any:
    torch.manual_seed(0)
    num_kinds, num_words = len(vocabulary.kinds) + 1, len(vocabulary.words) + example.FIRST_WORD
    return example.Encoder(num_kinds, num_words, num_labels)


def test_nodes_of_a_function_stand_below_their_parents(trees) -> None:
    function = function_of(trees)
    assert function.kinds[:4] == ("FunctionDef", "arguments", "arg", "arg")
    assert function.parents[:4] == (-1, 0, 1, 1)
    assert all(parent < index for index, parent in enumerate(function.parents))
    loop, nodes = function.kinds.index("For"), zip(function.kinds, function.parents, strict=True)
    assert [kind for kind, parent in nodes if parent == loop] == ["Name", "Name", "AugAssign"]


def test_variables_are_numbers_and_other_names_stay_words(trees) -> None:
    function = function_of(trees)
    places = [variable for variable in function.variables if variable != trees.NO_VARIABLE]
    # rows key | result | row rows | result row key | result
    assert places == [0, 1, 2, 3, 0, 2, 3, 1, 2]
    assert {"get", "default", "other", "total"} <= set(function.words)


def test_no_name_of_a_variable_is_left_in_a_function(trees) -> None:
    function = function_of(trees)
    assert not {"rows", "key", "result", "row"} & {*function.words, *function.kinds}
    renamed = SOURCE
    for number, name in enumerate(("rows", "key", "result", "row")):
        renamed = renamed.replace(name, f"v{number}")
    assert renamed != SOURCE
    assert function_of(trees, renamed.replace("v30", "v0")) == function


def test_held_out_modules_are_whole_and_share_no_function(trees, library) -> None:
    # a copy under another name would be known from the training
    (library / "copy.py").write_text((library / "module1.py").read_text())
    functions = trees.read_functions(library)
    training, held_out = trees.split(functions)
    assert training
    assert held_out
    assert len(training) + len(held_out) == len(functions) == 30 * 4
    tops = [{function.module.split("/")[0] for function in part} for part in (training, held_out)]
    assert not tops[0] & tops[1]
    contents = {(each.kinds, each.words, each.parents, each.variables) for each in functions}
    assert len(contents) == len(functions)


def test_functions_of_a_real_package_are_of_the_right_size(trees) -> None:
    functions = trees.read_functions(Path(json.__file__).parent)
    assert "decoder" in {function.module for function in functions}
    for function in functions:
        places = [variable for variable in function.variables if variable != trees.NO_VARIABLE]
        assert trees.SHORTEST <= len(function.kinds) <= trees.LONGEST
        assert 2 <= len(set(places)) <= trees.MOST_VARIABLES
        assert len(places) > len(set(places))


def test_about_a_fifth_of_the_standard_library_is_held_out(trees) -> None:
    names = sorted(sys.stdlib_module_names)
    held_out = [trees.is_held_out(name) for name in names]
    assert 0.1 < sum(held_out) / len(held_out) < 0.3
    # a package is held out whole
    assert [trees.is_held_out(f"{name}/inner") for name in names] == held_out


def test_tests_and_installed_packages_are_left_out(trees, library) -> None:
    for name in ("test", "site-packages", "package0/tests"):
        (library / name).mkdir()
        (library / name / "more.py").write_text(SOURCE)
    assert len(trees.read_functions(library)) == 30 * 4


def test_a_folder_without_functions_is_refused(trees, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="folder must hold Python modules with functions; got"):
        trees.read_functions(tmp_path)


def test_hidden_uses_look_alike_whatever_stood_there(example, trees) -> None:
    functions = [function_of(trees)] * 200
    batch = example.Vocabulary(functions).batch(functions)
    task = example.hide(batch, torch.Generator().manual_seed(0))
    assert (task.words[task.is_hidden] == example.MASK).all()
    assert (task.words[~task.is_hidden] != example.MASK).all()
    is_shown = (batch.variables >= 0) & ~task.is_hidden
    assert torch.equal(task.words[is_shown], example.FIRST_VARIABLE + task.targets[is_shown])
    is_word = batch.variables < 0
    assert torch.equal(task.words[is_word], batch.words[is_word])


def test_only_later_uses_are_hidden_and_some_in_each_function(example, trees) -> None:
    functions = [function_of(trees)] * 200
    batch = example.Vocabulary(functions).batch(functions)
    task = example.hide(batch, torch.Generator().manual_seed(0))
    places = [index for index, variable in enumerate(functions[0].variables) if variable != trees.NO_VARIABLE]
    firsts, later = places[:4], places[4:]
    assert not task.is_hidden[:, firsts].any()
    assert task.is_hidden[:, later].any(0).all()
    assert task.is_hidden.any(1).all()
    assert int(task.is_hidden.sum()) == int(task.is_hidden[:, later].sum())
    # four names are seen, each the target of its variable
    assert (task.in_scope.sum(1) == 4).all()
    assert task.in_scope.gather(1, task.targets[:, firsts]).all()


def test_names_of_variables_are_drawn_anew_so_that_none_is_likelier(example, trees) -> None:
    functions = [function_of(trees)] * 2000
    batch = example.Vocabulary(functions).batch(functions)
    task = example.hide(batch, torch.Generator().manual_seed(0))
    share = torch.bincount(task.targets[task.is_hidden], minlength=8) / task.is_hidden.sum()
    torch.testing.assert_close(share, torch.full((8,), 1 / 8), atol=0.02, rtol=0)


def test_a_change_of_what_is_hidden_changes_no_logit(example, trees) -> None:
    functions = [function_of(trees)]
    vocabulary = example.Vocabulary(functions)
    batch = vocabulary.batch(functions)
    for labelling, label in example.LABELLINGS.items():
        model = encoder(example, vocabulary, label(batch).num_labels)
        task = example.hide(batch, torch.Generator().manual_seed(1))
        other = example.Task(task.words, task.is_hidden, task.targets.flip(1), task.in_scope)
        logits, targets = example.hidden_logits(model, batch, task, labelling)
        others, other_targets = example.hidden_logits(model, batch, other, labelling)
        assert not torch.equal(targets, other_targets)
        torch.testing.assert_close(logits, others, atol=0, rtol=0)


def test_padding_changes_no_logit(example, trees) -> None:
    longer = function_of(trees, SOURCE.replace("return result", "return result + result + result"))
    functions = [function_of(trees), longer]
    vocabulary = example.Vocabulary(functions)
    alone, together = vocabulary.batch(functions[:1]), vocabulary.batch(functions)
    for label in example.LABELLINGS.values():
        model = encoder(example, vocabulary, label(alone).num_labels)
        logits = [
            model(batch.kinds, batch.words, _for_heads(label(batch).labels), batch.lengths)[0]
            for batch in (alone, together)
        ]
        torch.testing.assert_close(logits[1][: len(functions[0].kinds)], logits[0], atol=1e-5, rtol=0)


def _for_heads(labels: torch.Tensor) -> torch.Tensor:
    return labels[:, None] if labels.dim() == 3 else labels


@pytest.fixture
def _small_library(trees: ModuleType, example: ModuleType, library: Path, monkeypatch) -> None:
    monkeypatch.setattr(example, "read_functions", lambda: trees.read_functions(library))


@pytest.mark.usefixtures("_small_library")
def test_example_prints_a_table_of_all_labellings(example, capsys) -> None:
    example.main(["--updates", "2", "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert "blind choice 25.0 %" in lines[0]
    assert [line[:20].strip() for line in lines[1:]] == list(example.LABELLINGS)
    assert all(" %  (" in line for line in lines[1:])


@pytest.mark.usefixtures("_small_library")
def test_example_gives_the_same_records_twice(example, capsys) -> None:
    def records() -> list[dict]:
        example.main(["--updates", "3", "--json"])
        lines = capsys.readouterr().out.splitlines()
        return [{**json.loads(line), "seconds": 0, "cpu_seconds": 0} for line in lines]

    first = records()
    assert [record["labelling"] for record in first] == list(example.LABELLINGS)
    assert [record["labels"] for record in first] == [0, 17, 7, 21, 119]
    assert records() == first


def test_example_learns_what_only_a_relation_tells(example, trees) -> None:
    # the siblings of a hidden use show its variable, and no bag of nodes does
    calls = ["f(a, a, a)", "f(b, b, b)", "f(c, c, c)", "f(d, d, d)"]
    sources = ["def g(a, b, c, d):\n    " + "\n    ".join(calls[i:] + calls[:i]) for i in range(4)]
    functions = [function_of(trees, source) for source in sources] * 8
    vocabulary = example.Vocabulary(functions)
    scores = {}
    for labelling in ("none", "tree"):
        num_labels = example.LABELLINGS[labelling](vocabulary.batch(functions[:1])).num_labels
        model = encoder(example, vocabulary, num_labels)
        example.train(model, functions, vocabulary, labelling, 80, 0)
        scores[labelling] = example.score(model, functions, vocabulary, labelling)["accuracy"]
    assert scores["tree"] > scores["none"] + 0.4


@pytest.mark.usefixtures("_small_library")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--functions", "1"], "functions must be enough for training and test; got 1. Take more."),
        (["--seeds", "0"], "argument --seeds: must be a number of at least 1; got 0"),
        (["--update", "3"], "unrecognized arguments: --update 3"),
        (["--updates", "many"], "argument --updates: must be a number of at least 1; got many"),
    ],
)
def test_wrong_options_of_the_example_are_refused_in_a_line(example, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(arguments)
    assert message in capsys.readouterr().err


@pytest.fixture
def start(library: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the example in a process of its own on the small library, with its output to a file."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import ast_identifiers as example; "
        "functions = example.read_functions(pathlib.Path(sys.argv[2])); "
        "example.read_functions = lambda: functions; example.main(sys.argv[3:])"
    )

    def call(*arguments: str, stdout: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(FOLDER), str(library), *arguments]
        streams = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run(command, **streams, check=False, timeout=120)

    return call


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_example_in_one_line(start) -> None:
    with open("/dev/full", "w") as full:
        done = start("--updates", "1", stdout=full)
    assert (done.returncode, done.stderr) == (1, "ast_identifiers.py: No space left on device\n")


@pytest.mark.parametrize("arguments", [["--updates", "1", "--json"], ["--help"]])
def test_a_reader_that_left_is_no_failure_of_the_example(start, arguments) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    done = start(*arguments, stdout=writable)
    os.close(writable)
    assert (done.returncode, done.stderr) == (0, "")


def test_page_shows_the_means_of_the_records(example) -> None:
    root = FOLDER.parent
    lines = (root / "benchmarks" / "results" / "ast.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    page = (root / "docs" / "relations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+?)[,:]?(?: [^|]*)?\| (\d+) \| ([\d.]+) % \|", page, re.MULTILINE)
    assert len(rows) == len(example.LABELLINGS)
    for labelling, (_, labels, mean) in zip(example.LABELLINGS, rows, strict=True):
        chosen = [record for record in records if record["labelling"] == labelling]
        assert {record["labels"] for record in chosen} == {int(labels)}
        assert f"{statistics.mean(100 * record['accuracy'] for record in chosen):.1f}" == mean

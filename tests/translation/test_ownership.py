"""Folders of other people: what relpos did not write stays as it was, whether a command works or fails."""

import json
import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from relpos.cli import run as relpos
from relpos.translation.checkpoints import save_sealed, sealed_checkpoints
from relpos.translation.corpora import Source
from relpos.translation.errors import InputError, RelposWarning
from relpos.translation.ownership import working_in
from relpos.translation.recipe import check_recipe, load_recipe
from relpos.translation.run_cleanup import keep_newest, remove_beginning, remove_checkpoint
from relpos.translation.training import train
from small_runs import read_metrics, small_values, wait_until

FOLDERS = ("checkpoints", "logs", "tokenizer", "cache", "model")
RUN_NAMES = (*FOLDERS, "metrics.jsonl", "recipe.yaml", "data.json")


def put(folder: Path, *names: str) -> None:
    """The user's own files under these names; those that a run has as folders are folders."""
    for name in names:
        place = folder / name
        if name in FOLDERS:
            (place / "checkpoint-5").mkdir(parents=True)
            (place / "checkpoint-5" / "thesis.txt").write_text("mine")
            (place / "tokenizer.json").write_text("mine")
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("mine")


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in `folder`, with what files hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def four_updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates."""
    run = tmp_path_factory.mktemp("four") / "run"
    train(check_recipe(small_values(updates=4), "small"), run)
    return run


@pytest.fixture
def run(four_updates: Path, tmp_path: Path) -> Path:
    """A run of four updates that a test may change."""
    return Path(shutil.copytree(four_updates, tmp_path / "run"))


@pytest.mark.parametrize("name", RUN_NAMES)
@pytest.mark.parametrize("resume", [False, True])
def test_a_name_that_another_has_taken_is_refused_and_nothing_changes(
    small_recipe, tmp_path, name, resume
) -> None:
    put(tmp_path, name, "notes.txt")
    before = tree(tmp_path)
    told = "holds no run to resume" if resume else rf"holds {name} that relpos did not write"
    with pytest.raises(InputError, match=told):
        train(small_recipe(), tmp_path, resume=resume)
    assert tree(tmp_path) == before


def test_all_clashes_are_told_at_once(small_recipe, tmp_path) -> None:
    put(tmp_path, *RUN_NAMES)
    with pytest.raises(InputError, match=r"recipe\.yaml, data\.json, tokenizer, .* and 3 more"):
        train(small_recipe(), tmp_path)


def test_a_link_to_nothing_is_a_clash_too(small_recipe, tmp_path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(InputError, match="holds model that relpos did not write"):
        train(small_recipe(), tmp_path)


def test_a_run_begins_and_resumes_beside_other_files(small_recipe, tmp_path) -> None:
    mine = ("notes.txt", "results.jsonl", "report.html", "model.old", "model.part", "tokenizer.part")
    put(tmp_path, *mine)
    train(small_recipe(updates=4), tmp_path)
    put(tmp_path, "checkpoints/checkpoint-4-backup/weights", "checkpoints/checkpoint-best/weights")
    put(tmp_path, "checkpoints/checkpoint-²/weights", "logs/notes.txt", "cache/notes.txt", "model/README.md")
    for where in ("logs", "cache", "model"):
        assert any((tmp_path / where).iterdir())
    theirs = {name: text for name, text in tree(tmp_path).items() if text == b"mine"}
    assert len(theirs) == len(mine) + 6
    for resume in ({"updates": 12, "keep": 1}, {"updates": 12, "keep": 1}):
        train(small_recipe(**resume), tmp_path, resume=True)
        after = tree(tmp_path)
        assert {name: after.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("name", ["optimizer.pt", "seal.json"])
def test_a_link_in_a_damaged_checkpoint_is_not_written_through(small_recipe, run, tmp_path, name) -> None:
    (tmp_path / "mine").write_text("mine")
    recipe = small_recipe(updates=12)
    train(recipe, run, resume=True)
    link = run / "checkpoints" / "checkpoint-12" / name
    link.unlink()
    link.symlink_to(tmp_path / "mine")
    shutil.rmtree(run / "model")
    train(recipe, run, resume=True)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not link.is_symlink()
    assert sealed_checkpoints(run / "checkpoints")[-1] == link.parent


def test_a_beginning_that_failed_gives_way_and_what_was_put_there_stays(small_recipe, tmp_path) -> None:
    recipe, run = small_recipe(updates=4), tmp_path / "run"
    wrong = recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"vocabulary": 9000})})
    with pytest.raises(InputError, match="too small for its vocabulary"):
        train(wrong, run)
    put(run, "logs/thesis.txt", "tokenizer/thesis.txt", "cache/thesis.txt", "cache/text/thesis.txt")
    assert train(recipe, run) == run / "model"
    for where in ("logs", "tokenizer", "cache", "cache/text"):
        assert (run / where / "thesis.txt").read_text() == "mine"


SOURCES = [{"tsv": "gone.tsv"}, {"tsv": "bad.tsv"}, {"files": ["bad.tsv", "gone"]}, {"tsv": "empty"}]


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_written_before_the_text_is_found_and_its_first_pair_read(
    small_recipe, tmp_path, source
) -> None:
    (tmp_path / "bad.tsv").write_text("no tab\n")
    (tmp_path / "empty").touch()
    (tmp_path / "recipe.yaml").write_text(json.dumps({"data": {"train": [source]}}))
    before = tree(tmp_path)
    assert relpos(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]) == 1
    assert relpos(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path)]) == 1
    assert tree(tmp_path) == before


def test_a_later_corpus_is_checked_too(small_recipe, tmp_path) -> None:
    recipe = small_recipe()
    (tmp_path / "bad.tsv").write_text("no tab\n")
    data = recipe.data.model_copy(update={"test": [Source(tsv=tmp_path / "bad.tsv")]})
    with pytest.raises(InputError, match="has no tab"):
        train(recipe.model_copy(update={"data": data}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_process_is_refused_with_the_number_of_the_first(
    small_file, small_recipe, tmp_path, command
) -> None:
    run = tmp_path / "run"
    process = command("train", small_file(updates=100_000), "--out", run)
    try:
        wait_until(lambda: sealed_checkpoints(run / "checkpoints"), process)
        for resume in (True, False):
            told = f"another process \\({process.pid}\\) uses" if resume else "holds a run already"
            with pytest.raises(InputError, match=told):
                train(small_recipe(updates=100_000), run, resume=resume)
    finally:
        process.kill()
        process.communicate()
    # the lock went with the process
    train(small_recipe(updates=12), run, resume=True)


def test_a_lock_is_released_and_names_its_holder(tmp_path) -> None:
    for _ in range(2):
        with ExitStack() as stack:
            stack.enter_context(working_in(tmp_path / "new", "run"))
            with pytest.raises(InputError, match=rf"another process \({os.getpid()}\)"):
                stack.enter_context(working_in(tmp_path / "new", "run"))


def test_the_folder_of_another_kind_is_refused(small_recipe, tmp_path) -> None:
    with working_in(tmp_path, "experiment"):
        pass
    with pytest.raises(InputError, match="must be a relpos folder of kind run; got kind experiment"):
        train(small_recipe(), tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"folder": "run"}', '{"folder": "run", "format": "x"}', "[" * 9999]
)
def test_a_mark_that_cannot_be_read_is_told_by_name(small_recipe, tmp_path, content) -> None:
    (tmp_path / "relpos.json").write_text(content)
    with pytest.raises(InputError, match=r"relpos\.json: cannot be read"):
        train(small_recipe(), tmp_path)


def test_a_run_from_before_folders_were_marked_is_recognised_and_marked(small_recipe, run) -> None:
    for name in ("relpos.json", "relpos.lock"):
        (run / name).unlink()
    with pytest.raises(InputError, match=r"holds a run already\. Add --resume"):
        train(small_recipe(updates=4), run)
    train(small_recipe(updates=8), run, resume=True)
    assert json.loads((run / "relpos.json").read_text())["format"] == 1


def test_only_older_checkpoints_are_removed_and_never_the_best(tmp_path) -> None:
    for number in (2, 4, 6, 8, 10):
        put(tmp_path, f"checkpoint-{number}/model.safetensors")
        (tmp_path / f"checkpoint-{number}" / "seal.json").write_text(
            json.dumps({"files": {"model.safetensors": {}, "../../precious": {}, "/etc/hostname": {}}})
        )
    mine = ("notes.txt", "model-mine.safetensors", "rng_state_mine.pth")
    put(tmp_path, *(f"checkpoint-4/{name}" for name in mine))
    put(tmp_path.parent, "precious")
    keep_newest(tmp_path, 2, best=2)
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{n}" for n in (2, 4, 8, 10)}
    assert tree(tmp_path / "checkpoint-4") == dict.fromkeys(sorted(mine), b"mine")
    assert (tmp_path.parent / "precious").exists()


def test_removing_follows_no_link(tmp_path) -> None:
    put(tmp_path, "precious/tokenizer.json", "precious/config.json")
    (tmp_path / "run").mkdir()
    for name in ("tokenizer", "logs", "checkpoints"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    remove_beginning(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    remove_checkpoint(tmp_path / "link")
    assert set(tree(tmp_path / "precious")) == {"tokenizer.json", "config.json"}


def test_a_model_that_was_changed_after_training_is_not_replaced(small_recipe, run) -> None:
    config = run / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    before = tree(run)
    with pytest.raises(InputError, match=r"the model was changed after its training.*Move it elsewhere"):
        train(small_recipe(updates=8), run, resume=True)
    assert {**tree(run), "relpos.json": b""} == {**before, "relpos.json": b""}


def test_resuming_a_finished_run_leaves_its_model_alone(small_recipe, run) -> None:
    times = {path: path.stat().st_mtime_ns for path in (run / "model").iterdir()}
    train(small_recipe(updates=4), run, resume=True)
    assert {path: path.stat().st_mtime_ns for path in (run / "model").iterdir()} == times


@pytest.mark.parametrize("line", [b"{\n", b"\xff\n", b"null\n", b'{"loss": 1}\n', b"[" * 9999 + b"\n"])
def test_a_damaged_line_of_the_metrics_is_told_by_its_number(small_recipe, run, line) -> None:
    kept = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(kept + line)
    with pytest.raises(InputError, match=rf"metrics\.jsonl line {kept.count(10) + 1} is damaged"):
        train(small_recipe(updates=8), run, resume=True)
    assert (run / "metrics.jsonl").read_bytes() == kept + line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("generator-train.arrow", b""), ("generator-train.arrow", None), ("cache-*.arrow", b"garbage")),
        *(("dataset_info.json", b"{}"), ("tables.json", b"{"), ("tables.json", b'{"a": [1]}')),
    ],
)
def test_a_damaged_cache_is_made_anew(small_recipe, run, name, content) -> None:
    before = (run / "data.json").read_bytes()
    damaged = list((run / "cache").rglob(name))
    assert damaged
    for path in damaged:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    put(run / "cache", "thesis.txt")
    train(small_recipe(updates=5), run, resume=True)
    assert (run / "data.json").read_bytes() == before
    assert (run / "cache" / "thesis.txt").read_text() == "mine"


@pytest.fixture
def moved(tmp_path, small_file, monkeypatch) -> tuple[Path, Path]:
    """A recipe whose text lies beside it, and the run it made from another folder; both then moved."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    words = [first + second for first in "bdfgklmn" for second in ("ato", "ira", "upo", "esi", "olu")]
    draw = random.Random(1)
    lines = ["\t".join(" ".join(draw.choices(words, k=6)) for _ in range(2)) for _ in range(300)]
    (project / "text.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    values = json.loads(json.dumps(load_recipe(str(small_file(updates=4))).model_dump(mode="json")))
    values["data"] = {"train": [{"tsv": "text.tsv"}], "validation_share": 0.1, "test_share": 0.1}
    (project / "recipe.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(elsewhere)
    assert relpos(["train", "../project/recipe.yaml", "--out", "run"]) == 0
    (elsewhere / "run").rename(tmp_path / "archive")
    (project / "text.tsv").unlink()
    return project / "recipe.yaml", tmp_path / "archive"


def test_a_run_works_from_any_folder_and_without_its_text(moved, tmp_path, monkeypatch, capsys) -> None:
    recipe, run = moved
    assert load_recipe(str(run / "recipe.yaml")).data.folder == recipe.parent
    monkeypatch.chdir(tmp_path)
    before, pairs = tree(run), json.loads((run / "data.json").read_text())["pairs"]
    assert relpos(["evaluate", "archive", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["segments"] == pairs["test"]
    # it is looked at, no more: a run may lie where nothing can be written
    assert tree(run) == before
    monkeypatch.chdir(run)
    assert relpos(["train", str(recipe), "--out", ".", "--resume", "--training.updates", "8"]) == 0
    assert relpos(["train", "recipe.yaml", "--out", ".", "--resume", "--training.updates", "12"]) == 0
    assert sealed_checkpoints(run / "checkpoints")[-1].name == "checkpoint-12"


def test_the_best_checkpoint_is_found_after_a_move(small_recipe, tmp_path) -> None:
    # a learning rate that rises until it destroys what was learned
    settings = {"warmup": 100, "learning_rate_scale": 200.0, "best": "loss", "keep": 1, "validation_pairs": 1}
    train(small_recipe(updates=24, **settings), tmp_path / "run")
    losses = read_metrics(tmp_path / "run", "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    (tmp_path / "run").rename(tmp_path / "moved")
    train(small_recipe(updates=28, **settings), tmp_path / "moved", resume=True)
    kept = [path.name for path in sealed_checkpoints(tmp_path / "moved" / "checkpoints")]
    assert kept == [f"checkpoint-{best}", "checkpoint-28"]
    weights = tmp_path / "moved" / "checkpoints" / kept[0] / "model.safetensors"
    assert (tmp_path / "moved" / "model" / "model.safetensors").read_bytes() == weights.read_bytes()


def test_text_that_only_the_working_folder_has_is_found_and_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "text.tsv").write_text("one\teins\n")
    (tmp_path / "recipes" / "recipe.yaml").write_text("data: {train: [{tsv: text.tsv}]}")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RelposWarning, match=r"text\.tsv is not beside the recipe.*Give --data\.folder"):
        assert load_recipe("recipes/recipe.yaml").data.folder == tmp_path
    (tmp_path / "recipes" / "text.tsv").write_text("one\teins\n")
    assert load_recipe("recipes/recipe.yaml").data.folder == tmp_path / "recipes"


def test_paths_on_the_command_line_start_at_the_working_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipe.yaml").write_text("data: {train: [{tsv: text.tsv}], folder: ..}")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/recipe.yaml").data.folder == tmp_path / "recipes" / ".."
    assert load_recipe("recipes/recipe.yaml", ["data.folder=here"]).data.folder == tmp_path / "here"
    other = load_recipe("recipes/recipe.yaml", ["data.test=[{files: [a, b]}]"]).data
    assert other.test[0].files == (tmp_path / "a", tmp_path / "b")
    assert load_recipe("messages").data.folder == tmp_path


@pytest.mark.parametrize("name", ["X", "X.part", ".X.part"])
def test_output_leaves_other_names_alone(four_updates, tmp_path, name) -> None:
    put(tmp_path, "X.part", ".X.part", "X.old", "X.tmp")
    (tmp_path / name).write_text("one\n")
    before = tree(tmp_path)
    arguments = ["translate", str(four_updates), str(tmp_path / name), "--beams", "1"]
    assert relpos([*arguments, "--output", str(tmp_path / "Y")]) == 0
    assert {k: v for k, v in tree(tmp_path).items() if k != "Y"} == before
    # what is read is not written over
    assert relpos([*arguments, "--output", str(tmp_path / name)]) == 2
    assert {k: v for k, v in tree(tmp_path).items() if k != "Y"} == before


PLACES = ["recipe.yaml", "data.json", "metrics.jsonl", "tokenizer/tokenizer.json", "model/w"]


@pytest.mark.parametrize("name", [*PLACES, "checkpoints/checkpoint-3/w"])
@pytest.mark.parametrize("content", ["mine", "{}", "my: recipe"])
def test_what_was_put_where_a_beginning_had_failed_is_refused(small_recipe, tmp_path, name, content) -> None:
    with working_in(tmp_path, "run"):
        pass
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content)
    before = tree(tmp_path)
    with pytest.raises(InputError, match=r"Move it elsewhere first\."):
        train(small_recipe(), tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("is_link", [False, True])
def test_a_checkpoint_that_no_run_saved_is_refused_and_left_alone(
    small_recipe, run, tmp_path, is_link
) -> None:
    foreign = run / "checkpoints" / "checkpoint-100"
    put(tmp_path, "mine/config.json", "mine/model.safetensors")
    if is_link:
        foreign.symlink_to(tmp_path / "mine")
    else:
        (tmp_path / "mine").rename(foreign)
    before = tree(run)
    with pytest.raises(InputError, match=r"checkpoint-100 was not saved by this run"):
        train(small_recipe(updates=8), run, resume=True)
    assert {**tree(run), "relpos.json": b""} == {**before, "relpos.json": b""}


def test_a_model_that_its_user_sealed_is_not_replaced(small_recipe, run, capsys) -> None:
    put(run / "model", "README.md", "notes/a.txt")
    assert relpos(["seal", str(run)]) == 0
    put(run / "model", "notes/b.txt")
    before = tree(run / "model")
    with pytest.raises(InputError, match=r"was not written by this run.*Move it elsewhere first"):
        train(small_recipe(updates=8), run, resume=True)
    assert tree(run / "model") == before


def test_what_only_looks_like_a_draft_or_a_checkpoints_file_stays(small_recipe, run) -> None:
    names = [".notes.relpos-20261130", ".model.relpos-original/a", "checkpoints/.x.relpos-mybackup/a"]
    names += [".mine.relpos-draft-0123456789abcdef", "checkpoints/checkpoint-4/model-mine.safetensors"]
    put(run, *names)
    draft = run / ".data.json.relpos-draft-0123456789abcdef"
    draft.touch()
    train(small_recipe(updates=5), run, resume=True)
    assert [name for name in names if not (run / name).exists()] == []
    assert not draft.exists()


def test_output_does_not_write_over_a_model_or_a_run(run, tmp_path) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    before = tree(run)
    for name in ("model/config.json", "recipe.yaml", "metrics.jsonl", "checkpoints/checkpoint-4/config.json"):
        assert relpos(["translate", str(run), str(tmp_path / "in.txt"), "-o", str(run / name)]) == 2
        assert relpos(["evaluate", str(run), "--hypotheses", str(run / name)]) == 2
    assert tree(run) == before


def test_an_empty_path_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["train", "numbers", "--out", ""],
        ["reproduce", "demo", "--out", ""],
        ["translate", ""],
    ):
        assert relpos(arguments) == 2
    assert tree(tmp_path) == {}


def test_weights_are_as_readable_as_what_lies_beside_them(run) -> None:
    for folder in ("model", "checkpoints/checkpoint-4"):
        modes = {path.stat().st_mode & 0o777 for path in (run / folder).iterdir() if path.suffix != ".pth"}
        assert len(modes) == 1


def long_file(path: Path) -> None:
    """What is not read whole: after what was there, a hole of 100 GB, which takes no room."""
    with path.open("ab") as file:
        file.truncate(100 << 30)


ENDLESS = {
    "relpos.json": "cannot be read",
    "metrics.jsonl": "line [0-9] is damaged",
    "recipe.yaml": "a recipe must have at most 262,144 bytes",
}


@pytest.mark.parametrize(("name", "told"), ENDLESS.items())
def test_a_file_without_end_is_told_by_name_and_not_read_whole(small_recipe, run, name, told) -> None:
    long_file(run / name)
    with pytest.raises(InputError, match=rf"{name}:? {told}"):
        train(small_recipe(updates=8), run, resume=True)


def test_tables_without_end_are_made_anew(small_recipe, run) -> None:
    long_file(run / "cache" / "relpos-tables" / "tables.json")
    train(small_recipe(updates=8), run, resume=True)
    assert (run / "cache" / "relpos-tables" / "tables.json").stat().st_size < 10_000


def test_a_recipe_without_end_beside_a_model_is_passed_over(run, tmp_path) -> None:
    long_file(run / "model" / "recipe.yaml")
    (run / "model" / "seal.json").unlink()
    (tmp_path / "one.txt").write_text("one\n")
    assert relpos(["translate", str(run / "model"), str(tmp_path / "one.txt"), "--beams", "1"]) == 0


@pytest.mark.parametrize("name", ["recipe.yaml", "data.json", "metrics.jsonl", "relpos.json"])
def test_a_link_in_the_place_of_a_runs_file_is_not_written_through(small_recipe, run, tmp_path, name) -> None:
    mine = Path(shutil.move(run / name, tmp_path / "mine"))
    (run / name).symlink_to(mine)
    before = mine.read_bytes()
    with pytest.raises(InputError, match=rf"{name} must be a regular file; got a link"):
        train(small_recipe(updates=8), run, resume=True)
    assert mine.read_bytes() == before


def test_an_end_that_a_later_checkpoint_went_beyond_is_no_end(small_recipe, run) -> None:
    train(small_recipe(updates=8), run, resume=True)
    (run / "checkpoints" / "checkpoint-8" / "optimizer.pt").write_bytes(b"")
    train(small_recipe(updates=8), run, resume=True)
    assert max(read_metrics(run, "loss")) == 8


def test_a_checkpoint_is_removed_with_the_folders_of_its_files(tmp_path) -> None:
    folder = tmp_path / "checkpoint-4"
    save_sealed(folder, lambda draft: put(draft, "config.json", "inner/deeper/a.bin", "other/b.bin"))
    put(folder, "other/notes.txt")
    remove_checkpoint(folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {"other", "other/notes.txt"}

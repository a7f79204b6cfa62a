"""The test set and the length buckets of `relpos evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING

from relpos.translation.errors import UsageError

if TYPE_CHECKING:
    import datasets


def length_edges(text: str) -> list[int]:
    """The edges of the buckets in `--lengths`. Raises: UsageError."""
    try:
        edges = [int(part) for part in text.split(",")]
    except ValueError:
        edges = []
    if not edges or edges[0] < 1 or edges != sorted(set(edges)):
        raise UsageError(f"--lengths must be rising whole numbers >= 1, such as 5,10,20; got {text!r}.")
    return edges


def field_names(text: str | None, data: list[Path]) -> tuple[str, str] | None:
    """The two names in `--fields`, or None without that option. Raises: UsageError."""
    if text is None:
        return None
    if len(data) != 1 or not _is_json_lines(data[0]):
        raise UsageError("--fields applies to one .jsonl file only; give it with --data, or omit --fields.")
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise UsageError(f"--fields must be two names, such as en,de; got {text!r}.")
    return names[0], names[1]


def read_test_set(
    model: Path, data: list[Path], fields: tuple[str, str] | None, scratch: Path
) -> "datasets.Dataset":
    """The pairs in `data`, or the test part of the run `model` if `data` is empty.

    Args:
        scratch: folder for tables; nothing is written to the run.
    Raises:
        UsageError: more than two files, or none and the model has no test set.
        InputError: the pairs cannot be read.
    """
    from relpos.translation.corpora import Source, read_corpus

    if not data:
        return _test_part(model, scratch)
    if len(data) > 2:
        raise UsageError(f"--data takes one file of pairs, or two files; got {len(data)}.")
    if len(data) == 2:
        source = Source(files=(data[0], data[1]))
    elif _is_json_lines(data[0]):
        source = Source(jsonl=data[0], fields=fields)
    else:
        source = Source(tsv=data[0])
    return read_corpus(source, "source", "target", scratch)


def _test_part(model: Path, scratch: Path) -> "datasets.Dataset":
    from relpos.translation.atomic_files import link_folder
    from relpos.translation.checkpoints import find_model
    from relpos.translation.preparation import read_parts
    from relpos.translation.recipe import load_recipe

    recipe = model / "recipe.yaml"
    if not recipe.is_file():
        raise UsageError(f"{model} has no recipe.yaml that names a test set; give one with --data.")
    # a run has its text in its cache; tables that are missing there are written to scratch
    if find_model(model) != model:
        link_folder(model / "cache", scratch)
    return read_parts(load_recipe(str(recipe)).data, scratch)[0]["test"]


def _is_json_lines(file: Path) -> bool:
    return ".jsonl" in file.suffixes

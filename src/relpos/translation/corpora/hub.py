"""Pairs from a data set of the Hugging Face Hub, or from a local folder that `datasets` can read.

Code in a data set is never run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from datasets.exceptions import DatasetGenerationError, DatasetsError
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from relpos.translation.corpora.readers import Pair, nearest, pick
from relpos.translation.errors import InputError, first_line

_TIMEOUT_SECONDS = 10


def load(name: str, config: str | None, split: str, cache: Path) -> datasets.Dataset:
    """Load one split of a data set, without running its code.

    Args:
        name: a name on the Hub, or a folder written by `save_to_disk`, or one with csv, json or parquet
            files.
        config: the data set's configuration, if it has several.
        split: the name of a split.
        cache: folder for tables from a local folder; tables from the Hub are in the cache of `datasets`.
    Raises:
        InputError: the data set, configuration or split does not exist, or the Hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_file():
        raise InputError(
            f"dataset: must be a name or a folder; got the file {name}. Use tsv or jsonl for it."
        )
    if folder.is_dir():
        return _load_folder(folder, config, split, cache)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(
            f"dataset: the folder {name} does not exist (seen from {Path.cwd()}); check the path."
        )
    _check_on_hub(name)
    return _load(name, config, split)


def first_rows(name: str, config: str | None, split: str, fields: tuple[str, str]) -> Iterator[Pair]:
    """Yield the pairs of a data set as `load` and `read_rows` do, without writing tables.

    Raises:
        InputError: as `load`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() or _is_saved(folder):
        yield from read_rows(load(name, config, split, Path()), name, fields)
        return
    try:
        yield from read_rows(_load(str(folder), config, split, streaming=True), name, fields)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(f"dataset: {name}, split {split} cannot be read: {first_line(error)}") from error


def read_rows(rows: Iterable[dict[str, Any]], name: str, fields: tuple[str, str]) -> Iterator[Pair]:
    """Yield two fields of each row; `translation.en` is the field `en` in the column `translation`."""
    for number, row in enumerate(rows, start=1):
        where = f"dataset {name} row {number}"
        yield pick(row, fields[0], where), pick(row, fields[1], where)


def _load_folder(folder: Path, config: str | None, split: str, cache: Path) -> datasets.Dataset:
    if _is_saved(folder):
        try:
            saved = datasets.load_from_disk(str(folder))
        except (OSError, ValueError) as error:
            raise InputError(f"dataset: the folder {folder} cannot be read ({first_line(error)}).") from error
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise InputError(f"dataset: {folder} has no split {split!r}{nearest(split, saved)}.")
        return saved[split]
    return _load(str(folder), config, split, cache_dir=str(cache))


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _load(name: str, config: str | None, split: str, **options: Any) -> datasets.Dataset:
    try:
        return datasets.load_dataset(name, config, split=split, **options)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        of_config = f", configuration {config}" if config else ""
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None
        raise InputError(
            f"dataset: {name}{of_config}, split {split} cannot be loaded: "
            f"{first_line(cause if isinstance(cause, OSError) else error)}"
        ) from error


def _check_on_hub(name: str) -> None:
    """Fail early if a data set is neither cached nor on the Hub; `load_dataset` retries for half a minute."""
    if (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
        return
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_TIMEOUT_SECONDS)
    except RepositoryNotFoundError as error:
        raise InputError(
            f"dataset: the Hugging Face Hub has no data set {name!r} that you may read; check the name, "
            "or log in with `hf auth login`."
        ) from error
    except HfHubHTTPError as error:
        raise InputError(f"dataset: the Hugging Face Hub refused {name!r}: {first_line(error)}") from error
    except Exception as error:
        # the type of a connection error depends on the HTTP client of huggingface_hub
        raise InputError(
            f"dataset: {name!r} is neither a local folder nor in the cache, and the Hugging Face Hub "
            f"cannot be reached ({type(error).__name__}); check the name and the network."
        ) from error

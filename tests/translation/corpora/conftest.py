"""What the tests of corpora share: tables of given pairs, and the message of a failed reading."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import datasets
import pytest

from relpos.translation.corpora import Source, read_corpus
from relpos.translation.errors import InputError

Pairs = list[tuple[str, str]]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Pairs]:
    """Read a corpus given as the keys of a recipe, and return its pairs."""

    def _read(source_language: str = "en", target_language: str = "de", **keys: object) -> Pairs:
        table = read_corpus(Source(**keys), source_language, target_language, tmp_path / "cache")
        return list(zip(table["source"], table["target"], strict=True))

    return _read


@pytest.fixture
def failure(read: Callable[..., Pairs]) -> Callable[..., str]:
    """Read a corpus that cannot be read, and return the message, which must be one line."""

    def _failure(*languages: str, **keys: object) -> str:
        with pytest.raises(InputError) as caught:
            read(*languages, **keys)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return _failure


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """Limit the size of files for a while, which fails like a full disk: in the middle of a write."""

    @contextmanager
    def _full_disk() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return _full_disk


@pytest.fixture
def table() -> Callable[[Pairs], datasets.Dataset]:
    """Make a table of pairs."""
    return lambda pairs: datasets.Dataset.from_dict(
        {"source": [pair[0] for pair in pairs], "target": [pair[1] for pair in pairs]}
    )

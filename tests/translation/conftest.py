"""What the tests of model folders share: a sealed folder, and a copy of it to be damaged."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed folder that nobody may change."""
    from test_checkpoints import TEXTS, VOCABULARY, small_model

    from relpos.translation.checkpoints import save_sealed
    from relpos.translation.tokenizer import train_tokenizer

    def write(draft: Path) -> None:
        small_model().save_pretrained(draft)
        train_tokenizer(TEXTS, VOCABULARY).save_pretrained(draft)

    folder = tmp_path_factory.mktemp("whole") / "model"
    save_sealed(folder, write)
    return folder


@pytest.fixture
def sealed(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))

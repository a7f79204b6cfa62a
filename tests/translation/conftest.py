"""A small sealed model for tests of model folders."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sealed model; tests must not change it."""
    from test_checkpoints import TEXTS, VOCABULARY, small_model

    from relpos.translation.checkpoints import save_sealed
    from relpos.translation.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("whole") / "model"

    def write(draft: Path) -> None:
        small_model().save_pretrained(draft)
        train_tokenizer(TEXTS, VOCABULARY).save_pretrained(draft)

    save_sealed(folder, write)
    return folder

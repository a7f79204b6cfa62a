"""Converts a model's folder of an older format to a new folder of the present one."""

from contextlib import suppress
from pathlib import Path

from relpos.translation.atomic_files import write_text_atomic
from relpos.translation.checkpoints import CARD, find_model, recipe_places, save_sealed
from relpos.translation.errors import InputError
from relpos.translation.loading import load_model, no_bars
from relpos.translation.model_card import write_card
from relpos.translation.recipe import load_recipe
from relpos.translation.strict_json import read_bytes
from relpos.translation.strict_yaml import MOST_BYTES
from relpos.translation.tokenizer import save_tokenizer
from relpos.translation.weights import read_header


def convert_model(folder: Path, out: Path) -> Path:
    """Write the model in `folder` (or `folder`/model), of an older format, to `out` in the present format.

    The weights keep their values and their type, in one file; the recipe and the model card are
    copied, and a missing card is written. `out` is sealed.

    Args:
        out: a new or an empty folder.
    Returns:
        `out`.
    Raises:
        InputError: there is no relpos model in `folder`, a damaged one, or one of the present format; or
            something is in `out`. OSError: `out` cannot be written.
    """
    _check_new(out)
    folder = find_model(folder)
    if not read_header(folder).is_old:
        raise InputError(f"{folder}: the model has the present format already. Use it as it is.")
    model, tokenizer = load_model(folder)
    recipe = next((path for path in recipe_places(folder) if path.exists()), None)
    copied = [path for path in (recipe, folder / CARD) if path is not None and path.exists()]
    texts = {path.name: _read_text(path) for path in copied}

    def write(draft: Path) -> None:
        with no_bars():
            model.save_pretrained(draft)
        save_tokenizer(tokenizer, draft)
        for name, text in texts.items():
            write_text_atomic(draft / name, text)
        if recipe is not None and CARD not in texts:
            # no card for a recipe that this relpos cannot read
            with suppress(InputError):
                write_card(load_recipe(str(recipe)), draft / CARD)

    save_sealed(out, write)
    return out


def _check_new(out: Path) -> None:
    """Refuse a path at which something is. Raises: InputError."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        found = "a link" if out.is_symlink() else "a file"
    elif out.is_dir() and any(out.iterdir()):
        found = "one that holds something"
    else:
        return
    raise InputError(f"{out}: --out must be a new or an empty folder; got {found}. Choose another.")


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text in UTF-8; the file is damaged. Copy it again.") from None

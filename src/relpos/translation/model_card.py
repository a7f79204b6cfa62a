"""The model card of a finished model: README.md, as model hubs show it."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from relpos.translation.recipe import Recipe

_TEXT = """---
{data}
---

# Translation from {source} to {target}

Trained with relpos: an encoder-decoder {positions}.
{encoder} encoder and {decoder} decoder layers, d_model = {width}. `recipe.yaml` has every setting.

```sh
relpos translate FOLDER < source.txt
```

In transformers `import relpos.translation` registers the model with the Auto classes. The folder has no code:

```python
import relpos.translation
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
ids = model.generate(**tokenizer(["..."], return_tensors="pt"))
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
```

Say here what the model was trained on, its scores, and its licence.
"""


def write_card(recipe: Recipe, path: Path) -> None:
    """Write the card of the model that `recipe` trains. Raises: OSError."""
    languages = [recipe.data.source_language, recipe.data.target_language]
    data = ModelCardData(
        language=list(dict.fromkeys(languages)),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["relpos", "relative-position"],
    )
    text = _TEXT.format(
        data=data.to_yaml(),
        source=languages[0],
        target=languages[1],
        positions=_positions(recipe),
        encoder=recipe.model.encoder_layers,
        decoder=recipe.model.decoder_layers,
        width=recipe.model.d_model,
    )
    path.write_text(str(ModelCard(text)), encoding="utf-8")


def _positions(recipe: Recipe) -> str:
    model = recipe.model
    found = []
    if model.relative_max_distance is not None and (model.relative_keys or model.relative_values):
        found.append(f"relative positions (clip distance {model.relative_max_distance})")
    if model.absolute_positions != "none":
        found.append(f"{model.absolute_positions} absolute positions")
    return f"with {' and '.join(found)}" if found else "without positions"

"""The report of an experiment: its records, and pictures of the relative positions of its first model."""

from pathlib import Path
from typing import Any

import torch

from relpos.inspection import (
    Observation,
    Picture,
    attention_picture,
    distances_picture,
    number_line_picture,
    observe,
    write_report,
)
from relpos.translation.generation import Translator
from relpos.translation.text import normal


def write_comparison(title: str, out: Path, records: list[dict[str, Any]]) -> Path:
    """Write `out`/report.html from the records of an experiment in `out`; returns its path."""
    pictures = [number_line_picture()]
    for record in records:
        observations, tokens = _look(
            Translator.load(out / record["task"] / record["variant"]), record["samples"]
        )
        if observations:
            pictures += _pictures_of(observations, tokens)
            break
    return write_report(out / "report.html", records, title=title, pictures=pictures)


def _look(translator: Translator, samples: list[dict[str, str]]) -> tuple[list[Observation], list[str]]:
    """Observe the model on the sample whose length is nearest to 12 tokens."""
    rows = [translator.tokenizer(sample["source"]).input_ids for sample in samples]
    source = min(rows, key=lambda ids: abs(len(ids) - 12))
    ids = torch.tensor([source])
    start = torch.tensor([[translator.model.config.decoder_start_token_id]])
    made = translator.model.generate(input_ids=ids, decoder_input_ids=start, num_beams=1, max_new_tokens=40)

    def run() -> None:
        with torch.no_grad():
            translator.model(input_ids=ids, decoder_input_ids=made[:, :-1])

    tokens = [
        normal(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")) or "\N{OPEN BOX}"
        for token in _names(translator, source)
    ]
    return observe(translator.model, run), tokens


def _names(translator: Translator, ids: list[int]) -> list[str]:
    return list(translator.tokenizer.convert_ids_to_tokens(ids))


def _pictures_of(observations: list[Observation], tokens: list[str]) -> list[Picture]:
    in_encoder = [observation for observation in observations if ".encoder." in f".{observation.layer}"]
    return [distances_picture(observations), attention_picture(in_encoder[0], tokens)]

"""Translating text: batches inside, the given order outside; the search is transformers' own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BatchEncoding, PreTrainedTokenizerFast

from relpos.translation.batching import TokenBatches
from relpos.translation.checkpoints import load_model
from relpos.translation.errors import InputError
from relpos.translation.model import RelposForConditionalGeneration


@dataclass(frozen=True)
class Hypothesis:
    """One translation.

    `score` is log-probability, nats, over length^length_penalty; 0 for an empty line, nan where no scores
    were asked for.
    """

    text: str
    score: float


@dataclass(frozen=True)
class Search:
    """How hypotheses are found.

    Args:
        beams: hypotheses kept at each step; 1 is greedy.
        length_penalty: exponent on the length that divides a score.
        n_best: hypotheses returned for each text, at most `beams` unless sampling.
        sample: draw from the model instead of searching; uses torch's random generator.
        temperature: flattens (over 1) or sharpens (under 1) the distribution sampled from.
        tokens_per_batch: source tokens translated at once, padding included.
    """

    beams: int = 4
    length_penalty: float = 0.6
    n_best: int = 1
    sample: bool = False
    temperature: float = 1.0
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        for name in ("beams", "n_best", "tokens_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not self.sample and self.n_best > self.beams:
            raise ValueError(f"n_best must be at most beams = {self.beams}; got {self.n_best}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be over 0; got {self.temperature}.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a number; got {self.length_penalty}.")


class Translator:
    """A model and its tokenizer, ready to translate."""

    def __init__(self, model: RelposForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: Path | str) -> "Translator":
        """The translator in a model's folder, or in that of the run that trained it. Raises: InputError."""
        return cls(*load_model(Path(folder)))

    @torch.inference_mode()
    def translate(
        self,
        texts: Sequence[str],
        search: Search | None = None,
        *,
        prefix: str = "",
        with_scores: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses for each text, best first, in the order of `texts`.

        Texts are translated in batches of similar length; which others are in the batch does not matter.
        A text without any character but white space becomes one empty hypothesis.

        Args:
            texts: one segment each.
            search: default `Search()`.
            prefix: words that every hypothesis begins with.
            with_scores: False saves a pass of the model; then n_best must be 1, since scores rank.
            progress: called with the number of texts done since its last call.
        Raises:
            InputError: a text or the prefix has more subwords than the model has learned positions; then
                nothing is translated. ValueError: several hypotheses without scores.
        """
        search = search or Search()
        if search.n_best > 1 and not with_scores:
            raise ValueError(f"n_best must be 1 where with_scores is False; got {search.n_best}.")
        results: list[list[Hypothesis]] = [[Hypothesis("", 0.0)] for _ in texts]
        rows = [row for row, text in enumerate(texts) if text.strip()]
        ids = self.tokenizer([texts[row] for row in rows]).input_ids if rows else []
        lengths = [len(row) for row in ids]
        start = [self.model.config.decoder_start_token_id]
        start += self.tokenizer(prefix).input_ids[:-1] if prefix else []
        room = self._room(start, dict(zip(rows, lengths, strict=True)), texts)
        if progress and len(rows) < len(texts):
            progress(len(texts) - len(rows))
        for members, limit in _groups(lengths, search.tokens_per_batch, room):
            hypotheses = self._generate(
                [ids[member] for member in members], start, limit, search, with_scores
            )
            for member, found in zip(members, hypotheses, strict=True):
                results[rows[member]] = found
            if progress:
                progress(len(members))
        return results

    def _room(self, start: list[int], lengths: dict[int, int], texts: Sequence[str]) -> float:
        """New tokens that learned positions leave for behind `start`; infinite without such positions."""
        if self.model.config.absolute_positions != "learned":
            return math.inf
        last = self.model.config.max_positions
        for row, length in lengths.items():
            if length > last:
                text = texts[row] if len(texts[row]) <= 40 else f"{texts[row][:40].strip()} ..."
                raise InputError(
                    f"line {row + 1} ({text!r}) has {length} subwords, and this model's learned positions "
                    f"end at {last}; split the line, or use a model with relative or sinusoidal positions."
                )
        if len(start) > last:
            raise InputError(
                f"the prefix has {len(start) - 1} subwords, and this model's learned positions leave room "
                f"for {last - 1}; shorten the prefix."
            )
        # the last new token is never read, so it needs no position
        return last - len(start) + 1

    def _generate(
        self, ids: list[list[int]], start: list[int], limit: int, search: Search, with_scores: bool
    ) -> list[list[Hypothesis]]:
        device = self.model.device
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device)
        was_training = self.model.training
        self.model.eval()
        try:
            sequences = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                decoder_input_ids=torch.tensor([start], device=device).expand(len(ids), -1),
                num_return_sequences=search.n_best,
                max_length=None,
                max_new_tokens=limit,
                **_settings(search),
            )
            by_rank = sequences.unflatten(0, (len(ids), search.n_best)).unbind(1)
            ranked = [
                self._read(found, self._scores(batch, found, len(start), search) if with_scores else None)
                for found in by_rank
            ]
        finally:
            self.model.train(was_training)
        return [
            sorted(found, key=lambda hypothesis: -hypothesis.score) for found in zip(*ranked, strict=True)
        ]

    def _read(self, sequences: Tensor, scores: Tensor | None) -> list[Hypothesis]:
        """Texts of one sequence per source, with their scores."""
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        values = [math.nan] * len(texts) if scores is None else scores.tolist()
        return [Hypothesis(text.strip(), score) for text, score in zip(texts, values, strict=True)]

    def _scores(self, batch: BatchEncoding, sequences: Tensor, num_given: int, search: Search) -> Tensor:
        """Scores [batch] of one sequence per source, from one teacher-forced pass."""
        tokens = sequences[:, 1:]
        ends = torch.isin(tokens, torch.tensor(self.model.config.eos_token_id, device=tokens.device))
        # greedy search fills with padding behind the end, beam search with further ends
        labels = tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, -100)
        labels[:, : num_given - 1] = -100
        # so many tokens at once that their logits, [batch, chunk, vocabulary], stay within the budget
        width = max(1, search.tokens_per_batch // len(tokens))
        total = torch.zeros(len(tokens), device=tokens.device)
        encoded, cache = self.model.encoder(batch["input_ids"], batch["attention_mask"]), None
        for given, chunk in zip(sequences[:, :-1].split(width, 1), labels.split(width, 1), strict=True):
            out = self.model(
                attention_mask=batch["attention_mask"],
                encoder_outputs=encoded,
                decoder_input_ids=given,
                cache=cache,
                use_cache=True,
            )
            cache = out.cache
            logits = out.logits.flatten(0, 1).float()
            losses = F.cross_entropy(logits, chunk.flatten(), reduction="none")
            total -= losses.view(chunk.shape).sum(1)
        return total / (labels != -100).sum(1).clamp(min=1) ** search.length_penalty


def _settings(search: Search) -> dict[str, Any]:
    """`search` in the words of `generate`, which warns of settings that have no effect."""
    if search.sample:
        return {"do_sample": True, "num_beams": 1, "temperature": search.temperature, "top_k": 0}
    if search.beams == 1:
        return {"do_sample": False, "num_beams": 1, "length_penalty": None, "early_stopping": None}
    return {
        "do_sample": False,
        "num_beams": search.beams,
        "length_penalty": search.length_penalty,
        "early_stopping": False,
    }


def _groups(lengths: list[int], tokens_per_batch: int, room: float) -> list[tuple[list[int], int]]:
    """Batches of rows of similar length, longest first, each with its limit of new tokens, at most `room`.

    The limit depends on a row's own length alone, rounded up to a power of two, and a batch holds rows
    of one limit, so that a hypothesis does not depend on its neighbours.
    """
    by_limit: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        limit = 2 * (1 << (length - 1).bit_length()) + 16
        by_limit.setdefault(int(min(limit, room)), []).append(row)
    groups = []
    for limit, rows in sorted(by_limit.items(), reverse=True):
        batches = TokenBatches([lengths[row] for row in rows], tokens_per_batch, shuffle=False)
        groups += [([rows[i] for i in batch], limit) for batch in batches]
    return groups

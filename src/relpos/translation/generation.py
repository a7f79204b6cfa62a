"""Translates text in batches of similar length, with the search of transformers."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BatchEncoding, PreTrainedTokenizerFast

from relpos.translation.batching import TokenBatches
from relpos.translation.checkpoints import find_model, recipe_places
from relpos.translation.errors import InputError, RelposWarning, UsageError
from relpos.translation.loading import load_model
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.sentence_splitting import split_text
from relpos.translation.setting_ranges import LENGTH_PENALTIES, TEMPERATURES
from relpos.translation.strict_json import read_bytes
from relpos.translation.strict_yaml import MOST_BYTES, YamlTextError, read_yaml
from relpos.translation.text import normal

# subwords of the longest text that is translated unsplit; time grows with their square
MOST_SUBWORDS = 4096
# a text over this many times the longest training text gets a warning
_FAR = 2
# subwords of the pieces of a long text, if the longest training text is unknown
_PIECE = 128


@dataclass(frozen=True)
class Hypothesis:
    """One translation.

    `score` is the log-probability in nats divided by length^length_penalty. It is 0 for an empty line, NaN if
    scores were not requested, and the sum over the pieces of a split text.
    """

    text: str
    score: float


@dataclass(frozen=True)
class Search:
    """The settings of a search.

    Args:
        beams: beam size; 1 is greedy search.
        length_penalty: scores are divided by length^length_penalty; -5 to 5.
        n_best: number of hypotheses for each text, at most `beams` unless sampling.
        sample: sample from the model instead of searching; uses torch's random generator.
        temperature: of sampling; over 1 flattens the distribution, under 1 sharpens it; 0.001 to 1000.
        tokens_per_batch: source tokens in a batch, padding included.
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
        for name, (least, most) in (("temperature", TEMPERATURES), ("length_penalty", LENGTH_PENALTIES)):
            # also false of NaN
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least:g} to {most:g}; got {getattr(self, name)}.")


class LongTextWarning(RelposWarning):
    """A text is much longer than the training data of the model."""


class Translator:
    """A model and its tokenizer, ready to translate.

    Args:
        trained_length: subwords of the longest training texts, if known.
    """

    def __init__(
        self,
        model: RelposForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast,
        *,
        trained_length: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.trained_length = model, tokenizer, trained_length

    @classmethod
    def load(cls, folder: Path | str) -> "Translator":
        """Load a translator from the folder of a model or of a run. Raises: InputError."""
        place = find_model(Path(folder))
        return cls(*load_model(place), trained_length=_trained_length(place))

    def check(self, search: Search) -> None:
        """Raise UsageError if the model does not support the search."""
        most = self.model.config.decoder_vocab_size
        if search.beams > most:
            raise UsageError(
                f"beams must be at most the model's vocabulary = {most:,}, since each begins with a subword "
                f"of its own; got {search.beams:,}."
            )

    def translate(
        self,
        texts: Sequence[str],
        search: Search | None = None,
        *,
        prefix: str = "",
        split_long: bool = False,
        first_line: int = 1,
        with_scores: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses for each text, best first, in the order of `texts`.

        Texts are normalised as in training, see `text.normal`, and translated in batches of similar length.
        A translation does not depend on the other texts in its batch. A text without a visible character
        gives one empty hypothesis.

        Args:
            texts: one segment each.
            search: default `Search()`.
            prefix: first words of every hypothesis.
            split_long: split texts longer than the training data at sentence ends, translate the pieces, and
                join the translations with spaces. The prefix begins the first piece.
            first_line: number of the first text in messages.
            with_scores: False saves a forward pass; n_best must be 1 then, since scores rank hypotheses.
            progress: called with the number of texts finished since its last call.
        Warns:
            LongTextWarning: once, if unsplit texts are much longer than the training data.
        Raises:
            UsageError: more beams than the vocabulary has subwords.
            InputError: a text or the prefix has half of a surrogate pair (also a ValueError), or more
                subwords than learned positions or the limit allow. Nothing is translated.
            ValueError: n_best is over 1 without scores.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of str; got one str. Put it in a list.")
        search = search or Search()
        self.check(search)
        if search.n_best > 1 and not with_scores:
            raise ValueError(f"n_best must be 1 where with_scores is False; got {search.n_best}.")
        texts = [normal(text, f"line {line}") for line, text in enumerate(texts, start=first_line)]
        prefix = normal(prefix, "the prefix")
        results: list[list[Hypothesis]] = [[Hypothesis("", 0.0)] for _ in texts]
        rows, ids = self._encode(texts, split_long)
        self._check_lengths(rows, ids, texts, first_line)
        left = Counter(rows)
        if progress and len(left) < len(texts):
            progress(len(texts) - len(left))
        found: list[list[Hypothesis]] = [[] for _ in rows]
        for members, start in self._starts(rows, prefix):
            lengths = [len(ids[member]) for member in members]
            for group, limit in _groups(lengths, search.tokens_per_batch, self._room(start)):
                batch = [members[i] for i in group]
                with torch.inference_mode():
                    hypotheses = self._generate(
                        [ids[member] for member in batch], start, limit, search, with_scores
                    )
                for member, best in zip(batch, hypotheses, strict=True):
                    found[member] = best
                    left[rows[member]] -= 1
                if progress:
                    progress(sum(not left[row] for row in {rows[member] for member in batch}))
        for row in left:
            results[row] = []
        for row, further in zip(rows, found, strict=True):
            results[row] = _joined(results[row], further)
        return results

    def _encode(self, texts: list[str], split_long: bool) -> tuple[list[int], list[list[int]]]:
        """The row of each nonempty text, or of each piece of a text, and its subwords."""
        rows = [row for row, text in enumerate(texts) if text]
        # verbose=False: transformers would warn about a length that is not a limit here
        ids = self.tokenizer([texts[row] for row in rows], verbose=False).input_ids if rows else []
        longest = self.trained_length or _PIECE
        if not split_long or all(len(row) <= longest for row in ids):
            return rows, ids
        pieces: list[tuple[int, str]] = []
        for row, encoded in zip(rows, ids, strict=True):
            is_long = len(encoded) > longest
            parts = split_text(texts[row], longest, self.tokenizer) if is_long else [texts[row]]
            pieces += [(row, part) for part in parts]
        ids = self.tokenizer([piece for _, piece in pieces], verbose=False).input_ids
        return [row for row, _ in pieces], ids

    def _check_lengths(
        self, rows: list[int], ids: list[list[int]], texts: list[str], first_line: int
    ) -> None:
        """Refuse texts that are too long, and warn once about a text much longer than the training data."""
        learned = self.model.config.absolute_positions == "learned"
        last = min(self.model.config.max_positions if learned else math.inf, MOST_SUBWORDS)
        far = math.inf if self.trained_length is None else _FAR * self.trained_length
        is_warned = False
        for row, encoded in zip(rows, ids, strict=True):
            if len(encoded) <= min(last, far):
                continue
            text = texts[row] if len(texts[row]) <= 40 else f"{texts[row][:40].strip()} ..."
            name = f"line {row + first_line} ({text!r}) has {len(encoded)} subwords"
            if len(encoded) > last and last < MOST_SUBWORDS:
                raise InputError(
                    f"{name}, and this model's learned positions end at {last}; split the line, or use a "
                    "model with relative or sinusoidal positions."
                )
            if len(encoded) > last:
                raise InputError(
                    f"{name}, and at most {last} are translated at once; split the line, or have it split: "
                    "--split-long (split_long=True)."
                )
            if not is_warned:
                warnings.warn(
                    f"{name}, and this model was trained on at most {self.trained_length}: such lines may be "
                    "translated wrongly; relpos translate --split-long (split_long=True) splits them.",
                    LongTextWarning,
                    stacklevel=3,
                )
                is_warned = True

    def _starts(self, rows: list[int], prefix: str) -> list[tuple[list[int], list[int]]]:
        """Indices into `rows`, of first and further pieces, with the tokens that begin their hypotheses."""
        start = [self.model.config.decoder_start_token_id]
        given = start + (self.tokenizer(prefix, verbose=False).input_ids[:-1] if prefix else [])
        self._room(given)
        is_further = [member > 0 and rows[member - 1] == row for member, row in enumerate(rows)]
        first = [member for member in range(len(rows)) if not is_further[member] or not prefix]
        further = [member for member in range(len(rows)) if is_further[member] and prefix]
        return [(first, given), (further, start)]

    def _room(self, start: list[int]) -> float:
        """The number of new tokens with learned positions after `start`; infinite without such positions."""
        if self.model.config.absolute_positions != "learned":
            return math.inf
        last = self.model.config.max_positions
        if len(start) > last:
            raise InputError(
                f"the prefix has {len(start) - 1} subwords, and this model's learned positions leave room "
                f"for {last - 1}; shorten the prefix."
            )
        # the last new token is not an input, so it needs no position
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
        """Hypotheses from one sequence per source."""
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        values = [math.nan] * len(texts) if scores is None else scores.tolist()
        return [Hypothesis(normal(text), score) for text, score in zip(texts, values, strict=True)]

    def _scores(self, batch: BatchEncoding, sequences: Tensor, num_given: int, search: Search) -> Tensor:
        """Scores [batch] of one sequence per source, from one teacher-forced pass."""
        tokens = sequences[:, 1:]
        ends = torch.isin(tokens, torch.tensor(self.model.config.eos_token_id, device=tokens.device))
        # after the end, greedy search fills with padding, and beam search with end tokens
        labels = tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, -100)
        labels[:, : num_given - 1] = -100
        # chunks keep the logits, [batch, chunk, vocabulary], within the token budget
        width = max(1, search.tokens_per_batch // len(tokens))
        total = torch.zeros(len(tokens), device=tokens.device)
        encoded, cache = self.model.get_encoder()(batch["input_ids"], batch["attention_mask"]), None
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
        return total / (labels != -100).sum(1).clamp(min=1) ** float(search.length_penalty)


def _joined(before: list[Hypothesis], further: list[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses of a text's pieces so far, joined with those of the next piece, rank by rank."""
    if not before:
        return further
    return [
        Hypothesis(f"{one.text} {other.text}".strip(), one.score + other.score)
        for one, other in zip(before, further, strict=True)
    ]


def _trained_length(model: Path) -> int | None:
    """Subwords of the longest training texts, from the recipe beside a model; None if it is unknown."""
    for path in recipe_places(model):
        try:
            text = read_bytes(path, MOST_BYTES).decode("utf-8")
            length = read_yaml(text)["training"]["max_length"]
        except (OSError, ValueError, TypeError, LookupError, YamlTextError):
            continue
        if type(length) is int and length > 0:
            return length
    return None


def _settings(search: Search) -> dict[str, Any]:
    """Arguments of `generate` for `search`; it would warn about settings without effect."""
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

    The limit depends only on a row's length, rounded up to a power of two, and all rows of a batch have the
    same limit, so that a hypothesis does not depend on the other rows.
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

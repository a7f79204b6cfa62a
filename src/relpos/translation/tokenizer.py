"""Subword tokenizer: one BPE for both languages with byte fallback, so that no character is unknown."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from relpos.translation.errors import InputError, first_line
from relpos.translation.setting_ranges import SMALLEST_VOCABULARY
from relpos.translation.text import NORMALIZER, normal
from relpos.translation.tokenizer_files import read_tokenizer

# each special token ends with a word joiner. Normalisation removes word joiners from text, so that "<s>" in a
# text is not a special token, while tokens that a user adds are found
_PAD, _BOS, _EOS, _UNK = "<pad>\u2060", "<s>\u2060", "</s>\u2060", "<unk>\u2060"
MARKS = [_PAD, _BOS, _EOS, _UNK]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

# longer words are cut before training and encoding; the time of training grows with the square of the length
_LONGEST_WORD = 256


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learn `vocabulary` subwords from `texts` in both languages; training is deterministic.

    Words include the space before them as "▁". Punctuation marks and digits are separate. A character that
    was not learned becomes its UTF-8 bytes. Words of more than 256 characters are cut. Encoding normalises
    as `text.normal` does and appends the end token. Decoding gives the normalised text, with a space for
    each "▁". `texts` is iterated twice; an iterator is first read into memory.

    Raises:
        InputError: `texts` yields fewer subwords than `vocabulary`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=_UNK, byte_fallback=True))
    tokenizer.normalizer = NORMALIZER
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
            pre_tokenizers.Split(Regex(r"(?!▁)[\p{P}\p{S}]|\p{Nd}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(f".{{{_LONGEST_WORD}}}"), behavior="isolated"),
        ]
    )
    texts = list(texts) if isinstance(texts, Iterator) else texts
    limit = max(1, (vocabulary - len(MARKS) - len(_BYTES)) // 2)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=MARKS + _BYTES,
        # the trainer itself breaks ties between equally frequent characters at random
        initial_alphabet=_frequent_characters(texts, limit),
        limit_alphabet=limit,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found < vocabulary:
        suffices = found >= SMALLEST_VOCABULARY
        smaller = f"set tokenizer.vocabulary to {found} or less, or " if suffices else ""
        least = "" if suffices else f" (a recipe needs at least {SMALLEST_VOCABULARY})"
        raise InputError(
            f"the corpus is too small for its vocabulary: it yields {found} subwords, the recipe asks for "
            f"{vocabulary}{least}; {smaller}give more text."
        )
    tokenizer = _with_plain_bytes(tokenizer)
    end = tokenizer.token_to_id(_EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", _EOS], pair=["$A", _EOS, "$B", _EOS], special_tokens=[(_EOS, end)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        unk_token=_UNK,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _frequent_characters(texts: Iterable[str], limit: int) -> list[str]:
    """The `limit` most frequent characters after normalisation; ties are broken by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update("▁" + normal(text).replace(" ", "▁"))
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _with_plain_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with bytes as ordinary subwords; decoding would drop them as special tokens."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in MARKS]
    return Tokenizer.from_str(json.dumps(content))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer` to `folder`. Raises: OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        # `tokenizers` raises a bare Exception on a full disk
        raise OSError(first_line(error)) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder`; runs no code and needs no network. Raises: InputError."""
    return read_tokenizer(folder)

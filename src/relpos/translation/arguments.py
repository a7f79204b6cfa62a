"""Checks of the arguments of a call of the translation model, in combination."""

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.utils import logging

_logger = logging.get_logger(__name__)

# arguments that transformers hands from model to model, and those of `generate` that it hands on
_PASSED = (
    *("output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch"),
    *("tokenizer", "assistant_tokenizer"),
)
_KNOWN = (
    *("input_ids", "attention_mask", "inputs_embeds", "decoder_input_ids", "decoder_attention_mask"),
    *("decoder_inputs_embeds", "encoder_outputs", "encoder_hidden_states", "encoder_attention_mask"),
    *("cache", "use_cache", "labels"),
)


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Refuse further arguments, unless they are None, as code for all models of transformers passes them.

    Raises:
        TypeError: one has a value, which would have no effect.
    """
    for name, value in given.items():
        if value is None or name in _PASSED:
            continue
        nearest = difflib.get_close_matches(name, (*_PASSED, *_KNOWN), 1)
        advice = f"Did you mean {nearest[0]}?" if nearest else "Leave it out."
        raise TypeError(f"{name} must be None, since this model has no such argument; got a value. {advice}")


def check_one_input(name: str, ids: Tensor | None, embeds_name: str, embeds: Tensor | None) -> None:
    """Refuse both or none of two inputs. Raises: ValueError."""
    if (ids is None) == (embeds is None):
        found = "neither" if ids is None else "both"
        raise ValueError(f"exactly one of {name} and {embeds_name} must be given; got {found}.")


def resolve_use_cache(model: PreTrainedModel, use_cache: bool | None, cache: Cache | None) -> bool:
    """Whether to make a cache if none is given; by default the configuration says it, but for training.

    Raises:
        ValueError: there is a cache, and use_cache is False, or gradient checkpointing trains, for which
            layers run without it.
    """
    if use_cache is False and cache is not None:
        raise ValueError(
            f"use_cache must not be False where a cache is given; got {type(cache).__name__}. "
            "Leave out one of them."
        )
    is_training = model.training and torch.is_grad_enabled()
    is_checkpointing = is_training and getattr(model, "gradient_checkpointing", False)
    length = 0 if cache is None or not is_checkpointing else int(cache.get_seq_length())
    if length:
        raise ValueError(
            f"cache must be None or empty while gradient checkpointing trains; got one of {length} tokens. "
            "Leave it out, or call under torch.no_grad()."
        )
    if use_cache is None:
        return bool(model.config.use_cache) and not is_training
    if use_cache and is_checkpointing:
        _logger.warning_once("use_cache=True has no effect while gradient checkpointing trains.")
        return False
    return use_cache


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Refuse labels that are no subwords. On other devices than the CPU the loss finds them.

    Raises:
        TypeError: they are no integers. ValueError: they are not [batch, target], or out of the vocabulary.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32):
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be a tensor of int64; got {found}. Convert them with .long().")
    if labels.dim() != 2:
        raise ValueError(
            f"labels must be [batch, target]; got {list(labels.shape)}. Give one row for each target."
        )
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    outside = (labels != -100) & ((labels < 0) | (labels >= vocab_size))
    if bool(outside.any()):
        raise ValueError(
            f"labels must be from 0 to {vocab_size - 1}, or -100 where there is none; got "
            f"{int(labels[outside][0])}. Check that tokenizer and model belong together."
        )

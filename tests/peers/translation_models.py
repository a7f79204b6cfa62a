"""transformers' tests of models, run on the translator or on MarianMTModel of the same sizes.

pytest is given this file by `suites.py`, with transformers' package `tests` on the path and the name of the
side in PEERS_SIDE. It is no part of `make test`.
"""

import os
import unittest
from typing import Any

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers import MarianConfig, MarianModel, MarianMTModel, PreTrainedConfig
from transformers.models.auto import modeling_auto

from relpos.translation import model as relpos_model
from relpos.translation.config import RelposConfig

VOCAB_SIZE, D_MODEL, LAYERS, HEADS, D_FF = 99, 16, 2, 4, 4
BATCH, LENGTH = 13, 7
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FIRST_WORD = 3


def relpos_config(**changes: Any) -> RelposConfig:
    """The translator's configuration; distances are clipped well within LENGTH."""
    settings = {"relative_max_distance": 3} | TOKENS | changes
    return RelposConfig(
        vocab_size=VOCAB_SIZE,
        d_model=D_MODEL,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        num_heads=HEADS,
        d_ff=D_FF,
        activation="gelu",
        activation_dropout=0.0,
        label_smoothing=0.0,
        **settings,
    )


def relpos_config_without_distances() -> RelposConfig:
    """The same with absolute positions alone, as Marian has them."""
    return relpos_config(relative_max_distance=None, absolute_positions="sinusoidal")


def marian_config() -> MarianConfig:
    """MarianMTModel's configuration of the same sizes."""
    return MarianConfig(
        vocab_size=VOCAB_SIZE,
        d_model=D_MODEL,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=D_FF,
        decoder_ffn_dim=D_FF,
        max_position_embeddings=100,
        attention_dropout=0.1,
        forced_eos_token_id=None,
        **TOKENS,
    )


def relpos_classes() -> tuple[type, ...]:
    """The classes of the translator's model: with a layer for subwords, and without if there is one."""
    names = ("RelposModel", "RelposForConditionalGeneration")
    return tuple(getattr(relpos_model, name) for name in names if hasattr(relpos_model, name))


SIDES = {
    "relpos": (relpos_config, relpos_classes()),
    "relpos-no-distances": (relpos_config_without_distances, relpos_classes()),
    "marian": (marian_config, (MarianModel, MarianMTModel)),
}
MAKE_CONFIG, CLASSES = SIDES[os.environ["PEERS_SIDE"]]

# the suite asks these tables which class has a loss; a model inside transformers stands in them
modeling_auto.MODEL_MAPPING_NAMES["relpos"] = "RelposModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["relpos"] = "RelposForConditionalGeneration"


class SmallModels:
    """What the suites ask about the models under test."""

    batch_size = BATCH
    seq_length = LENGTH
    is_training = True
    num_hidden_layers = LAYERS
    hidden_size = D_MODEL
    num_attention_heads = HEADS

    def get_config(self) -> PreTrainedConfig:
        """The configuration of the side under test."""
        return MAKE_CONFIG()

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """A configuration, and one batch without padding."""
        source = ids_tensor([BATCH, LENGTH], VOCAB_SIZE).clamp(FIRST_WORD)
        source[:, -1] = TOKENS["eos_token_id"]
        target = ids_tensor([BATCH, LENGTH], VOCAB_SIZE).clamp(FIRST_WORD)
        mask = torch.ones_like(source)
        inputs = {
            "input_ids": source,
            "attention_mask": mask,
            "decoder_input_ids": target,
            "decoder_attention_mask": mask.clone(),
        }
        return self.get_config(), inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class TestModels(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """Both sides have one name here: a test is the same test of either."""

    all_model_classes = CLASSES
    is_encoder_decoder = True

    def setUp(self) -> None:
        self.model_tester = SmallModels()

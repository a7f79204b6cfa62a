"""What all models of the translator share: initial weights, kinds of attention, loading from a folder."""

import dataclasses
import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from relpos.translation.attention import IMPLEMENTATIONS, RelposAttention
from relpos.translation.config import RelposConfig
from relpos.translation.device_maps import for_accelerate
from relpos.translation.generation_settings import read_generation_settings
from relpos.translation.model_folders import config_settings, local_folder, read_config
from relpos.translation.weights import FolderWeights, check_fit, read_header, read_weights


class RelposPreTrainedModel(PreTrainedModel):
    """Base of all models here: configuration, initial weights, and what transformers may do with them."""

    config: RelposConfig
    config_class = RelposConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RelposEncoderLayer", "RelposDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RelposAttention):
            # the bounds of torch.nn.MultiheadAttention, which packs the three weights into one
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                init.xavier_uniform_(projection.weight, gain=2**-0.5)
            for table in (module.relative_position_keys, module.relative_position_values):
                if table is not None:
                    # xavier_uniform_ of one head's [rows, head_dim]
                    limit = math.sqrt(6 / (table.shape[-2] + table.shape[-1]))
                    init.uniform_(table, -limit, limit)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """The kind of attention: "relpos" unless another of `attention.IMPLEMENTATIONS` is asked for.

        Raises:
            ValueError: it is unknown, or "sdpa", which has no relative positions, where the model has them.
        """
        kind = "relpos" if requested_attention is None else requested_attention
        if kind not in IMPLEMENTATIONS:
            raise ValueError(f"attn_implementation must be one of {IMPLEMENTATIONS}; got {kind!r}.")
        if kind == "sdpa" and self.config.is_relative:
            raise ValueError(
                'attn_implementation must be "relpos" or "eager" for a model with relative positions; got '
                '"sdpa", which has none.'
            )
        return kind

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        # transformers would look for a name that it does not know on the hub
        return self.get_correct_attn_implementation(attn_implementation, is_init_check)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of tied weights, each with the name that it is tied to.

        Source and target share embeddings by `target_vocab_size`, whatever tie_word_embeddings says.
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return self._tied_names()

    def _tied_names(self) -> dict[str, str]:
        return {}

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Inputs with which the whole model can be called."""
        ids = torch.full((2, 3), int(self.config.decoder_start_token_id or 0), device=self.device)
        return {"input_ids": ids, "decoder_input_ids": ids}

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: RelposConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model from a folder or the Hugging Face Hub; safe for untrusted models.

        Checks every file before it builds the model: types and bounds of all settings, shapes against the
        header of the weights, weights for NaN. Reads safetensors only, and converts those of an older format.
        Arguments: as in transformers.

        Raises:
            ModelFolderError: a file cannot be used; the message is one sentence. Also a ValueError.
        """
        name = pretrained_model_name_or_path
        if name is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(name, *model_args, config=config, **kwargs)
        folder = local_folder(name, kwargs)
        if not isinstance(config, RelposConfig):
            changed = config_settings(kwargs)
            config = read_config(folder, changed)
            kwargs = {name: value for name, value in kwargs.items() if name not in changed}
        config.check()
        header = read_header(folder)
        if not kwargs.get("ignore_mismatched_sizes"):
            check_fit(header, config, cls)
        # an adapter in the folder is not checked, so it is not loaded
        kwargs.pop("adapter_kwargs", None)
        if cls.can_generate():
            generation = kwargs.pop("generation_config", None)
            kwargs["generation_config"] = generation or read_generation_settings(folder, config)
        if isinstance(kwargs.get("device_map"), dict):
            with torch.device("meta"):
                model = cls(config)
            kwargs["device_map"] = for_accelerate(
                kwargs["device_map"], model, shared=model.all_tied_weights_keys
            )
        loaded = super().from_pretrained(
            None, *model_args, config=config, state_dict=read_weights(header), **kwargs
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(name)
        return loaded

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *arguments: Any, **options: Any
    ) -> Any:
        # weights that stay on disk are left in the model's files; transformers would write them a second time
        if isinstance(state_dict, FolderWeights):
            checkpoint_files, index = state_dict.files_in_place()
            load_config = dataclasses.replace(load_config, sharded_metadata=index)
        info, places = PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *arguments, **options
        )
        for name, source in model.all_tied_weights_keys.items():
            if places and source in places:
                places.setdefault(name, places[source])
        return info, places

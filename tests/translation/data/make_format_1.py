"""Writes the folders in format_1/, models of format 1; needs the code of commit fd807bc or before.

From a checkout of that commit: PYTHONPATH=src python make_format_1.py format_1
The logits of both rows were computed by that code in float32, from weights rounded to float16.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from relpos.translation.config import FORMAT, RelposConfig
from relpos.translation.model import RelposForConditionalGeneration

SIZES = {
    "vocab_size": 270,
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 12,
    "encoder_layers": 1,
    "decoder_layers": 2,
}
FOLDERS = {
    "tables_by_head": {"relative_per_head": True, "relative_max_distance": [2, 1]},
    "post_norm": {
        "norm_first": False,
        "absolute_positions": "learned",
        "max_positions": 20,
        "tie_word_embeddings": False,
        "relative_max_distance": None,
        "activation": "gelu",
    },
    "shards": {"relative_max_distance": 2, "relative_keys": False, "encoder_layers": 2},
}


def main(out: Path) -> None:
    """Write one folder for each of FOLDERS."""
    assert FORMAT == 1
    for seed, (name, settings) in enumerate(FOLDERS.items()):
        torch.manual_seed(seed)
        model = RelposForConditionalGeneration(RelposConfig(**SIZES | settings)).eval()
        for weight in model.parameters():
            # biases and norms too, which begin as zeros and ones
            weight.data = torch.randn_like(weight).mul(0.4).half()
        model.generation_config.num_beams = 3
        model.save_pretrained(out / name, max_shard_size="4KB" if name == "shards" else "50GB")
        sources, targets = torch.randint(4, 270, (2, 5)), torch.randint(4, 270, (2, 3))
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        with torch.no_grad():
            logits = model.float()(sources, attention_mask=mask, decoder_input_ids=targets).logits
        found = {"sources": sources, "mask": mask, "targets": targets, "logits": logits}
        save_file(found, out / name / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

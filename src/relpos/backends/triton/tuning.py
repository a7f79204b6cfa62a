"""Sizes of blocks by trial: RELPOS_TRITON_TUNE=1 times the candidates of sizes.py and keeps the fastest.

The first call of each kind does so, for each kernel that meets pairs; Triton keeps the results on disk. It is
off otherwise, and in compiled graphs: a first call then takes no longer than compiling one size.
"""

import os
from functools import cache
from typing import Any

import triton

from relpos.backends.triton import sizes
from relpos.backends.triton.block import IS_INTERPRETED
from relpos.backends.triton.forward import forward
from relpos.backends.triton.key_value_gradients import key_value_gradients
from relpos.backends.triton.query_gradients import query_gradients

# interpreted there is nothing to time
IS_WANTED = os.environ.get("RELPOS_TRITON_TUNE") == "1" and not IS_INTERPRETED.value

_KERNELS = {
    "forward": forward,
    "key_value_gradients": key_value_gradients,
    "query_gradients": query_gradients,
}
# what is timed once for all lengths; the dtypes of tensors count as well
_KEY = [
    *("GROUPS", "PADDED_K", "PADDED_V", "HAS_REL_K", "HAS_REL_V", "HAS_RELATIONS", "HAS_DROPOUT", "MASK"),
    *("IS_CAUSAL", "IS_DETERMINISTIC"),
]
# a kernel that is run again must find what it read, and later wrote to, as it was
_REWRITTEN = {
    "forward": ["sums"],
    "key_value_gradients": [],
    "query_gradients": ["logits_by_label", "grad_weights_by_label", "grad_logit_sums", "weight_sums"],
}


@cache
def tuner(name: str, timer: Any = None) -> Any:
    """The kernel of this name, to be launched without sizes.

    Args:
        timer: how a run is timed; by default as Triton does, on the GPU.
    """
    near = near_name(name)
    every = [size for kind in sizes.kinds() for size in sizes.candidates(name, kind)]
    return triton.autotune(
        configs=[config(size, near) for size in dict.fromkeys(every)],
        key=_KEY,
        restore_value=_REWRITTEN[name],
        prune_configs_by={
            "early_config_prune": lambda configs, given, **known: _of_kind(name, given | known)
        },
        do_bench=timer,
        cache_results=True,
    )(_KERNELS[name])


def near_name(name: str) -> str:
    """What the kernel calls the smaller blocks."""
    return "NEAR_Q" if name == "key_value_gradients" else "NEAR_K"


def config(size: sizes.Size, near: str) -> Any:
    """A size as Triton takes it."""
    meta = {"BLOCK_Q": size.queries, "BLOCK_K": size.keys, near: size.near}
    return triton.Config(meta, num_warps=size.warps, num_stages=size.stages)


def _of_kind(name: str, given: dict[str, Any]) -> list[Any]:
    kind = sizes.Kind(
        itemsize=given["query"].dtype.itemsize,
        width=max(given["PADDED_K"], given["PADDED_V"]),
        is_general=given["HAS_RELATIONS"] or given["HAS_DROPOUT"] or given["MASK"] != "none",
        is_grouped=given["GROUPS"] > 1,
        has_one_table=given["HAS_REL_K"] != given["HAS_REL_V"],
        has_float_mask=given["MASK"] == "float",
    )
    return [config(size, near_name(name)) for size in sizes.candidates(name, kind)]

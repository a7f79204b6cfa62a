"""From which size on one backend is faster than another; nothing else decides between two that fit.

Measured with benchmarks/attention.py on an AMD EPYC (Zen 5), float32, 8 heads of 64, k 16, 4,096 tokens in a
batch, forward and backward: docs/log.md has the figures. `cpu` has no threshold: by benchmarks/crossover.py
it is the fastest from 3 tokens on, and below in all but batches of thousands. On CUDA nothing was measured.
"""

import torch

from relpos._inputs import Inputs

# below these `dense` wastes less than `merged` spends on its many small steps
MERGED_QUERIES = 16
MERGED_KEYS = 256
MERGED_PAIRS = 8 << 20
# on CUDA a guess: each small step costs a launch there, which is worth more pairs of dense; and for so many
# pairs dense holds 0.9 GiB, some 7 tensors of float32
MERGED_PAIRS_ON_CUDA = 32 << 20
# and below so many keys for each distance that has a row of its own
MERGED_KEYS_FOR_A_ROW = 2


def merged_is_slower(inputs: Inputs) -> str | None:
    """Why `dense` is faster than `merged`; None where it is not.

    On CUDA a guess: the thresholds of the CPU, but for four times as many pairs, and never measured there.
    """
    batch, heads, num_queries, _ = inputs.query.shape
    num_keys = inputs.key.shape[2]
    least_keys = max(MERGED_KEYS, MERGED_KEYS_FOR_A_ROW * (inputs.left + inputs.right))
    sizes = [("keys", num_keys, least_keys), ("queries", num_queries, MERGED_QUERIES)]
    if not torch.compiler.is_compiling():
        # each comparison may cost a compiled function one more graph
        least_pairs = MERGED_PAIRS_ON_CUDA if inputs.query.device.type == "cuda" else MERGED_PAIRS
        sizes.append(("pairs in all heads", batch * heads * num_queries * num_keys, least_pairs))
    for name, size, least in sizes:
        if size < least:
            return f"is slower with fewer than {least:,} {name}"
    return None

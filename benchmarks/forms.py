"""The forms of attention that benchmarks compare, and their inputs.

torch's attention without positions, by any kernel or by one of CUDA's; FlexAttention; two forms of other
libraries, with a vector for each pair of query and key, [length, length, d_k] (paper, equations 3 and 4,
gathered); and each backend of relpos. FlexAttention changes logits only, so it holds rel_k and not rel_v.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from relpos import explain_backends, relation_attention, relative_attention
from relpos._masks import combine_masks, key_mask
from relpos._positions import label_table
from relpos.backends import BACKENDS

DTYPES = ("float64", "float32", "bfloat16", "float16")
PASSES = ("forward", "both")
KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
# how many of query, key, value, rel_k, rel_v a form takes, where these are not all five
NUM_TENSORS = {"sdpa": 3, "sdpa_flash": 3, "sdpa_cudnn": 3, "flex": 4}
# beyond that the gathered vectors take tens of GiB of a GPU
GATHER_LENGTH = 4096


@dataclass(frozen=True)
class Setting:
    """One way of calling attention.

    Args:
        length: keys of each sequence, in tokens, padding included.
        queries: number of tokens that attend, the last ones; None for all.
        max_distance: k; each table has 2k + 1 rows.
        padding: share of each sequence, at its end, that is padding.
        is_masked: relpos gets padding as a bool mask [batch, 1, 1, key], not as key_lengths.
        is_labelled: relpos gets the label of each pair, not distances.
        dropout: probability of dropping a weight.
        has_backward: a pass computes the gradients of query, key, value and both tables too.
    """

    length: int
    batch: int = 1
    heads: int = 8
    d_k: int = 64
    max_distance: int = 16
    dtype: str = "float32"
    device: str = "cpu"
    is_causal: bool = False
    padding: float = 0.0
    is_masked: bool = False
    is_labelled: bool = False
    queries: int | None = None
    dropout: float = 0.0
    has_backward: bool = False

    @property
    def num_queries(self) -> int:
        """Tokens that attend."""
        return self.length if self.queries is None else self.queries

    @property
    def query_start(self) -> int:
        """Position of the first of them."""
        return self.length - self.num_queries


class Tensors(NamedTuple):
    """The inputs of every form; query, key, value and grad_out are [batch, heads, tokens, d_k]."""

    query: Tensor
    key: Tensor
    value: Tensor
    rel_k: Tensor  # [labels, d_k]
    rel_v: Tensor  # [labels, d_k]
    grad_out: Tensor
    key_lengths: Tensor | None  # [batch]


Attend = Callable[[], Tensor]
Step = Callable[[], tuple[Tensor, ...]]


def make_tensors(setting: Setting) -> Tensors:
    """Normal random numbers, the same for the same setting."""
    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    generator = torch.Generator(device).manual_seed(0)
    query = (setting.batch, setting.heads, setting.num_queries, setting.d_k)
    key = (setting.batch, setting.heads, setting.length, setting.d_k)
    table = (2 * setting.max_distance + 1, setting.d_k)
    made = [
        torch.randn(*shape, generator=generator, dtype=dtype, device=device)
        for shape in (query, key, key, table, table, query)
    ]
    key_lengths = None
    if setting.padding > 0:
        num_keys = max(1, round(setting.length * (1 - setting.padding)))
        key_lengths = torch.full((setting.batch,), num_keys, device=device)
    return Tensors(*(x.requires_grad_(setting.has_backward) for x in made[:5]), made[5], key_lengths)


def why_not(name: str, setting: Setting, tensors: Tensors) -> list[str]:
    """Every reason why the form cannot run in this setting; an empty list if it can."""
    if name == "gather" and setting.device == "cuda" and setting.length > GATHER_LENGTH:
        return [f"holds vectors [length, length, d_k]: left out beyond {GATHER_LENGTH:,} tokens"]
    if name in OTHERS:
        return []
    keywords = _keywords(setting, tensors)
    return explain_backends(*tensors[:5], relations=_labels(setting, tensors), **keywords)[name]


def prepare(name: str, setting: Setting, tensors: Tensors) -> Step:
    """A function without arguments that runs one pass. Masks are made here, once.

    Returns:
        A function that returns (out,), or out and the gradients of the tensors that the form takes.
    """
    attend = FORMS[name](setting, tensors)
    if not setting.has_backward:
        return lambda: (attend(),)
    wanted = given(name, tensors)

    def step() -> tuple[Tensor, ...]:
        out = attend()
        return out, *torch.autograd.grad(out, wanted, tensors.grad_out)

    return step


def given(name: str, tensors: Tensors) -> tuple[Tensor, ...]:
    """The tensors that the form takes: the first of query, key, value, rel_k, rel_v."""
    return tensors[:5][: NUM_TENSORS.get(name, 5)]


def make_step(name: str, setting: Setting) -> Step:
    """`prepare` with tensors of its own."""
    return prepare(name, setting, make_tensors(setting))


def _sdpa(setting: Setting, tensors: Tensors) -> Attend:
    """torch's attention, without positions."""
    # it takes a mask or is_causal, and is_causal aligns the first query with the first key
    has_no_mask = tensors.key_lengths is None and setting.query_start == 0
    mask = None if has_no_mask else _allowed(setting, tensors)
    is_causal = setting.is_causal and has_no_mask
    given = {"attn_mask": mask, "dropout_p": setting.dropout, "is_causal": is_causal}
    return lambda: F.scaled_dot_product_attention(*tensors[:3], **given)


def _pinned(name: str, setting: Setting, tensors: Tensors) -> Attend:
    """torch's attention by this kernel only; on a CPU, which lacks both kernels, by plain operators."""
    chosen = KERNELS[name] if setting.device == "cuda" else SDPBackend.MATH

    def attend() -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(*tensors[:3], is_causal=setting.is_causal)

    return attend


def label_logits(query: Tensor, rel_k: Tensor) -> Tensor:
    """scale * query . rel_k[label] for every label: [batch, heads, query, labels] in float32.

    The gradients of all keys beyond the clip distance add up in one of these numbers, which needs float32.
    """
    return (query @ rel_k.mT).float() * query.shape[-1] ** -0.5


def score_mod(logits: Tensor, max_distance: int) -> Callable[..., Tensor]:
    """FlexAttention's change of a logit: it adds that of the pair's label."""

    def add(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        label = torch.clamp(j - i, -max_distance, max_distance) + max_distance
        return score + logits[batch, head, i, label]

    return add


def _flex(setting: Setting, tensors: Tensors) -> Attend:
    """FlexAttention with rel_k, compiled on CUDA. The label logits and their gradients are part of a call."""
    mask = None
    if setting.is_causal:
        shape = (setting.length, setting.length)
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, *shape, device=setting.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> Tensor:
        change = score_mod(logits, setting.max_distance)
        return flex_attention(query, key, value, score_mod=change, block_mask=mask)

    run: Callable[..., Tensor] = attend
    if setting.device == "cuda":
        # graphs of earlier shapes would count against torch.compile's limit
        torch.compiler.reset()
        run = torch.compile(attend, dynamic=False, fullgraph=True)
    else:
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    query, key, value, rel_k = tensors[:4]
    return lambda: run(query, key, value, label_logits(query, rel_k))


def _gather(setting: Setting, tensors: Tensors) -> Attend:
    """One matrix product for each query: [batch * heads, d_k] times the vectors of its keys, [d_k, key].

    Source: the form of tensor2tensor and OpenNMT.
    """

    def times(x: Tensor, vectors: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        by_query = x.permute(2, 0, 1, 3).reshape(length, batch * heads, width)
        product = torch.bmm(by_query, vectors)  # [query, batch * heads, key or d_k]
        return product.view(length, batch, heads, -1).permute(1, 2, 0, 3)

    bias = _bias(setting, tensors)
    return partial(_with_vectors, setting, tensors, bias, lambda query, a_k: times(query, a_k.mT), times)


def _einsum(setting: Setting, tensors: Tensors) -> Attend:
    """Two einsums over the vectors of the pairs.

    Source: the form of Hugging Face transformers for keys ("relative_key"), and the same for values.
    """
    times_keys, times_values = (partial(torch.einsum, x) for x in ("bhld,lrd->bhlr", "bhlr,lrd->bhld"))
    return partial(_with_vectors, setting, tensors, _bias(setting, tensors), times_keys, times_values)


def _with_vectors(
    setting: Setting,
    tensors: Tensors,
    bias: Tensor | None,
    times_keys: Callable[[Tensor, Tensor], Tensor],
    times_values: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Equations 3 and 4 with vectors [query, key, d_k]; the forms differ in their products with these."""
    query = tensors.query / math.sqrt(setting.d_k)
    labels = _distance_labels(setting, query.device)  # [query, key]
    logits = torch.matmul(query, tensors.key.mT)  # [batch, heads, query, key]
    logits = logits + times_keys(query, F.embedding(labels, tensors.rel_k))
    if bias is not None:
        logits = logits + bias
    weights = F.dropout(torch.softmax(logits, -1), setting.dropout)
    out = torch.matmul(weights, tensors.value)  # [batch, heads, query, d_k]
    return out + times_values(weights, F.embedding(labels, tensors.rel_v))


def _relpos(name: str, setting: Setting, tensors: Tensors) -> Attend:
    """The backend of this name."""
    labels, keywords = _labels(setting, tensors), _keywords(setting, tensors)
    if labels is None:
        return partial(relative_attention, *tensors[:5], backend=name, **keywords)
    return partial(relation_attention, *tensors[:3], labels, *tensors[3:5], backend=name, **keywords)


def _keywords(setting: Setting, tensors: Tensors) -> dict:
    lengths, mask = tensors.key_lengths, None
    if setting.is_labelled and setting.is_causal:
        # relation_attention has no is_causal
        lengths, mask = None, _allowed(setting, tensors)
    elif setting.is_masked and lengths is not None:
        lengths, mask = None, key_mask(lengths, setting.length)
    common = {"key_lengths": lengths, "attn_mask": mask, "dropout_p": setting.dropout}
    if setting.is_labelled:
        return common
    distances = {"max_distance": setting.max_distance, "query_start": setting.query_start}
    return {**common, **distances, "is_causal": setting.is_causal}


def _labels(setting: Setting, tensors: Tensors) -> Tensor | None:
    """The clipped distances as labels of pairs, [batch, 1, query, key]; None if relpos gets distances."""
    if not setting.is_labelled:
        return None
    labels = _distance_labels(setting, tensors.query.device)
    # graphs differ from sequence to sequence
    return labels.repeat(setting.batch, 1, 1, 1)


def _distance_labels(setting: Setting, device: torch.device) -> Tensor:
    k = setting.max_distance
    return label_table(setting.num_queries, setting.length, setting.query_start, k, k, device)


def _allowed(setting: Setting, tensors: Tensors) -> Tensor | None:
    """True where a pair may attend, in the smallest shape; None if all may."""
    allowed, _ = combine_masks(
        setting.num_queries,
        setting.length,
        setting.query_start,
        attn_mask=None,
        key_lengths=tensors.key_lengths,
        is_causal=setting.is_causal,
        device=tensors.query.device,
    )
    return None if allowed is None or allowed.all() else allowed


def _bias(setting: Setting, tensors: Tensors) -> Tensor | None:
    """`_allowed` as 0 and -inf."""
    allowed = _allowed(setting, tensors)
    if allowed is None:
        return None
    return torch.zeros_like(allowed, dtype=tensors.query.dtype).masked_fill_(~allowed, float("-inf"))


OTHERS: dict[str, Callable[[Setting, Tensors], Attend]] = {
    "sdpa": _sdpa,
    **{name: partial(_pinned, name) for name in KERNELS},
    "flex": _flex,
    "gather": _gather,
    "einsum": _einsum,
}
FORMS = {**OTHERS, **{backend.name: partial(_relpos, backend.name) for backend in BACKENDS}}
ON_CPU = [name for name in FORMS if name not in (*KERNELS, "flex", "triton")]

"""Attention between heads, as a module without parameters: hooks see what each call attends with."""

from typing import Any

from torch import Tensor, nn

from relpos._functional import attention_with_weights, relative_attention


class AttentionCore(nn.Module):
    """`relative_attention` as a module. Models that project queries, keys and values themselves call it.

    It has no parameters; `relpos.inspection.observe` reads the arguments of its calls.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rel_k: Tensor | None,
        rel_v: Tensor | None,
        *,
        max_distance: tuple[int, int] | None = None,
        query_start: int | Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `relpos.relative_attention` does, with its arguments.

        Returns:
            [batch, heads, query, d_v], and the weights before dropout, [batch, heads, query, key], if they
            are needed: the backend "dense" computes them.
        """
        limits: dict[str, Any] = {
            "max_distance": max_distance,
            "query_start": query_start,
            "attn_mask": attn_mask,
            "key_lengths": key_lengths,
            "is_causal": is_causal,
            "dropout_p": dropout_p,
        }
        if need_weights:
            return attention_with_weights(query, key, value, rel_k, rel_v, **limits)
        return relative_attention(query, key, value, rel_k, rel_v, **limits), None

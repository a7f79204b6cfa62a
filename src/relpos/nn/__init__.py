"""Modules with relative positions, called like their counterparts in torch.nn."""

from relpos.nn.attention import RelativeMultiheadAttention
from relpos.nn.cache import AttentionCache, KeyValueCache
from relpos.nn.layers import RelativeTransformerDecoderLayer, RelativeTransformerEncoderLayer

__all__ = [
    "AttentionCache",
    "KeyValueCache",
    "RelativeMultiheadAttention",
    "RelativeTransformerDecoderLayer",
    "RelativeTransformerEncoderLayer",
]

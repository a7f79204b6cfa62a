"""Modules with relative positions, called like their counterparts in torch.nn."""

from relpos.nn.attention import RelativeMultiheadAttention
from relpos.nn.cache import AttentionCache, KeyValueCache, StaticKeyValueCache
from relpos.nn.layers import RelativeTransformerDecoderLayer, RelativeTransformerEncoderLayer
from relpos.nn.stacks import RelativeTransformer, RelativeTransformerDecoder, RelativeTransformerEncoder

__all__ = [
    "AttentionCache",
    "KeyValueCache",
    "RelativeMultiheadAttention",
    "RelativeTransformer",
    "RelativeTransformerDecoder",
    "RelativeTransformerDecoderLayer",
    "RelativeTransformerEncoder",
    "RelativeTransformerEncoderLayer",
    "StaticKeyValueCache",
]

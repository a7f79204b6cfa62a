"""Modules with relative positions, called like their counterparts in torch.nn."""

from relpos.nn._attention import RelativeMultiheadAttention
from relpos.nn._cache import AttentionCache, KeyValueCache, StaticKeyValueCache
from relpos.nn._core import AttentionCore
from relpos.nn._layers import RelativeTransformerDecoderLayer, RelativeTransformerEncoderLayer
from relpos.nn._stacks import RelativeTransformer, RelativeTransformerDecoder, RelativeTransformerEncoder

__all__ = [
    "AttentionCache",
    "AttentionCore",
    "KeyValueCache",
    "RelativeMultiheadAttention",
    "RelativeTransformer",
    "RelativeTransformerDecoder",
    "RelativeTransformerDecoderLayer",
    "RelativeTransformerEncoder",
    "RelativeTransformerEncoderLayer",
    "StaticKeyValueCache",
]

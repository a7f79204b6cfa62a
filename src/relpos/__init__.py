"""Self-attention with relative position representations (Shaw, Uszkoreit and Vaswani, 2018)."""

from importlib.metadata import version

from relpos import nn, relations
from relpos.functional import explain_backends, relation_attention, relative_attention

__all__ = [
    "__version__",
    "explain_backends",
    "nn",
    "relation_attention",
    "relations",
    "relative_attention",
]

__version__ = version("relpos")

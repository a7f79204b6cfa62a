"""Self-attention with relative position representations (Shaw, Uszkoreit and Vaswani, 2018)."""

import sys
from importlib.metadata import version

try:
    from relpos import nn, relations
    from relpos.functional import explain_backends, relation_attention, relative_attention
except KeyboardInterrupt:
    # Ctrl-C while torch is loaded: `python -m relpos` comes here first, with argv[0] as it is until then
    if sys.argv[:1] != ["-m"]:
        raise
    if sys.stderr is not None:
        print("relpos: stopped.", file=sys.stderr)
    sys.exit(130)

__all__ = [
    "__version__",
    "explain_backends",
    "nn",
    "relation_attention",
    "relations",
    "relative_attention",
]

__version__ = version("relpos")

"""Self-attention with relative position representations (Shaw, Uszkoreit and Vaswani, 2018)."""

import sys as _sys
from importlib.metadata import version as _version

try:
    from relpos import decompose, nn, relations
    from relpos._functional import explain_backends, relation_attention, relative_attention
except KeyboardInterrupt:
    # `python -m relpos` imports this file first, with argv[0] == "-m": Ctrl-C there prints no traceback
    if _sys.argv[:1] != ["-m"]:
        raise
    if _sys.stderr is not None:
        print("relpos: stopped.", file=_sys.stderr)
    _sys.exit(130)

__all__ = [
    "__version__",
    "decompose",
    "explain_backends",
    "nn",
    "relation_attention",
    "relations",
    "relative_attention",
]

__version__ = _version("relpos")

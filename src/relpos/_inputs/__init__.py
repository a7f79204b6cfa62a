"""The arguments of attention, checked: the one place where shapes, dtypes, devices and ranges are judged."""

from relpos._inputs.inputs import Inputs, check
from relpos._inputs.pairs import in_four_dimensions, no_labels
from relpos._inputs.sequences import check_start
from relpos._inputs.tensors import FLOAT_DTYPES, INT_DTYPES, can_look_at, check_layout, kind_of, sizes_of

__all__ = [
    "FLOAT_DTYPES",
    "INT_DTYPES",
    "Inputs",
    "can_look_at",
    "check",
    "check_layout",
    "check_start",
    "in_four_dimensions",
    "kind_of",
    "no_labels",
    "sizes_of",
]

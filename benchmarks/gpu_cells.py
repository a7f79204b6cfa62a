"""Which settings the GPU benchmark measures, in which order, and how long it may take.

A cell is a setting that all sides are measured in. What the budget does not reach is what matters least.
"""

import time
from itertools import product

from attention_forms import Setting

TOKENS, WIDTH = 16_384, 1024
# (d_k, k); the aims are about d 64 and k 16, and about 2,048 tokens and more
TABLES = ((64, 16), (128, 16), (64, 128), (128, 128))
LENGTHS = (4096, 2048, 16_384, 8192, 1024, 512)
# the share of the budget that may go into compiling a side anew for each shape
COMPILING_SHARE = {"flex": 0.35}


def cells(is_rehearsal: bool) -> list[Setting]:
    """Every setting, the one that matters most first; small ones on the CPU for a rehearsal."""
    if is_rehearsal:
        few = ((64, False, False), (64, False, True), (128, True, False))
        return [
            Setting(length, 1, 2, 16, max_distance=4, is_causal=is_causal, has_backward=has_backward)
            for length, is_causal, has_backward in few
        ]
    return [
        Setting(
            length,
            TOKENS // length,
            WIDTH // d_k,
            d_k,
            max_distance=max_distance,
            dtype="bfloat16",
            device="cuda",
            is_causal=is_causal,
            has_backward=has_backward,
        )
        for (d_k, max_distance), length, is_causal, has_backward in product(
            TABLES, LENGTHS, (False, True), (False, True)
        )
    ]


def label(setting: Setting) -> str:
    """The cell in words."""
    passes = "both" if setting.has_backward else "forward"
    causal = "causal, " if setting.is_causal else ""
    return f"d {setting.d_k}, k {setting.max_distance}, n {setting.length}, {causal}{passes}"


class Budget:
    """Seconds for everything, and for what is compiled anew in each cell."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.compiling = dict.fromkeys(COMPILING_SHARE, 0.0)

    def is_spent(self) -> bool:
        """Whether no further cell should begin."""
        return time.monotonic() >= self.end

    def why_not(self, name: str) -> list[str]:
        """Whether the side has compiled for as long as it may."""
        share = COMPILING_SHARE.get(name)
        if share is None or self.compiling[name] < share * self.seconds:
            return []
        return [f"left out: it has compiled for {self.compiling[name]:.0f} s, the budget's share for that"]

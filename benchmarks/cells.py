"""The settings that are measured on a GPU, in order of importance, and the time that they may take."""

import time
from itertools import product

from forms import Setting

TOKENS, WIDTH = 16_384, 1024
# (d_k, k); the aims are about d 64 and k 16, and about 2,048 tokens and more
TABLES = ((64, 16), (128, 16), (64, 128), (128, 128))
LENGTHS = (4096, 2048, 16_384, 8192, 1024, 512)
# share of the budget for compiling a form, which is compiled for each shape
COMPILING_SHARE = {"flex": 0.35}


def cells(is_rehearsal: bool) -> list[Setting]:
    """Every setting, the most important first; for a rehearsal three small ones on the CPU."""
    if is_rehearsal:
        few = ((64, False, False), (64, False, True), (128, True, False))
        return [
            Setting(length, 1, 2, 16, max_distance=4, is_causal=is_causal, has_backward=has_backward)
            for length, is_causal, has_backward in few
        ]
    fixed = {"dtype": "bfloat16", "device": "cuda"}
    return [
        Setting(n, TOKENS // n, WIDTH // d_k, d_k, k, is_causal=is_causal, has_backward=has_backward, **fixed)
        for (d_k, k), n, is_causal, has_backward in product(TABLES, LENGTHS, (False, True), (False, True))
    ]


def label(setting: Setting) -> str:
    """The cell in words."""
    passes = "both" if setting.has_backward else "forward"
    causal = "causal, " if setting.is_causal else ""
    return f"d {setting.d_k}, k {setting.max_distance}, n {setting.length}, {causal}{passes}"


class Budget:
    """Seconds for all cells, and seconds for compiling."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.compiling = dict.fromkeys(COMPILING_SHARE, 0.0)

    def is_spent(self) -> bool:
        """Whether no further cell should begin."""
        return time.monotonic() >= self.end

    def refused(self) -> dict[str, str]:
        """Forms that have compiled for their share of the budget, and the reason in words."""
        return {
            name: f"left out: it has compiled for {spent:.0f} s, the budget's share for that"
            for name, spent in self.compiling.items()
            if spent >= COMPILING_SHARE[name] * self.seconds
        }

"""The learning rate schedule: linear warm-up, then decay with the inverse square root of the step.

Source: Vaswani et al. 2017, equation 3, times the recipe's learning_rate_scale.
"""

import math


def peak_rate(d_model: int, warmup: int, scale: float) -> float:
    """The highest rate, at step `warmup`: scale * d_model^-0.5 * warmup^-0.5."""
    return scale * (d_model * warmup) ** -0.5


def share_of_peak(updates: int, warmup: int, first_step: int) -> float:
    """The rate of the update after `updates` others, as a share of the peak, 0 to 1.

        rate(step) = scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)

    Args:
        first_step: step of the first update: 1 as in the paper, or 0 in runs of format 1, whose first update
            has rate 0.
    """
    step = updates + first_step
    return step / warmup if step < warmup else 1 / math.sqrt(step / warmup)

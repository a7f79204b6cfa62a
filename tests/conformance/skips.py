"""What a backend may refuse on purpose: only these reasons may skip a case of the suite.

A case that a backend skips for any other reason fails the run, and so does a backend that runs too few of
them: see required.py. A line here is a limit of that backend which its documentation states.
"""

# backend -> how each reason of its why_not begins that stands for such a limit
MAY_SKIP: dict[str, tuple[str, ...]] = {
    "merged": (
        "needs distances",
        "takes no attn_mask but a bool one that hides keys at the end",
        "drops no weights",
        "is an operator of relpos, which no exported program should need",
        "has no rules for torch.func and forward-mode derivatives",
    ),
}

# the share of the cases that each backend runs at least, where the whole suite runs
LEAST_SHARE = 0.5

"""Figures with captions: a title, and a guide to reading the figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from relpos.inspection._attention import plot_attention
from relpos.inspection._distances import plot_distances
from relpos.inspection._number_line import plot_number_line
from relpos.inspection._observation import Observation
from relpos.inspection._optional_dependencies import Figure


@dataclass(frozen=True)
class Picture:
    """A figure for the report, with its caption.

    Attributes:
        title: a few words on its content.
        guide: two or three sentences on how to read it.
        figure: the figure.
    """

    title: str
    guide: str
    figure: Figure


def number_line_picture(n: int = 4, k: int = 2) -> Picture:
    """`plot_number_line` with a caption."""
    return Picture(
        title="From positions to rows of a table",
        guide=(
            "Take each token in turn as the centre: every other token stands at a distance "
            f"j \N{MINUS SIGN} i from it, so {n} tokens have {2 * n - 1} distances. Each distance is looked "
            "up in a table of learned vectors, as a word is in an embedding. Beyond "
            f"{k} all distances share the row at the end, so the table has {2 * k + 1} rows however long the "
            "sentence is."
        ),
        figure=plot_number_line(n, k),
    )


def distances_picture(observations: Sequence[Observation]) -> Picture:
    """`plot_distances` with a caption."""
    return Picture(
        title="What each distance does in each layer",
        guide=(
            "Top: where a line is high, the head looks more at tokens of that distance, whatever they say; "
            "one more nat makes a weight e ≈ 2.7 times larger before all are made to sum to 1. Bottom: a "
            "longer row of rel_v changes the output more when a token of that distance is attended to. The "
            "shaded ends stand for all distances beyond; a decoder looks back only, so its lines end at 0."
        ),
        figure=plot_distances(observations),
    )


def attention_picture(
    observation: Observation, tokens: Sequence[str], *, head: int | None = None, row: int = 0
) -> Picture:
    """`plot_attention` with a caption."""
    averaged = (
        " The panels are averages over the heads, so the third is the mean of many softmaxes, not one."
        if head is None
        else ""
    )
    return Picture(
        title="One sentence: what words say and what distances say",
        guide=(
            "Each row is one token that looks, each column one that it may look at; grey pairs are "
            "forbidden. The first panel comes from the words looked at, the second from their distance, so a "
            "habit such as “the token before” is a stripe along a diagonal. Added and put through a softmax "
            "they give the weights on the right." + averaged
        ),
        figure=plot_attention(observation, tokens, head=head, row=row),
    )

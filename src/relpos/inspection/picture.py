"""A figure with a title and a guide to reading it, and the guides to the pictures of distances."""

from collections.abc import Sequence
from dataclasses import dataclass

from relpos.inspection._extra import Figure
from relpos.inspection.attention import plot_attention
from relpos.inspection.distances import plot_distances
from relpos.inspection.number_line import plot_number_line
from relpos.inspection.observation import Observation


@dataclass(frozen=True)
class Picture:
    """A figure for the report.

    Attributes:
        title: what it shows, in a few words.
        guide: how to read it, two or three sentences for a learner.
        figure: the figure.
    """

    title: str
    guide: str
    figure: Figure


def number_line_picture(n: int = 4, k: int = 2) -> Picture:
    """`plot_number_line` with its guide."""
    return Picture(
        title="From positions to rows of a table",
        guide=(
            "Take each token in turn as the centre: every other token stands at a distance j − i from it, "
            f"so {n} tokens have {2 * n - 1} distances. Each distance is looked up in a table of learned vectors, "
            f"as a word is in an embedding. Beyond {k} all distances share the row at the end, so the table has "
            f"{2 * k + 1} rows however long the sentence is."
        ),
        figure=plot_number_line(n, k),
    )


def distances_picture(observations: Sequence[Observation]) -> Picture:
    """`plot_distances` with its guide."""
    return Picture(
        title="What each distance does in each layer",
        guide=(
            "Top: where a line is high, the head looks more at tokens of that distance, whatever they say; one more "
            "nat makes a weight e ≈ 2.7 times larger. Bottom: a longer row of rel_v changes the output more when a "
            "token of that distance is attended to. The shaded ends stand for all distances beyond; a decoder looks "
            "back only, so its lines end at 0."
        ),
        figure=plot_distances(observations),
    )


def attention_picture(
    observation: Observation, tokens: Sequence[str], *, head: int | None = None, row: int = 0
) -> Picture:
    """`plot_attention` with its guide."""
    averaged = (
        " The panels are averages over the heads, so the third is the sum of many softmaxes, not one of the sums."
        if head is None
        else ""
    )
    return Picture(
        title="One sentence: what words say and what distances say",
        guide=(
            "Each row is one token that looks, each column one that it may look at; grey pairs are forbidden. The "
            "first panel depends on the words alone, the second on the distance as this query sees it, so it shows "
            "stripes along the diagonals. Added and put through a softmax they give the weights on the right."
            + averaged
        ),
        figure=plot_attention(observation, tokens, head=head, row=row),
    )

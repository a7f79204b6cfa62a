"""Show what each distance contributes: observations of a model, plots, and a report in one HTML file."""

from relpos.inspection._attention import plot_attention
from relpos.inspection._captions import Picture, attention_picture, distances_picture, number_line_picture
from relpos.inspection._comparison import plot_by_length, plot_learning
from relpos.inspection._distances import plot_distances
from relpos.inspection._number_line import plot_number_line
from relpos.inspection._observation import Observation, observe
from relpos.inspection._report import write_report

__all__ = [
    "Observation",
    "Picture",
    "attention_picture",
    "distances_picture",
    "number_line_picture",
    "observe",
    "plot_attention",
    "plot_by_length",
    "plot_distances",
    "plot_learning",
    "plot_number_line",
    "write_report",
]

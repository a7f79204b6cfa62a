"""Pictures draw the numbers they are given, say what they show, and leave no global state."""

import math
import subprocess
import sys

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from relpos.inspection import (
    Observation,
    observe,
    plot_attention,
    plot_by_length,
    plot_distances,
    plot_learning,
    plot_number_line,
)
from relpos.inspection._comparison import wilson_interval
from relpos.inspection._style import distance_ticks, layer_name
from relpos.nn import RelativeMultiheadAttention

TOKENS = ["we", "$must$", "not", "_give", "up"]


@pytest.fixture
def seen() -> list[Observation]:
    return _seen(is_causal=False)


def _seen(*, is_causal: bool, **options: object) -> list[Observation]:
    torch.manual_seed(0)
    settings: dict = {"batch_first": True, "max_distance": 2} | options
    model = nn.ModuleDict({"self_attn": RelativeMultiheadAttention(8, 2, **settings)}).eval()
    x = torch.randn(1, len(TOKENS), 8)
    return observe(model, lambda: model["self_attn"](x, x, x, is_causal=is_causal))


def _result(variant: str, exact: list[float], **more: object) -> dict:
    buckets = [
        {"shortest": n, "longest": n, "scores": {"segments": 50, "bleu": 100 * share, "exact": share}}
        for n, share in enumerate(exact, start=1)
    ]
    history = [{"step": 10 * n, "seconds": 2.0 * n, "eval_bleu": 5.0 * n} for n in (1, 2, 3)]
    return {"task": "t", "variant": variant, "buckets": buckets, "history": history, **more}


def _texts(figure: Figure) -> str:
    figure.canvas.draw()
    return "\n".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def test_distances_draws_a_line_for_each_head(seen) -> None:
    figure = plot_distances(seen)
    above, below = figure.axes
    lines = [line for line in above.lines if len(line.get_xdata()) == 5]
    drawn = [torch.tensor(line.get_ydata()) for line in lines]
    torch.testing.assert_close(torch.stack(drawn).float(), seen[0].position_by_distance)
    assert list(lines[0].get_xdata()) == [-2, -1, 0, 1, 2]
    norms = torch.tensor(below.lines[0].get_ydata()).float()
    torch.testing.assert_close(norms, seen[0].rel_v_norms[0])
    assert "head 2" in _texts(figure)
    assert "≥+2" in _texts(figure)


def test_calls_of_one_layer_are_averaged_by_their_pairs(seen) -> None:
    once, twice = plot_distances(seen), plot_distances(seen * 2)
    assert len(twice.axes) == len(once.axes)
    for one, other in zip(once.axes[0].lines, twice.axes[0].lines, strict=True):
        assert list(map(float, one.get_ydata())) == pytest.approx(list(map(float, other.get_ydata())))


def test_distances_a_decoder_never_meets_are_not_drawn() -> None:
    figure = plot_distances(_seen(is_causal=True))
    norms = list(figure.axes[1].lines[0].get_ydata())
    assert [math.isnan(norm) for norm in norms] == [False, False, False, True, True]


@pytest.mark.parametrize(("is_causal", "word"), [(True, "0"), (False, "≥0")])
def test_a_last_row_stands_for_more_only_where_pairs_lie_beyond(is_causal, word) -> None:
    figure = plot_distances(_seen(is_causal=is_causal, max_distance=(3, 0)))
    figure.canvas.draw()
    assert figure.axes[1].get_xticklabels()[-1].get_text() == word


@pytest.mark.parametrize(
    ("missing", "words"),
    [("relative_keys", "no table on the keys"), ("relative_values", "no table on the values")],
)
def test_a_missing_table_is_said_in_words(missing, words) -> None:
    assert words in _texts(plot_distances(_seen(is_causal=False, **{missing: False})))


def test_distances_of_no_observation_is_an_error() -> None:
    with pytest.raises(ValueError, match="observations must hold at least one; got none"):
        plot_distances([])


def test_attention_panels_add_up(seen) -> None:
    figure = plot_attention(seen[0], TOKENS, head=1)
    content, position, weights = (
        torch.tensor(axes.images[0].get_array().filled(math.nan)) for axes in figure.axes[:3]
    )
    torch.testing.assert_close((content + position).softmax(-1), weights, rtol=1e-5, atol=1e-6)
    assert "must" in _texts(figure)


def test_forbidden_pairs_are_blank(seen) -> None:
    figure = plot_attention(_seen(is_causal=True)[0], TOKENS)
    for axes in figure.axes[:3]:
        blank = torch.tensor(axes.images[0].get_array().mask)
        assert torch.equal(blank, torch.ones(5, 5, dtype=torch.bool).triu(1))


def test_attention_needs_a_token_for_each_key(seen) -> None:
    with pytest.raises(ValueError, match="tokens must be as many as the keys = 5; got 4"):
        plot_attention(seen[0], TOKENS[:4])


def test_by_length_draws_the_shares_and_shades_what_was_trained() -> None:
    results = [
        _result("relative", [0.9, 0.8, 0.7], trained_up_to=2, length_unit="numbers"),
        _result("none", [0, 0]),
    ]
    figure = plot_by_length(results)
    axes = figure.axes[0]
    drawn = [container.lines[0].get_ydata() for container in axes.containers]
    assert list(drawn[0]) == pytest.approx([90, 80, 70])
    assert list(drawn[1]) == [0, 0]
    texts = _texts(figure)
    assert "never trained on" in texts
    assert "numbers" in texts
    (shade,) = axes.patches
    assert shade.get_x() + shade.get_width() == pytest.approx(1.5)


@pytest.mark.parametrize(("limit", "has_note"), [(None, False), (2, True), (9, False)])
def test_lengths_never_trained_on_are_named_where_there_are_any(limit, has_note) -> None:
    figure = plot_by_length([_result("relative", [0.5, 0.5, 0.5], trained_up_to=limit)], "bleu")
    assert ("never trained on" in _texts(figure)) == has_note


def test_learning_draws_against_seconds_and_updates() -> None:
    left, right = plot_learning([_result("relative", []), _result("none", [], history=[])]).axes
    assert list(left.lines[0].get_xdata()) == [2, 4, 6]
    assert list(right.lines[0].get_xdata()) == [10, 20, 30]
    assert list(right.lines[0].get_ydata()) == [5, 10, 15]
    assert len(left.lines) == 1


@pytest.mark.parametrize("plot", [plot_by_length, plot_learning])
def test_nothing_recorded_is_said_in_words(plot) -> None:
    assert "no " in _texts(plot([{"task": "t", "variant": "relative"}]))


def test_number_line_shows_the_labels_of_the_paper() -> None:
    figure = plot_number_line(4, 2)
    rows = figure.axes[1].images[0].get_array().tolist()
    assert rows == [[2, 3, 4, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert "Distances beyond 2 share" in _texts(figure)
    assert "row of its own" in _texts(plot_number_line(2, 3))
    with pytest.raises(ValueError, match="n must be at least 1"):
        plot_number_line(0, 2)


@pytest.mark.parametrize(
    ("sides", "places"), [((2, 2), [-2, -1, 0, 1, 2]), ((0, 0), [0]), ((3, 0), [-3, -2, -1, 0])]
)
def test_ticks_mark_both_ends_and_the_query(sides, places) -> None:
    assert distance_ticks(*sides)[0] == places


def test_modules_of_a_stack_get_readable_names() -> None:
    assert layer_name("model.encoder.layers.0.self_attn") == "encoder, layer 1"
    assert layer_name("blocks.attention") == "blocks.attention"
    assert layer_name("") == "attention"


def test_wilson_interval_stays_a_share() -> None:
    low, high = wilson_interval(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert wilson_interval(0.0, 10)[0] == 0.0
    assert wilson_interval(1.0, 10)[1] == 1.0


def test_pictures_do_not_touch_pyplot() -> None:
    program = "import sys, relpos.inspection as see; see.plot_number_line().canvas.draw()\n"
    program += "print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

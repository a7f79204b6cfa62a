"""The attention module against `torch.nn.MultiheadAttention`, against its own laws, and its tables."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from relpos.nn import (
    KeyValueCache,
    RelativeMultiheadAttention,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, BATCH, QUERIES, KEYS = 16, 4, 2, 5, 7
MODES = {
    "none": {},
    "both": {"max_distance": 2},
    "keys": {"max_distance": 2, "relative_values": False},
    "values": {"max_distance": 2, "relative_keys": False},
    "k = 0": {"max_distance": 0},
    "left over right": {"max_distance": (3, 1)},
    "left only": {"max_distance": (3, 0)},
    "per head": {"max_distance": 2, "relative_per_head": True},
    "beyond the length": {"max_distance": 50},
}
modes = pytest.mark.parametrize("mode", MODES)


def module(*, seed: int = 0, **settings) -> RelativeMultiheadAttention:
    """A module in float64 whose biases are not zero, [batch, length, width] unless told."""
    torch.manual_seed(seed)
    made = RelativeMultiheadAttention(
        WIDTH, HEADS, **({"batch_first": True, "dtype": torch.float64, "max_distance": None} | settings)
    )
    with torch.no_grad():
        for bias in (made.in_proj_bias, made.out_proj.bias):
            if bias is not None:
                bias.normal_()
    return made


def torch_twin(ours: RelativeMultiheadAttention) -> nn.MultiheadAttention:
    """torch's module with the same weights; fails if names or shapes differ."""
    has_bias = ours.in_proj_bias is not None
    theirs = nn.MultiheadAttention(
        WIDTH, HEADS, bias=has_bias, batch_first=ours.batch_first, dtype=torch.float64
    )
    theirs.load_state_dict(ours.state_dict())
    return theirs


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden(*shape: int) -> Tensor:
    """A mask in torch.nn's sense, True = hidden, that leaves each query the first key."""
    mask = draw(*shape, seed=2) > 0.3
    mask[..., 0] = False
    return mask


def as_float(mask: Tensor) -> Tensor:
    return draw(*mask.shape, seed=3).masked_fill(mask, float("-inf"))


def masks(kind: str, shape: str) -> dict[str, Tensor]:
    attn_mask = hidden(QUERIES, KEYS) if shape == "plain" else hidden(BATCH * HEADS, QUERIES, KEYS)
    padding = hidden(BATCH, KEYS)
    if kind == "float":
        attn_mask, padding = as_float(attn_mask), as_float(padding)
    return {"attn_mask": attn_mask, "key_padding_mask": padding}


def assert_equals_torch(ours: RelativeMultiheadAttention, *tensors: Tensor, **arguments) -> None:
    found, found_weights = ours(*tensors, **arguments)
    true, true_weights = torch_twin(ours)(*tensors, **arguments)
    torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)
    if arguments.get("need_weights", True):
        torch.testing.assert_close(found_weights, true_weights, atol=1e-10, rtol=1e-10)
    else:
        assert found_weights is None
        assert true_weights is None


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("shape", ["plain", "per head"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "given", [(), ("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")]
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_without_tables_it_equals_torch(batch_first, given, kind, shape, averaged) -> None:
    query, key, value = (
        draw(BATCH, QUERIES, WIDTH),
        draw(BATCH, KEYS, WIDTH),
        draw(BATCH, KEYS, WIDTH, seed=9),
    )
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    assert_equals_torch(
        module(batch_first=batch_first),
        query,
        key,
        value,
        average_attn_weights=averaged,
        **{name: mask for name, mask in masks(kind, shape).items() if name in given},
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kdim", "vdim"), [(8, 6), (8, 8), (WIDTH, 6), (8, None), (None, 6)])
def test_keys_and_values_of_other_widths_equal_torch(kdim, vdim, bias, batch_first) -> None:
    options = {"kdim": kdim, "vdim": vdim, "bias": bias, "batch_first": batch_first, "dtype": torch.float64}
    ours, theirs = module(**options), nn.MultiheadAttention(WIDTH, HEADS, **options)
    theirs.load_state_dict(ours.state_dict())
    query = draw(BATCH, QUERIES, WIDTH)
    key = draw(BATCH, KEYS, kdim or WIDTH, seed=4)
    value = key if kdim == vdim else draw(BATCH, KEYS, vdim or WIDTH, seed=5)
    given = {**masks("bool", "plain"), "need_weights": True}
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        value = key if kdim == vdim else value.transpose(0, 1)
    grads = []
    for attention in (ours, theirs):
        out, weights = attention(query, key, value, **given)
        torch.testing.assert_close(out, theirs(query, key, value, **given)[0], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(weights, theirs(query, key, value, **given)[1], atol=1e-10, rtol=1e-10)
        out.square().sum().backward()
        grads.append({name: x.grad for name, x in attention.named_parameters()})
    torch.testing.assert_close(*grads, atol=1e-10, rtol=1e-10)


def test_a_memory_of_another_width_is_kept_in_a_cache() -> None:
    ours, memory, cache = module(kdim=8, vdim=8), draw(BATCH, KEYS, 8), KeyValueCache(is_memory=True)
    for step in draw(BATCH, 3, WIDTH).split(1, 1):
        found, _ = ours(step, memory, memory, cache=cache)
        torch.testing.assert_close(found, ours(step, memory, memory)[0], atol=1e-12, rtol=1e-12)


@modes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_one_sequence_alone_is_a_batch_of_one_without_its_dimension(mode, batch_first, averaged) -> None:
    ours, x = module(batch_first=batch_first, **MODES[mode]), draw(KEYS, WIDTH)
    padding, mask = hidden(KEYS), hidden(HEADS, KEYS, KEYS)
    options = {"attn_mask": mask, "average_attn_weights": averaged}
    batch = x[None] if batch_first else x[:, None]
    out, weights = ours(x, x, x, padding, **options)
    true, true_weights = ours(batch, batch, batch, padding[None], **options)
    assert torch.equal(out, true.squeeze(0 if batch_first else 1))
    assert torch.equal(weights, true_weights[0])
    assert weights.shape == ((KEYS, KEYS) if averaged else (HEADS, KEYS, KEYS))


def test_a_bool_mask_beside_a_float_mask_hides_and_adds() -> None:
    ours, x = module(), draw(BATCH, KEYS, WIDTH)
    added, padding = draw(KEYS, KEYS, seed=5), hidden(BATCH, KEYS)
    mixed, _ = ours(x, x, x, padding, attn_mask=added)
    as_floats = torch.zeros(BATCH, KEYS, dtype=torch.float64).masked_fill(padding, float("-inf"))
    torch.testing.assert_close(mixed, ours(x, x, x, as_floats, attn_mask=added)[0], atol=1e-12, rtol=1e-12)


@modes
def test_module_equals_its_formula_written_out(mode) -> None:
    ours, x = module(**MODES[mode]), draw(BATCH, KEYS, WIDTH)
    q, k, v = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (x @ ours.in_proj_weight.T + ours.in_proj_bias).chunk(3, -1)
    )
    left, right = ours.max_distance or (0, 0)
    distance = torch.arange(KEYS) - torch.arange(KEYS)[:, None]
    rows = distance.clamp(-left, right) + left
    nothing = torch.zeros(1 + left + right, WIDTH // HEADS, dtype=torch.float64)
    a_k, a_v = (
        (nothing if table is None else table).expand(HEADS, -1, -1)[:, rows]  # [heads, query, key, d]
        for table in (ours.relative_position_keys, ours.relative_position_values)
    )
    logits = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + a_k) / (WIDTH // HEADS) ** 0.5
    weights = logits.softmax(-1)
    heads = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + a_v)
    out, found_weights = ours(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(found_weights, weights, atol=1e-10, rtol=1e-10)
    true = ours.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, true, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("max_distance", "labels"),
    [(2, 5), ((3, 1), 5), ((4, 0), 5), (0, 1), ((0, 6), 7)],
)
@pytest.mark.parametrize("is_per_head", [True, False])
def test_tables_have_a_row_for_each_distance_and_their_sharing_shows(
    max_distance, labels, is_per_head
) -> None:
    ours = module(max_distance=max_distance, relative_per_head=is_per_head)
    shape = (HEADS, labels, WIDTH // HEADS) if is_per_head else (labels, WIDTH // HEADS)
    assert ours.relative_position_keys.shape == shape
    assert ours.relative_position_values.shape == shape


@pytest.mark.parametrize(
    ("settings", "present"),
    [
        ({}, set()),
        ({"max_distance": 2}, {"keys", "values"}),
        ({"max_distance": 2, "relative_values": False}, {"keys"}),
        ({"max_distance": 2, "relative_keys": False}, {"values"}),
        ({"max_distance": 2, "relative_keys": False, "relative_values": False}, set()),
        ({"relative_per_head": True}, set()),
    ],
)
def test_what_a_mode_does_not_use_does_not_exist(settings, present) -> None:
    names = {name for name, _ in module(**settings).named_parameters()}
    assert {name for name in names if "relative" in name} == {f"relative_position_{x}" for x in present}
    assert set(module(**settings).state_dict()) == names


@modes
def test_what_padding_holds_changes_nothing(mode) -> None:
    ours, x = module(**MODES[mode]), draw(BATCH, KEYS, WIDTH)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, 4:] = True
    other = x.masked_fill(padding[..., None], 1e6)
    found, true = (ours(y, y, y, padding)[0][~padding] for y in (other, x))
    torch.testing.assert_close(found, true, atol=1e-12, rtol=1e-12)


@modes
def test_a_row_of_padding_alone_gives_finite_outputs_and_gradients(mode) -> None:
    ours, x = module(**MODES[mode]), draw(BATCH, KEYS, WIDTH).requires_grad_()
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    out, weights = ours(x, x, x, padding)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert (weights[1] == 0).all()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


@modes
def test_any_length_runs_and_the_state_holds_nothing_of_a_length(mode) -> None:
    ours = module(**MODES[mode], dtype=torch.float32)
    shapes = {name: x.shape for name, x in ours.state_dict().items()}
    for n in (0, 1, 3, 300):
        x = draw(1, n, WIDTH).float()
        out, weights = ours(x, x, x)
        assert out.shape == x.shape
        assert weights.shape == (1, n, n)
        assert out.isfinite().all()
    assert {name: x.shape for name, x in ours.state_dict().items()} == shapes
    assert not list(ours.buffers())


@modes
def test_low_precision_autocast_is_near_to_full_precision(mode) -> None:
    ours, x = module(**MODES[mode], dtype=torch.float32), draw(BATCH, KEYS, WIDTH).float()
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, 5:] = True
    true, true_weights = ours(x, x, x, padding)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = ours(x, x, x, padding)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())
    torch.testing.assert_close(out.float(), true, atol=0.1, rtol=0.1)
    torch.testing.assert_close(weights.float(), true_weights, atol=0.05, rtol=0.05)


def test_dropout_acts_while_training_only_and_never_on_the_weights_returned() -> None:
    ours, x = module(max_distance=2, dropout=0.5), draw(BATCH, KEYS, WIDTH)
    with torch.no_grad():
        trained, weights = ours(x, x, x)
        ours.eval()
        true, true_weights = ours(x, x, x)
        assert torch.equal(true, ours(x, x, x)[0])
    assert not torch.allclose(trained, true)
    torch.testing.assert_close(weights, true_weights, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(true_weights.sum(-1), torch.ones(BATCH, KEYS).double())


@pytest.mark.parametrize(("width", "heads"), [(16, 3), (4, 8)])
def test_heads_that_do_not_divide_the_width_are_refused(width, heads) -> None:
    with pytest.raises(ValueError, match=rf"^num_heads must divide embed_dim = {width}; got {heads}\."):
        RelativeMultiheadAttention(width, heads, max_distance=2)


@pytest.mark.parametrize("heads", [0, -4])
def test_no_head_at_all_is_refused(heads) -> None:
    with pytest.raises(ValueError, match=rf"^num_heads must be at least 1; got {heads}\."):
        RelativeMultiheadAttention(16, heads, max_distance=2)


@pytest.mark.parametrize("bias", [True, False])
def test_projected_heads_are_those_of_the_packed_weights(bias) -> None:
    ours = module(bias=bias)
    query, key, value = draw(2, 3, WIDTH), draw(2, KEYS, WIDTH, seed=2), draw(2, KEYS, WIDTH, seed=3)
    for given in ((query, query, query), (query, key, key), (query, key, value)):
        biases = [None] * 3 if ours.in_proj_bias is None else ours.in_proj_bias.chunk(3)
        for found, x, w, b in zip(
            ours.project(*given), given, ours.in_proj_weight.chunk(3), biases, strict=True
        ):
            true = nn.functional.linear(x, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            torch.testing.assert_close(found, true, atol=1e-12, rtol=1e-12)


def test_new_tables_lie_within_xavier_bounds_of_one_head_and_are_not_zero() -> None:
    for is_per_head, sides in itertools.product((True, False), (0, 2, (3, 1))):
        ours = module(max_distance=sides, relative_per_head=is_per_head)
        for table in (ours.relative_position_keys, ours.relative_position_values):
            bound = (6 / (table.shape[-2] + table.shape[-1])) ** 0.5
            assert 0 < table.abs().max() <= bound


def test_module_prints_its_settings() -> None:
    for settings, told in (
        ({"max_distance": 2}, "max_distance=(2, 2), relative keys and values"),
        ({"max_distance": (3, 1), "relative_keys": False}, "max_distance=(3, 1), relative values"),
        (
            {"max_distance": 0, "relative_values": False, "relative_per_head": True},
            "max_distance=(0, 0), relative keys, per head",
        ),
        ({}, "no relative positions"),
        ({"max_distance": 2, "relative_keys": False, "relative_values": False}, "no relative positions"),
    ):
        assert module(**settings).extra_repr() == f"embed_dim=16, num_heads=4, {told}"

"""Self-attention is known by its lengths: copies of a tensor, queries alone, torch's layers."""

import functools
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relpos.nn import (
    KeyValueCache,
    RelativeMultiheadAttention,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoderLayer,
    StaticKeyValueCache,
)

WIDTH, HEADS, BATCH, LENGTH = 16, 4, 2, 7


def module(**settings) -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    options = {"batch_first": True, "dtype": torch.float64, "max_distance": 2} | settings
    made = RelativeMultiheadAttention(WIDTH, HEADS, **options)
    with torch.no_grad():
        made.in_proj_bias.normal_()
    return made


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found: object, true: object) -> None:
    torch.testing.assert_close(found, true, atol=1e-12, rtol=1e-12)


def gradients(ours: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    ours.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in ours.named_parameters()}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_copies_of_one_tensor_are_that_tensor(batch_first, is_causal) -> None:
    ours, x = module(batch_first=batch_first), draw(BATCH, LENGTH, WIDTH)
    true = gradients(ours, x, lambda x: ours(x, x, x, is_causal=is_causal)[0])
    for copies in (lambda x: (x[:], x[:], x[:]), lambda x: (x, x.clone(), x), lambda x: (x, x, x + 0)):
        near(gradients(ours, x, lambda x, c=copies: ours(*c(x), is_causal=is_causal)[0]), true)


def test_positions_added_to_query_and_key_alone_equal_the_formula() -> None:
    ours, x, added = module(), draw(BATCH, LENGTH, WIDTH), draw(LENGTH, WIDTH, seed=2)
    found, weights = ours(x + added, x + added, x, average_attn_weights=False)
    parts = zip(
        (x + added, x + added, x), ours.in_proj_weight.chunk(3), ours.in_proj_bias.chunk(3), strict=True
    )
    q, k, v = ((y @ w.T + b).unflatten(-1, (HEADS, -1)).transpose(1, 2) for y, w, b in parts)
    rows = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).clamp(-2, 2) + 2
    a_k, a_v = ours.relative_position_keys[rows], ours.relative_position_values[rows]
    logits = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + a_k) / (WIDTH // HEADS) ** 0.5
    near(weights, logits.softmax(-1))
    heads = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + a_v)
    near(found, ours.out_proj(heads.transpose(1, 2).flatten(2)))


def test_keys_and_values_of_other_widths_have_relative_positions_too() -> None:
    ours = RelativeMultiheadAttention(WIDTH, HEADS, kdim=8, vdim=6, batch_first=True, max_distance=2).double()
    given = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, 8), draw(BATCH, LENGTH, 6)
    before, _ = ours(*given)
    for name in ("relative_position_keys", "relative_position_values"):
        ours.get_parameter(name).data.zero_()
        after, _ = ours(*given)
        assert not torch.allclose(before, after)
        before = after


def test_full_backward_hooks_change_nothing() -> None:
    ours, x, seen = module(), draw(BATCH, LENGTH, WIDTH), []
    true = gradients(ours, x, lambda x: ours(x, x, x)[0])
    ours.register_full_backward_hook(lambda *_: seen.append("after"))
    ours.register_full_backward_pre_hook(lambda *_: seen.append("before"))
    near(gradients(ours, x, lambda x: ours(x, x, x)[0]), true)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_both_kinds_change_nothing(use_reentrant) -> None:
    ours, x = module(), draw(BATCH, LENGTH, WIDTH)
    attend = functools.partial(ours, need_weights=False)
    true = gradients(ours, x, lambda x: attend(x, x, x)[0])
    near(gradients(ours, x, lambda x: checkpoint(attend, x, x, x, use_reentrant=use_reentrant)[0]), true)


def test_vmap_over_three_arguments_is_one_call_for_each() -> None:
    ours, x = module(), draw(3, BATCH, LENGTH, WIDTH)
    found = torch.func.vmap(lambda q, k, v: ours(q, k, v, need_weights=False)[0])(x, x, x)
    near(found, torch.stack([ours(y, y, y, need_weights=False)[0] for y in x]))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_fully_sharded_attention_changes_nothing(alone) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ours, x = module(), draw(BATCH, LENGTH, WIDTH)
    true = gradients(ours, x, lambda x: ours(x, x, x)[0])
    fully_shard(ours, mesh=init_device_mesh("cpu", (1,)))
    found = gradients(ours, x, lambda x: ours(x, x, x)[0])
    near({name: getattr(y, "full_tensor", lambda y=y: y)() for name, y in found.items()}, true)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("is_batch", [False, True])
def test_the_last_queries_alone_are_the_last_rows_of_all(is_batch, batch_first, is_causal) -> None:
    ours = module(batch_first=batch_first, max_distance=(3, 1))
    x = draw(LENGTH, BATCH, WIDTH) if is_batch else draw(LENGTH, WIDTH)
    for last in (1, 3):
        tail, start = x[-last:], LENGTH - last
        starts = [start, torch.full((BATCH if is_batch else 1,), start)]
        turned = (lambda y: y.transpose(0, 1)) if is_batch and batch_first else (lambda y: y)
        whole, memory = turned(x), turned(x)
        true, true_weights = ours(whole, whole, whole, is_causal=is_causal)
        for given in starts:
            out, weights = ours(turned(tail), memory, memory, is_causal=is_causal, query_start=given)
            near(turned(out), turned(true)[-last:])
            near(weights, true_weights[..., -last:, :])


def test_each_sequence_may_have_its_own_start() -> None:
    ours, x = module(), draw(BATCH, LENGTH, WIDTH)
    true = ours(x, x, x, is_causal=True)[0]
    query = torch.stack((x[0, 2:4], x[1, 5:7]))
    found = ours(query, x, x, is_causal=True, query_start=torch.tensor([2, 5]))[0]
    near(found, torch.stack((true[0, 2:4], true[1, 5:7])))


@pytest.mark.parametrize("is_static", [False, True])
def test_beside_a_cache_query_start_counts_all_tokens_held(is_static) -> None:
    ours, x = module().requires_grad_(False).eval(), draw(BATCH, LENGTH, WIDTH)
    true = ours(x, x, x, is_causal=True)[0]
    sizes = {"batch": BATCH, "capacity": LENGTH + 2} if is_static else {}
    cache = ours.make_cache(**sizes)
    assert isinstance(cache, StaticKeyValueCache if is_static else KeyValueCache)
    ours(x[:, :3], x[:, :3], x[:, :3], is_causal=True, cache=cache)
    chunk = x[:, 3:]
    found, _ = ours(chunk[:, -1:], chunk, chunk, is_causal=True, cache=cache, query_start=LENGTH - 1)
    near(found, true[:, -1:])


def test_a_start_without_sense_is_refused_before_a_cache_is_filled() -> None:
    ours, x, cache = module(), draw(BATCH, LENGTH, WIDTH), KeyValueCache()
    for start, error, told in (
        (1.0, TypeError, "query_start must be an integer or an integer tensor [batch]; got float."),
        (torch.tensor([1, 2, 3]), ValueError, "query_start must be [batch] = [2]; got [3]."),
        (torch.tensor([1.0, 2.0]), TypeError, "query_start must be a tensor of integers; got torch.float32."),
    ):
        with pytest.raises(error, match=rf"^{re.escape(told)}"):
            ours(x[:, :1], x, x, cache=cache, query_start=start)
    assert cache.length == 0


@pytest.mark.parametrize("has_cache", [False, True])
def test_lengths_that_differ_need_a_start(has_cache) -> None:
    ours, x = module(), draw(BATCH, LENGTH, WIDTH)
    cache = KeyValueCache() if has_cache else None
    with pytest.raises(ValueError, match=r"^query_start must be given .*; got lengths 3 and 7\. "):
        ours(x[:, :3], x, x, cache=cache)
    # without positions nothing is asked
    assert module(max_distance=None)(x[:, :3], x, x)[0].shape == (BATCH, 3, WIDTH)


def test_causal_attention_to_a_cached_memory_takes_a_start() -> None:
    ours, memory = module(max_distance=None), draw(BATCH, LENGTH, WIDTH)
    cache = KeyValueCache(is_memory=True)
    for i in range(3):
        step = draw(BATCH, 1, WIDTH, seed=i)
        found = ours(step, memory, memory, is_causal=True, cache=cache, query_start=i)[0]
        near(found, ours(step, memory[:, : i + 1], memory[:, : i + 1])[0])


class Roomy(KeyValueCache):
    """A memory's cache of static capacity, as other libraries have them: more room than the memory fills."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(*(nn.functional.pad(x, (0, 0, 0, 3)) for x in (key, value)))


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_memory_cache_with_more_room_than_the_memory_is_named(is_masked) -> None:
    layer = RelativeTransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True, max_distance=2).double()
    tgt, memory = draw(BATCH, 3, WIDTH), draw(BATCH, LENGTH, WIDTH)
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool) if is_masked else None
    with pytest.raises(ValueError, match=r"^a memory cache must .* = 7; got 10 from a Roomy, "):
        layer(tgt, memory, memory_key_padding_mask=hidden, memory_cache=Roomy(is_memory=True))


def torchs_encoder(*, is_nested: bool, norm_first: bool = False) -> nn.TransformerEncoder:
    """torch's own encoder, with our attention in its layers."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 24, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_nested)
    for block in encoder.layers:
        block.self_attn = module()
        nn.init.normal_(block.self_attn.relative_position_keys)
    return encoder.eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_torchs_encoder_keeps_our_positions_in_eval_mode(is_nested, is_padded) -> None:
    encoder, x = torchs_encoder(is_nested=is_nested), draw(BATCH, LENGTH, WIDTH)
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, LENGTH - 3])[:, None]
    given = {"src_key_padding_mask": padding} if is_padded else {}
    true = encoder(x, **given).detach()  # with gradients torch has no fast path
    with torch.no_grad():
        found = encoder(x, **given)
    kept = ~padding if is_padded else torch.ones_like(padding)
    near(found[kept], true[kept])
    for block in encoder.layers:
        nn.init.zeros_(block.self_attn.relative_position_keys)
    assert not torch.allclose(encoder(x, **given)[kept], true[kept])


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_layer_equals_ours_with_the_same_weights_in_eval_mode(norm_first) -> None:
    theirs = torchs_encoder(is_nested=False, norm_first=norm_first).layers[0]
    ours = RelativeTransformerEncoderLayer(
        WIDTH, HEADS, 24, batch_first=True, norm_first=norm_first, max_distance=2, dtype=torch.float64
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    x, padding = draw(BATCH, LENGTH, WIDTH), torch.arange(LENGTH).expand(BATCH, -1) >= 5
    with torch.no_grad():
        for given in ({}, {"src_key_padding_mask": padding}, {"src_mask": torch.ones(7, 7).triu(1).bool()}):
            near(theirs(x, **given), ours(x, **given))


def test_torchs_encoder_is_told_of_our_attention_when_it_is_made() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
    layer.self_attn = module(dtype=torch.float32)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        nn.TransformerEncoder(layer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_torchs_decoder_layer_takes_our_attention_in_both_places() -> None:
    torch.manual_seed(3)
    theirs = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True, dtype=torch.float64).eval()
    theirs.self_attn, theirs.multihead_attn = module(), module(max_distance=None)
    ours = RelativeTransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True, max_distance=2).double().eval()
    ours.load_state_dict(theirs.state_dict())
    tgt, memory = draw(BATCH, 5, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=2)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        near(theirs(tgt, memory, future, tgt_is_causal=True), ours(tgt, memory, tgt_is_causal=True))


def test_a_module_attends_by_the_backend_that_it_is_given() -> None:
    x = draw(BATCH, LENGTH, WIDTH)
    layer = RelativeTransformerEncoderLayer(
        WIDTH, HEADS, 24, 0.0, batch_first=True, max_distance=2, dtype=torch.float64, backend="dense"
    )
    y = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(y).square().sum(), y, create_graph=True)
    grad.square().sum().backward()
    assert y.grad.isfinite().all()
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"^backend 'merged' cannot run this attention:"):
        module(backend="merged")(x, x, x, attn_mask=mask, need_weights=False)


@pytest.mark.parametrize("name", ["cpu", "merged"])
def test_a_refused_second_derivative_names_what_works_in_modules_too(name) -> None:
    ours, x = module(backend=name), draw(BATCH, LENGTH, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(ours(x, x, x, need_weights=False)[0].square().sum(), x, create_graph=True)
    with pytest.raises(
        NotImplementedError,
        match=rf'^backend "{name}" has no second derivative\. Give backend="dense" to relative_attention or '
        r"relation_attention, or to the module of relpos\.nn, which keeps it as its attribute `backend`\.$",
    ):
        grad.square().sum().backward()
    ours.backend = "dense"
    (grad,) = torch.autograd.grad(ours(x, x, x, need_weights=False)[0].square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad.isfinite().all()

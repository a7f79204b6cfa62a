"""Attributes of torch.nn's modules, for code that reads them: with torch's meaning, or listed as absent."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from small_modules import BATCH, HEADS, KEY, KEYS, QUERY, WIDTH, attention, draw, layer
from torch import nn

from relpos.nn import (
    RelativeMultiheadAttention,
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
PADDING = torch.arange(KEYS) >= torch.tensor([KEYS, 4])[:, None]
# each stands in docs/modules.md with its reason
ABSENT = {
    RelativeMultiheadAttention: {"_reset_parameters"},
    RelativeTransformerEncoderLayer: {"_sa_block", "_ff_block", "activation_relu_or_gelu"},
    RelativeTransformerDecoderLayer: {"_sa_block", "_mha_block", "_ff_block"},
    RelativeTransformerEncoder: set(),
    RelativeTransformerDecoder: set(),
    RelativeTransformer: {"_reset_parameters"},
}


def encoder_layer() -> RelativeTransformerEncoderLayer:
    return layer(RelativeTransformerEncoderLayer)


def torchs_layer(**settings) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, **settings)


def pairs() -> list[tuple[nn.Module, nn.Module]]:
    ours = layer(RelativeTransformerDecoderLayer)
    theirs = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True)
    return [
        (attention(max_distance=2), nn.MultiheadAttention(WIDTH, HEADS)),
        (encoder_layer(), torchs_layer()),
        (ours, theirs),
        (RelativeTransformerEncoder(encoder_layer(), 2), nn.TransformerEncoder(torchs_layer(), 2)),
        (RelativeTransformerDecoder(ours, 2), nn.TransformerDecoder(theirs, 2)),
        (
            RelativeTransformer(WIDTH, HEADS, 1, 1, 24, batch_first=True, max_distance=2),
            nn.Transformer(WIDTH, HEADS, 1, 1, 24, batch_first=True),
        ),
    ]


def test_every_attribute_of_torchs_modules_is_there_or_listed_with_its_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for ours, theirs in pairs():
        missing = set(dir(theirs)) - set(dir(ours)) - {"__constants__"}
        assert missing == ABSENT[type(ours)], type(ours)
        assert all(f"`{name}`" in page for name in missing)
        assert set(dict(ours.named_children())) == set(dict(theirs.named_children()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (WIDTH, WIDTH), (8, 6), (WIDTH, 6), (8, None)])
def test_without_positions_attention_has_torchs_values(kdim, vdim, bias) -> None:
    given = {"dropout": 0.25, "bias": bias, "kdim": kdim, "vdim": vdim, "batch_first": True}
    ours = RelativeMultiheadAttention(WIDTH, HEADS, **given, max_distance=None)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **given)
    for name in (
        "embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn",
        "_qkv_same_embed_dim", "bias_k", "bias_v",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    for name, x in theirs._parameters.items():
        assert (x is None) == (ours._parameters[name] is None), name


def test_with_positions_attention_forbids_computing_it_from_the_packed_weights() -> None:
    for settings in ({}, {"relative_keys": False}, {"relative_values": False}):
        ours = attention(max_distance=2, **settings)
        assert ours.in_proj_weight is not None
        assert ours._qkv_same_embed_dim is False
        assert copy.deepcopy(ours)._qkv_same_embed_dim is False
    assert attention(max_distance=2, relative_keys=False, relative_values=False)._qkv_same_embed_dim is True


@pytest.mark.parametrize("max_distance", [None, 2])
def test_names_that_are_none_change_no_state_dict(max_distance) -> None:
    ours, theirs = attention(max_distance=max_distance), nn.MultiheadAttention(WIDTH, HEADS)
    tables = {name for name in ours.state_dict() if name.startswith("relative_position_")}
    assert set(ours.state_dict()) - tables == set(theirs.state_dict())


def test_a_state_dict_with_an_appended_key_does_not_load() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"bias_k\", \"bias_v\""):
        attention().load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("is_packed", [True, False])
def test_torchs_function_computes_our_attention_without_positions_from_its_attributes(is_packed) -> None:
    ours = attention(batch_first=False, **({} if is_packed else {"kdim": 8, "vdim": 6})).eval()
    query, key, value = (
        x.transpose(0, 1)
        for x in (QUERY, *((KEY, KEY) if is_packed else (KEY[..., :8], draw(BATCH, KEYS, 6))))
    )
    assert ours._qkv_same_embed_dim == is_packed
    true, true_weights = nn.functional.multi_head_attention_forward(
        query,
        key,
        value,
        ours.embed_dim,
        ours.num_heads,
        ours.in_proj_weight,
        ours.in_proj_bias,
        ours.bias_k,
        ours.bias_v,
        ours.add_zero_attn,
        ours.dropout,
        ours.out_proj.weight,
        ours.out_proj.bias,
        training=ours.training,
        key_padding_mask=PADDING,
        use_separate_proj_weight=not ours._qkv_same_embed_dim,
        q_proj_weight=ours.q_proj_weight,
        k_proj_weight=ours.k_proj_weight,
        v_proj_weight=ours.v_proj_weight,
    )
    out, weights = ours(query, key, value, PADDING)
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(weights, true_weights)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(
    "mask", [None, torch.ones(KEYS, KEYS).triu(1), torch.zeros(BATCH * HEADS, KEYS, KEYS)]
)
def test_masks_are_merged_as_torch_merges_them(mask, padding) -> None:
    padding = None if padding is None else padding.float()
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    for found, true in zip(
        attention().merge_masks(mask, padding, KEY), theirs.merge_masks(mask, padding, KEY), strict=True
    ):
        assert torch.equal(found, true) if isinstance(true, torch.Tensor) else found == true


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "given", [{}, {"src_key_padding_mask": PADDING}, {"mask": torch.ones(7, 7).triu(1) > 0}]
)
def test_torchs_encoder_takes_its_fast_path_with_attention_without_positions(given, monkeypatch) -> None:
    torch.manual_seed(0)
    block = torchs_layer(dropout=0.0)
    block.self_attn = attention()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = nn.TransformerEncoder(block, 2).eval()
    slow = encoder(KEY, **given)  # gradients rule the fast path out

    def forbidden(*_args, **_kwargs) -> None:
        raise AssertionError("the fast path calls no attention module")

    monkeypatch.setattr(RelativeMultiheadAttention, "forward", forbidden)
    with torch.no_grad():
        fast = encoder(KEY, **given)
    kept = ~given.get("src_key_padding_mask", torch.zeros(BATCH, KEYS, dtype=torch.bool))
    torch.testing.assert_close(fast[kept], slow[kept], atol=1e-5, rtol=1e-5)


def test_an_encoder_tells_what_it_was_given_of_nested_tensors() -> None:
    ours = RelativeTransformerEncoder(encoder_layer(), 2, None, False, True)
    assert (ours.enable_nested_tensor, ours.mask_check, ours.use_nested_tensor) == (False, True, False)
    ours = RelativeTransformerEncoder(encoder_layer(), 2, mask_check=False)
    assert (ours.enable_nested_tensor, ours.mask_check, ours.use_nested_tensor) == (True, False, False)


def test_torchs_stacks_take_our_layers() -> None:
    encoder, decoder = encoder_layer().eval(), layer(RelativeTransformerDecoderLayer).eval()
    future = nn.Transformer.generate_square_subsequent_mask(KEYS)
    given = {"tgt_mask": future, "memory_key_padding_mask": PADDING.float()}
    torchs = nn.TransformerDecoder(decoder, 2).eval()
    ours = RelativeTransformerDecoder(decoder, 2).eval()
    torch.testing.assert_close(
        torchs(KEY, QUERY[:, :1].expand(-1, KEYS, -1), **given),
        ours(KEY, QUERY[:, :1].expand(-1, KEYS, -1), **given),
    )
    torchs = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval()
    ours = RelativeTransformerEncoder(encoder, 2).eval()
    torch.testing.assert_close(
        torchs(KEY, src_key_padding_mask=PADDING), ours(KEY, src_key_padding_mask=PADDING)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_output_and_weights_have_the_dtype_of_the_module(batch_first, is_training, dtype) -> None:
    ours = attention(batch_first=batch_first, max_distance=2).to(dtype).train(is_training)
    x = KEY.to(dtype)
    with torch.set_grad_enabled(is_training):
        for need_weights in (True, False):
            out, weights = ours(x, x, x, need_weights=need_weights)
            assert (out.dtype, out.shape) == (dtype, x.shape)
            assert weights is None or weights.dtype == dtype

"""State dicts of torch.nn's modules in ours: they load, and with zero tables nothing can be told apart."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relpos.nn import (
    RelativeMultiheadAttention,
    RelativeTransformer,
    RelativeTransformerDecoder,
    RelativeTransformerDecoderLayer,
    RelativeTransformerEncoder,
    RelativeTransformerEncoderLayer,
)

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

WIDTH, HEADS, INNER, BATCH, TARGET, SOURCE, LAYERS = 16, 2, 24, 2, 5, 6, 2
RELATIVE = {"max_distance": (3, 1)}
SIZES = {"dim_feedforward": INNER, "dropout": 0.0, "layer_norm_eps": 1e-3, "dtype": torch.float64}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    """`module` with weights that are all different, norms, biases and layers too."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def tables(module: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in module.named_parameters() if "relative_position_" in name}


def attention_pair(**options) -> tuple[nn.Module, nn.Module]:
    sizes = {"dtype": torch.float64} | {k: options[k] for k in ("bias", "batch_first") if k in options}
    return (
        nn.MultiheadAttention(WIDTH, HEADS, **sizes),
        RelativeMultiheadAttention(WIDTH, HEADS, **sizes, **RELATIVE),
    )


def encoder_layer_pair(**options) -> tuple[nn.Module, nn.Module]:
    return (
        nn.TransformerEncoderLayer(WIDTH, HEADS, **SIZES, **options),
        RelativeTransformerEncoderLayer(WIDTH, HEADS, **SIZES, **options, **RELATIVE),
    )


def decoder_layer_pair(**options) -> tuple[nn.Module, nn.Module]:
    return (
        nn.TransformerDecoderLayer(WIDTH, HEADS, **SIZES, **options),
        RelativeTransformerDecoderLayer(WIDTH, HEADS, **SIZES, **options, **RELATIVE),
    )


def encoder_pair(**options) -> tuple[nn.Module, nn.Module]:
    theirs, ours = encoder_layer_pair(**options)
    norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    return (
        nn.TransformerEncoder(theirs, LAYERS, norm, enable_nested_tensor=False),
        RelativeTransformerEncoder(ours, LAYERS, copy.deepcopy(norm), enable_nested_tensor=False),
    )


def decoder_pair(**options) -> tuple[nn.Module, nn.Module]:
    theirs, ours = decoder_layer_pair(**options)
    return nn.TransformerDecoder(theirs, LAYERS), RelativeTransformerDecoder(ours, LAYERS)


def transformer_pair(**options) -> tuple[nn.Module, nn.Module]:
    arguments = (WIDTH, HEADS, LAYERS, LAYERS)
    return (
        nn.Transformer(*arguments, **SIZES, **options),
        RelativeTransformer(*arguments, **SIZES, **options, **RELATIVE),
    )


PAIRS: dict[str, Callable[..., tuple[nn.Module, nn.Module]]] = {
    "attention": attention_pair,
    "encoder layer": encoder_layer_pair,
    "decoder layer": decoder_layer_pair,
    "encoder": encoder_pair,
    "decoder": decoder_pair,
    "transformer": transformer_pair,
}
pairs = pytest.mark.parametrize("pair", PAIRS)
# what torch says of its own Transformer where norm_first or an odd layout rules out its fast path
quiet = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def padding(length: int) -> Tensor:
    hidden = torch.zeros(BATCH, length, dtype=torch.bool)
    hidden[1, length - 2 :] = True
    return hidden


def added(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def arguments(pair: str, batch_first: bool, kind: str, is_batch: bool = True) -> tuple[list, dict]:
    """What to call a module with: tensors, and masks of that kind."""
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    cut = turn if is_batch else (lambda x: x[0])
    src, tgt = cut(draw(BATCH, SOURCE, WIDTH)), cut(draw(BATCH, TARGET, WIDTH, seed=2))
    source, target = (added(padding(n)) if is_batch else added(padding(n))[1] for n in (SOURCE, TARGET))
    cross = draw(TARGET, SOURCE, seed=3)
    if kind == "bool":
        source, target, cross = source < 0, target < 0, cross > 1
    future = causal if kind == "float" else (lambda n: causal(n) < 0)
    if pair == "attention":
        inputs, masks = [src, src, src], {"attn_mask": future(SOURCE), "key_padding_mask": source}
    elif pair == "encoder layer":
        inputs, masks = [src], {"src_mask": future(SOURCE), "src_key_padding_mask": source}
    elif pair == "encoder":
        inputs, masks = [src], {"mask": future(SOURCE), "src_key_padding_mask": source}
    else:
        inputs = [src, tgt] if pair == "transformer" else [tgt, src]
        masks = {
            "tgt_mask": future(TARGET),
            "memory_mask": cross,
            "tgt_key_padding_mask": target,
            "memory_key_padding_mask": source,
        }
    return inputs, {} if kind == "none" else masks


def loaded(pair: str, **options) -> tuple[nn.Module, nn.Module]:
    """torch's module and ours, with its weights and zero tables."""
    theirs, ours = PAIRS[pair](**options)
    randomised(theirs)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for table in tables(ours).values():
            table.zero_()
    return theirs, ours


def assert_same(pair: str, theirs: nn.Module, ours: nn.Module, inputs: list, masks: dict) -> None:
    """Equal outputs, and equal gradients of every input and every weight that both have."""
    found_grads, outs = [], []
    for module in (theirs, ours):
        module.zero_grad()
        own = [x.detach().clone().requires_grad_() for x in inputs]
        if pair == "attention":
            own = [own[0]] * 3
        out = module(*own, **masks)
        outs.extend(x for x in (out if isinstance(out, tuple) else (out,)) if x is not None)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        grads = {name: x.grad for name, x in module.named_parameters() if name not in tables(module)}
        found_grads.append(grads | {f"input {i}": x.grad for i, x in enumerate(own)})
    half = len(outs) // 2
    for found, true in zip(outs[half:], outs[:half], strict=True):
        torch.testing.assert_close(found, true, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found_grads[1], found_grads[0], atol=1e-10, rtol=1e-10)
    for name, table in tables(ours).items():
        assert table.grad is not None, name
        assert table.grad.isfinite().all(), name


@quiet
@pairs
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_with_torchs_weights_and_zero_tables_outputs_and_gradients_are_torchs(
    pair, kind, batch_first, norm_first
) -> None:
    theirs, ours = loaded(pair, batch_first=batch_first, norm_first=norm_first)
    assert_same(pair, theirs, ours, *arguments(pair, batch_first, kind))


@quiet
@pytest.mark.parametrize("pair", [name for name in PAIRS if name != "attention"])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.functional.silu, torch.tanh])
def test_so_it_is_with_any_activation(pair, activation) -> None:
    theirs, ours = loaded(pair, activation=activation, batch_first=True)
    assert_same(pair, theirs, ours, *arguments(pair, True, "bool"))


@quiet
@pairs
def test_so_it_is_without_biases(pair) -> None:
    theirs, ours = loaded(pair, bias=False, batch_first=True)
    assert_same(pair, theirs, ours, *arguments(pair, True, "bool"))


@quiet
@pairs
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_so_it_is_with_one_sequence_that_is_no_batch(pair, kind, batch_first) -> None:
    theirs, ours = loaded(pair, batch_first=batch_first)
    assert_same(pair, theirs, ours, *arguments(pair, batch_first, kind, is_batch=False))


@quiet
@pairs
def test_tables_that_torchs_state_lacks_stay_as_they_are(pair) -> None:
    theirs, ours = PAIRS[pair]()
    before = {name: x.detach().clone() for name, x in tables(ours).items()}
    assert before
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    for name, table in tables(ours).items():
        assert torch.equal(table, before[name])
        assert table.any()
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)


@quiet
@pairs
def test_one_of_two_tables_is_an_error_that_names_the_other(pair) -> None:
    _, ours = PAIRS[pair]()
    for name in tables(ours):
        state = {key: x for key, x in ours.state_dict().items() if key != name}
        with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"{name}\""):
            ours.load_state_dict(state)


@quiet
@pairs
def test_unknown_and_missing_names_are_errors_as_ever(pair) -> None:
    theirs, ours = PAIRS[pair]()
    state = theirs.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"relative_keys\""):
        ours.load_state_dict(state | {"relative_keys": torch.zeros(1)})
    with pytest.raises(
        RuntimeError, match=r"Unexpected key\(s\) in state_dict: \".*relative_position_keys\""
    ):
        theirs.load_state_dict(ours.state_dict())
    name = next(name for name in state if name.endswith("in_proj_weight"))
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"{name}\""):
        ours.load_state_dict({key: x for key, x in state.items() if key != name})


def test_a_state_without_anything_of_the_module_lists_its_tables_as_missing() -> None:
    _, ours = attention_pair()
    missing, unexpected = ours.load_state_dict({}, strict=False)
    assert {"relative_position_keys", "relative_position_values", "in_proj_weight"} <= set(missing)
    assert not unexpected


def test_a_table_of_another_size_is_refused_by_name_and_sizes() -> None:
    for other in (RelativeMultiheadAttention(WIDTH, HEADS, max_distance=2), None):
        state = RelativeMultiheadAttention(WIDTH, HEADS, max_distance=1, relative_per_head=other is None)
        ours = RelativeMultiheadAttention(WIDTH, HEADS, max_distance=1) if other is None else other
        with pytest.raises(RuntimeError, match=r"size mismatch for relative_position_keys: copying a param"):
            ours.load_state_dict(state.state_dict())


def test_a_table_without_values_to_keep_is_missing() -> None:
    with torch.device("meta"):
        _, ours = attention_pair()
    theirs, _ = attention_pair()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"relative_position_keys\""):
        ours.load_state_dict(theirs.state_dict(), assign=True)


@quiet
@pairs
def test_a_state_goes_through_safetensors_and_copies_unchanged(pair, tmp_path: Path) -> None:
    _, ours = PAIRS[pair](batch_first=True)
    randomised(ours)
    save_file(ours.state_dict(), tmp_path / "weights.safetensors")
    _, other = PAIRS[pair](batch_first=True)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    inputs, masks = arguments(pair, True, "bool")
    copied = copy.deepcopy(ours)
    for twin in (other, copied):
        found, true = (module(*inputs, **masks) for module in (twin, ours))
        torch.testing.assert_close(found, true, atol=0, rtol=0)
    with torch.no_grad():
        for table in tables(copied).values():
            table.zero_()
    assert all(table.any() for table in tables(ours).values())

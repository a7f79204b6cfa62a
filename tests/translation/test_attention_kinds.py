"""`attn_implementation`: every kind of attention gives the same, and no other name is looked up anywhere."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_model import POSITIONS, SIZES, assert_close, model, new_cache, padded, tokens
from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM, EncoderDecoderCache, StaticCache

from relpos.translation.config import RelposConfig
from relpos.translation.model import RelposForConditionalGeneration

KINDS = ("relpos", "eager", "sdpa")
SINUSOIDAL = POSITIONS["sinusoidal"]
# "sdpa" has no relative positions
OTHERS = [("eager", "relative"), ("eager", "per head"), ("eager", "learned"), ("sdpa", "sinusoidal")]
each_kind = pytest.mark.parametrize(("kind", "positions"), OTHERS)


def pair(kind: str, positions: str) -> tuple[RelposForConditionalGeneration, RelposForConditionalGeneration]:
    """Two models of the same weights, with attention of this kind and of the default one."""
    found, true = model(**POSITIONS[positions], attn_implementation=kind), model(**POSITIONS[positions])
    assert (found.config._attn_implementation, true.config._attn_implementation) == (kind, "relpos")
    return found, true


@each_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_gives_the_same(kind, positions, side) -> None:
    source, source_mask = padded([tokens(1, n, seed=n)[0] for n in (5, 1, 3)], side)
    target, target_mask = padded([tokens(1, n, seed=n)[0] for n in (2, 4, 1)], side)
    source_mask[1] = 0
    outs = [
        made(source, source_mask, decoder_input_ids=target, decoder_attention_mask=target_mask).logits
        for made in pair(kind, positions)
    ]
    assert outs[0].isfinite().all()
    assert_close(*outs)


def static_cache(made: RelposForConditionalGeneration) -> EncoderDecoderCache:
    return EncoderDecoderCache(*(StaticCache(config=made.config, max_cache_len=n) for n in (9, 8)))


@each_kind
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("chunks", [(1, 1, 3, 2), (4, 3)])
def test_chunks_with_a_cache_give_one_pass(kind, positions, is_static, chunks) -> None:
    found, true = pair(kind, positions)
    source, target = tokens(2, 5), tokens(2, 7)
    mask = torch.ones_like(target)
    mask[0, :2] = 0
    cache = static_cache(found) if is_static else new_cache()
    outs, start = [], 0
    for chunk in chunks:
        outs.append(
            found(
                source,
                decoder_input_ids=target[:, start : start + chunk],
                decoder_attention_mask=mask[:, : start + chunk],
                cache=cache,
            ).logits
        )
        start += chunk
    assert_close(
        torch.cat(outs, 1), true(source, decoder_input_ids=target, decoder_attention_mask=mask).logits
    )


def masks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """A random mask of whom to attend to, in each form."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.4
    # a row without a key, too
    allowed[0, :, 1] = False
    added = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return {
        "bool": allowed,
        "integer": allowed.long(),
        "float": added,
        "float with -inf": added.masked_fill(~allowed, float("-inf")),
    }


@each_kind
@pytest.mark.parametrize(
    ("form", "heads"), [("bool", 2), ("integer", 1), ("float", 1), ("float with -inf", 2)]
)
def test_masks_of_four_dimensions_give_the_same(kind, positions, form, heads) -> None:
    given = {
        "attention_mask": masks((2, heads, 5, 5))[form],
        "decoder_attention_mask": masks((2, heads, 4, 4))[form],
    }
    outs = []
    for made in pair(kind, positions):
        states = made.get_encoder()(tokens(2, 5), given["attention_mask"]).last_hidden_state
        cross = masks((2, heads, 4, 5))[form]
        out = made.get_decoder()(tokens(2, 4), given["decoder_attention_mask"], states, cross)
        outs.append(out.last_hidden_state)
    assert outs[0].isfinite().all()
    assert_close(*outs)


@each_kind
def test_gradients_are_the_same(kind, positions) -> None:
    labels = tokens(2, 4)
    labels[0, :2] = -100
    found, true = pair(kind, positions)
    for made in (found, true):
        made(tokens(2, 5), torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), labels=labels).loss.backward()
    for (name, x), y in zip(found.named_parameters(), true.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_weights_keeps_their_mean_and_trains(kind) -> None:
    settings = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.5}
    made = model(**SINUSOIDAL, **settings, attn_implementation=kind, encoder_layers=1, norm_first=False)
    attention = made.model.encoder.layers[0].self_attn
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    true = attention(x)[0]
    made.train()
    torch.manual_seed(0)
    found = attention(x.expand(3000, -1, -1))[0]
    assert not torch.equal(found[0], found[1])
    error = (found.mean(0) - true).abs() / (found.std(0) / 3000**0.5)
    assert error.max() < 5
    made(tokens(2, 5), labels=tokens(2, 4)).loss.backward()
    assert all(x.grad.isfinite().all() for x in made.parameters())


def test_a_change_of_kind_changes_what_runs_and_not_what_comes_out(monkeypatch) -> None:
    made = model(**SINUSOIDAL)
    calls: list[str] = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "relpos.translation.attention._plain_attention",
        lambda q, k, v, **_: calls.append("sdpa") or plain(q, k, v),
    )
    monkeypatch.setattr(
        made.model.encoder.layers[0].self_attn.core,
        "forward",
        lambda q, k, v, *_, need_weights, **__: (
            calls.append(f"core {need_weights}") or (plain(q, k, v), None)
        ),
    )
    made.model.encoder.layers[1] = torch.nn.Identity()
    made.model.encoder.layers[1].forward = lambda x, *_, **__: x
    truth = made.get_encoder()(tokens(2, 5)).last_hidden_state
    for kind in ("eager", "sdpa", "relpos"):
        made.set_attn_implementation(kind)
        assert_close(made.get_encoder()(tokens(2, 5)).last_hidden_state, truth)
    assert calls == ["core False", "core True", "sdpa", "core False"]


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [("eager", None), ("relpos", "eager"), ("eager", "sdpa"), ("sdpa", "relpos")],
)
def test_a_model_saved_with_one_kind_loads_with_another(saved_with, loaded_with, tmp_path: Path) -> None:
    made = model(**SINUSOIDAL, attn_implementation=saved_with).float()
    made.save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text()
    for cls in (RelposForConditionalGeneration, AutoModelForSeq2SeqLM):
        loaded = cls.from_pretrained(tmp_path, attn_implementation=loaded_with)
        assert loaded.config._attn_implementation == (loaded_with or "relpos")
        given = {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
        torch.testing.assert_close(loaded(**given).logits, made(**given).logits)


def from_config(name: str, folder: Path) -> None:
    AutoModelForSeq2SeqLM.from_config(RelposConfig(**SIZES), attn_implementation=name)


def by_constructor(name: str, folder: Path) -> None:
    config = RelposConfig(**SIZES)
    config._attn_implementation = name
    RelposForConditionalGeneration(config)


def by_config(name: str, folder: Path) -> None:
    RelposForConditionalGeneration(RelposConfig(**SIZES, attn_implementation=name))


def by_setting(name: str, folder: Path) -> None:
    RelposForConditionalGeneration(RelposConfig(**SIZES)).set_attn_implementation(name)


def by_setting_the_encoder(name: str, folder: Path) -> None:
    RelposForConditionalGeneration(RelposConfig(**SIZES)).get_encoder().set_attn_implementation(name)


def by_file(name: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": name}))
    AutoModelForSeq2SeqLM.from_pretrained(folder)


def loads(cls: type) -> Callable[[str, Path], None]:
    return lambda name, folder: cls.from_pretrained(folder, attn_implementation=name)


DOORS = {
    "config": by_config,
    "constructor": by_constructor,
    "from_config": from_config,
    "set_attn_implementation": by_setting,
    "set_attn_implementation of the encoder": by_setting_the_encoder,
    "config.json": by_file,
    "from_pretrained": loads(RelposForConditionalGeneration),
    "AutoModelForSeq2SeqLM": loads(AutoModelForSeq2SeqLM),
    "AutoModel": loads(AutoModel),
}
doors = pytest.mark.parametrize("door", DOORS)


@pytest.fixture
def nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a connection is opened, or a kernel is asked for."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was looked up")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", refuse)
    # transformers asks the hub unless it is told to be offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")


@doors
@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/x", "paged|eager", "spda"])
@pytest.mark.usefixtures("nothing_is_looked_up")
def test_another_name_is_refused_at_every_door(door, name, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    call = lambda: DOORS[door](name, tmp_path)  # noqa: E731
    refuses_setting(call, [*map(repr, KINDS), repr(name)])


def refuses_setting(call: Callable[[], None], said: list[str]) -> None:
    """The error names the setting, after the file that it is in, if it is in one."""
    with pytest.raises(ValueError, match="attn_implementation must be") as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert [word for word in said if word not in message] == [], message


@doors
@pytest.mark.usefixtures("nothing_is_looked_up")
def test_sdpa_is_refused_where_there_are_relative_positions(door, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    refuses_setting(lambda: DOORS[door]("sdpa", tmp_path), ["relpos", "eager", "sdpa", "relative positions"])


def test_relative_tables_that_are_switched_off_allow_sdpa() -> None:
    settings = {"relative_keys": False, "relative_values": False}
    made, true = model(**settings, attn_implementation="sdpa"), model(**settings)
    given = {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
    assert_close(made(**given).logits, true(**given).logits)

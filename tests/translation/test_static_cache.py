"""A cache of fixed size, and torch.compile: one graph serves all steps of decoding."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from test_model import PAD, POSITIONS, START, assert_close, model, padded, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from relpos.translation.model import RelposForConditionalGeneration

SMALL = {"encoder_layers": 1, "decoder_layers": 1}
SOURCE, SOURCE_MASK = padded([tokens(1, n, seed=n)[0] for n in (4, 2)], "right")
STARTS = torch.full((2, 1), START)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def static_cache(made: RelposForConditionalGeneration, *, target: int, source: int) -> EncoderDecoderCache:
    sides = (StaticCache(config=made.config, max_cache_len=length) for length in (target, source))
    return EncoderDecoderCache(*sides)


@torch.no_grad()
def encode(made: RelposForConditionalGeneration) -> BaseModelOutput:
    return made.get_encoder()(SOURCE, SOURCE_MASK)


def decoded(call, encoded, target: Tensor, mask: Tensor | None, cache, *, start: int, chunk: int) -> Tensor:
    """Scores of the target from `start` on, chunk by chunk."""
    outs = []
    for i in range(start, target.shape[1], chunk):
        with torch.no_grad():
            out = call(
                encoder_outputs=encoded,
                attention_mask=SOURCE_MASK,
                decoder_input_ids=target[:, i : i + chunk],
                decoder_attention_mask=mask,
                cache=cache,
            )
        outs.append(out.logits.clone())
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    ("positions", "kind", "chunk", "backend", "is_masked"),
    [
        ("relative", "relpos", 1, "aot_eager", False),
        ("per head", "relpos", 2, "eager", True),
        ("learned", "sdpa", 1, "eager", True),
        ("both", "eager", 1, "eager", True),
    ],
)
def test_one_graph_decodes_until_the_cache_is_full(positions, kind, chunk, backend, is_masked) -> None:
    made = model(**POSITIONS[positions], **SMALL, attn_implementation=kind)
    encoded = encode(made)
    target = tokens(2, 10)
    mask = None
    if is_masked:
        mask = torch.ones_like(target)
        mask[1, :2] = 0
    with torch.no_grad():
        # padding is told by the mask, of which a call without a cache takes what it needs
        true = made(None, SOURCE_MASK, target, mask, encoded).logits
    # cross-attention's side of the cache is longer than the source
    cache = static_cache(made, target=10, source=9)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    prefix = decoded(made, encoded, target[:, :2], mask, cache, start=0, chunk=2)
    rest = decoded(compiled, encoded, target, mask, cache, start=2, chunk=chunk)
    assert_close(torch.cat((prefix, rest), 1), true)
    assert counter.frame_count == 1
    # a second text of the same sizes needs no other graph
    cache.reset()
    again = target.flip(0)
    decoded(made, encoded, again[:, :2], mask, cache, start=0, chunk=2)
    rest = decoded(compiled, encoded, again, mask, cache, start=2, chunk=chunk)
    with torch.no_grad():
        assert_close(rest, made(None, SOURCE_MASK, again, mask, encoded).logits[:, 2:])
    assert counter.frame_count == 1


def test_the_first_step_compiles_too_and_fills_both_sides() -> None:
    made = model(**SMALL)
    encoded = encode(made)
    target, cache = tokens(2, 6), static_cache(made, target=8, source=SOURCE.shape[1])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    found = decoded(compiled, encoded, target, None, cache, start=0, chunk=1)
    with torch.no_grad():
        assert_close(found, made(None, SOURCE_MASK, target, None, encoded).logits)
    # one graph makes the cache, one fills it
    assert counter.frame_count == 2
    assert int(cache.get_seq_length()) == 6
    assert int(cache.cross_attention_cache.get_seq_length()) == SOURCE.shape[1]


def test_keys_and_values_of_the_source_are_projected_once() -> None:
    made = model(**SMALL)
    encoded = encode(made)
    calls: list[int] = []
    attention = made.model.decoder.layers[0].encoder_attn
    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(lambda _, given, __: calls.append(given[0].shape[1]))
    cache = static_cache(made, target=8, source=SOURCE.shape[1])
    decoded(made, encoded, tokens(2, 4), None, cache, start=0, chunk=1)
    assert calls == [SOURCE.shape[1]] * 2


PREFIX = torch.cat((STARTS, tokens(2, 3)), 1)
LEFT, LEFT_MASK = padded([PREFIX[0, :2], PREFIX[1]], "left")
SEARCHES = {
    "greedy": {},
    "forced prefix": {"decoder_input_ids": PREFIX},
    "prefix with padding": {"decoder_input_ids": LEFT, "decoder_attention_mask": LEFT_MASK},
    "beam": {"num_beams": 3},
    "beam with a prefix": {"num_beams": 2, "decoder_input_ids": PREFIX},
    "beam, prefix with padding": {
        "num_beams": 2,
        "decoder_input_ids": LEFT,
        "decoder_attention_mask": LEFT_MASK,
    },
}
COMMON = {"attention_mask": SOURCE_MASK, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def graphs() -> int:
    """How many graphs were compiled since dynamo was reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def everywhere(**settings) -> CompileConfig:
    """A configuration with which `generate` compiles on the CPU as on a GPU."""
    config = CompileConfig(fullgraph=True, mode=None, **settings)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("positions", ["relative", "both"])
def test_generation_with_a_static_cache_gives_that_with_a_dynamic_one(search, positions) -> None:
    made = model(**POSITIONS[positions])
    true = made.generate(SOURCE, **COMMON, **SEARCHES[search])
    assert len(set(map(tuple, true.tolist()))) == 2
    assert torch.equal(
        made.generate(SOURCE, **COMMON, **SEARCHES[search], cache_implementation="static"), true
    )


# transformers compiles greedy search and sampling only
@pytest.mark.parametrize("search", ["greedy", "prefix with padding"])
def test_generation_compiles_one_graph_and_keeps_it(search) -> None:
    made = model(**SMALL, **POSITIONS["both"])
    given = COMMON | SEARCHES[search]
    compiled = {"cache_implementation": "static", "compile_config": everywhere(backend="eager")}
    before = graphs()
    assert torch.equal(made.generate(SOURCE, **given, **compiled), made.generate(SOURCE, **given))
    assert graphs() == before + 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = {"max_new_tokens": 4, "min_new_tokens": 4}
        found = made.generate(SOURCE.flip(0), **given | other, **compiled)
    assert torch.equal(found, made.generate(SOURCE.flip(0), **given | other))
    assert graphs() == before + 1


@pytest.mark.parametrize("search", ["beam, prefix with padding"])
def test_generation_runs_a_forward_that_was_compiled(search) -> None:
    made = model(**SMALL)
    true = made.generate(SOURCE, **COMMON, **SEARCHES[search])
    counter = CompileCounterWithBackend("eager")
    made.forward = torch.compile(made.forward, backend=counter, fullgraph=True)
    found = made.generate(SOURCE, **COMMON, **SEARCHES[search], cache_implementation="static")
    assert torch.equal(found, true)
    # the prefix, and one step for all others
    assert counter.frame_count == 2


@pytest.mark.slow
# inductor imports what torch itself has deprecated
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
@pytest.mark.parametrize("positions", ["relative", "learned"])
def test_inductor_generates_the_same(positions) -> None:
    made = model(**SMALL, **POSITIONS[positions])
    for search in ("greedy", "prefix with padding"):
        given = COMMON | SEARCHES[search]
        compiled = {"cache_implementation": "static", "compile_config": everywhere(backend="inductor")}
        before = graphs()
        assert torch.equal(made.generate(SOURCE, **given, **compiled), made.generate(SOURCE, **given))
        assert graphs() == before + 1


def test_padding_of_the_prefix_matters() -> None:
    made = model()
    given = COMMON | SEARCHES["prefix with padding"]
    alone = made.generate(
        SOURCE[:1],
        **given
        | {"attention_mask": SOURCE_MASK[:1]}
        | {"decoder_input_ids": PREFIX[:1, :2], "decoder_attention_mask": None},
    )
    assert torch.equal(made.generate(SOURCE, **given)[:1, -6:], alone[:, -6:])
    assert int(LEFT[0, 0]) == PAD

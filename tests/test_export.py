"""Exported programs and ONNX files: they serve every batch and length, and need nothing of relpos.

A program is traced at one batch and one length, both larger than 1, and run at others.
"""

import functools
import re
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from relpos import relation_attention
from relpos.nn import RelativeTransformerEncoder, RelativeTransformerEncoderLayer

HEADS, WIDTH = 4, 16
PAGE = Path(__file__).parents[1] / "docs" / "export.md"

# k is beyond the traced length of 7, and far below the longest length run
SETTINGS = {
    "both tables": {"max_distance": 16},
    "causal, per head, left over right": {
        "max_distance": (5, 1),
        "relative_per_head": True,
        "is_causal": True,
    },
    "keys only, norm first": {"max_distance": (2, 9), "relative_values": False, "norm_first": True},
    "values only, k = 0": {"max_distance": 0, "relative_keys": False},
}
SIZES = ((1, 1), (4, 1), (1, 9), (5, 2), (2, 200), (3, 0), (0, 5))  # batch, length

# torch copies a class of its own that it has deprecated
exports_to_onnx = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


class Encoder(nn.Module):
    """Embedding and two layers."""

    def __init__(self, *, is_causal: bool = False, norm_first: bool = False, **relative) -> None:
        super().__init__()
        layer = RelativeTransformerEncoderLayer(
            WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first, **{"max_distance": None} | relative
        )
        self.embedding = nn.Embedding(50, WIDTH)
        self.encoder = RelativeTransformerEncoder(layer, 2, nn.LayerNorm(WIDTH) if norm_first else None)
        self.is_causal = is_causal

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(self.embedding(tokens), src_key_padding_mask=padding, is_causal=self.is_causal)


def encoder(name: str) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**SETTINGS[name]).eval()


def sentences(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens, and True where there is padding: the first sentence is full, the last, if it can be, empty."""
    lengths = torch.linspace(length, 0 if batch > 2 else 1, batch).long()
    return torch.randint(0, 50, (batch, length)), torch.arange(length) >= lengths[:, None]


def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    sizes = {0: Dim("batch"), 1: Dim("length")}
    return torch.export.export(model, inputs, dynamic_shapes=(sizes,) * len(inputs), strict=False)


@pytest.fixture(scope="module", params=SETTINGS)
def traced(request: pytest.FixtureRequest) -> tuple[Encoder, ExportedProgram]:
    """Each encoder, and its program."""
    model = encoder(request.param)
    return model, exported(model, sentences(3, 7))


def test_an_exported_encoder_runs_at_sizes_it_was_not_traced_with(
    traced: tuple[Encoder, ExportedProgram],
) -> None:
    model, program = traced
    run = program.module()
    for size in SIZES:
        inputs = sentences(*size)
        torch.testing.assert_close(run(*inputs), model(*inputs))


def test_an_encoder_without_a_padding_mask_is_exported_too() -> None:
    model = encoder("both tables")
    run = exported(model, sentences(3, 7)[:1]).module()
    for size in SIZES:
        tokens, _ = sentences(*size)
        torch.testing.assert_close(run(tokens), model(tokens))


def test_an_exported_program_holds_operators_of_torch_alone(
    traced: tuple[Encoder, ExportedProgram],
) -> None:
    used = [node.target for node in traced[1].graph.nodes if node.op == "call_function"]
    assert {x.namespace for x in used if isinstance(x, torch._ops.OpOverload)} == {"aten"}


def test_attention_over_a_graph_is_exported_with_any_number_of_nodes() -> None:
    class Attention(nn.Module):
        def forward(self, x, relations, rel_k, rel_v):
            return relation_attention(x, x, x, relations, rel_k, rel_v)

    torch.manual_seed(0)
    batch, nodes = Dim("batch"), Dim("nodes")
    tables = torch.randn(6, 4), torch.randn(6, 4)

    def graph(b: int, n: int) -> tuple[Tensor, ...]:
        return torch.randn(b, 2, n, 4), torch.randint(-1, 6, (b, 1, n, n)), *tables

    program = torch.export.export(
        Attention(),
        graph(3, 7),
        dynamic_shapes=({0: batch, 2: nodes}, {0: batch, 2: nodes, 3: nodes}, None, None),
    ).module()
    for size in ((1, 1), (2, 5), (4, 40)):
        inputs = graph(*size)
        torch.testing.assert_close(program(*inputs), Attention()(*inputs))


@pytest.fixture(scope="module")
def onnx_file(traced: tuple[Encoder, ExportedProgram], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of each encoder."""
    path = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    names = {0: "batch", 1: "length"}, {0: Dim.AUTO, 1: Dim.AUTO}
    program = torch.onnx.export(
        traced[1],
        input_names=["tokens", "padding"],
        output_names=["states"],
        dynamic_shapes=dict(zip(("tokens", "padding"), names, strict=True)),
        verbose=False,
    )
    assert program is not None
    program.save(path)
    return path


def run_onnx(session: onnxruntime.InferenceSession, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    feeds = {"tokens": inputs[0].numpy(), "padding": inputs[1].numpy()}
    return [torch.from_numpy(x) for x in session.run(None, feeds)]


@exports_to_onnx
def test_an_onnx_file_runs_at_sizes_it_was_not_traced_with(
    traced: tuple[Encoder, ExportedProgram], onnx_file: Path
) -> None:
    model, _ = traced
    session = onnxruntime.InferenceSession(onnx_file)
    assert [x.shape for x in session.get_inputs()] == [["batch", "length"]] * 2
    assert [x.shape for x in session.get_outputs()] == [["batch", "length", WIDTH]]
    for size in SIZES:
        inputs = sentences(*size)
        (states,) = run_onnx(session, inputs)
        with torch.no_grad():
            torch.testing.assert_close(states, model(*inputs), atol=1e-5, rtol=1e-4)


@exports_to_onnx
def test_onnxruntime_computes_no_tensor_of_queries_by_keys_by_width(onnx_file: Path) -> None:
    graph = onnx.load(onnx_file)
    onnx.checker.check_model(graph)
    assert not graph.functions
    # every value that any operator makes becomes an output, and nothing is fused
    graph.graph.output.extend(
        onnx.ValueInfoProto(name=x) for node in graph.graph.node for x in node.output if x and x != "states"
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    batch, length = 2, 150
    values = run_onnx(session, sentences(batch, length))
    assert len(values) > 50
    assert max(x.numel() for x in values) == batch * HEADS * length * length


@exports_to_onnx
def test_code_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # inductor takes half a minute, and test_compilation.py runs it
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    torch._dynamo.reset()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for code in blocks:
        exec(compile(code, "export.md", "exec"), names)
        printed = capsys.readouterr().out
        for expected in re.findall(r"print\(.*\)  # (.*)", code):
            assert expected in printed
    torch._dynamo.reset()

"""Labels of pairs: small structures worked by hand, laws on random ones, each refusal by its wording."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from refusals import refuses
from relpos import relation_attention, relative_attention
from relpos import relations as relations_module
from relpos.relations import (
    TREE_NAMES,
    Relations,
    combine_relations,
    distance_relations,
    edge_relations,
    grid_relations,
    stack_relations,
    tree_path_relations,
    tree_relations,
)

# 0 has children 1, 2; 1 has children 3, 4; 3 has child 5; 6 is a root of its own
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 3, -1])


def named(relations: Relations, i: int, j: int) -> str:
    """The name of the label at (i, j)."""
    return relations.names[int(relations.labels[i, j])]


def random_parents(tokens: int, seed: int) -> Tensor:
    """A random forest whose tokens stand in random order."""
    generator = torch.Generator().manual_seed(seed)
    above = torch.tensor(
        [int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(tokens)]
    )
    return permuted_parents(above, torch.randperm(tokens, generator=generator))


def permuted_parents(parents: Tensor, order: Tensor) -> Tensor:
    """The same tree when token order[i] stands at i."""
    place = order.argsort()
    above = parents[order]
    return torch.where(above < 0, above, place[above.clamp(min=0)])


def path_by_walking(parents: list[int], i: int, j: int) -> tuple[int, int]:
    """Steps up and steps down from i to j; an imagined root joins the trees."""

    def line(token: int) -> list[int]:
        return [token] if token == -1 else [token, *line(parents[token])]

    ups, downs = line(i), line(j)
    return next((up, downs.index(token)) for up, token in enumerate(ups) if token in downs)


def test_distances_are_those_of_relative_attention() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    relations = distance_relations(7, max_distance=(2, 3))
    rel_k, rel_v = (torch.randn(relations.num_labels, 4, dtype=torch.float64) for _ in range(2))
    by_label = relation_attention(query, key, value, relations.labels, rel_k, rel_v)
    by_distance = relative_attention(query, key, value, rel_k, rel_v, max_distance=(2, 3))
    torch.testing.assert_close(by_label, by_distance, atol=1e-10, rtol=0)


def test_distances_of_a_later_chunk_count_from_its_start() -> None:
    relations = distance_relations(1, 4, max_distance=2, query_start=2)
    assert relations.labels.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("max_distance", "names"),
    [
        (1, ("1 or more before", "same position", "1 or more after")),
        ((2, 0), ("2 or more before", "1 before", "same position or after")),
        ((0, 1), ("same position or before", "1 or more after")),
        (0, ("any",)),
    ],
)
def test_names_of_distances_say_where_they_are_clipped(max_distance: int, names: tuple[str, ...]) -> None:
    relations = distance_relations(4, max_distance=max_distance)
    assert relations.names == names
    assert relations.num_labels == len(names)


def test_every_pair_of_a_grid_is_named_by_its_offset() -> None:
    relations = grid_relations(2, 3, max_distance=(1, 2))
    assert relations.labels.shape == (6, 6)
    assert relations.num_labels == 3 * 5
    assert named(relations, 0, 0) == "same row, same column"
    assert named(relations, 0, 4) == "1 or more down, 1 right"
    assert named(relations, 4, 0) == "1 or more up, 1 left"
    assert named(relations, 0, 2) == "same row, 2 or more right"


def test_labels_of_a_grid_follow_the_formula_for_each_pair() -> None:
    height, width, k_h, k_w = 3, 4, 1, 2
    labels = grid_relations(height, width, max_distance=(k_h, k_w)).labels
    for i in range(height * width):
        for j in range(height * width):
            down = min(max(j // width - i // width, -k_h), k_h)
            right = min(max(j % width - i % width, -k_w), k_w)
            assert labels[i, j] == (down + k_h) * (2 * k_w + 1) + right + k_w


def test_a_grid_of_one_row_has_the_labels_of_distances() -> None:
    assert torch.equal(
        grid_relations(1, 5, max_distance=(0, 2)).labels, distance_relations(5, max_distance=2).labels
    )


def test_every_kind_of_tree_relation_is_what_the_key_is_to_the_query() -> None:
    relations = tree_relations(PARENTS)
    assert relations.names == TREE_NAMES
    assert named(relations, 3, 3) == "self"
    assert named(relations, 3, 1) == "parent"
    assert named(relations, 1, 3) == "child"
    assert named(relations, 3, 4) == "sibling"
    assert named(relations, 5, 0) == "ancestor"
    assert named(relations, 0, 5) == "descendant"
    assert named(relations, 3, 2) == "other"
    assert named(relations, 0, 6) == "other"


@pytest.mark.parametrize("seed", range(5))
def test_tree_labels_equal_a_walk_along_the_branches(seed: int) -> None:
    parents = random_parents(13, seed)
    kinds, paths = tree_relations(parents), tree_path_relations(parents, max_steps=(3, 2))
    for i in range(13):
        for j in range(13):
            up, down = path_by_walking(parents.tolist(), i, j)
            assert paths.labels[i, j] == min(up, 3) * 3 + min(down, 2)
            is_among_roots = up > 0 and down > 0 and parents[i] == parents[j] == -1
            kind = {(0, 0): "self", (1, 0): "parent", (0, 1): "child", (1, 1): "sibling"}.get((up, down))
            if kind is None:
                kind = "ancestor" if down == 0 else "descendant" if up == 0 else "other"
            assert named(kinds, i, j) == ("other" if is_among_roots else kind)


@pytest.mark.parametrize("label", [tree_relations, lambda x: tree_path_relations(x, max_steps=3)])
def test_a_permuted_tree_permutes_its_labels(label) -> None:
    parents = random_parents(17, 1)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(2))
    expected = label(parents).labels[order][:, order]
    assert torch.equal(label(permuted_parents(parents, order)).labels, expected)


@pytest.mark.parametrize(
    "label", [tree_relations, lambda x, **more: tree_path_relations(x, max_steps=2, **more)]
)
def test_a_batch_of_trees_is_each_tree_and_minus_one(label) -> None:
    parents = torch.full((2, 7), 99)
    parents[0], parents[1, :3] = PARENTS, torch.tensor([1, -1, 1])
    labels = label(parents, lengths=torch.tensor([7, 3])).labels
    assert torch.equal(labels[0], label(PARENTS).labels)
    assert torch.equal(labels[1, :3, :3], label(parents[1, :3]).labels)
    assert (labels[1, 3:] == -1).all()
    assert (labels[1, :, 3:] == -1).all()


def test_names_of_paths_count_steps_up_and_down() -> None:
    relations = tree_path_relations(PARENTS, max_steps=(2, 1))
    assert relations.num_labels == 3 * 2
    assert named(relations, 3, 1) == "up 1, down 0"
    assert named(relations, 3, 2) == "up 2 or more, down 1 or more"
    assert named(relations, 0, 1) == "up 0, down 1 or more"


def test_a_chain_as_long_as_the_text_is_a_tree() -> None:
    relations = tree_path_relations(torch.arange(300) - 1, max_steps=400, dtype=torch.int32)
    assert named(relations, 299, 0) == "up 299, down 0"


def test_autocast_changes_no_label_of_a_deep_tree() -> None:
    # bfloat16 counts to 256 only
    chain = torch.arange(300) - 1
    truth = tree_path_relations(chain, max_steps=3).labels
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tree_path_relations(chain, max_steps=3).labels, truth)


def test_edges_label_the_pair_from_start_to_end_and_no_other() -> None:
    edges, types = torch.tensor([[0, 2], [1, 0]]), torch.tensor([1, 0])
    relations = edge_relations(edges, types, num_nodes=3, names=["calls", "reads"])
    assert relations.labels.tolist() == [[-1, 1, -1], [-1, -1, -1], [0, -1, -1]]
    assert named(relations, 0, 1) == "reads"


def test_inverse_edges_have_labels_of_their_own_where_no_edge_runs() -> None:
    edges, types = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]]), torch.tensor([0, 1, 1, 0])
    relations = edge_relations(edges, types, num_nodes=3, names=["a", "b"], inverse=True)
    assert relations.names == ("a", "b", "inverse of a", "inverse of b")
    assert relations.labels.tolist() == [[-1, 0, -1], [1, -1, 1], [-1, 3, 0]]


def test_pairs_without_an_edge_take_the_label_that_is_named_for_them() -> None:
    edges, types = torch.tensor([[0], [1]]), torch.tensor([0])
    relations = edge_relations(edges, types, num_nodes=2, names=["a"], inverse=True, elsewhere="apart")
    assert relations.names == ("a", "inverse of a", "apart")
    assert relations.labels.tolist() == [[2, 0], [1, 2]]


def test_an_edge_given_twice_with_one_type_is_one_edge() -> None:
    edges, types = torch.tensor([[0, 0], [1, 1]]), torch.tensor([0, 0])
    assert edge_relations(edges, types, num_nodes=2, names=["a"]).labels.tolist() == [[-1, 0], [-1, -1]]


def test_a_permuted_graph_permutes_its_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randperm(9 * 9, generator=generator)[:20]
    edges, types = torch.stack([pairs // 9, pairs % 9]), torch.randint(3, (20,), generator=generator)
    order = torch.randperm(9, generator=generator)
    options = {"num_nodes": 9, "names": ["a", "b", "c"], "inverse": True}
    expected = edge_relations(edges, types, **options).labels[order][:, order]
    assert torch.equal(edge_relations(order.argsort()[edges], types, **options).labels, expected)


def test_a_permuted_graph_permutes_the_output_of_attention() -> None:
    torch.manual_seed(0)
    parents, order = random_parents(11, 3), torch.randperm(11)
    query, key, value = (torch.randn(1, 2, 11, 4, dtype=torch.float64) for _ in range(3))
    rel_k, rel_v = (torch.randn(len(TREE_NAMES), 4, dtype=torch.float64) for _ in range(2))
    out = relation_attention(query, key, value, tree_relations(parents).labels, rel_k, rel_v)
    labels = tree_relations(permuted_parents(parents, order)).labels
    permuted = relation_attention(
        query[:, :, order], key[:, :, order], value[:, :, order], labels, rel_k, rel_v
    )
    torch.testing.assert_close(permuted, out[:, :, order], atol=1e-10, rtol=0)


def test_a_product_has_a_label_for_each_two_labels() -> None:
    tree, distance = tree_relations(PARENTS), distance_relations(7, max_distance=1)
    both = combine_relations(tree, distance)
    assert both.num_labels == 7 * 3
    assert named(both, 3, 4) == "sibling, 1 or more after"
    assert named(both, 4, 3) == "sibling, 1 or more before"
    assert torch.equal(both.labels // 3, tree.labels)
    assert torch.equal(both.labels % 3, distance.labels)


def test_a_product_has_no_relation_where_a_part_has_none() -> None:
    parents, lengths = torch.tensor([[-1, 0, 0], [-1, 0, 0]]), torch.tensor([3, 2])
    tree = tree_relations(parents, lengths=lengths)
    distance = distance_relations(3, max_distance=1)
    for both in (combine_relations(tree, distance), combine_relations(distance, tree)):
        assert both.labels.shape == (2, 3, 3)
        assert torch.equal(both.labels == -1, tree.labels == -1)


def test_a_stack_pads_with_no_relation() -> None:
    parts = [tree_relations(torch.tensor(parents)) for parents in ([-1, 0, 0], [-1])]
    stacked = stack_relations(parts)
    assert stacked.names == TREE_NAMES
    assert torch.equal(stacked.labels[0], parts[0].labels)
    assert stacked.labels[1].tolist() == [[0, -1, -1], [-1, -1, -1], [-1, -1, -1]]


def test_a_stack_has_the_widest_dtype_of_its_parts() -> None:
    names = tuple(str(i) for i in range(300))
    narrow = Relations(torch.zeros(1, 1, dtype=torch.int8), names)
    wide = Relations(torch.full((1, 1), 255), names)
    for parts in ([narrow, wide], [wide, narrow]):
        assert sorted(stack_relations(parts).labels.flatten().tolist()) == [0, 255]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_labels_come_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    made = [
        distance_relations(3, max_distance=2, dtype=dtype),
        grid_relations(2, 2, max_distance=1, dtype=dtype),
        tree_relations(PARENTS, dtype=dtype),
        tree_path_relations(PARENTS, max_steps=2, dtype=dtype),
        edge_relations(
            torch.tensor([[0], [1]]), torch.tensor([0]), num_nodes=2, names=["a"], inverse=True, dtype=dtype
        ),
    ]
    made.append(combine_relations(made[2], made[2], dtype=dtype))
    made.append(stack_relations([made[3], made[3]]))
    assert [relations.labels.dtype for relations in made] == [dtype] * len(made)


@pytest.mark.parametrize(
    "relations",
    [
        distance_relations(0, max_distance=2),
        grid_relations(0, 3, max_distance=2),
        tree_relations(torch.zeros(0, dtype=torch.long)),
        tree_path_relations(torch.zeros(0, dtype=torch.long), max_steps=2),
        edge_relations(
            torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long), num_nodes=0, names=["a"]
        ),
    ],
)
def test_nothing_has_no_pairs(relations: Relations) -> None:
    assert relations.labels.shape == (0, 0)


def test_a_batch_of_no_trees_is_a_batch() -> None:
    assert tree_relations(torch.zeros(0, 3, dtype=torch.long)).labels.shape == (0, 3, 3)
    assert tree_path_relations(torch.zeros(2, 0, dtype=torch.long), max_steps=1).labels.shape == (2, 0, 0)


def test_names_given_as_a_list_become_a_tuple() -> None:
    names = ["a", "b"]
    relations = Relations(torch.tensor([[0, 1]]), names)
    names.append("c")
    assert relations.names == ("a", "b")
    assert relations.num_labels == 2


def test_relations_print_their_shape_and_first_names_in_a_line() -> None:
    assert repr(tree_relations(PARENTS)) == (
        "Relations(labels=[7, 7] int64, num_labels=7, names=('self', 'parent', 'child', ...))"
    )
    assert repr(Relations(torch.full((1, 1), -1, dtype=torch.int8), ())) == (
        "Relations(labels=[1, 1] int8, num_labels=0, names=())"
    )


def test_distances_are_told_as_far_as_attention_tells_them() -> None:
    for query_start, label in ((2**62, 0), (-(2**62), 2)):
        found = distance_relations(2, max_distance=1, query_start=query_start)
        assert found.labels.unique().tolist() == [label]


EDGES, TYPES = torch.tensor([[0, 0], [1, 1]]), torch.tensor([0, 1])
TREE, PAIR = tree_relations(PARENTS), torch.tensor([[0, 1]])


def edges(edge_index=EDGES, edge_types=TYPES, num_nodes=2, names=("a", "b"), **more) -> Relations:
    return edge_relations(edge_index, edge_types, num_nodes=num_nodes, names=names, **more)


REFUSALS = {  # argument -> calls, and what each must say
    "num_queries": [
        (lambda: distance_relations(-1, max_distance=1), (0, -1)),
        (lambda: distance_relations(2.0, max_distance=1), ("integer", "float")),
    ],
    "num_keys": [(lambda: distance_relations(2, -3, max_distance=1), (0, -3))],
    "query_start": [
        (lambda: distance_relations(2, max_distance=1, query_start=torch.tensor([1])), ("Tensor",)),
        (lambda: distance_relations(2, max_distance=1, query_start=2**62 + 1), ("2**62", 2**62 + 1)),
        (lambda: distance_relations(2, max_distance=1, query_start=-(2**64)), ("2**62", -(2**64))),
    ],
    "max_distance": [
        (lambda: distance_relations(2, max_distance=-1), (0, -1, "tokens")),
        (lambda: distance_relations(2, max_distance=None), ("left, right", None)),
        (lambda: grid_relations(1, 2, max_distance=(1, -1)), (0, (1, -1), "cells")),
        (lambda: grid_relations(1, 2, max_distance=(1, 2, 3)), ("k_h, k_w", (1, 2, 3))),
    ],
    "max_steps": [
        (lambda: tree_path_relations(PARENTS, max_steps=(1, True)), ("max_up, max_down", (1, True))),
        (lambda: tree_path_relations(PARENTS, max_steps=-1), (0, -1, "edges")),
    ],
    "dtype": [
        (lambda: distance_relations(2, max_distance=1, dtype=torch.uint8), ("int64, int32, int16 or int8",)),
        (lambda: distance_relations(2, max_distance=100, dtype=torch.int8), (200, torch.int8, 127)),
    ],
    "height": [(lambda: grid_relations(-1, 2, max_distance=1), (0, -1))],
    "width": [(lambda: grid_relations(1, -2, max_distance=1), (0, -2))],
    "parents": [
        (lambda: tree_relations([0]), ("list",)),
        (lambda: tree_relations(torch.zeros(2)), ("int64", torch.float32)),
        (lambda: tree_relations(torch.zeros(1, 1, 1, dtype=torch.long)), ("[batch, tokens]", [1, 1, 1])),
        (lambda: tree_relations(torch.tensor([-1, 2])), (-1, 2)),
        (lambda: tree_relations(torch.tensor([-2, 0])), (-1, -2)),
        (lambda: tree_relations(torch.tensor([[2, 0, 0]]), lengths=torch.tensor([2])), (-1, 2)),
        (lambda: tree_relations(torch.tensor([-1, 2, 1])), ("a cycle",)),
        (lambda: tree_path_relations(torch.tensor([0]), max_steps=1), ("a cycle through token 0",)),
    ],
    "lengths": [
        (lambda: tree_relations(PARENTS, lengths=torch.tensor([7])), ([7], [1])),
        (lambda: tree_relations(PARENTS[None], lengths=torch.tensor([8])), (0, "less than 8", "got 8")),
    ],
    "edge_index": [
        (lambda: edges(EDGES.T.reshape(4)), ("[2, edges]", [4])),
        (lambda: edges(torch.zeros(3, 2).long()), ("[2, edges]", [3, 2], "Transpose")),
        (lambda: edges(num_nodes=1), (0, "less than 1", "got 1")),
    ],
    "num_nodes": [(lambda: edges(num_nodes=-2), (0, -2))],
    "edge_types": [
        (lambda: edges(edge_types=TYPES[:1]), ([2], [1])),
        (lambda: edges(edge_types=TYPES.float()), ("int64", torch.float32)),
        (lambda: edges(names=["a"]), (0, "less than 1", "got 1")),
        (edges, ("one type", [0, 1], "from 0 to 1")),
        (lambda: edges(edge_types=TYPES.to("meta")), ("cpu", "meta")),
    ],
    "names": [
        (lambda: edges(names="ab"), ("str",)),
        (lambda: edges(EDGES[:, :1], TYPES[:1], names=["a"], elsewhere="a"), ("different", "'a'")),
        (lambda: Relations(PAIR, "ab"), ("str",)),
        (lambda: Relations(PAIR, 2), ("int",)),
        (lambda: Relations(PAIR, ("a", 1)), ("strings", "int")),
        (lambda: Relations(PAIR, ("a", "b", "a")), ("different", "'a'")),
    ],
    "first": [(lambda: combine_relations(None, TREE), ("Relations", "NoneType"))],
    "second": [
        (lambda: combine_relations(TREE, distance_relations(3, max_distance=1)), ([7, 7], [3, 3])),
        (lambda: combine_relations(TREE, TREE.labels), ("Relations", "Tensor")),
    ],
    "parts": [
        (lambda: stack_relations(TREE), ("list", "Relations")),
        (lambda: stack_relations([]), (1, 0)),
        (lambda: stack_relations([TREE, distance_relations(3, max_distance=1)]), (7, 3)),
        (lambda: stack_relations([tree_relations(PARENTS[None])]), ("[query, key]", [1, 7, 7])),
    ],
    "parts[1]": [(lambda: stack_relations([TREE, PARENTS]), ("Relations", "Tensor"))],
    "labels": [
        (lambda: Relations(PAIR, ("a",)), (-1, "less than 1", "got 1")),
        (lambda: Relations(torch.tensor([0]), ("a",)), (2, [1])),
    ],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_by_name_and_numbers(name: str) -> None:
    for call, said in REFUSALS[name]:
        refuses(call, (ValueError, TypeError), name, said)


def test_code_of_the_page_on_relations_runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "relations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for code in blocks:
        exec(compile(code, "relations.md", "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        for expected in re.findall(r"^print\(.*\)  # (.*)", code, re.MULTILINE):
            assert expected in printed


def test_page_on_relations_names_every_function_of_the_module() -> None:
    page = (Path(__file__).parents[1] / "docs" / "relations.md").read_text(encoding="utf-8")
    functions = {name for name in vars(relations_module) if re.fullmatch(r"[a-z]\w*_relations", name)}
    assert len(functions) == 7
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == functions

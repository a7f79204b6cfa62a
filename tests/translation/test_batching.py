"""Batches: within the budget, every row once, the same for the same seed, shared fairly by processes."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos.translation.batching import EpochLoader, PairCollator, TokenBatches

lengths = st.lists(st.integers(1, 30), max_size=60)
budgets = st.integers(1, 80)
quickly = settings(max_examples=100, deadline=None, database=None, derandomize=True)


def rows_of(batches: TokenBatches) -> list[int]:
    return sorted(chain.from_iterable(batches))


@quickly
@given(
    lengths=lengths, budget=budgets, seed=st.integers(0, 9), epoch=st.integers(0, 9), shuffle=st.booleans()
)
def test_every_row_comes_once_and_no_batch_exceeds_the_budget(lengths, budget, seed, epoch, shuffle) -> None:
    batches = TokenBatches(lengths, budget, seed=seed, shuffle=shuffle)
    batches.set_epoch(epoch)
    drawn = list(batches)
    assert sorted(chain.from_iterable(drawn)) == list(range(len(lengths)))
    assert len(drawn) == len(batches)
    for batch in drawn:
        size = len(batch) * max(lengths[row] for row in batch)
        assert size <= budget or len(batch) == 1


@quickly
@given(lengths=lengths, budget=budgets, seed=st.integers(0, 9))
def test_the_number_of_batches_and_their_shapes_stay_over_epochs(lengths, budget, seed) -> None:
    batches = TokenBatches(lengths, budget, seed=seed)
    shapes = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        shapes.append(sorted((len(batch), max(lengths[row] for row in batch)) for batch in batches))
        assert len(shapes[-1]) == len(batches)
    assert all(found == shapes[0] for found in shapes)


@quickly
@given(lengths=lengths, budget=budgets, num_processes=st.integers(1, 7), epoch=st.integers(0, 3))
def test_processes_share_the_batches_and_repeat_fewer_than_they_are(
    lengths, budget, num_processes, epoch
) -> None:
    def share(process: int, num_processes: int) -> list[tuple[int, ...]]:
        batches = TokenBatches(lengths, budget, process=process, num_processes=num_processes)
        batches.set_epoch(epoch)
        found = [tuple(batch) for batch in batches]
        assert len(found) == len(batches)
        return found

    shares = [share(process, num_processes) for process in range(num_processes)]
    assert len({len(found) for found in shares}) == 1
    alone = share(0, 1)
    together = list(chain.from_iterable(shares))
    assert set(together) == set(alone)
    assert 0 <= len(together) - len(alone) <= num_processes - 1


@quickly
@given(lengths=lengths, budget=budgets, num_processes=st.integers(1, 5))
def test_unshuffled_processes_share_the_batches_without_repeating(lengths, budget, num_processes) -> None:
    shares = []
    for process in range(num_processes):
        batches = TokenBatches(lengths, budget, shuffle=False, process=process, num_processes=num_processes)
        shares.append(list(batches))
        assert len(shares[-1]) == len(batches)
    assert sorted(chain.from_iterable(chain.from_iterable(shares))) == list(range(len(lengths)))


def test_one_seed_and_epoch_give_one_order_and_others_another() -> None:
    some = [1 + (7 * i) % 13 for i in range(200)]

    def order(seed: int, epoch: int) -> list[list[int]]:
        batches = TokenBatches(some, 40, seed=seed)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(3, 1) == order(3, 1)
    orders = [order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])


def test_drawing_batches_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    list(TokenBatches(list(range(1, 50)), 40))
    assert torch.equal(torch.get_rng_state(), before)


def test_other_epochs_mix_rows_of_one_length_into_other_batches() -> None:
    batches = TokenBatches([4] * 40, 20)
    first = {frozenset(batch) for batch in batches}
    batches.set_epoch(1)
    assert first != {frozenset(batch) for batch in batches}


def test_rows_of_similar_length_come_together() -> None:
    some = [1 + (31 * i) % 64 for i in range(640)]
    batches = TokenBatches(some, 512)
    padded = sum(len(batch) * max(some[row] for row in batch) for batch in batches)
    assert padded < 1.1 * sum(some)


def test_the_collator_pads_ids_with_the_pad_and_labels_with_what_the_loss_leaves_out() -> None:
    rows = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [2], "labels": [8, 9, 7, 2]}]
    found = PairCollator(pad_token_id=3)(rows)
    assert {name: x.tolist() for name, x in found.items()} == {
        "input_ids": [[5, 6, 2], [2, 3, 3]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[7, 2, -100, -100], [8, 9, 7, 2]],
    }
    assert all(x.dtype == torch.long for x in found.values())


def test_the_mask_follows_lengths_and_not_what_the_ids_are() -> None:
    found = PairCollator(pad_token_id=0)([{"input_ids": [0, 0], "labels": [1]}])
    assert found["attention_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_loader_hands_the_epoch_to_its_batches(epoch) -> None:
    rows = [{"input_ids": [i] * (1 + i % 3), "labels": [i]} for i in range(3, 20)]
    batches = TokenBatches([len(row["input_ids"]) for row in rows], 6, seed=5)
    loader = EpochLoader(rows, batch_sampler=batches, collate_fn=PairCollator(0))
    loader.set_epoch(epoch)
    expected = TokenBatches([len(row["input_ids"]) for row in rows], 6, seed=5)
    expected.set_epoch(epoch)
    assert [batch["labels"][:, 0].tolist() for batch in loader] == [
        [rows[i]["labels"][0] for i in batch] for batch in expected
    ]

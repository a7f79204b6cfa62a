"""Batches with a token budget: rows of similar length, little padding, deterministic for a seed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler


class TokenBatches(Sampler[list[int]]):
    """Samples lists of row numbers whose padded size stays within a budget.

    Rows are sorted by length, with ties shuffled, and cut into batches, which are then shuffled. The number
    of batches is constant, since the sorted lengths do not change, so an epoch can be resumed in its middle.
    Each of several processes gets every num_processes-th batch; the first batches are repeated until all
    processes have the same number.

    Args:
        lengths: tokens of each row, the longer side.
        tokens_per_batch: maximum of rows times longest row. A longer row is a batch of its own.
        seed: of the order, together with the epoch.
        shuffle: False keeps rows sorted by length, without repetition.
        process, num_processes: the share of the batches for this process.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.long)
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0
        self.process, self.num_processes = process, num_processes
        self._cuts = _cut(self.lengths.sort().values.tolist(), tokens_per_batch)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        if not self.shuffle:
            return len(range(self.process, len(self._cuts), self.num_processes))
        return -(-len(self._cuts) // self.num_processes)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            rows = self.lengths.sort(stable=True).indices.tolist()
            batches = [rows[start:stop] for start, stop in self._cuts]
            return iter(batches[self.process :: self.num_processes])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        rows = order[self.lengths[order].sort(stable=True).indices].tolist()
        batches = [rows[start:stop] for start, stop in self._cuts]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        # there may be fewer batches than processes
        total = len(self) * self.num_processes
        return (batches[i % len(batches)] for i in range(self.process, total, self.num_processes))


def _cut(sorted_lengths: list[int], tokens_per_batch: int) -> list[tuple[int, int]]:
    """Start and stop of each batch in the rows sorted by length."""
    cuts, start = [], 0
    for row, length in enumerate(sorted_lengths):
        if row > start and (row + 1 - start) * length > tokens_per_batch:
            cuts.append((start, row))
            start = row
    if start < len(sorted_lengths):
        cuts.append((start, len(sorted_lengths)))
    return cuts


class EpochLoader(DataLoader):
    """A DataLoader that passes the epoch to its batch sampler; transformers' Trainer calls set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class PairCollator:
    """Pads rows to the longest one: input_ids, attention_mask, and labels with -100 for padding."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        source = _pad([row["input_ids"] for row in rows], self.pad_token_id)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        mask = torch.arange(source.shape[1]) < lengths[:, None]
        return {
            "input_ids": source,
            "attention_mask": mask.long(),
            "labels": _pad([row["labels"] for row in rows], -100),
        }


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

"""The arguments of one call of `merged`: dtypes, the width of heads, and how far the near distances reach."""

from typing import Any

import torch

from relpos.backends.arguments import Arguments
from relpos.backends.merged import sdpa

# further than any key from any query
_NO_END = 1 << 64


class Problem(Arguments):
    """The arguments of one call. `relations`, `mask`, `seed` and `dropout_p` are not used: see `why_not`."""

    @property
    def width(self) -> int:
        """The one width that the fused kernel wants for keys and values."""
        multiple = sdpa.kernel(self.query.device, self.query.dtype).multiple
        return -(-max(self.query.shape[3], self.value.shape[3]) // multiple) * multiple

    @property
    def far_distances(self) -> tuple[int, int | None]:
        """How far left of a query one far region begins, and how far right of it the other, or None."""
        if self.is_causal:
            return (self.left if self.has_tables else 0), None
        # one row for all, or none: one region without end
        if not self.has_tables or self.left + self.right == 0:
            return -_NO_END, None
        return self.left, max(self.right, 1 - self.left)

    @property
    def num_regions(self) -> int:
        """Far regions, for some lengths."""
        return 1 if self.far_distances[1] is None else 2

    def on_host(self) -> "Problem":
        """The problem with starts and key lengths where Python can read them; waits for a GPU once."""
        given = {"starts": self.starts, "key_lengths": self.key_lengths}
        present = {name: x for name, x in given.items() if x is not None and x.device.type != "cpu"}
        if not present:
            return self
        fetched = torch.stack([x.long() for x in present.values()]).cpu()
        fields: dict[str, Any] = dict(zip(present, fetched, strict=True))
        return self._replace(**fields)

    def within_reach(self) -> "Problem":
        """The problem with left and right no larger than the distances that occur, and the same tables.

        A side keeps one row more than that, so that a side of 0, which has no near distance, stays one.
        """
        starts = [self.start] if self.starts is None else self.starts.tolist()
        farthest_left = max(starts, default=0) + self.query.shape[2] - 1
        farthest_right = self.key.shape[2] - 1 - min(starts, default=0)
        left, right = (
            min(side, max(farthest, 0) + 1)
            for side, farthest in ((self.left, farthest_left), (self.right, farthest_right))
        )
        return self._replace(left=left, right=right)

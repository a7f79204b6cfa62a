"""The projections of torch.nn.MultiheadAttention: one packed weight, or one each for query, key and value."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


def shapes(width: int, kdim: int, vdim: int, bias: bool) -> dict[str, tuple[int, ...] | None]:
    """The shape of each parameter, by torch.nn's names; None for an absent parameter."""
    is_packed = kdim == vdim == width
    return {
        "in_proj_weight": (3 * width, width) if is_packed else None,
        "q_proj_weight": None if is_packed else (width, width),
        "k_proj_weight": None if is_packed else (width, kdim),
        "v_proj_weight": None if is_packed else (width, vdim),
        "in_proj_bias": (3 * width,) if bias else None,
    }


@dataclass(frozen=True)
class Projections:
    """Weights `packed` [3 * width, width] or `separate` [width, input width], and bias [3 * width]."""

    packed: Tensor | None
    separate: tuple[Tensor, Tensor, Tensor] | None
    bias: Tensor | None
    num_heads: int

    def query(self, x: Tensor) -> Tensor:
        """Project x [batch, length, width] to queries [batch, heads, length, dim]."""
        return self._heads(x, *self._part(0))[0]

    def all(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project query, key and value, with one matrix product for each distinct tensor."""
        if self.packed is not None and query is key and key is value:
            q, k, v = self._heads(query, self.packed, self.bias, 3)
            return q, k, v
        q = self.query(query)
        if self.packed is not None and key is value:
            width = self.packed.shape[1]
            bias = None if self.bias is None else self.bias[width:]
            k, v = self._heads(key, self.packed[width:], bias, 2)
            return q, k, v
        return q, self._heads(key, *self._part(1))[0], self._heads(value, *self._part(2))[0]

    def _part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the queries (0), keys (1) or values (2)."""
        if self.packed is not None:
            weight = self.packed.chunk(3)[index]
        else:
            assert self.separate is not None
            weight = self.separate[index]
        return weight, None if self.bias is None else self.bias.chunk(3)[index]

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int = 1) -> tuple[Tensor, ...]:
        """Project x [batch, length, width] to `parts` tensors [batch, heads, length, dim]."""
        out = F.linear(x, weight, bias).unflatten(-1, (parts, self.num_heads, -1))
        return out.permute(2, 0, 3, 1, 4).unbind(0)

"""XAttention (Xu et al., 2025, arXiv 2503.16428): sums along antidiagonals of small squares weigh blocks of pairs.

Of `stride` neighbouring queries and as many keys, the products along the square's antidiagonal are one logit for all of
its pairs. A row of blocks keeps the blocks with the largest sums of such weights, until they hold a share `threshold`.

Symbols   paper B, S = `block`, `stride`.
Cost      1 / stride of all pairs' products.
Differs   `select=code` does as the authors' code in its first chunk of queries: there the first block loses its mark as
          one that is always kept and is kept all the same, so that up to one block more is taken than is needed.
          `select=paper` does not. Their code also leaves out all earlier chunks on one path, which is not reproduced.
Fails     where single pairs off the antidiagonals count.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from math import inf, nextafter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import show
from kvbench.engine.declared import Count, Is, Share
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.blocks import BlockRule, meets, places
from kvbench.kernels.scratch import at_once, finer, finest

LOGIT_BYTES = 32 << 20  # of groups' logits at a time; their softmax takes as much again
MOST_GROUPED = 1 << 28  # what the authors' chunks are limited by
SMALLEST_CHUNK = 2048
Table = Annotated[Path, Is("a JSON file of a list of shares per layer")]


@dataclass(frozen=True, kw_only=True)
class XAttention(BlockRule):
    """The keys of conf/prefill/xattention.yaml."""

    block: Count
    stride: Count  # tokens of a group
    # Share of the weights, one for each head, or a JSON file of one per layer and head; not with `density`.
    threshold: Share | tuple[Share, ...] | Table
    select: Literal["code", "paper"]
    chunk_size: Count | None  # queries of the authors' chunks; null: by the prompt's length, as theirs

    title: ClassVar[str] = "XAttention"
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % self.stride:
            raise ConfigError(
                f"prefill.stride={self.stride} does not divide prefill.block={self.block}; give one that does"
            )
        if isinstance(self.threshold, Path):
            self.table()

    @property
    def given(self) -> tuple[Fraction, ...]:
        """Thresholds that are given as numbers: one for all heads, or one for each; none where a file has them."""
        threshold = self.threshold
        return () if isinstance(threshold, Path) else (threshold,) if isinstance(threshold, Fraction) else threshold

    def table(self) -> list[list[float]]:
        """The file's thresholds, by layer and head."""
        assert isinstance(self.threshold, Path)
        try:
            read: Any = json.loads(self.threshold.expanduser().read_text())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not JSON"
            raise ConfigError(
                f"prefill.threshold={self.threshold} cannot be read ({reason}); give a share from 0 to 1, or a JSON "
                "file of a list of shares per layer"
            ) from None
        rows = read if isinstance(read, list) else []
        values = [x for row in rows for x in (row if isinstance(row, list) else [None])]
        if not values or any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1 for x in values):
            raise ConfigError(
                f"prefill.threshold={self.threshold} does not hold a list of shares from 0 to 1 per layer; write "
                "[[0.9, 0.8, …], …] with a number for each query head"
            )
        return read

    def check(self, shape: ModelShape) -> None:
        super().check(shape)
        if isinstance(self.threshold, tuple) and len(self.threshold) != shape.h:
            raise ConfigError(
                f"prefill.threshold=[{','.join(map(show, self.threshold))}] does not fit model {shape.name!r}; it "
                f"needs {shape.h} shares, one for each query head, or one number for all"
            )
        if isinstance(self.threshold, Path):
            sizes = {len(row) for row in self.table()}
            if (len(self.table()), sizes) != (shape.n_layers, {shape.h}):
                raise ConfigError(
                    f"prefill.threshold={self.threshold} does not fit model {shape.name!r}; it needs {shape.n_layers} "
                    f"lists of {shape.h} shares"
                )

    def data_digest(self) -> str | None:
        if not isinstance(self.threshold, Path):
            return None
        return sha256(json.dumps(self.table()).encode()).hexdigest()[:16]

    @property
    def sides(self) -> tuple[int, int]:
        return self.block, self.block

    def keeps_all(self, s: int) -> bool:
        return s <= self.block or (self.density is None and set(self.given) == {1})

    def estimate(self, s: int) -> float:
        return 1 / self.stride

    def level(self, layer: int, s: int, like: Tensor) -> Tensor | float:
        """Bound of `levels`: blocks below the threshold are kept; all, where that is 1."""
        if isinstance(self.threshold, Fraction):
            return nextafter(float(self.threshold), -inf)
        of_heads = self.table()[layer] if isinstance(self.threshold, Path) else map(float, self.threshold)
        below = torch.tensor([inf if x == 1 else nextafter(x, -inf) for x in of_heads], dtype=torch.float64)
        below = below.pin_memory() if like.is_cuda else below
        return below.to(finest(like.device)).to(like.device, non_blocking=True)[:, None, None]

    def first_rows(self, s: int) -> int:
        """Rows of blocks in the authors' first chunk of queries; none where the paper's rule holds for all."""
        if self.select == "paper":
            return 0
        longest = 1 << max(0, s - 1).bit_length()
        chunk = self.chunk_size or max(SMALLEST_CHUNK, min(longest, MOST_GROUPED // longest))
        return chunk // self.block

    def levels(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        s = k.shape[2]
        sums = finer(self.block_sums(q, k, softmax))  # (h, n, n)
        n = sums.shape[1]
        row = torch.arange(n, device=q.device)
        is_own, is_first = row.unsqueeze(-1) == row, (row == 0).expand(n, n)
        in_first_chunk = (row < self.first_rows(s)).unsqueeze(-1)
        always = is_own | is_first
        marked = torch.where(in_first_chunk, is_own, always)  # counted as taken before any other
        order = sums.masked_fill(marked | ~meets(s, self.block, self.block, q.device), -torch.inf)
        order = order.sort(dim=-1, descending=True, stable=True)
        others = order.values.clamp(min=0)
        before = others.cumsum(-1) - others  # of the others, what is taken before each
        own = sums.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        first = sums[..., :1].masked_fill(row.unsqueeze(-1) == 0, 0)
        # In the first chunk two blocks count as marked and one is: each of the others is taken by the sum before the
        # last one, and the best of them by none.
        late = own + first + before
        early = torch.nn.functional.pad(own + before, (1, -1))
        early[..., 0] = 0
        taken = torch.where(in_first_chunk, early, late) / sums.sum(-1, keepdim=True)
        return taken.gather(-1, places(order.indices)).masked_fill(always, -torch.inf)

    def block_sums(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        """Weights of groups, summed over each block: (h, n, n) float32; a row's sum is its groups."""
        (_, h, s, _), h_kv, stride = q.shape, k.shape[1], self.stride
        n, per_block = -(-s // self.block), self.block // stride
        n_groups, n_real = n * per_block, -(-s // stride)
        group = torch.arange(n_groups, device=q.device)
        keys = grouped(k[0], stride, n_groups).mT  # (h_kv, stride * d_h, n_groups)
        sums = torch.empty(h, n, n, device=q.device)
        n_rows = max(1, at_once(LOGIT_BYTES, q.device) // (4 * h * n_groups * per_block))  # of blocks
        for start in range(0, n, n_rows):
            stop = min(start + n_rows, n)
            rows, n_seen = group[start * per_block : stop * per_block, None], stop * per_block
            queries = q[0, :, start * self.block : stop * self.block]
            queries = grouped(queries, stride, len(rows), turned=True) * (softmax.scale / stride)
            logits = queries.unflatten(0, (h_kv, -1)).flatten(1, 2) @ keys[..., :n_seen]
            logits = logits.unflatten(1, (h // h_kv, -1)).flatten(0, 1)  # (h, groups of queries, n_seen)
            logits.masked_fill_(group[:n_seen] > rows, -torch.inf)
            weights = logits.softmax(-1).masked_fill_(rows >= n_real, 0)
            of_blocks = weights.unflatten(1, (-1, per_block)).unflatten(-1, (-1, per_block)).sum((2, 4))
            sums[:, start:stop] = torch.nn.functional.pad(of_blocks, (0, n - stop))
        return sums


def grouped(x: Tensor, stride: int, n_groups: int, turned: bool = False) -> Tensor:
    """Tokens (heads, s, d_h), zeros after them, side by side in groups: (heads, n_groups, stride * d_h) float32."""
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, n_groups * stride - x.shape[1])).unflatten(1, (n_groups, stride))
    return (x.flip(2) if turned else x).flatten(2)

"""Labels of keys, and the search by them: what Double Sparsity and Loki have in common.

Of every key few numbers are kept, its label; of a query as many are multiplied with it, and the tokens with the largest
products are fetched. A method says which numbers these are, of keys and of queries.

Not here: any method; the search itself (`kernels/labels.py`, `kernels/rows/logits.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.budget import Budget
from kvbench.engine.placement import Offloaded
from kvbench.engine.selection import Cost, Found, Search, Selection
from kvbench.kernels.labels import by_channel, label_top
from kvbench.kernels.rows.logits import channel_keys
from kvbench.kernels.scratch import Scratch, empty
from kvbench.kernels.topk import KeyChoice
from kvbench.methods.base import SelectiveAttention, Variant


@dataclass(frozen=True)
class Labels:
    """Of one layer: labels of keys, and how a query becomes weights of their numbers.

    `keys` (stored, s, c) are rounded as the model's own keys are; a stored head is a KV head, or a query head where
    labels of query heads differ.
    """

    keys: Tensor
    turn: Tensor  # (stored, d_h or c, c): what is asked times this gives weights
    n_bits: int  # of all heads' labels of one token

    def n_bytes(self, n_tokens: int) -> int:
        return -(-self.n_bits * n_tokens // 8)

    def longer(self, n: int) -> Labels:
        """A copy with room for labels of `n` tokens."""
        stored, s, c = self.keys.shape
        room = self.keys.new_empty(stored, c, n).mT if self.keys.stride(1) == 1 else self.keys.new_empty(stored, n, c)
        room[:, :s] = self.keys
        return replace(self, keys=room)


def stored(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels (stored, s, c) float32 as they are searched: on a GPU by token, on a CPU by channel in their own `dtype`.

    It has to hold them exactly.
    """
    return labels.contiguous() if labels.is_cuda else by_channel(labels.to(dtype))


class LabelSearch(SelectiveAttention):
    """A method that fetches the tokens with the largest products of label and query."""

    labels: dict[int, Labels]  # per layer; a variant's own where generated tokens compete
    now: Budget  # of the context, or of the conversation as it was last held within one

    no_growth = "has labels of the context alone; method.generated=compete labels what follows, and grows"

    def setup(self) -> None:
        self.labels, self.now = {}, self.budget

    @abstractmethod
    def shared_labels(self, layer: int) -> Labels:
        """Labels of the prompt, the same object for all rows that can be searched together."""

    @abstractmethod
    def label_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Labels (stored, n, c) float32 of keys (1, h_kv, n, d_h)."""

    @abstractmethod
    def asked(self, layer: int, q: Tensor) -> Tensor:
        """What of queries (n, h, 1, d_h) `Labels.turn` is applied to: (n, `n_asking`, …)."""

    @property
    @abstractmethod
    def n_asking(self) -> int:
        """Heads that select for themselves."""

    def n_chosen(self, n: int) -> int:
        """How many of `n` tokens that compete are fetched."""
        return self.plan.k if not self.competes else self.now.allowance(n - self.now.s_prompt)

    @classmethod
    def extends(cls, params: Any) -> bool:
        return super().extends(params) or params.generated == "compete"

    def extend(self, layer: int, q: Tensor, grown: Variant) -> None:
        self.now = grown.budget

    @property
    def competes(self) -> bool:
        """Whether generated tokens are searched like those of the prompt, the current one too."""
        return self.params.generated == "compete"

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        labels = self.shared_labels(layer)
        self.labels[layer] = labels.longer(self.trace.s_prompt + self.store.n_new) if self.competes else labels
        return Offloaded(0, 0, capacity=0 if self.competes else None)

    # A decode step.

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """Rows with the same labels are searched at once."""
        for row in rows:
            row.take_in(layer)
        if q.is_cuda:
            search = ProductSearch(rows, layer, q)
            search.choose(q)
            return [Selection(idx, cost) for idx, cost in zip(search.idx, search.spent, strict=True)]
        first, n = rows[0], rows[0].n_searched(layer)
        labels = first.labels[layer]
        weights = weights_of(labels, first.asked(layer, q))
        found = [label_top(weights[i : i + 1], labels.keys, n, row.n_best(n)) for i, row in enumerate(rows)]
        return [Selection(idx, row.cost(layer)) for row, idx in zip(rows, found, strict=True)]

    @classmethod
    def search_again(cls, rows: Sequence[Self], layer: int, q: Tensor, scratch: Scratch) -> Search | None:
        return ProductSearch(rows, layer, q, scratch) if all(row.repeats for row in rows) else None

    @property
    def repeats(self) -> bool:
        """Labels of the prompt alone stay what they are."""
        return self.variant.is_full or not self.competes

    def kind(self, layer: int) -> Hashable:
        return id(self.labels[layer].keys)

    def n_searched(self, layer: int) -> int:
        return self.store[layer].n_seen if self.competes else self.trace.s_prompt

    def n_best(self, n: int) -> int:
        """How many of `n` tokens are fetched."""
        return min(self.n_chosen(n), n)

    def take_in(self, layer: int) -> None:
        """Label the current token where it competes."""
        if self.competes:
            n = self.n_searched(layer)
            self.labels[layer].keys[:, n - 1 : n] = self.label_keys(layer, self.store[layer].newest[0])

    def cost(self, layer: int) -> Cost:
        """All labels stay and are read."""
        n_bytes = self.labels[layer].n_bytes(self.n_searched(layer))
        return Cost(n_bytes, n_bytes)


class ProductSearch(Search):
    """Rows with the same labels, on a GPU: positions in the lower halves."""

    def __init__(self, rows: Sequence[LabelSearch], layer: int, q: Tensor, scratch: Scratch | None = None) -> None:
        self.first, self.layer, self.n = rows[0], layer, rows[0].n_searched(layer)
        self.labels = self.first.labels[layer]
        self.partial, self.spent = self.labels.keys[:, : self.n], [row.cost(layer) for row in rows]
        heads, ks = self.first.n_asking, [row.n_best(self.n) for row in rows]
        is_all = min(ks) == self.n
        room = empty if scratch is None or is_all else scratch.take
        self.keys = room("keys", q.device, torch.int64, len(rows), heads, self.n)
        self.choice = None if is_all else KeyChoice(len(rows), heads, ks, q.device, scratch)
        out = self.keys if self.choice is None else self.choice.out
        self.idx = [out[i : i + 1, :, :k] for i, k in enumerate(ks)]

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, age: int) -> None:
        self.choose(q)

    def choose(self, q: Tensor) -> None:
        asked = self.first.asked(self.layer, q).unsqueeze(2)
        channel_keys(asked, self.labels.turn, self.partial, "query_head", self.keys)
        if self.choice is not None:
            self.choice.take(self.keys, self.n)

    def costs(self, age: int) -> Sequence[Cost]:
        return self.spent


def weights_of(labels: Labels, asked: Tensor) -> Tensor:
    """What labels are multiplied with: (rows, heads, c) float32."""
    stored, rows = len(labels.turn), len(asked)
    grouped = asked.float().unflatten(1, (stored, -1)).transpose(0, 1).flatten(1, 2)  # (stored, rows * g, c')
    return (grouped @ labels.turn).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)

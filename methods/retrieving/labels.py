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

from engine.budget import Budget
from engine.placement import Offloaded
from engine.selection import Cost, Found, Selection
from kernels.labels import by_channel, label_top
from kernels.rows.logits import channel_keys
from kernels.topk import top_keys
from methods.base import SelectiveAttention, Variant


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
        """What of queries (n, h, 1, d_h) `Labels.turn` is applied to: (n, heads, …), heads as many as select."""

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
        ks = [row.take_in(layer) for row in rows]
        found = best(rows[0].labels[layer], rows[0].asked(layer, q), rows[0].n_searched(layer), ks)
        return [Selection(idx, row.cost(layer)) for row, idx in zip(rows, found, strict=True)]

    def kind(self, layer: int) -> Hashable:
        return id(self.labels[layer].keys)

    def n_searched(self, layer: int) -> int:
        return self.store[layer].n_seen if self.competes else self.trace.s_prompt

    def take_in(self, layer: int) -> int:
        """Label the current token where it competes: how many tokens are to be fetched."""
        at, n = self.store[layer], self.n_searched(layer)
        if self.competes:
            self.labels[layer].keys[:, n - 1 : n] = self.label_keys(layer, at.newest[0])
        return min(self.n_chosen(n), n)

    def cost(self, layer: int) -> Cost:
        """All labels stay and are read."""
        n_bytes = self.labels[layer].n_bytes(self.n_searched(layer))
        return Cost(n_bytes, n_bytes)


def best(labels: Labels, asked: Tensor, n: int, ks: Sequence[int]) -> list[Tensor]:
    """For rows of asked (rows, heads, c') the `ks` best of the first `n` tokens: positions (1, heads, k) each."""
    if asked.is_cuda:  # positions in the lower halves
        keys = channel_keys(asked.unsqueeze(2), labels.turn, labels.keys[:, :n], "query_head")
        found = top_keys(keys, ks)
        return [found[i : i + 1, :, :k] for i, k in enumerate(ks)]
    weights = weights_of(labels, asked)
    return [label_top(weights[i : i + 1], labels.keys, n, k) for i, k in enumerate(ks)]


def weights_of(labels: Labels, asked: Tensor) -> Tensor:
    """What labels are multiplied with: (rows, heads, c) float32."""
    stored, rows = len(labels.turn), len(asked)
    grouped = asked.float().unflatten(1, (stored, -1)).transpose(0, 1).flatten(1, 2)  # (stored, rows * g, c')
    return (grouped @ labels.turn).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)

"""Labels of keys, and the search by them: what Double Sparsity and Loki have in common.

Of every key few numbers are kept, its label; of a query as many are multiplied with it, and the tokens with the largest
products are fetched. A method says which numbers these are, of keys and of queries.

Not here: any method; the search itself (`kernels/labels.py`, `kernels/rows/logits.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.budget import Budget
from kvbench.engine.placement import Offloaded
from kvbench.engine.search import Launch, Units
from kvbench.engine.selection import Cost, Found, Selection
from kvbench.kernels.clock import Since
from kvbench.kernels.labels import by_channel, label_scores, label_top
from kvbench.kernels.rows.logits import channel_keys
from kvbench.methods.base import Variant
from kvbench.methods.indexed import Indexed
from kvbench.methods.traits import Traits


@dataclass(frozen=True)
class Labels:
    """Labels of one layer's keys, and how a query becomes weights of their numbers.

    `keys` (stored, s, c) are rounded as the model's own keys are; a stored head is a KV head, or a query head where
    labels of query heads differ.
    """

    keys: Tensor
    turn: Tensor  # (stored, d_h or c, c): what is asked times this gives weights
    n_bits: int  # of all heads' labels of one token

    def first(self, n: int) -> Labels:
        """Labels of the first `n` tokens."""
        return replace(self, keys=self.keys[:, :n])

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


class LabelSearch(Indexed):
    """A method that fetches the tokens with the largest products of label and query."""

    ops = ("logits", "topk")
    packs_host = True
    index: dict[int, Labels]  # a variant's own where generated tokens compete
    now: Budget  # of the context, or of the conversation as it was last held within one

    no_growth = "has labels of the context alone; method.generated=compete labels what follows, and grows"

    def setup(self) -> None:
        super().setup()
        self.now = self.budget

    @abstractmethod
    def shared_labels(self, layer: int) -> Labels:
        """Labels of the prompt, the same object for all rows that can be searched together."""

    @abstractmethod
    def label_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Labels (stored, n, c) float32 of keys (1, h_kv, n, d_h)."""

    @abstractmethod
    def asked_of(self, layer: int, q: Tensor) -> Tensor:
        """The part of queries (n, h, 1, d_h) that `Labels.turn` is applied to: (n, `n_choosing`, …)."""

    def n_chosen(self, n: int) -> int:
        """How many of `n` tokens that compete are fetched."""
        return self.plan.k if not self.competes else self.now.allowance(n - self.now.s_prompt)

    @classmethod
    def traits_of(cls, params: Any) -> Traits:
        return replace(super().traits_of(params), extends=params.generated == "compete")

    def extend(self, layer: int, q: Tensor, grown: Variant) -> None:
        self.now = grown.budget

    @property
    def competes(self) -> bool:
        """Whether generated tokens are searched like those of the prompt, the current one too."""
        return self.params.generated == "compete"

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        labels = self.shared_labels(layer)
        self.index[layer] = labels.longer(self.trace.s_prompt + self.store.n_new) if self.competes else labels
        return Offloaded(0, 0, capacity=0 if self.competes else None)

    # A decode step.

    def question(self, layer: int, q: Tensor) -> Tensor:
        return weights_of(self.index[layer], self.asked_of(layer, q))

    def score(self, layer: int, question: Tensor, index: Labels) -> Tensor:
        """The products of labels and their weights."""
        return label_scores(question, index.keys, index.keys.shape[1]).unsqueeze(2)

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """Products and choice are one."""
        if rows[0].has_kernel(layer):
            return super().search(rows, layer, q)
        for row in rows:
            row.append(layer)
        index, n = rows[0].index[layer], rows[0].units(layer).stop
        weights = rows[0].question(layer, q)
        found = [label_top(weights[i : i + 1], index.keys, n, row.units(layer).n_chosen) for i, row in enumerate(rows)]
        return [Selection(idx, row.cost(layer)) for row, idx in zip(rows, found, strict=True)]

    def units(self, layer: int) -> Units:
        n = self.store[layer].n_seen if self.competes else self.trace.s_prompt
        return Units(self.n_chosen(n), n)

    def seen(self, layer: int) -> Labels:
        return self.index[layer].first(self.units(layer).stop) if self.competes else self.index[layer]

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        first, found = rows[0], keys()
        index = first.seen(layer)

        def launch(q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> Tensor:
            return channel_keys(first.asked_of(layer, q).unsqueeze(2), index.turn, index.keys, "query_head", found)

        return launch

    @property
    def repeats(self) -> bool:
        """Labels of the prompt alone stay what they are."""
        return self.variant.is_full or not self.competes

    def selects_feeds(self, layer: int) -> bool:
        return self.repeats

    def append(self, layer: int) -> None:
        """Label the current token where it competes."""
        if self.competes:
            n = self.store[layer].n_seen
            self.index[layer].keys[:, n - 1 : n] = self.label_keys(layer, self.store[layer].newest[0])

    def cost(self, layer: int) -> Cost:
        """Cost of a step: all labels stay and are read."""
        n_bytes = self.index[layer].n_bytes(self.units(layer).stop)
        return Cost(n_bytes, n_bytes)


def weights_of(labels: Labels, asked: Tensor) -> Tensor:
    """Weights by which labels are multiplied: (rows, heads, c) float32."""
    stored, rows = len(labels.turn), len(asked)
    grouped = asked.float().unflatten(1, (stored, -1)).transpose(0, 1).flatten(1, 2)  # (stored, rows * g, c')
    return (grouped @ labels.turn).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)

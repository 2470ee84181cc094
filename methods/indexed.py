"""Methods that find tokens by an index: `Indexed`.

Such a method makes an index of the prompt's keys and writes one formula: what the index's units (tokens, pages, blocks)
are worth to a query. The rest is the same for all: which units are best, the tokens of these, rows that share an index,
feeds, a kernel in place of the formula, steps that are planned once.

Not here: any method; how units are chosen (`engine/search.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvbench.engine.placement import Offloaded, Placement
from kvbench.engine.search import KernelSearch, Launch, Search, Units, best_tokens
from kvbench.engine.selection import ALWAYS, Cost, FeedSelection, Found, Selection
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.clock import now
from kvbench.kernels.fast import takes
from kvbench.kernels.scratch import Scratch, empty
from kvbench.methods.base import SelectiveAttention


def merged(scores: Tensor, agg: str) -> Tensor:
    """Scores (n, h_kv, g, units) of those who choose, as `agg` says: (n, h, units), or (n, h_kv, units) of a group."""
    if agg == "query_head":
        return scores.flatten(1, 2)
    return scores.mean(2) if agg == "group_mean" else scores.amax(2)


class Indexed(SelectiveAttention):
    """A method writes the prompt's index (`make_index`), a formula (`score`), and what a step takes (`units`, `cost`).

    Rows whose index is the same object are searched at once.
    """

    drops = False
    ops: ClassVar[Sequence[str]] = ()  # its kernel, by the names of `kernels/fast.py`; none: torch makes the scores
    takes_newest: ClassVar[bool] = False  # its kernel reads the newest K and V

    index: dict[int, Any]  # per layer

    def setup(self) -> None:
        self.index = {}

    # What a method writes.

    def make_index(self, layer: int) -> Any:
        """The index of the prompt."""
        raise NotImplementedError(f"{type(self).__name__} has neither `make_index` nor an `arrange` that fills `index`")

    def made_of(self) -> Hashable:
        """What an index depends on besides the prompt and the layer: rows of which this is the same share one."""
        return self.params

    def arrange(self, layer: int) -> Placement | None:
        """Place the whole prompt on the host by default, and what follows it on the device."""
        key = "index", type(self), layer, self.made_of()
        self.index[layer] = self.trace.once(key, lambda: self.make_index(layer))
        return Offloaded(0, 0)

    def question(self, layer: int, q: Tensor) -> Any:
        """What an index is asked, of queries (n, h, 1, d_h): by default these by KV head, (n, h_kv, g, d_h) float32."""
        return q.float().unflatten(1, (self.trace.shape.h_kv, -1)).squeeze(3)

    @abstractmethod
    def score(self, layer: int, question: Any, index: Any) -> Tensor:
        """Scores of units for each query head: (n, h_kv, g, units) float32."""

    def merge(self, layer: int, scores: Tensor) -> Tensor:
        """Scores of units for the heads that choose, (n, heads, units): groups or query heads, by `method.agg`."""
        return merged(scores, self.agg)

    @abstractmethod
    def units(self, layer: int) -> Units:
        """Which units compete at the step at hand, whose token the layer has taken in, and how many are fetched."""

    @abstractmethod
    def cost(self, layer: int) -> Cost:
        """What it costs to find a step's units."""

    def append(self, layer: int) -> None:
        """Take the current token into the index, for methods whose index grows."""

    def seen(self, layer: int) -> Any:
        """The index as far as it is searched."""
        return self.index[layer]

    @classmethod
    def generated(cls, rows: Sequence[Self], layer: int) -> Any:
        """An index of generated tokens that compete, row by row, where the shared index has none of them."""
        return None

    @classmethod
    def asked(cls, rows: Sequence[Self], q: Tensor) -> Tensor:
        """The queries that rows search by."""
        return q

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor | None:
        """Positions to fetch by the merged scores (n, heads, units); `scores` are those of query heads."""
        return best_tokens(ranking, self.units(layer))

    @property
    def agg(self) -> str:
        return getattr(self.params, "agg", "query_head")

    @property
    def n_choosing(self) -> int:
        """Heads that choose for themselves."""
        return self.trace.shape.h if self.agg == "query_head" else self.trace.shape.h_kv

    def of_heads(self, idx: Tensor) -> Tensor:
        """Positions (n, heads, k) for each KV head, (n, h_kv, k), where one head may choose for all."""
        return idx.expand(-1, self.trace.shape.h_kv, -1) if idx.shape[1] == 1 else idx

    def found(self, layer: int, idx: Tensor | None) -> Selection:
        """The selection of a step, from positions (1, heads, k)."""
        return Selection(idx, self.cost(layer))

    def n_static(self, layer: int) -> int:
        """For how many steps to come a kernel searches as at this one."""
        return ALWAYS

    def alike(self, layer: int) -> Hashable:
        """A key that rows with one index share if they are searched together."""
        return self.agg

    # On an accelerator.

    def has_kernel(self, layer: int) -> bool:
        """Whether a kernel makes the scores."""
        device = self.store[layer].device
        return device.type == "cuda" and bool(self.ops) and all(takes(op, device) for op in self.ops)

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        """Tell the kernel of rows that are searched together, for the step at hand and so many after it.

        `keys()` is memory for a key of each unit.
        """
        raise NotImplementedError

    @classmethod
    def plan_search(cls, rows: Sequence[Self], layer: int, scratch: Scratch | None, ahead: int) -> KernelSearch:
        """The search of rows by their kernel, for the step at hand and so many after it at most."""
        first, room = rows[0], empty if scratch is None else scratch.take

        def keys() -> Tensor:
            size = len(rows), first.n_choosing, first.units(layer).behind
            return room("keys", first.store[layer].device, torch.int64, *size)

        n_steps = min(ahead, *(row.n_static(layer) for row in rows))
        return KernelSearch(rows, layer, cls.launch(rows, layer, keys, n_steps), scratch, n_steps)

    @classmethod
    def search_again(
        cls, rows: Sequence[Self], layer: int, q: Tensor, scratch: Scratch, ahead: int
    ) -> Search | None:  # fmt: skip
        if not all(row.repeats for row in rows) or not rows[0].has_kernel(layer):
            return None
        search = cls.plan_search(rows, layer, scratch, ahead)
        return search if search.is_settled else None

    # A step.

    def kind(self, layer: int) -> Hashable:
        return id(self.index[layer]), self.alike(layer)

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        q = cls.asked(rows, q)
        if rows[0].has_kernel(layer):
            return cls.search_by_kernel(rows, layer, q)
        for row in rows:
            row.append(layer)
        found = [row.choose(layer, *each) for row, each in zip(rows, cls.scored(rows, layer, q), strict=True)]
        return [
            row.found(layer, None if idx is None else row.of_heads(idx)) for row, idx in zip(rows, found, strict=True)
        ]

    @classmethod
    def scored(cls, rows: Sequence[Self], layer: int, q: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each row what units are worth to the heads that choose, (1, heads, units), and to query heads."""
        first = rows[0]
        question = first.question(layer, q)
        scores = first.score(layer, question, first.seen(layer))
        if (own := cls.generated(rows, layer)) is not None:
            scores = torch.cat([scores, first.score(layer, question, own)], -1)
        ranking = first.merge(layer, scores)
        return [*zip(ranking.split(1), scores.split(1), strict=True)] if len(rows) > 1 else [(ranking, scores)]

    @classmethod
    def search_by_kernel(cls, rows: Sequence[Self], layer: int, q: Tensor) -> list[Selection]:
        k = v = q
        if cls.takes_newest:
            k, v = (torch.cat([row.store[layer].newest[i] for row in rows]) for i in (0, 1))
        search = cls.plan_search(rows, layer, None, 0)
        search.find(q, k, v, now(q.device))
        search.enter(0)
        cls.searched(rows, search)
        if search.made_keys:
            each = zip(rows, search.idx, search.made_keys, strict=True)
            return [Selection(idx, row.cost(layer), keys=made) for row, idx, made in each]
        return [row.found(layer, idx if idx.shape[2] else None) for row, idx in zip(rows, search.idx, strict=True)]

    @classmethod
    def searched(cls, rows: Sequence[Self], search: KernelSearch) -> None:
        """The rows were searched so, for methods that read more of it than positions."""

    def count_search(self, layer: int) -> None:
        """A kernel has searched once more, for methods that keep count of it."""

    # A feed.

    def selects_feeds(self, layer: int) -> bool:
        """Whether no token of a feed changes what the next ones find: none is added to the index."""
        return type(self).append is Indexed.append

    def generated_of_feed(self, layer: int, feed: Feed) -> Any:
        """`generated` of this row with all tokens of the feed."""
        return None

    def select_feed(self, layer: int, feed: Feed) -> FeedSelection:
        question, m = self.question(layer, feed.queries), len(feed.moments)
        scores = self.score(layer, question, self.seen(layer))
        if (own := self.generated_of_feed(layer, feed)) is not None:
            late = self.score(layer, question, own)
            coming = torch.ones(m, m, dtype=torch.bool, device=late.device).triu(1).view(m, 1, 1, m)
            late[..., -m:].masked_fill_(coming, -torch.inf)
            scores = torch.cat([scores, late], -1)
        idx = self.choose(layer, self.merge(layer, scores), scores)
        return FeedSelection(None if idx is None else self.of_heads(idx), [self.cost(layer)] * m)

"""`Turns`: the half of a method's interface that is about contexts which are asked many times.

What a row knows can be copied, so that it goes back behind a question. Tokens of a feed that change nothing but what is
added to the cache are read in one call: `at_once` says how many. A method that retrieves needs `select_feed` for it.

Not here: how a feed is read (`engine/turns`), which questions are asked (`evals/conversation.py`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torch import Tensor

from engine.placement import Stay
from engine.selection import FeedSelection
from engine.turns.at_once import read_at_once
from engine.turns.feed import Feed
from engine.turns.state import Mark, fork_of

if TYPE_CHECKING:
    from methods.base import SelectiveAttention
    from methods.variant import Variant

HOOKS = ("after_attention", "behind", "resident")
CLASSWIDE = ("resident_rows", "after_rows")


class Turns:
    @property
    def row(self) -> "SelectiveAttention":
        return cast("SelectiveAttention", self)

    def mark(self) -> Mark:
        """This moment, to go back to."""
        return Mark(self.row)

    def reset(self, mark: Mark) -> None:
        """Go back to where the mark was made, as if nothing had been read since; the ledger begins anew."""
        mark.restore(self.row)

    def fork(self) -> "SelectiveAttention":
        """A second row that goes on from here."""
        return fork_of(self.row)

    @property
    def is_still(self) -> bool:
        """Whether a step only adds its token to what is resident."""
        kind = type(self.row)
        usual = next(base for base in kind.__mro__ if Turns in base.__bases__)
        return self.row.variant.is_full or (
            all(getattr(kind, name) is getattr(usual, name) for name in HOOKS)
            and all(getattr(kind, name).__func__ is getattr(usual, name).__func__ for name in CLASSWIDE)
        )

    def at_once(self, layer: int, m: int) -> int:
        """How many of the next `m` tokens this layer may read in one call, 1 where they have to come alone."""
        at = self.row.store[layer]
        if not at.takes_feeds:
            return 1
        on_gpu = at.device.type == "cuda"
        if at.can_fetch:
            takes = not on_gpu and self.selects_feeds(layer)
        else:
            takes = self.is_still or layer in self.row.skipped_layers()
        # A query sees at least one of the window's tokens before the feed.
        most = at.capacity - (at.n_window if on_gpu else 1)
        return max(1, min(m, most)) if takes else 1

    def selects_feeds(self, layer: int) -> bool:
        """Whether `select_feed` does for many tokens what steps do for each."""
        return False

    def select_feed(self, layer: int, feed: Feed) -> FeedSelection:
        """`select` for every token of a feed, of which the host has K and V already."""
        raise AssertionError(f"{type(self).__name__} selects for one token at a time")

    def after_feed(self, layer: int, feed: Feed, out: Tensor, lse: Tensor) -> Tensor:
        """`after_attention` for all tokens of a feed, once they are taken in: out (1, h, m, d_h), corrected.

        `lse` (1, h, m) are the log-sum-exps of the scaled logits of all that each token attended to.
        """
        return out

    def extend(self, layer: int, q: Tensor, grown: "Variant") -> Stay | None:
        """Hold a feed's tokens within the budget of `grown`, the method on prompts as long as the conversation is.

        The feed stays and was read with the queries q (1, h, m, d_h). What was dropped before is gone. Returns which
        tokens stay, if some leave; what is written for that, and its `cost`, are `rebuilt_bytes` of the ledger.
        A method that `fetches_more` lets the growth go to what a step fetches, beside sinks and a window of one size.
        """
        row, at = self.row, self.row.store[layer]
        assert row.fetches_more, f"{type(self).__name__} keeps the budget of the context"
        if at.can_fetch:
            row.plan = replace(row.plan, k=grown.budget.tokens - at.n_kept - at.n_window)

    def read_feed(self, layer: int, feed: Feed) -> Tensor:
        """Take in tokens of which `at_once` allows as many; their outputs (1, h, m, d_h)."""
        return read_at_once(self.row, layer, feed)

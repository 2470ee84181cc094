"""What a step fetches, as values: `Selection`, and what it took to find it, `Cost`.

Not here: where tokens lie (`engine/placement.py`). No torch: settings read this first.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


ALWAYS = 1 << 40  # steps


class Reads(NamedTuple):
    """Elements of an index that an accelerator read, and counted there."""

    n: "Tensor"  # (n,) int32
    element_bytes: int


class Cost(NamedTuple):
    """Bytes beside K and V that a step holds, reads or moves; the engine enters them into the ledger.

    Tuples are compared and made fast: a row makes one in every layer and step.
    """

    held_bytes: int = 0  # on the device: whatever a method keeps there in order to find tokens
    moved_bytes: int = 0  # moved or read in order to find tokens: what `comm` prices
    read_bytes: int = 0  # of an index on the device, read to find tokens, beside what is moved
    searched_bytes: int = 0  # read by an exact search, which no budget prices
    released_bytes: int = 0  # device to host, beside K and V
    made_bytes: int = 0  # of keys of fetched tokens that are made on the device
    rebuilt_bytes: int = 0  # read and written to choose or to index tokens anew
    reads: Reads | None = None  # moved or read, too


FREE = Cost()


class Selection(NamedTuple):
    """What a query fetches beside what is resident. A method returns positions alone where it has no more to say."""

    idx: "Tensor | None" = None  # (1, h_kv or h, k) positions without repeats, -1 for none where the method `pads`
    cost: Cost = FREE  # of finding them
    bias: "Tensor | None" = None  # in the shape of idx, float32: added to the tokens' scaled logits
    keys: "Tensor | None" = None  # (1, h_kv, k, d_h) of tokens of which the host has the values alone
    turned: "Callable[[Any], Any] | None" = None  # of the part that was fetched: that which is attended to
    stand_ins: Sequence[Any] = ()  # parts of pseudo-tokens, which stand for tokens that are not fetched


class Search:
    """A search of some rows at steps that are alike: those do nothing but take in tokens and fetch as many others."""

    idx: "Sequence[Tensor]"  # of each row (1, heads, k), where the positions of every step come to lie
    more: Sequence[int] = ()  # so many more at each step, head by head behind those of `idx`; none: nowhere
    n_steps: int = ALWAYS  # for so many
    corrects: bool = False  # True: `correct` has something to do

    def holds(self) -> bool:
        """Whether what is searched is what it was."""
        return True

    def find(self, q: "Tensor", k_new: "Tensor", v_new: "Tensor", age: int) -> None:
        """For the rows' queries and newest K and V (n, heads, 1, d_h), so many steps behind the one it was told."""
        raise NotImplementedError

    def costs(self, age: int) -> Sequence[Cost]:
        """What each row's search took at that step."""
        raise NotImplementedError

    def chosen(self, age: int) -> "Sequence[Tensor]":
        """`idx` of that step."""
        if not self.more:
            return self.idx
        longer = ((*x.shape[:2], x.shape[2] + age * grows) for x, grows in zip(self.idx, self.more, strict=True))
        return [x.as_strided(size, x.stride()) for x, size in zip(self.idx, longer, strict=True)]

    def correct(self, out: "Tensor") -> None:
        """Behind attention, in place: (n, h, 1, d_h)."""


class Searches(Search):
    """Those of rows that are searched apart."""

    def __init__(self, each: "Sequence[tuple[Search, Sequence[int], Tensor]]") -> None:
        """Each with its rows, and the same on the device."""
        self.each, places = each, [(i, idx) for search, at, _ in each for i, idx in zip(at, search.idx, strict=True)]
        self.idx = [idx for _, idx in sorted(places, key=lambda place: place[0])]
        grown = {i: grows for search, at, _ in each for i, grows in zip(at, search.more, strict=False)}
        self.more = [grown.get(i, 0) for i in range(len(self.idx))] if grown else ()
        self.n_steps = min(search.n_steps for search, *_ in each)
        self.corrects = any(search.corrects for search, *_ in each)

    def holds(self) -> bool:
        return all(search.holds() for search, *_ in self.each)

    def find(self, q: "Tensor", k_new: "Tensor", v_new: "Tensor", age: int) -> None:
        for search, _, rows in self.each:
            search.find(q.index_select(0, rows), k_new.index_select(0, rows), v_new.index_select(0, rows), age)

    def costs(self, age: int) -> Sequence[Cost]:
        costs = [FREE] * len(self.idx)
        for search, at, _ in self.each:
            for i, cost in zip(at, search.costs(age), strict=True):
                costs[i] = cost
        return costs

    def correct(self, out: "Tensor") -> None:
        for search, _, rows in self.each:
            if search.corrects:
                own = out.index_select(0, rows)
                search.correct(own)
                out.index_copy_(0, rows, own)


class FeedSelection(NamedTuple):
    """What each token of a feed fetches."""

    idx: "Tensor | None" = None  # (m, h_kv or h, k) positions, -1: none
    costs: Sequence[Cost] = ()  # of each token; none: all are free
    bias: "Tensor | None" = None  # (m, h_kv or h, k) float32


Found: TypeAlias = "Selection | Tensor | None"  # what `select` returns


def selection(found: "Selection | Tensor | None") -> Selection:
    """What `select` returned, with its parts by name."""
    return found if isinstance(found, Selection) else Selection(found)

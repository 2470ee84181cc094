"""What a step fetches, as values: `Selection`, and what it took to find it, `Cost`; whose choice it is, `Reuse`.

Not here: where tokens lie (`engine/placement.py`). No torch: settings read this first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


ALWAYS = 1 << 40  # steps


class Reads(NamedTuple):
    """Elements of an index that an accelerator read, and counted there."""

    n: "Tensor"  # (n,) int32
    element_bytes: int


class Cost(NamedTuple):
    """Bytes besides K and V that a step holds, reads or moves; the engine enters them into the ledger.

    Tuples are compared and made fast: a row makes one in every layer and step.
    """

    held_bytes: int = 0  # on the device: whatever a method keeps there in order to find tokens
    moved_bytes: int = 0  # moved or read in order to find tokens: what `comm` prices
    read_bytes: int = 0  # of an index on the device, read to find tokens, besides what is moved
    searched_bytes: int = 0  # read by an exact search, which no budget prices
    released_bytes: int = 0  # device to host, besides K and V
    made_bytes: int = 0  # of keys of fetched tokens that are made on the device
    rebuilt_bytes: int = 0  # read and written to choose or to index tokens anew
    reads: Reads | None = None  # moved or read, too


FREE = Cost()


class Selection(NamedTuple):
    """What a query fetches besides what is resident. A method returns positions alone where it has no more to say."""

    idx: "Tensor | None" = None  # (1, h_kv or h, k) positions without repeats, -1 for none where the method `pads`
    cost: Cost = FREE  # of finding them
    bias: "Tensor | None" = None  # in the shape of idx, float32: added to the tokens' scaled logits
    keys: "Tensor | None" = None  # (1, h_kv, k, d_h) of tokens of which the host has the values alone
    turned: "Callable[[Any], Any] | None" = None  # of the part that was fetched: that which is attended to
    stand_ins: Sequence[Any] = ()  # parts of pseudo-tokens, which stand for tokens that are not fetched


class FeedSelection(NamedTuple):
    """What each token of a feed fetches."""

    idx: "Tensor | None" = None  # (m, h_kv or h, k) positions, -1: none
    costs: Sequence[Cost] = ()  # of each token; none: all are free
    bias: "Tensor | None" = None  # (m, h_kv or h, k) float32


class Behind(NamedTuple):
    """A layer that searches nothing, and attends to what an earlier one chose at the same step."""

    layer: int
    anchor: int
    heads: tuple[int, ...] = ()  # KV head of the anchor whose choice each KV head takes; none: its own number's


@dataclass(frozen=True)
class Reuse:
    """Which layers choose, and whose choice the others attend to; layers that it does not name are as ever."""

    anchors: tuple[int, ...]
    behind: tuple[Behind, ...] = ()
    all_too: tuple[int, ...] = ()  # anchors that attend to all tokens themselves
    dense: tuple[int, ...] = ()  # layers that attend to all tokens, and choose none


Found: TypeAlias = "Selection | Tensor | None"  # what `select` returns


def selection(found: "Selection | Tensor | None") -> Selection:
    """What `select` returned, with its parts by name."""
    return found if isinstance(found, Selection) else Selection(found)

"""`Row`: a method's variant on one sample as an engine sees it, which is all that an engine knows of methods.

`methods/base.py` is the one class that has this interface; its docstrings say what each of these means.

Not here: what a row says of its tokens (`engine/placement.py`, `engine/selection.py`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.footprint import Footprint
from kvbench.engine.budget import Budget
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Change, Placement, Release, Stay
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.search import Search
from kvbench.engine.selection import FeedSelection, Found, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.scratch import Scratch


class Variant(Protocol):
    """A method with its parameters, its budget and its integers for prompts of one length."""

    @property
    def method(self) -> "type[Row]": ...
    @property
    def budget(self) -> Budget: ...
    @property
    def params(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def is_full(self) -> bool: ...
    def row(self, trace: Trace, n_new: int) -> Any: ...


class Row(Protocol):
    """The variant on one sample."""

    title: ClassVar[Any]
    traits: Any
    wants_weights: bool
    wants_lookahead: bool
    q_ahead: Tensor
    delay: int | None
    wants_input: bool
    x_now: Tensor
    variant: Any
    params: Any
    plan: Any
    budget: Budget
    trace: Trace
    store: Any
    skipped: Sequence[int]

    # The prompt.

    @classmethod
    def footprint(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> Footprint: ...
    @classmethod
    def whole_layers(cls, params: Any, shape: ModelShape) -> Sequence[int]: ...
    def arrange(self, layer: int) -> Placement | None: ...
    def arrange_rest(self) -> Mapping[int, Placement]: ...

    # A step.

    @property
    def is_stored(self) -> bool: ...
    @property
    def is_still(self) -> bool: ...
    @property
    def repeats(self) -> bool: ...
    def resident(self, layer: int, q: Tensor) -> list[Part]: ...
    def follow(self, layer: int) -> None: ...
    def take(self, layer: int, idx: Tensor | None) -> Selection: ...
    def kind(self, layer: int) -> Hashable: ...
    @classmethod
    def search(cls, rows: Sequence[Any], layer: int, q: Tensor) -> Sequence[Found]: ...
    @classmethod
    def search_again(
        cls, rows: Sequence[Any], layer: int, q: Tensor, scratch: Scratch, ahead: int
    ) -> Search | None: ...
    @classmethod
    def after_rows(
        cls, rows: Sequence[Any], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]: ...
    @classmethod
    def after_rows_on_gpu(
        cls, rows: Sequence[Any], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]: ...
    def update(self, layer: int, weights: Tensor, ahead: int = 0) -> Any: ...
    def after_step(self) -> Iterable[tuple[int, Change]]: ...
    def cue(self, encode: Callable[[str], Sequence[int]]) -> Cue | None: ...

    # A feed.

    def at_once(self, layer: int, m: int) -> int: ...
    def select_feed(self, layer: int, feed: Feed) -> FeedSelection: ...
    def after_feed(self, layer: int, feed: Feed, out: Tensor, lse: Tensor) -> Tensor: ...
    def read_feed(self, layer: int, feed: Feed) -> Tensor | None: ...
    def extend(self, layer: int, q: Tensor, grown: Any) -> Stay | Release | None: ...

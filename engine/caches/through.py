"""The cache that a model is given: compressed layers hand K and V through, all others are the model's own.

Where a layer keeps a state in addition to K and V, the state stays with it. A model that takes no cache but one of its
own class gets that, with layers made as it asks for them.

Not here: where K and V of compressed layers go (`engine/store.py`), its rows (`engine/caches/forks.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

Enter = Callable[[int, Tensor, Tensor], None]  # a layer, and what it gives its cache as keys and values


class HandThrough(DynamicLayer):
    """Stores nothing: the session keeps K and V."""

    def __init__(self, layer: int, enter: Enter) -> None:
        """`enter` hears of every update: modules that serve several layers do not know which one it is."""
        super().__init__()
        self.layer, self.enter, self.seen = layer, enter, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        self.enter(self.layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """No tensors, nothing to choose."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "HandThrough":
        made = HandThrough(self.layer, self.enter)
        made.seen = self.seen
        return made


class HandThroughBeside(LinearAttentionAndFullAttentionLayer):
    """Stores the state alone."""

    def __init__(self, layer: int, enter: Enter, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.layer, self.enter, self.seen = layer, enter, 0

    update = HandThrough.update  # pyright: ignore[reportAssignmentType]  # the same words for another class
    get_seq_length = HandThrough.get_seq_length  # pyright: ignore[reportAssignmentType]

    def reorder_cache(self, beam_idx: Any) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)


def new_cache(config: Any, compressed: Iterable[int], enter: Enter, own: type[DynamicCache] | None = None) -> Any:
    """An empty cache; `own` is the class of a model that takes no other."""
    if own is not None:
        return lazy_cache(own(), frozenset(compressed), enter)
    cache = DynamicCache(config=config)
    for i in compressed:
        old = cache.layers[i]
        is_hybrid = isinstance(old, LinearAttentionAndFullAttentionLayer)
        cache.layers[i] = HandThroughBeside(i, enter, old.number_of_states) if is_hybrid else HandThrough(i, enter)
    return cache


def lazy_cache(cache: Any, compressed: frozenset[int], enter: Enter) -> Any:
    """A cache that makes its layers when they are asked for, one after the other."""

    def next_layer() -> DynamicLayer:
        i = len(cache.layers)
        return HandThrough(i, enter) if i in compressed else DynamicLayer()

    cache.layer_class_to_replicate = next_layer
    return cache

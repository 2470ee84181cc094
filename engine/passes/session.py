"""Who answers a model's attention calls, what such a call was given, and a model as those see it who run it.

Not here: the model (`engine/model.py`), its sessions (`engine/prefill.py`, `engine/batch.py`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax

# Moves queries or keys (n, heads, s, d_h) by so many positions, or by (n or 1, s) of them.
Turn = Callable[[Tensor, int | Tensor], Tensor]


class Session(Protocol):
    """Who answers the model's attention calls: the prefill or the batch that decodes."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        """Output (n, h, s_q, d_h) for q (n, h, s_q, d_h) and what the cache returned as k and v.

        With a window a query sees so many tokens, itself the last one; with a chunk, those of its own chunk. `softmax`
        makes weights of products; what it caps and its sinks are part of the output.
        """
        ...


class PruningSession(Protocol):
    """A prefill that tokens leave on their way up."""

    positions: Tensor  # of the tokens that are still in it, (n,)

    def leave(self, hidden: Tensor) -> Tensor:
        """A layer's output (1, n, D) without the tokens that go no further."""
        ...


@dataclass(frozen=True)
class Call:
    """Input and arguments of a layer's attention."""

    x: Tensor  # (n, s_q, D), after the layer's input norm
    beside: dict[str, Any]  # positions, rotary embedding and whatever else this architecture passes


class Runner(Protocol):
    """A loaded model, of which `engine/model.py` says what each of these does."""

    hf: Any
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    allows_graphs: bool

    @property
    def devices(self) -> tuple[torch.device, ...]: ...
    @cached_property
    def attentions(self) -> list[Any]: ...
    @cached_property
    def graph_pool(self) -> Any: ...
    def new_cache(self) -> Any: ...
    def count_token(self, cache: Any) -> None: ...
    def forward(self, ids: Tensor, position: int | Tensor, cache: Any, session: Session) -> Tensor: ...
    def hooked(self) -> AbstractContextManager[Any]: ...
    def watched(self, calls: dict[int, Call]) -> AbstractContextManager[None]: ...
    def asking(self, layer: int, x: Tensor, beside: dict[str, Any]) -> tuple[Tensor, Tensor]: ...

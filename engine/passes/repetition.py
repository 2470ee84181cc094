"""The repetition of a context: what its tokens get, and what queries ask, while the model is made to repeat it.

`Repetition` notes the most attention that each token gets. The context is cut into chunks. Each is asked for in words
and then fed, so that its tokens are read as an answer is, after the full cache. A token's number is its largest weight
from any of these queries, request included, over the prompt's prefix, the chunk itself and what was fed. Chunks of
other places take part in the pass and not in this softmax, so that numbers of different chunks mean the same.
`RepeatedQueries` notes some of the queries themselves.

Not here: the pass itself (`engine/passes/second_pass.py`), what is kept (`methods/dropping/kvzip.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.budget import Frame
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import spaced
from kvbench.engine.passes.second_pass import Pass, SecondPass
from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import column_maxima

if TYPE_CHECKING:
    from kvbench.engine.model import Model

# What is said before the first chunk, and before each later one with the last tokens of the chunk in front of it.
FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with "


@dataclass(frozen=True)
class Repetition(SecondPass):
    """Most attention of each token between the frame's ends, (1, h_kv, n) float32, above 0 and at most 1."""

    chunk: int  # tokens
    overlap: int  # tokens of the chunk before, which the request for a chunk repeats
    frame: Frame
    first_ids: tuple[int, ...] | None = None  # in place of the words of `FIRST`
    next_ids: tuple[int, ...] | None = None  # and of `NEXT`

    def passes(self, model: "Model", ids: Sequence[int]) -> list[Pass]:
        first = words_of(model, FIRST) if self.first_ids is None else self.first_ids
        following = words_of(model, NEXT) if self.next_ids is None else self.next_ids
        n_prefix, end = self.frame.n_prefix, len(ids) - self.frame.n_suffix
        prefix, found = (range(n_prefix),) if n_prefix else (), []
        for start in range(n_prefix, end, self.chunk):
            at = range(start, min(start + self.chunk, end))
            request = first if start == n_prefix else (*following, *ids[start - min(self.overlap, self.chunk) : start])
            fed = (*request, *self.frame.postfix_ids, *ids[at.start : at.stop])
            found.append(Pass(fed, (*prefix, at)))
        return found

    def observe(self, at: Pass, q: Tensor, near: Tensor, softmax: Softmax, lse: Tensor) -> Tensor:
        return largest_weights(q, near[:, :, near.shape[2] - len(at.near[-1]) :], softmax, lse)

    def join(self, found: Sequence[Tensor]) -> Tensor:
        return torch.cat([*found], -1)


@dataclass(frozen=True)
class RepeatedQueries(SecondPass):
    """Queries of `n` tokens at even distances while the context is repeated in one pass: (1, h, n, d_h)."""

    n: int
    frame: Frame
    first_ids: tuple[int, ...] | None = None  # in place of the words of `FIRST`

    def passes(self, model: "Model", ids: Sequence[int]) -> list[Pass]:
        n_context = len(ids) - self.frame.n_prefix - self.frame.n_suffix
        return Repetition(n_context, 0, self.frame, self.first_ids, self.first_ids).passes(model, ids)

    def observe(self, at: Pass, q: Tensor, near: Tensor, softmax: Softmax, lse: Tensor) -> Tensor:
        places = spaced(self.n, len(at.ids) - len(at.near[-1]), len(at.ids))
        return q.index_select(2, torch.tensor([*places], device=q.device))

    def join(self, found: Sequence[Tensor]) -> Tensor:
        (queries,) = found
        return queries


def words_of(model: "Model", text: str) -> tuple[int, ...]:
    """Tokens of what is said to the model; `ConfigError` where it has no words."""
    if model.tokenizer is None:
        raise ConfigError(
            f"the model {model.shape.name!r} has no tokenizer for the request to repeat a context; give its tokens as "
            "method.first_ids=[…] and method.next_ids=[…]"
        )
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def largest_weights(q: Tensor, keys: Tensor, softmax: Softmax, lse: Tensor) -> Tensor:
    """The most that each key (1, h_kv, n, d_h) gets from any query of its group, (1, h_kv, n) float32.

    q (1, h, r, d_h) with the log-sum-exp (1, h, r) that makes weights of its logits.
    """
    # Kernels in half precision round log-sum-exps, by which a weight near 1 could come out above it.
    return column_maxima(q, keys, softmax.scale, lse, softmax.cap).exp_().clamp_(max=1).unsqueeze(0)

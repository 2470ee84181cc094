"""A second pass: tokens that the model reads after a prompt's full cache, to see what they look at; nothing of them stays.

A method declares second_passes as it declares observations. They run once the prompt was read and before any variant
completes, one after the other, and all variants that ask for the same one share it. A second pass may take several passes;
each starts after the prompt's last token, and its own K and V are gone when it ends.

Not here: which tokens, and what is noted of them (`engine/passes/repetition.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.books.spans import span
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.causal import Chunk, over_past, whole
from kvbench.engine.passes.trace import SecondPassResult, Trace
from kvbench.engine.softmax import Softmax

if TYPE_CHECKING:
    from kvbench.engine.model import Model


@dataclass(frozen=True)
class Pass:
    """Tokens to read, and the places of the prompt that they are about."""

    ids: tuple[int, ...]
    near: tuple[range, ...]  # ascending


class SecondPass(ABC):
    """What is read, and what is noted of each layer; a frozen dataclass, equal where the result is."""

    @abstractmethod
    def passes(self, model: "Model", ids: Sequence[int]) -> Sequence[Pass]:
        """The passes over a prompt of these tokens."""

    @abstractmethod
    def observe(self, at: Pass, q: Tensor, near: Tensor, softmax: Softmax, lse: Tensor) -> Tensor:
        """Note of one layer of a pass, from q (1, h, r, d_h) and the keys of the near tokens (1, h_kv, n, d_h).

        `lse` (1, h, r) has each query's log-sum-exp over the near tokens, the pass's own up to itself and the sinks.
        """

    @abstractmethod
    def join(self, found: Sequence[Tensor]) -> Tensor:
        """A layer's result, from what was observed in each pass."""


def run_second_passes(model: "Model", trace: Trace, asked: Iterable[SecondPass]) -> None:
    """Run what was asked for and has not run yet; the trace notes what it finds."""
    for what in dict.fromkeys(asked):
        if what not in trace.second_passes:
            start = perf_counter()
            with span("second pass"):
                found = run(model, trace, what)
            synchronize(model.devices)
            trace.second_passes[what] = SecondPassResult(found, perf_counter() - start)


def run(model: "Model", trace: Trace, what: SecondPass) -> dict[int, Tensor]:
    """What one second pass finds of each layer."""
    assert trace.shape.n_own == 0, "a layer with a cache of its own"
    assert not trace.positions, "a prompt that tokens left"
    session = _Behind(trace, what)
    for at in what.passes(model, trace.ids):
        session.enter(at)
        ids = torch.tensor([at.ids], device=model.device)
        with model.hooked():
            model.forward(ids, trace.s_prompt, model.new_cache(), session)
    return {layer: what.join(found) for layer, found in session.found.items()}


class _Behind:
    """Stands in the model's attention: the pass's tokens see the whole prompt, and their own past."""

    def __init__(self, trace: Trace, what: SecondPass) -> None:
        self.trace, self.what = trace, what
        self.found: dict[int, list[Tensor]] = {layer: [] for layer in trace.shape.attention_layers}

    def enter(self, at: Pass) -> None:
        self.at = at
        places = torch.zeros(self.trace.s_prompt, dtype=torch.bool)
        for some in at.near:
            places[some.start : some.stop] = True
        sides = places.nonzero().squeeze(1), (~places).nonzero().squeeze(1)
        devices = {self.trace.device_of(layer) for layer in self.trace.shape.attention_layers}
        self.sides = {device: tuple(x.to(device) for x in sides) for device in devices}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        keys, values = self.trace.keys(layer), self.trace.values(layer)
        at_near, at_far = self.sides[self.trace.device_of(layer)]
        near = keys.index_select(2, at_near)
        with span("attention", layer):
            parts = [over_past(q, k, v, softmax)]
            if len(at_near):
                parts.append(whole(q, near, values.index_select(2, at_near), softmax))
            lse = torch.stack([each for _, each in parts]).logsumexp(0)
            lse = lse if softmax.sink is None else torch.logaddexp(lse, softmax.sink.view(-1, 1))
            if len(at_far):
                parts.append(whole(q, keys.index_select(2, at_far), values.index_select(2, at_far), softmax))
            out, _ = softmax.finish(*joined(parts))
        with span("observe", layer):
            self.found[layer].append(self.what.observe(self.at, q, near, softmax, lse))
        return out


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over several sets of tokens and its log-sum-exps (1, h, r), from those over each (1, h, r, d_h)."""
    (out, lse), *others = parts
    for more, its_lse in others:
        share = (its_lse - lse).sigmoid_().unsqueeze(-1)  # of the weights that lie on these tokens
        out, lse = torch.lerp(out, more, share.to(out.dtype)), torch.logaddexp(lse, its_lse)
    return out, lse

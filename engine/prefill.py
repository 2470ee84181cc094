"""One full pass over the prompt, and the `Trace` that it leaves for all variants.

The pass is ordinary exact attention, unless it is given a sparse one. Of every layer that methods compress the trace
keeps K and V as the attention saw them (after rotary embedding, not repeated over query heads), and what the variants
asked to observe. A method whose point is to leave tokens out of the pass brings a `TokenPruning`; its trace is its own.

Not here: which observations exist (`engine/observe.py`), how a model is called (`engine/model.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from kvbench.engine.batch import refuse_switch
from kvbench.engine.books.spans import span
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.causal import Chunk, causal
from kvbench.engine.errors import ConfigError, NotFiniteError, first_line
from kvbench.engine.model import Model
from kvbench.engine.observe import ModelFact, Observation
from kvbench.engine.passes.chunks import in_chunks
from kvbench.engine.passes.evicting import Evicting
from kvbench.engine.passes.latents import ByHeads, Latent
from kvbench.engine.passes.trace import Trace
from kvbench.engine.row import Variant
from kvbench.engine.sampling.finite import REMEDY
from kvbench.engine.shapes import DRAWN, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.kernels.scratch import finest


class TokenPruning(Protocol):
    """Which tokens leave the pass on their way up. Hashable: variants with equal prunings share a pass."""

    def going_on(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor | None:
        """Ascending indices of the layer's tokens that reach the next one; None: all. The last one always does."""
        ...


def prefill(
    model: Model,
    ids: Sequence[int],
    observations: Iterable[Observation] = (),
    on_layer: Callable[[Trace, int], None] | None = None,
    pruning: TokenPruning | None = None,
    sparsity: SparsePrefill | None = None,
    chunk: int | None = None,
    n_home: int = 0,
    evicts: Variant | None = None,
) -> Trace:
    """Read the prompt once. `on_layer` is called as soon as a compressed layer's K and V are in the trace.

    With a variant that `evicts` the prompt is read `chunk` tokens at a time, and between chunks the variant drops what
    it does not keep (`engine/passes/evicting.py`): the trace is its own.

    The K and V of `n_home` layers will go to the host tier, where memory is taken for them before.

    `sparsity` takes the place of exact attention in layers without a sliding window. What works token by token reads
    `chunk` tokens at a time. `NotFiniteError` where the model's numbers are none.
    """
    assert pruning is None or sparsity is None, "a pass that tokens leave is not sparse as well"
    trace = Trace(model.shape, len(ids), model.device, model.layer_devices)
    trace.ids, trace.turn = ids, model.turn
    every = dict.fromkeys(observations)
    for what in every:
        if isinstance(what, ModelFact):
            trace.know(what, what.of(model))
    asked = tuple(what for what in every if not isinstance(what, ModelFact))
    trace.make_homes(n_home, model.dtype)
    start = perf_counter()  # what is known of a model is no part of reading a prompt
    trace.rest = model.new_cache()
    prompt = torch.tensor([ids], device=model.device)
    if not model.digest.startswith(DRAWN):
        trace.digests = (model.digest, *model.other_digests)
    hears = model.watched(trace.inputs) if any(what.of_input for what in asked) else nullcontext()
    with span("prefill"), in_chunks(model, chunk), _explained(trace), hears:
        if evicts is not None:
            assert pruning is None and sparsity is None and chunk is not None, "a pass of its own"
            refuse_switch(model, chunk, len(ids))
            trace.logits = Evicting(trace, evicts, asked, on_layer).read(model, prompt, chunk)
        elif pruning is None:
            session = _Reading(trace, asked, on_layer, sparsity)
            trace.logits = model.forward(prompt, 0, trace.rest, session)[0]
        else:
            pruned = _Pruning(trace, asked, on_layer, pruning)
            with model.pruned(pruned):
                trace.logits = model.forward(prompt, 0, trace.rest, pruned)[0]
    synchronize(model.devices)
    trace.seconds = perf_counter() - start
    check_pass(trace)
    return trace


def n_home(variants: Iterable[Variant], shape: ModelShape) -> int:
    """Layers of which all tokens go to the host while a prompt is read for these."""
    n, most = len(shape.attention_layers), 0
    for each in variants:
        traits = each.method.traits
        if traits.sends_all and traits.has_budget and not (each.is_full or traits.drops or traits.changes):
            most = max(most, n - len(each.method.whole_layers(each.params, shape)))
    return most


@contextmanager
def _explained(trace: Trace) -> Iterator[None]:
    """Say what caused an error of a method that was given NaN."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_cause(trace):
            raise
        raise NotFiniteError(
            f"the model's keys or values of the prompt are NaN or infinite ({first_line(error)}); {REMEDY}"
        ) from error


def check_pass(trace: Trace) -> None:
    """Raise `NotFiniteError` where a pass over a prompt left logits that choose nothing."""
    assert trace.logits is not None, "the pass has not ended"
    if not trace.logits.amax().isfinite().item():
        raise NotFiniteError(f"the model's logits behind the prompt are NaN or infinite; {REMEDY}")


def is_cause(trace: Trace) -> bool:
    """Whether a pass that was broken off had keys or values that are no numbers, on which methods fail as they may."""
    layers = trace.held_layers()
    return any(not x.isfinite().all() for layer in layers for x in (trace.keys(layer), trace.values(layer)))


class _Reading(ByHeads):
    """Stands in the model's attention during prefill."""

    def __init__(
        self,
        trace: Trace,
        observations: tuple[Observation, ...],
        on_layer: Callable[[Trace, int], None] | None,
        sparsity: SparsePrefill | None = None,
    ) -> None:
        self.trace, self.observations, self.on_layer = trace, observations, on_layer
        self.sparsity = sparsity
        self.compressed = frozenset(trace.shape.attention_layers)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        self.trace.kept = None
        with span("attention", layer):
            out, lse = self.attention(layer, q, k, v, softmax, window)
        if layer in self.compressed:
            self.take_in(layer, q, k, v, softmax, lse)
        return out

    def attend_heads(
        self, layer: int, latent: Latent, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, softmax: Softmax,
        window: int | Chunk | None,
    ) -> Tensor:  # fmt: skip
        self.trace.kept = None
        with span("attention", layer):
            out, lse = self.attention(layer, q, k, v, softmax, window)
        self.trace.latents[layer] = latent
        self.take_in(layer, latent.absorbed(q) if self.asks else q, rows, rows[..., : latent.d_c], softmax, lse)
        return out

    @property
    def asks(self) -> bool:
        """Whether queries are looked at, beyond the pass's own attention."""
        return bool(self.observations)

    def take_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, lse: Tensor | None) -> None:
        """A compressed layer's tokens go into the trace, and are observed."""
        self.trace.add(layer, k, v, softmax)
        with span("observe", layer):
            for what in self.observations:
                self.trace.observe(layer, what, q, k, softmax, lse)
            self.trace.inputs.pop(layer, None)
        if self.on_layer is not None:
            with span("build", layer):
                self.on_layer(self.trace, layer)

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output, and each query's log-sum-exp of what was computed; None where sums want all pairs."""
        if self.sparsity is not None and window is None and q.shape[2] == k.shape[2]:
            if not self.sparsity.is_exact(layer, k.shape[2]):
                out, lse, share, kept = self.sparsity.attend(q, k, v, softmax, layer)
                self.trace.shares.append(share)
                if self.sparsity.observe == "exact":
                    return out, None
                self.trace.kept = kept
                return out, lse
            self.trace.shares.append(torch.ones((), dtype=finest(q.device), device=q.device))
        return causal(q, k, v, softmax, window)


class _Pruning(_Reading):
    """Reading in a pass that tokens leave: between two layers the model asks who goes on."""

    def __init__(
        self,
        trace: Trace,
        observations: tuple[Observation, ...],
        on_layer: Callable[[Trace, int], None] | None,
        pruning: TokenPruning,
    ) -> None:
        super().__init__(trace, observations, on_layer)
        assert trace.shape.n_own == 0, "a layer with a cache of its own"
        self.pruning = pruning
        self.positions = torch.arange(trace.s_prompt, device=trace.device)
        self.survivors: Tensor | None = None

    @property
    def asks(self) -> bool:
        return True

    def take_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, lse: Tensor | None) -> None:
        if len(self.positions) < self.trace.s_prompt:
            self.trace.positions[layer] = self.positions.to(q.device)
        super().take_in(layer, q, k, v, softmax, lse)
        self.survivors = self.pruning.going_on(layer, q, k, softmax)

    def leave(self, hidden: Tensor) -> Tensor:
        """What the layer above gets of a layer's output (1, n, D)."""
        if self.survivors is None:
            return hidden
        self.positions = self.positions.to(hidden.device)[self.survivors]
        return hidden.index_select(1, self.survivors)

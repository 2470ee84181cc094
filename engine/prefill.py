"""One full pass over the prompt, and the `Trace` that it leaves behind for all variants.

The pass is ordinary exact attention, unless it is given a sparse one. Of every layer that methods compress the trace
keeps K and V as the attention saw them (after rotary embedding, not repeated over query heads), and what the variants
asked to observe. A method whose point is to leave tokens out of the pass brings a `Thinning`; its trace is its own.

Not here: which observations exist (`engine/observe.py`), how a model is called (`engine/model.py`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.books.clock import synchronize
from engine.books.spans import span
from engine.causal import Chunk, causal
from engine.errors import ConfigError, NotFiniteError, first_line
from engine.latents import ByHeads, Latent
from engine.observe import Known, ModelFact, Observation
from engine.passes.chunks import in_chunks
from engine.passes.rotations import Turn
from engine.passes.streams import sent_home
from engine.sampling.finite import REMEDY, check_pass, is_cause
from engine.shapes import DRAWN, ModelShape
from engine.softmax import Softmax
from engine.sparse.base import SparsePrefill
from kernels.attend_kept import Kept
from kernels.gather import move_both
from kernels.rows.rotation import Rotation, rotation_of

if TYPE_CHECKING:
    from engine.model import Call, Model

T = TypeVar("T")


class Thinning(Protocol):
    """Which tokens leave the pass on their way up. Hashable: variants with equal thinnings share a pass."""

    def going_on(self, layer: int, q: Tensor, k: Tensor, soft: Softmax) -> Tensor | None:
        """Ascending indices of the layer's tokens that reach the next one; None: all. The last one always does."""
        ...


class Trace:
    """What one prefill leaves behind; read-only to everyone, because every variant of the sample shares it."""

    def __init__(
        self, shape: ModelShape, s_prompt: int, device: torch.device, layer_devices: Sequence[torch.device] = ()
    ) -> None:
        """`layer_devices` are those of the layers, where several GPUs share the model; by default all are `device`."""
        self.shape = shape
        self.s_prompt = s_prompt
        self.device = device  # of the tokens, and of most layers
        self.layer_devices = layer_devices
        self.host_device = torch.device("cpu")
        self.softmax: dict[int, Softmax] = {}  # what a layer makes weights of q·k with
        self.logits: Tensor | None = None  # (vocabulary,) float32, of the token behind the prompt
        self.rest: Any = None  # the model's own cache of the layers that nobody compresses
        self.turn: Mapping[int, Turn] | None = None  # how each layer moves queries and keys by so many positions
        self.ids: Sequence[int] = ()
        self.seconds = 0.0
        self.positions: dict[int, Tensor] = {}  # of a layer's tokens (n,), where not all reached it
        self.shares: list[Tensor] = []  # of pairs of query and key, per layer with sparse attention
        self.kept: Kept | None = None  # what was computed of the layer at work, where observations are made of it
        self._device: dict[int, tuple[Tensor, Tensor]] = {}
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._held: set[int] = set()
        self._observed: dict[tuple[Observation, int], Tensor] = {}
        self._probed: dict[tuple[Hashable, int], Tensor] = {}
        self.probe_seconds: dict[Hashable, float] = {}  # of each probe
        self.origins: dict[ModelFact, Mapping[str, Any]] = {}  # where what is known of the model comes from
        self._shared: dict[Hashable, Any] = {}
        self.latents: dict[int, Latent] = {}  # of layers that cache those
        self.inputs: dict[int, Call] = {}  # what the attention at work was called with, where somebody observes it
        self.digests: Sequence[str] = ()  # names of the model's files, its own first; none of one with drawn weights

    def add(self, layer: int, k: Tensor, v: Tensor, soft: Softmax) -> None:
        """Take in a layer's K and V, (1, h_kv, s_prompt, d_h); of a thinned layer those that reached it."""
        n = len(self.positions[layer]) if layer in self.positions else self.s_prompt
        assert k.shape == (1, self.shape.h_kv, n, self.shape.d_h), f"layer {layer}: keys are {tuple(k.shape)}"
        k = k.contiguous()
        self._device[layer] = k, k[..., : self.shape.d_v] if self.shape.is_latent else v.contiguous()
        self.softmax[layer] = soft

    def device_of(self, layer: int) -> torch.device:
        """Where a layer's K and V lie, and all that is made of them."""
        return self.layer_devices[layer] if self.layer_devices else self.device

    def rotation(self, layer: int) -> Rotation | None:
        """Tables of the layer's rotary embedding; None where it has none, or none that turns pairs of numbers."""
        if self.turn is None:
            return None
        turn, device = self.turn[layer], self.device_of(layer)
        return self.once(("rotation", device, turn), lambda: rotation_of(turn, self.s_prompt, self.shape.d_h, device))

    def gathered(self, of_layers: Iterable[Tensor]) -> list[Tensor]:
        """What belongs to several layers, on one device, so that they can be compared."""
        return [x.to(self.device) for x in of_layers]

    @property
    def exact(self) -> "Trace":
        """The trace with K and V as the pass over the prompt had them."""
        return self

    def of_heads(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as heads attend to them: of latents the keys and values that all heads make of them."""
        return self.latents[layer].heads(k) if layer in self.latents else (k, v)

    def held_layers(self) -> list[int]:
        """Those whose K and V are here."""
        return [*self._device]

    def keys(self, layer: int) -> Tensor:
        """(1, h_kv, s_prompt, d_h), on the model's device."""
        return self._device[layer][0]

    def values(self, layer: int) -> Tensor:
        """(1, h_kv, s_prompt, d_h), on the model's device."""
        return self._device[layer][1]

    def host(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V on the host tier; where host and device are one memory, the same tensors."""
        return self._host[layer]

    def offload(self, layer: int) -> None:
        """Put a copy of the layer onto the host tier, pinned and without waiting where there is an accelerator."""
        if layer in self._host:
            return
        if self.device == self.host_device:
            self._host[layer] = self._device[layer]
            return
        with span("offload", layer):
            self._copy_to_host(layer)

    def _copy_to_host(self, layer: int) -> None:
        self._host[layer] = move_both(sent_home, *self._device[layer])

    def hold(self, layer: int) -> None:
        """Say that a variant goes on reading the layer's device tensors while it decodes."""
        self._held.add(layer)

    def forget(self, layer: int) -> None:
        """Let go of a layer's K and V, which lie elsewhere from now on."""
        del self._device[layer]

    def settle(self) -> None:
        """After every variant was built: wait for copies, and free device tensors that nobody holds."""
        if self.device == self.host_device:
            return
        synchronize([self.device, *self.layer_devices])
        for layer in self._host.keys() - self._held:
            del self._device[layer]

    def observe(
        self,
        layer: int,
        what: Observation,
        q: Tensor,
        k: Tensor,
        soft: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """Make one observation of one layer."""
        self._observed[what, layer] = what.observe_layer(self, layer, q, k, soft, lse)

    def know(self, what: ModelFact, known: Known) -> None:
        """Take in what is known of the model."""
        self.origins[what] = known.origin
        self._observed |= {(what, layer): x.to(self.device_of(layer)) for layer, x in known.layers.items()}

    def observed(self, what: Observation, layer: int) -> Tensor:
        """What was observed of a layer; only what a method declared is there."""
        return self._observed[what, layer]

    def note(self, what: Hashable, found: Mapping[int, Tensor], seconds: float) -> None:
        """Take in what a probe found of each layer, and how long it took."""
        self._probed |= {(what, layer): tensor for layer, tensor in found.items()}
        self.probe_seconds[what] = seconds

    def probed(self, what: Hashable, layer: int) -> Tensor:
        """What a probe found of a layer; only what a method declared is there, once the prompt was read."""
        return self._probed[what, layer]

    def share(self) -> float | None:
        """Which share of all pairs of query and key the pass computed, mean over layers; None where it was exact."""
        return torch.stack(self.gathered(self.shares)).mean().item() if self.shares else None

    def layer_shares(self) -> list[float]:
        """The same of each layer that may be sparse; none where the pass was exact."""
        return torch.stack(self.gathered(self.shares)).tolist() if self.shares else []

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` for the first who asks under `key`, its result for all others: codes, clusters.

        The key must hold everything that the result depends on.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


def prefill(
    model: "Model",
    ids: Sequence[int],
    observations: Iterable[Observation] = (),
    on_layer: Callable[[Trace, int], None] | None = None,
    thinning: Thinning | None = None,
    sparsity: SparsePrefill | None = None,
    chunk: int | None = None,
) -> Trace:
    """Read the prompt once. `on_layer` is called as soon as a compressed layer's K and V are in the trace.

    `sparsity` takes the place of exact attention in layers without a sliding window. What works token by token reads
    `chunk` tokens at a time. `NotFiniteError` where the model's numbers are none.
    """
    assert thinning is None or sparsity is None, "a pass that tokens leave is not sparse as well"
    trace = Trace(model.shape, len(ids), model.device, model.layer_devices)
    trace.ids, trace.turn = ids, model.turn
    every = dict.fromkeys(observations)
    for what in every:
        if isinstance(what, ModelFact):
            trace.know(what, model.known(what))
    asked = tuple(what for what in every if not isinstance(what, ModelFact))
    start = perf_counter()  # what is known of a model is no part of reading a prompt
    trace.rest = model.new_cache()
    prompt = torch.tensor([ids], device=model.device)
    if not model.digest.startswith(DRAWN):
        trace.digests = (model.digest, *model.other_digests)
    hears = model.watched(trace.inputs) if any(what.of_input for what in asked) else nullcontext()
    with span("prefill"), in_chunks(model, chunk), _explained(trace), hears:
        if thinning is None:
            session = _Reading(trace, asked, on_layer, sparsity)
            trace.logits = model.forward(prompt, 0, trace.rest, session)[0]
        else:
            thinned = _Thinned(trace, asked, on_layer, thinning)
            with model.thinned(thinned):
                trace.logits = model.forward(prompt, 0, trace.rest, thinned)[0]
    synchronize(model.devices)
    trace.seconds = perf_counter() - start
    check_pass(trace)
    return trace


@contextmanager
def _explained(trace: Trace) -> Iterator[None]:
    """Say what lies behind an error of a method that was given NaN."""
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        self.trace.kept = None
        with span("attention", layer):
            out, lse = self.attention(layer, q, k, v, soft, window)
        if layer in self.compressed:
            self.take_in(layer, q, k, v, soft, lse)
        return out

    def attend_heads(
        self, layer: int, latent: Latent, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, soft: Softmax,
        window: int | Chunk | None,
    ) -> Tensor:  # fmt: skip
        self.trace.kept = None
        with span("attention", layer):
            out, lse = self.attention(layer, q, k, v, soft, window)
        self.trace.latents[layer] = latent
        self.take_in(layer, latent.absorbed(q) if self.asks else q, rows, rows[..., : latent.d_c], soft, lse)
        return out

    @property
    def asks(self) -> bool:
        """Whether queries are looked at, beyond the pass's own attention."""
        return bool(self.observations)

    def take_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, lse: Tensor | None) -> None:
        """A compressed layer's tokens go into the trace, and are observed."""
        self.trace.add(layer, k, v, soft)
        with span("observe", layer):
            for what in self.observations:
                self.trace.observe(layer, what, q, k, soft, lse)
            self.trace.inputs.pop(layer, None)
        if self.on_layer is not None:
            with span("build", layer):
                self.on_layer(self.trace, layer)

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output, and each query's log-sum-exp of what was computed; None where sums want all pairs."""
        if self.sparsity is not None and window is None and q.shape[2] == k.shape[2]:
            if not self.sparsity.is_exact(layer, k.shape[2]):
                out, lse, share, kept = self.sparsity.attend(q, k, v, soft, layer)
                self.trace.shares.append(share)
                if self.sparsity.observe == "exact":
                    return out, None
                self.trace.kept = kept
                return out, lse
            self.trace.shares.append(torch.ones((), dtype=torch.float64, device=q.device))
        return causal(q, k, v, soft, window)


class _Thinned(_Reading):
    """As `_Reading`, for a pass that tokens leave: between two layers the model asks who goes on."""

    def __init__(
        self,
        trace: Trace,
        observations: tuple[Observation, ...],
        on_layer: Callable[[Trace, int], None] | None,
        thinning: Thinning,
    ) -> None:
        super().__init__(trace, observations, on_layer)
        assert trace.shape.n_own == 0, "a layer with a cache of its own"
        self.thinning = thinning
        self.positions = torch.arange(trace.s_prompt, device=trace.device)
        self.survivors: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        if len(self.positions) < self.trace.s_prompt:
            self.trace.positions[layer] = self.positions.to(q.device)
        return super().attend(layer, q, k, v, soft, window)

    def attend_heads(
        self, layer: int, latent: Latent, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, soft: Softmax,
        window: int | Chunk | None,
    ) -> Tensor:  # fmt: skip
        if len(self.positions) < self.trace.s_prompt:
            self.trace.positions[layer] = self.positions.to(q.device)
        return super().attend_heads(layer, latent, q, k, v, rows, soft, window)

    @property
    def asks(self) -> bool:
        return True

    def take_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, lse: Tensor | None) -> None:
        super().take_in(layer, q, k, v, soft, lse)
        self.survivors = self.thinning.going_on(layer, q, k, soft)

    def leave(self, hidden: Tensor) -> Tensor:
        """What the layer above gets of a layer's output (1, n, D)."""
        if self.survivors is None:
            return hidden
        self.positions = self.positions.to(hidden.device)[self.survivors]
        return hidden.index_select(1, self.survivors)

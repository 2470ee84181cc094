"""`Trace`: what one pass over a prompt leaves for all variants.

Of every layer that methods compress it has K and V as the attention saw them (after rotary embedding, not repeated
over query heads), and what the variants asked to observe.

Not here: the pass (`engine/prefill.py`), what may be observed (`engine/observe.py`).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.engine.books.spans import span
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.passes.latents import Latent
from kvbench.engine.passes.pinned import PinnedBuffers
from kvbench.engine.passes.session import Call, Turn
from kvbench.engine.passes.streams import NO_BUFFERS, sent_home
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.attend_kept import Kept
from kvbench.kernels.gather import bytes_of_both, move_both
from kvbench.kernels.rows.rotation import Rotation, rotation_of

T = TypeVar("T")


class Observer(Hashable, Protocol):
    """What looks at a layer while the prompt is read."""

    def observe_layer(
        self, trace: "Trace", layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Known:
    """Facts of a model by layer, and where they come from."""

    layers: Mapping[int, Tensor]  # of each compressed layer, on any device
    origin: Mapping[str, Any] = field(default_factory=dict)  # where it comes from, as JSON, for results


@dataclass(frozen=True)
class SecondPassResult:
    """What a second pass found of each layer, and how long it took."""

    layers: Mapping[int, Tensor]
    seconds: float


class Trace:
    """What one prefill leaves; read-only to everyone, because every variant of the sample shares it."""

    of_prompt: ClassVar = frozenset({"_device", "_host", "_shared"})  # K and V, and what was made of them

    def __init__(
        self, shape: ModelShape, s_prompt: int, device: torch.device, layer_devices: Sequence[torch.device] = ()
    ) -> None:
        """`layer_devices` are those of the layers, where several GPUs share the model; by default all are `device`."""
        self.shape = shape
        self.s_prompt = s_prompt  # within `as_held` what a layer holds of it
        self.n_read = s_prompt  # tokens of the prompt, always
        self.device = device  # of the tokens, and of most layers
        self.layer_devices = layer_devices
        # A tier of its own next to a GPU of CUDA's; other accelerators have one memory for both.
        self.host_device = torch.device("cpu") if device.type == "cuda" else device
        self.softmax: dict[int, Softmax] = {}  # what a layer makes weights of q·k with
        self.logits: Tensor | None = None  # (vocabulary,) float32, of the token after the prompt
        self.rest: Any = None  # the model's own cache of the layers that nobody compresses
        self.turn: Mapping[int, Turn] | None = None  # how each layer moves queries and keys by so many positions
        self.ids: Sequence[int] = ()
        self.seconds = 0.0
        self.positions: dict[int, Tensor] = {}  # of a layer's tokens (n,), where not all reached it
        self.slots: dict[int, Tensor] = {}  # the same by head (1, h_kv, n), -1: none, where some left it between chunks
        self.n_held: dict[int, int] = {}  # tokens that each layer holds
        self.peak_tokens = 0  # most tokens that all layers together held at once while the prompt was read
        self.shares: list[Tensor] = []  # of pairs of query and key, per layer with sparse attention
        self.kept: Kept | None = None  # what was computed of the layer at work, where observations are made of it
        self._device: dict[int, tuple[Tensor, Tensor]] = {}
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._pinned = NO_BUFFERS
        self._held: set[int] = set()
        self._observed: dict[tuple[Hashable, int], Tensor] = {}
        self.second_passes: dict[Hashable, SecondPassResult] = {}  # what each one found
        self.origins: dict[Hashable, Mapping[str, Any]] = {}  # where what is known of the model comes from
        self._shared: dict[Hashable, Any] = {}
        self.latents: dict[int, Latent] = {}  # of layers that cache those
        self.inputs: dict[int, Call] = {}  # what the attention at work was called with, where somebody observes it
        self.digests: Sequence[str] = ()  # names of the model's files, its own first; none of one with drawn weights
        self.peak_bytes = 0  # of K and V that the pass over the prompt held at once

    def add(self, layer: int, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Take in a layer's K and V, (1, h_kv, s_prompt, d_h); of a pruned layer those that reached it."""
        n = len(self.positions[layer]) if layer in self.positions else self.s_prompt
        n = self.slots[layer].shape[-1] if layer in self.slots else n
        assert k.shape == (1, self.shape.h_kv, n, self.shape.d_h), f"layer {layer}: keys are {tuple(k.shape)}"
        self.softmax[layer] = softmax
        self.keep(layer, k, v)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hold these K and V of a layer, in the place of those it had."""
        k = k.contiguous()
        self._device[layer] = k, k[..., : self.shape.d_v] if self.shape.is_latent else v.contiguous()
        self.n_held[layer] = k.shape[2]
        self.peak_tokens = max(self.peak_tokens, sum(self.n_held.values()))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        """Bytes of K and V that are on the model's devices; values that lie within their keys take none."""
        return sum(bytes_of_both(*pair) for pair in self._device.values())

    @contextmanager
    def as_held(self, layer: int) -> Iterator[None]:
        """Inside, the prompt is what a layer holds of it after others left between chunks, numbered from 0 on."""
        if layer in self.slots:
            self.s_prompt = self.slots[layer].shape[-1]
        try:
            yield
        finally:
            self.s_prompt = self.n_read

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forget afterwards what `once` has made inside."""
        before = dict(self._shared)
        try:
            yield
        finally:
            self._shared = before

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
        """Layers whose K and V are here."""
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
        self._host[layer] = move_both(lambda x: sent_home(x, self._pinned), *self._device[layer])

    def make_homes(self, n_layers: int, dtype: torch.dtype) -> None:
        """Pin memory for so many layers that will go to the host tier."""
        if self.device == self.host_device:
            return
        sizes, of_heads = Counter[int](), self.s_prompt * self.shape.h_kv * dtype.itemsize
        for width in (self.shape.d_h,) if self.shape.is_latent else (self.shape.d_h, self.shape.d_v):
            sizes[of_heads * width] += n_layers
        self._pinned = PinnedBuffers(sizes)

    def hold(self, layer: int) -> None:
        """Say that a variant goes on reading the layer's device tensors while it decodes."""
        self._held.add(layer)

    def is_held(self, layer: int) -> bool:
        """Whether somebody goes on reading the layer's device tensors."""
        return layer in self._held

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

    def release(self) -> None:
        """Let go of all that no row reads while it decodes: K and V that nobody holds, and what was seen of them.

        For one row, or several that are built: none can be built from then on.
        """
        for layer in self._device.keys() - self._held:
            del self._device[layer]
        self._observed = {key: x for key, x in self._observed.items() if key[0] in self.origins}
        self._shared, self.kept = {}, None
        self.inputs.clear()

    def observe(
        self,
        layer: int,
        what: Observer,
        q: Tensor,
        k: Tensor,
        softmax: Softmax,
        lse: Tensor | None = None,
    ) -> None:
        """Make one observation of one layer."""
        self._observed[what, layer] = what.observe_layer(self, layer, q, k, softmax, lse)

    def know(self, what: Hashable, known: Known) -> None:
        """Take in what is known of the model."""
        self.origins[what] = known.origin
        self._observed |= {(what, layer): x.to(self.device_of(layer)) for layer, x in known.layers.items()}

    def observed(self, what: Hashable, layer: int) -> Tensor:
        """What was observed of a layer; only what a method declared is there."""
        return self._observed[what, layer]

    def seen(self, what: Hashable, layer: int) -> Tensor | None:
        """`observed`, where there is anything yet."""
        return self._observed.get((what, layer))

    def see(self, what: Hashable, layer: int, found: Tensor) -> None:
        """Put this in the place of what was observed."""
        self._observed[what, layer] = found

    def of_second_pass(self, what: Hashable, layer: int) -> Tensor:
        """What a second pass found of a layer; only what a method declared is there, once the prompt was read."""
        return self.second_passes[what].layers[layer]

    def share(self) -> float | None:
        """Which share of all pairs of query and key the pass computed, mean over layers; None where it was exact."""
        return torch.stack(self.gathered(self.shares)).mean().item() if self.shares else None

    def layer_shares(self) -> list[float]:
        """Share of the pairs that the pass computed in each layer that may be sparse; none where the pass was exact."""
        return torch.stack(self.gathered(self.shares)).tolist() if self.shares else []

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` for the first who asks under `key`, its result for all others: codes, clusters.

        The key must hold everything that the result depends on.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

"""A model while it runs with our attention and our cache. It and `engine/checkpoints` alone know `transformers`.

The hook is what transformers offers: an attention function under a name of ours, no mask for that name, a `Cache` whose
compressed layers hand K and V through, and keyword arguments that reach the attention function. Layers with a sliding
window or without softmax attention keep the cache layer that transformers gives them. While a row looks ahead, hooks
on the attention modules note what each is called with, for that step alone.

Not here: what the attention does (`engine/prefill.py`, `engine/batch.py`), where the model comes from
(`engine/checkpoints/load.py`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk
from kvbench.engine.checkpoints.choosing import CHOICES
from kvbench.engine.checkpoints.kinds import INSTEAD, SAID, backbone, changes, number_of, survey
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.machine import is_out_of_memory
from kvbench.engine.passes.chosen import HearsChoices, attend_seen, seen_by
from kvbench.engine.passes.latents import ByHeads, Latent
from kvbench.engine.passes.rotations import forget_text, remembering, rotary_dims, rotations, switching_length, unmoved
from kvbench.engine.passes.session import Call, PruningSession, Session, Turn
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax

T = TypeVar("T")
NAME = "kvbench"  # of our attention function in transformers' registry
NAME_MASKED = "kvbench-masked"  # of the same for models that choose what they attend to, some of them by a mask


class _Query(Exception):
    """Carries query and key out of an attention module that need not go on."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.q, self.k = q, k


class _QueryOnly:
    """A session that wants no attention, only its query."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        raise _Query(q, k)


@dataclass
class _Running:
    """Which model runs, and who answers its attention calls. A `ContextVar` has it: some layers hand nothing on."""

    session: Session
    shape: ModelShape
    softmaxes: dict[int, Softmax]  # of the model's layers, which their first calls make
    latents: dict[int, Latent]
    repeated: set[int]
    layer: int | None = None  # that updated its cache last
    cached: tuple[Tensor, Tensor] | None = None  # by that update

    def has_cached(self, layer: int) -> bool:
        """Whether this layer updated its cache last, with as many KV heads as its shape says."""
        return self.layer == layer and self.cached is not None and self.cached[0].shape[1] == self.shape.h_kv


_RUNNING: ContextVar[_Running] = ContextVar("running")


@dataclass
class Model:
    """A loaded model with its tokenizer."""

    hf: Any
    tokenizer: Any
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    digest: str  # of the weights' files: which model this is, whatever its name
    facts: dict[Hashable, Any] = field(default_factory=dict)  # that were looked up so far
    layer_devices: tuple[torch.device, ...] = ()  # of each layer, where several GPUs share the model; `device` is first
    allows_graphs: bool = True  # of decode steps on a GPU
    other_digests: tuple[str, ...] = ()  # by which tables and calibrations may know the same files
    softmaxes: dict[int, Softmax] = field(default_factory=dict)  # of layers that attended so far
    latents: dict[int, Latent] = field(default_factory=dict)  # of those of them that cache latents
    repeated: set[int] = field(default_factory=set)  # those of them that repeat the KV heads of their cache

    @property
    def checkpoint(self) -> Checkpoint:
        """What is known of the model before it is loaded, and whether its layers do turn as its modules let expect."""
        n_rotary = 0 if self.turn is None else rotary_dims(self.hf)
        unturned = tuple(layer for layer, turn in (self.turn or {}).items() if turn is unmoved)
        where = str(getattr(self.hf, "name_or_path", ""))
        return Checkpoint(self.shape, (self.digest, *self.other_digests), n_rotary, unturned, where)

    def device_of(self, layer: int) -> torch.device:
        """Where a layer's weights lie, and with them its K and V."""
        return self.layer_devices[layer] if self.layer_devices else self.device

    @property
    def layers_on(self) -> tuple[torch.device, ...]:
        """The device of each layer, or of all."""
        return self.layer_devices or (self.device,)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that hold a part of the model, each once."""
        return tuple(dict.fromkeys((self.device, *self.layer_devices)))

    @cached_property
    def turn(self) -> Mapping[int, Turn] | None:
        """How each compressed layer moves queries by positions; None: not by a rotation that is known."""
        return rotations(self)

    def once(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """`look_up()` for the first who asks under `key`, its result for all others: what is known of the model."""
        if key not in self.facts:
            self.facts[key] = look_up()
        return self.facts[key]

    @contextmanager
    def hooked(self) -> Iterator["Model"]:
        """Our attention inside, the model's own again outside."""
        before = self.hf.config._attn_implementation
        self.hf.set_attn_implementation(NAME_MASKED if self.shape.choosing_layers else NAME)
        try:
            with torch.inference_mode():
                yield self
        finally:
            self.hf.set_attn_implementation(before)

    def forward(self, ids: Tensor, position: int | Tensor, cache: Any, session: Session) -> Tensor:
        """Run `ids` (n, s_q) from `position` on, or at positions (n, s_q).

        Returns the logits of each row's last token, (n, vocabulary) float32.
        """
        if isinstance(position, Tensor):
            positions = position
        else:
            positions = torch.arange(position, position + ids.shape[1], device=self.device).expand(len(ids), -1)
        with torch.inference_mode(), self.answered_by(session):
            out = self.hf(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **self.last_logits
            )
        return out.logits[:, -1].float()

    @contextmanager
    def answered_by(self, session: Session) -> Iterator[None]:
        """Inside, the session answers attention calls."""
        token = _RUNNING.set(_Running(session, self.shape, self.softmaxes, self.latents, self.repeated))
        try:
            yield
        finally:
            _RUNNING.reset(token)

    @cached_property
    def last_logits(self) -> dict[str, int]:
        """Arguments by which a model gives the last token's logits alone; none where it knows no such."""
        return {"logits_to_keep": 1} if "logits_to_keep" in signature(self.hf.forward).parameters else {}

    @cached_property
    def graph_pool(self) -> Any:
        """Memory that steps are captured into: no two of them are replayed at once."""
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def pruned(self, session: PruningSession) -> Iterator[None]:
        """Inside, tokens leave the pass between two layers, as `session` says; the others keep their positions."""

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            where = session.positions
            if isinstance(rotary := kwargs.get("position_embeddings"), Tensor):
                kwargs["position_embeddings"] = rotary.index_select(1, where.to(rotary.device))
            elif rotary is not None:
                kwargs["position_embeddings"] = tuple(x.index_select(1, where.to(x.device)) for x in rotary)
            if (ids := kwargs.get("position_ids")) is not None:
                kwargs["position_ids"] = ids.index_select(1, where.to(ids.device))
            return args, kwargs

        def leave(module: Any, args: Any, out: Any) -> Any:
            if isinstance(out, Tensor):
                return session.leave(out)
            return (session.leave(out[0]), *out[1:])

        hooks = []
        for layer in self.decoder_layers:
            hooks += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
        try:
            yield
        except RuntimeError as error:  # of shapes that this model's code holds on to
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the model {self.shape.name!r} does not go on with fewer tokens between two of its layers "
                f"({first_line(error)}); use a method that leaves the pass over the prompt as it is"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def watched(self, calls: dict[int, Call]) -> Iterator[None]:
        """Inside, `calls` has what each layer's attention was called with last; nothing is watched outside."""

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            x = self._input_of(args, kwargs)
            beside = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            calls[module.layer_idx] = Call(x, beside)

        hooks = [attention.register_forward_pre_hook(note, with_kwargs=True) for attention in self.attentions]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def foreseen(self, wants: Callable[[int], bool]) -> Iterator[None]:
        """Inside, layers that `wants` names get the input of the layer below too, as rows after their own.

        Their sessions see the queries of both, and answer with as many rows, of which the first ones go on: what
        `speculate` finds, with no call of its own.
        """
        below: Tensor | None = None

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            nonlocal below
            x, before = self._input_of(args, kwargs), below
            below = x
            if before is None or not wants(module.layer_idx):
                return None
            both = {"hidden_states": torch.cat([x, before.to(x.device)])}
            return args[1:], _of_one_row(kwargs) | both

        def leave(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            x = kwargs.get("hidden_states")
            if not isinstance(x, Tensor) or below is None or len(x) == len(below):
                return None
            return (out[0][: len(below)], *out[1:])

        hooks = []
        for attention in self.attentions:
            hooks.append(attention.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(attention.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _input_of(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(x, Tensor):
            raise self._unforeseeable("does not hand its input to it as hidden_states")
        return x

    @cached_property
    def decoder_layers(self) -> list[Any]:
        """The modules that tokens go through one after the other; none where the model has no such list."""
        return decoder_layers(self.hf)

    @cached_property
    def attentions(self) -> list[Any]:
        """The attention module of every layer, softmax or not."""
        parts = [*with_number(self.decoder_layers)]
        modules = [[part for part in parts if part.layer_idx == i] for i in range(self.shape.n_layers)]
        # Where a layer has a state in addition to attention, both have its number, and one of them a scale of logits.
        modules = [[part for part in some if hasattr(part, "scaling")] if len(some) > 1 else some for some in modules]
        if any(len(some) != 1 for some in modules):
            raise self._unforeseeable("has layers without one module of the layer's number")
        return [some[0] for some in modules]

    def speculate(self, layer: int, x: Tensor, beside: dict[str, Any]) -> Tensor:
        """The query (n, h, s_q, d_h) that a layer computes from the attention input x (n, s_q, D) of any layer.

        `beside` is that of the layer's own call in this step, for these rows, or for any where all are at one position.
        The layer's attention module runs, whatever the architecture, with its bias, norm and rotation, and is left
        where it would attend. It computes key and value for nothing: 2 / g of the query's cost where projections are
        apart.
        """
        return self.asking(layer, x, beside)[0]

    def asking(self, layer: int, x: Tensor, beside: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Query and key that a layer computes from an attention input (`speculate`)."""
        ids = beside.get("position_ids")
        arguments = dict(beside) if isinstance(ids, Tensor) and len(ids) == len(x) else _of_one_row(beside)
        enters = self.shape.is_latent or layer in self.repeated
        arguments |= {"hidden_states": x, "past_key_values": _Entering() if enters else None}
        forward = self.attentions[layer].forward  # not by its call, which is watched
        try:
            with self.answered_by(_QueryOnly()):
                forward(**arguments)
        except _Query as query:
            return query.q, query.k
        except TypeError:
            if takes(forward, arguments):
                raise
            raise self._unforeseeable("does not hand its input to it as hidden_states") from None
        raise self._unforeseeable("does not hand its query to an attention function of ours")

    def _unforeseeable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the model {self.shape.name!r} {why}, so that no query can be foretold from the layer below; "
            "use method.lookahead=0 with it"
        )

    def new_cache(self) -> Any:
        """An empty cache: compressed layers hand through, all others are the model's own."""
        from kvbench.engine.caches.through import new_cache

        self.forget_text()
        return new_cache(self.hf.config, self.shape.attention_layers, _enter, self.own_cache)

    def forget_text(self) -> None:
        """Turn the next text's tokens as if there had been none before."""
        for tables in self.remembering:
            forget_text(*tables)

    @cached_property
    def switching_length(self) -> int:
        """Tokens after which the model would read its whole text again, turned in another way; 0: it never does."""
        return switching_length(self.hf)

    @cached_property
    def remembering(self) -> list[Any]:
        """Modules whose tables stay as the text before has made them, and would turn the next one's tokens by these."""
        return remembering(self.hf)

    @cached_property
    def own_cache(self) -> Any:
        """The class of the only cache that the model takes; None: it takes transformers' usual one."""
        return survey(self.hf.config).own_cache

    def count_token(self, cache: Any) -> None:
        """Say that every row read a token without the cache."""
        for layer in self.shape.attention_layers:
            cache.layers[layer].seen += 1


def with_number(layers: Iterable[Any]) -> Iterator[Any]:
    """The modules of decoder layers that know which cache layer is theirs; a decoder layer may have several."""
    for layer in layers:
        for part in layer.children():
            for each in part if isinstance(part, torch.nn.ModuleList) else (part,):
                if isinstance(getattr(each, "layer_idx", None), int):
                    yield each


def decoder_layers(hf: Any) -> list[Any]:
    """A model's list of layers, whatever it is called."""
    decoder = backbone(hf)
    lists = [part for part in decoder.children() if isinstance(part, torch.nn.ModuleList)]
    return [*max(lists, key=len)] if lists else []


def takes(forward: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        signature(forward).bind(**arguments)
    except TypeError:
        return False
    return True


def _enter(layer: int, k: Tensor, v: Tensor) -> None:
    """A layer updates its cache, and calls attention next."""
    if (running := _RUNNING.get(None)) is not None:
        running.layer, running.cached = layer, (k, v)


class _Entering:
    """A cache that keeps nothing, for a single layer: of a module that has to be asked outside of a pass."""

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        _enter(layer, k, v)
        return k, v


def _of_one_row(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with positions of its first row: all rows are at one, and there may be more or fewer rows."""
    found = dict(arguments)
    for name in ("position_embeddings", "position_ids"):
        value = found.get(name)
        if isinstance(value, Tensor):
            found[name] = value[:1]
        elif value is not None:
            found[name] = tuple(part[:1] for part in value)
    return found


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that transformers calls instead of its own."""
    running = _RUNNING.get(None)
    assert running is not None, "our attention was called without a session: use Model.forward"
    others = [name for name, value in kwargs.items() if changes(name, value)]
    others += [] if attention_mask is None else ["attention_mask"]
    if running.shape.choosing_layers:
        others = [name for name in others if name not in CHOICES]
    if others:
        raise ConfigError(
            f"the model {running.shape.name!r} {SAID.get(others[0], f'hands {others[0]} to its attention')}, which "
            f"KVBench cannot; {INSTEAD}"
        )
    layer = number_of(module)
    if layer < 0:
        assert running.layer is not None, "a module without a number attends before any layer updated its cache"
        layer = running.layer
    window = Chunk(running.shape.chunk) if layer in running.shape.chunked_layers else sliding_window
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = running.softmaxes.get(layer)
    if softmax is None or softmax.scale != scale:  # made once: a sink is not converted at every step
        softmax = Softmax(scale, softcap or 0.0, None if s_aux is None else s_aux.detach().float())
        running.softmaxes[layer] = softmax
    is_compressed = layer in running.shape.attention_layers
    if running.shape.choosing_layers:
        assert attention_mask is not None, f"layer {layer} of a model that chooses has no mask"
        out = _attend_chosen(running, layer, q, k, v, softmax, seen_by(k, attention_mask, kwargs, block_of(module)))
    elif is_compressed and running.shape.is_latent:
        out = _attend_latents(running, module, layer, q, k, v, softmax, window)
    elif is_compressed and k.shape[1] != running.shape.h_kv and running.has_cached(layer):
        out = _attend_repeated(running, layer, q, k, softmax, window)
    else:
        out = running.session.attend(layer, q, k, v, softmax, window)
    return out.transpose(1, 2).contiguous(), None  # (n, s_q, h, d_h)


def block_of(module: Any) -> int:
    """Tokens of a block that an attention module chooses by number; 1: it chooses none."""
    return getattr(getattr(module, "indexer", None), "block_size", 1)


def _attend_chosen(
    running: _Running, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, seen: Tensor
) -> Tensor:
    """Attention of a layer to what its model chose."""
    if layer in running.shape.choosing_layers and isinstance(running.session, HearsChoices):
        running.session.choices.seen[layer] = seen
    return attend_seen(q, k, v, softmax, seen)


def _attend_repeated(
    running: _Running, layer: int, q: Tensor, k: Tensor, softmax: Softmax, window: int | Chunk | None
) -> Tensor:
    """Attention of a layer that repeats the KV heads of its cache, all of them one time after the other.

    Its session sees them as they are cached, and the query heads of each next to each other.
    """
    assert running.cached is not None
    (keys, values), h = running.cached, q.shape[1]
    if layer not in running.repeated:
        if softmax.sink is not None or k.shape[1] != h or not torch.equal(k, keys.repeat(1, h // keys.shape[1], 1, 1)):
            raise ConfigError(
                f"the model {running.shape.name!r} attends in layer {layer} to other keys than it caches, which "
                f"KVBench cannot compress; {INSTEAD}"
            )
        running.repeated.add(layer)
    asking = q.unflatten(1, (-1, keys.shape[1])).transpose(1, 2).flatten(1, 2)
    out = running.session.attend(layer, asking, keys, values, softmax, window)
    return out.unflatten(1, (keys.shape[1], -1)).transpose(1, 2).flatten(1, 2)


def _attend_latents(
    running: _Running, module: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax,
    window: int | Chunk | None,
) -> Tensor:  # fmt: skip
    """Attention of a layer that caches latents: its session sees those, and queries that ask them."""
    assert running.cached is not None and running.layer == layer, f"layer {layer} attends before it updates its cache"
    rows, d_c = torch.cat(running.cached, -1), running.cached[0].shape[-1]
    latent = running.latents.get(layer)
    if latent is None:
        try:
            latent = running.latents[layer] = Latent(module, d_c, rows.shape[-1] - d_c, rows)
        except ConfigError as error:
            raise ConfigError(
                f"the model {running.shape.name!r} caches latents in layer {layer}, and {error}; {INSTEAD}"
            ) from None
    if isinstance(running.session, ByHeads):
        return running.session.attend_heads(layer, latent, q, k, v, rows, softmax, window)
    asking = latent.absorbed(q)
    return latent.head_values(running.session.attend(layer, asking, rows, rows[..., :d_c], softmax, window))


def register_attention() -> None:
    """Make our attention known to transformers, without masks and with those of its own eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(NAME_MASKED, _attention)
    AttentionMaskInterface.register(NAME_MASKED, eager_mask)

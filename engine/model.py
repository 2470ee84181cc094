"""A model while it runs with our attention and our cache. It and `engine/checkpoints` alone know `transformers`.

The hook is what transformers offers: an attention function under a name of ours, no mask for that name, a `Cache` whose
compressed layers hand K and V through, and keyword arguments that reach the attention function. Layers with a sliding
window or without softmax attention keep the cache layer that transformers gives them. While a row looks ahead, hooks
on the attention modules note what each is called with, for that step alone.

Not here: what the attention does (`engine/prefill.py`, `engine/decode.py`), where the model comes from
(`engine/checkpoints/load.py`).
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.passes.graphs import StepGraphs
from engine.shapes import ModelShape

if TYPE_CHECKING:
    from engine.observe import Known, ModelFact

NAME = "kvbench"  # of our attention function in transformers' registry


class Session(Protocol):
    """Who answers the model's attention calls: the prefill or the batch that decodes."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Output (n, h, s_q, d_h) for q (n, h, s_q, d_h) and what the cache returned as k and v."""
        ...


class ThinnedSession(Protocol):
    """A prefill that tokens leave on their way up."""

    positions: Tensor  # of the tokens that are still in it, (n,)

    def leave(self, hidden: Tensor) -> Tensor:
        """A layer's output (1, n, D) without the tokens that go no further."""
        ...


@dataclass(frozen=True)
class Call:
    """What a layer's attention was called with."""

    x: Tensor  # (n, s_q, D), behind the layer's input norm
    beside: dict[str, Any]  # positions, rotary embedding and whatever else this architecture passes


class _Query(Exception):
    """Carries the query out of an attention module that need not go on."""

    def __init__(self, q: Tensor) -> None:
        super().__init__()
        self.q = q


class _QueryOnly:
    """A session that wants no attention, only its query."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        raise _Query(q)


@dataclass
class Model:
    """A loaded model with its tokenizer."""

    hf: Any
    tokenizer: Any
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    digest: str  # of the weights' files: which model this is, whatever its name
    # Moves queries (n, h, s, d_h) by so many positions, or by (n or 1, s) of them; None: positions are not rotary.
    turn: Callable[[Tensor, int | Tensor], Tensor] | None
    facts: "dict[ModelFact, Known]" = field(default_factory=dict)  # that were looked up so far
    layer_devices: tuple[torch.device, ...] = ()  # of each layer, where several GPUs share the model; `device` is first
    allows_graphs: bool = True  # of decode steps on a GPU

    def device_of(self, layer: int) -> torch.device:
        """Where a layer's weights lie, and with them its K and V."""
        return self.layer_devices[layer] if self.layer_devices else self.device

    @property
    def layers_on(self) -> tuple[torch.device, ...]:
        """The device of each layer, or of all."""
        return self.layer_devices or (self.device,)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that hold a part of the model, each once."""
        return tuple(dict.fromkeys((self.device, *self.layer_devices)))

    def known(self, what: "ModelFact") -> "Known":
        """What is known of this model, looked up once."""
        if what not in self.facts:
            self.facts[what] = what.look_up(self)
        return self.facts[what]

    @contextmanager
    def hooked(self) -> Iterator["Model"]:
        """Our attention inside, the model's own again outside."""
        before = self.hf.config._attn_implementation
        self.hf.set_attn_implementation(NAME)
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
        with torch.inference_mode():
            out = self.hf(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                session=session,
            )
        return out.logits[:, -1].float()

    def step(self, ids: Tensor, position: int | Tensor, cache: Any, session: Session) -> Tensor:
        """`forward` of one token per row (n, 1) in a step that no hook changes: by graphs where that can be."""
        return self.graphs.step(self, ids, position, cache, session)

    @cached_property
    def graphs(self) -> StepGraphs:
        """Captured steps."""
        return StepGraphs(StepGraphs.obstacle(self))

    def allow_graphs(self, allowed: bool) -> None:
        """Say whether steps may be captured; what was captured is given away where that changes."""
        if allowed != self.allows_graphs:
            self.allows_graphs = allowed
            self.__dict__.pop("graphs", None)

    @contextmanager
    def thinned(self, session: "ThinnedSession") -> Iterator[None]:
        """Inside, tokens leave the pass between two layers, as `session` says; the others keep their positions."""

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            where = session.positions
            if (rotary := kwargs.get("position_embeddings")) is not None:
                kwargs["position_embeddings"] = tuple(x.index_select(1, where.to(x.device)) for x in rotary)
            if (ids := kwargs.get("position_ids")) is not None:
                kwargs["position_ids"] = ids.index_select(1, where.to(ids.device))
            return args, kwargs

        def leave(module: Any, args: Any, out: Any) -> Any:
            if isinstance(out, Tensor):
                return session.leave(out)
            return (session.leave(out[0]), *out[1:])

        hooks = []
        for layer in self.hf.get_decoder().layers:
            hooks += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
        try:
            yield
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
        """Inside, layers that `wants` names get the input of the layer below too, as rows behind their own.

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
    def attentions(self) -> list[Any]:
        """The attention module of every layer, softmax or not."""
        layers: Any = getattr(self.hf.get_decoder(), "layers", [])
        modules = [
            [part for part in layer.children() if getattr(part, "layer_idx", None) == i]
            for i, layer in enumerate(layers)
        ]
        if len(modules) != self.shape.n_layers or any(len(parts) != 1 for parts in modules):
            raise self._unforeseeable("has layers without one module of the layer's number")
        return [parts[0] for parts in modules]

    def speculate(self, layer: int, x: Tensor, beside: dict[str, Any]) -> Tensor:
        """The query (n, h, s_q, d_h) that a layer computes from the attention input x (n, s_q, D) of any layer.

        `beside` is that of the layer's own call in this step, for these rows, or for any where all are at one position.
        The layer's attention module runs, whatever the architecture, with its bias, norm and rotation, and is left
        where it would attend. It computes key and value for nothing: 2 / g of the query's cost where projections are
        apart.
        """
        ids = beside.get("position_ids")
        arguments = dict(beside) if isinstance(ids, Tensor) and len(ids) == len(x) else _of_one_row(beside)
        arguments |= {"hidden_states": x, "past_key_values": None, "session": _QueryOnly()}
        try:
            self.attentions[layer].forward(**arguments)  # not by its call, which is watched
        except _Query as query:
            return query.q
        raise self._unforeseeable("does not hand its query to an attention function of ours")

    def _unforeseeable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the model {self.shape.name!r} {why}, so that no query can be foretold from the layer below; "
            "use method.lookahead=0 with it"
        )

    def new_cache(self) -> Any:
        """An empty cache: compressed layers hand through, all others are the model's own."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.hf.config)
        for layer in self.shape.attention_layers:
            cache.layers[layer] = _hand_through()
        return cache

    def count_token(self, cache: Any) -> None:
        """Say that every row read a token without the cache."""
        for layer in self.shape.attention_layers:
            cache.layers[layer].seen += 1

    def fork_cache(self, cache: Any, n: int) -> Any:
        """A copy for `n` rows; only the model's own layers hold tensors, and they are repeated."""
        forked = copy.deepcopy(cache)
        if n > 1:
            forked.batch_repeat_interleave(n)
        return forked

    def select_rows(self, cache: Any, rows: list[int]) -> None:
        """Keep only these rows in the model's own layers."""
        for device in self.devices:
            at = torch.tensor(rows, device=device, dtype=torch.long)
            for i, layer in enumerate(cache.layers):
                if self.device_of(i) == device:
                    layer.batch_select_indices(at)


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


def _hand_through() -> Any:
    """A cache layer that stores nothing: the session keeps K and V."""
    from transformers.cache_utils import DynamicLayer

    class HandThrough(DynamicLayer):
        seen = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.seen += key_states.shape[-2]
            return key_states, value_states

        def get_seq_length(self) -> int:
            return self.seen

        def batch_repeat_interleave(self, repeats: int) -> None:
            """No tensors, nothing to repeat."""

        def batch_select_indices(self, indices: Tensor) -> None:
            """No tensors, nothing to select."""

    return HandThrough()


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    session: Session | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls instead of its own attention."""
    assert session is not None, "our attention was called without a session: use Model.forward"
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"the model {module.config.name_or_path!r} uses {name} in its attention, which KVBench cannot; "
                "use a model with plain softmax attention"
            )
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = session.attend(module.layer_idx, q, k, v, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None  # (n, s_q, h, d_h)


def register_attention() -> None:
    """Make our attention known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def query_turner(hf: Any) -> Callable[[Tensor, int | Tensor], Tensor] | None:
    """Rotation of queries by a number of positions, from the model's own rotary embedding and its own formula."""
    rotary = next(
        (m for m in hf.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")),
        None,
    )
    attention = next((m for m in hf.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")), None)
    if rotary is None or attention is None:
        return None
    rotate = getattr(inspect.getmodule(type(attention)), "apply_rotary_pos_emb", None)
    if rotate is None:
        return None

    def turn(q: Tensor, by: int | Tensor) -> Tensor:
        where = torch.tensor([[by]], device=q.device) if isinstance(by, int) else by
        x = q.float()
        cos, sin = (each.to(q.device) for each in rotary(x, where))
        # Models that scale cos and sin have scaled q once already. The formula turns keys too; here there are none.
        turned, _ = rotate(x, x[:, :0], cos / rotary.attention_scaling, sin / rotary.attention_scaling)
        return turned.to(q.dtype)

    return turn

"""How each layer of a model turns its queries, found by trying: `rotations`.

A layer may turn all numbers of a head or some, by tables of its own kind of layer, before or after a norm, or not at
all; its attributes say so in as many ways as there are architectures. So the layer itself is asked: its attention
module computes the queries of the same tokens at two places, and what turns one into the other is its rotation. Tables
and formula are the model's own.

A layer that turns nothing gets a turn that changes nothing. A model of which no layer turns has positions of another
kind, or none, and one with a layer that nothing here explains is not known: both get None.

Not here: a rotation as tables (`kernels/rows/rotation.py`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk, causal
from kvbench.engine.checkpoints.kinds import backbone
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.session import Call, Runner, Turn
from kvbench.engine.softmax import Softmax

Asking = tuple[Tensor, Tensor]  # queries (n, h, s, d_h) and keys (n, h_kv, s, d_h)
N, BY = 8, 7  # tokens that are looked at, and how far they are moved
APART, APART_HALF = (
    1e-3,
    3e-2,
)  # of directions, in float32 and in half precision; another rotation is off by 0.1 or more
# Their tables depend on how long the text is, so that no two places alone say how to turn.
GROWING = ("dynamic", "longrope")


def unmoved(q: Tensor, by: int | Tensor) -> Tensor:
    """The turn of a layer without positions."""
    return q


class _Plain:
    """A session that only knows the tokens of the pass, and which layers asked."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        self.layers.add(layer)
        return causal(q, k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :], softmax, window)[0]


def rotations(model: Runner) -> dict[int, Turn] | None:
    """The turn of each compressed layer; None where a layer's is not known, or no layer turns."""
    if model.shape.choosing_layers:  # nobody turns what such a model attends to
        return None
    if model.shape.window < N + BY:  # there are no two such places
        return None
    try:
        pairs = moved_queries(model)
    except ConfigError:  # they cannot be had
        return None
    if all(explains(unmoved, here, there) for here, there in pairs.values()):
        return None
    found: dict[int, Turn] = {}
    known: list[Turn] = [unmoved]
    for layer in model.shape.attention_layers:
        here, there = pairs[layer]
        turn = next((one for one in known if explains(one, here, there)), None)
        if turn is None:
            turn = next((one for one in candidates(model, layer) if explains(one, here, there)), None)
            if turn is None:
                return None
            known.append(turn)
        found[layer] = turn
    if not model.shape.is_latent:
        return found
    of_rows = {turn: behind(turn, model.shape.d_v) for turn in found.values()}
    return {layer: of_rows[turn] for layer, turn in found.items()}


def behind(turn: Turn, d_c: int) -> Turn:
    """The turn of rows whose first numbers are a latent, which has no position."""
    if turn is unmoved:
        return unmoved

    def turned(q: Tensor, by: int | Tensor) -> Tensor:
        return torch.cat([q[..., :d_c], turn(q[..., d_c:], by)], -1)

    return turned


def moved_queries(model: Runner) -> dict[int, tuple[Asking, Asking]]:
    """Queries and keys of the same input at two places, of each layer that asks for attention.

    Of latents only the rotary part after them: they have no position, and would hide how small the rest is moved.
    """
    ids = torch.arange(1, N + 1, device=model.device).unsqueeze(0)
    here: dict[int, Call] = {}
    there: dict[int, Call] = {}
    session, d_c = _Plain(), model.shape.d_v if model.shape.is_latent else 0
    with model.hooked():
        for calls, position in ((here, 0), (there, BY)):
            with model.watched(calls):
                model.forward(ids, position, model.new_cache(), session)

        def asking(layer: int, calls: dict[int, Call]) -> Asking:
            q, k = model.asking(layer, here[layer].x, calls[layer].beside)
            return q[..., d_c:], k[..., d_c:]

        return {layer: (asking(layer, here), asking(layer, there)) for layer in session.layers}


def explains(turn: Turn, here: Asking, there: Asking) -> bool:
    """Whether it moves queries and keys as the layer does, and not, say, up to a norm after the rotation.

    Only directions count: some layers scale queries by position.
    """
    for x, right in zip(here, there, strict=True):
        try:
            moved = turn(x, BY)
        except (IndexError, RuntimeError, TypeError, ValueError):  # of another shape than this rotation
            return False
        if moved.shape != right.shape:
            return False
        apart = (direction(moved) - direction(right)).norm(dim=-1).max().item()
        if not apart < (APART if x.dtype == torch.float32 else APART_HALF):
            return False
    return True


def direction(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.float(), dim=-1)


def candidates(model: Runner, layer: int) -> Iterator[Turn]:
    """What may be the layer's rotation, from the rotary embeddings of the text model and its formula."""
    module = model.attentions[layer]
    file: Any = inspect.getmodule(type(module))
    own = getattr(file, "apply_rotary_pos_emb", None)
    for formula in (in_halves, in_pairs) if own is None else (own, in_halves, in_pairs):
        for tables in tables_of(model, layer):
            yield turner(formula, tables)
            yield turner(formula, tables, is_part=True)


def in_halves(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Numbers whose partners lie half of them further, turned."""
    first, second = q.chunk(2, -1)
    return q * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def in_pairs(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Numbers that stand next to their partners, turned; the tables' first halves are those of the pairs."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for x in (cos, sin))
    return q * cos + torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2) * sin


@dataclass(frozen=True)
class Tables:
    """A rotary embedding."""

    rotary: Any
    kinds: tuple[str, ...] = ()  # whose tables are meant, where kinds of layers have tables of their own

    def at(self, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (n, s, d) for queries x at positions (n, s).

        Models that scale them have scaled their queries once already, so that the scale is taken out.
        """
        name = "_".join((*self.kinds, "attention_scaling"))
        scale = getattr(self.rotary, name, 1.0)
        found = self.rotary(x, where, *self.kinds)
        if isinstance(found, Tensor):  # complex numbers, one for each pair
            found = (torch.cat([each, each], -1) for each in (found.real, found.imag))
        cos, sin = (each.to(x.device) / scale for each in found)
        if cos.ndim == 4:  # of time, height and width, which are the same in text
            cos, sin = cos[0], sin[0]
        return cos, sin


def tables_of(model: Runner, layer: int) -> Iterator[Tables]:
    """The tables of each rotary embedding: one for all layers, or one for each kind of layer."""
    kinds = kinds_of_layers(model.hf)
    for rotary, kind in rotaries(model.hf, kinds[layer : layer + 1]):
        if rope_type(rotary, kind) not in GROWING:
            yield Tables(rotary, () if kind is None else (kind,))


def kinds_of_layers(hf: Any) -> Sequence[str]:
    return getattr(hf.config.get_text_config(decoder=True), "layer_types", None) or ()


def rotaries(hf: Any, kinds: Iterable[str]) -> Iterator[tuple[Any, str | None]]:
    """The modules that make tables, and of which kind of layer those are; None: of all."""
    for module in backbone(hf).modules():
        if hasattr(module, "inv_freq"):
            yield module, None
        else:
            yield from ((module, kind) for kind in kinds if hasattr(module, f"{kind}_inv_freq"))


def remembering(hf: Any) -> list[tuple[Any, str | None]]:
    """The modules whose tables stay as long as the longest text so far has made them."""
    found = rotaries(hf, dict.fromkeys(kinds_of_layers(hf)))
    return [(rotary, kind) for rotary, kind in found if rope_type(rotary, kind) == "dynamic"]


def forget_text(rotary: Any, kind: str | None) -> None:
    """Let tables be those of a short text again: what another prompt made of them is not this one's."""
    first = torch.zeros(1, 1, dtype=torch.long, device=speeds(rotary, kind).device)
    rotary(first.float(), first, *(() if kind is None else (kind,)))


def switching_length(hf: Any) -> int:
    """Tokens after which a model reads its whole text again, turned by other tables; 0: it never does."""
    from transformers import GenerationMixin

    usual: Any = GenerationMixin
    if type(hf).prepare_inputs_for_generation is usual.prepare_inputs_for_generation:
        return 0  # it goes on with keys that the other tables turned
    found = rotaries(hf, dict.fromkeys(kinds_of_layers(hf)))
    if all(rope_type(rotary, kind) != "longrope" for rotary, kind in found):
        return 0
    return getattr(hf.config, "original_max_position_embeddings", None) or 0


def rope_type(rotary: Any, kind: str | None) -> str | None:
    found = getattr(rotary, "rope_type", None)
    return found.get(kind) if isinstance(found, dict) else found


def rotary_dims(hf: Any) -> int:
    """Dimensions of a head that a text model's tables turn, as its modules tell without weights.

    0: there are none, they grow with the text, or their formula is not known. Whether each layer does turn by them is
    only seen of weights: `rotations`.
    """
    text = backbone(hf)
    if not hasattr(inspect.getmodule(type(text)), "apply_rotary_pos_emb"):
        return 0
    for rotary, kind in rotaries(hf, dict.fromkeys(kinds_of_layers(hf))):
        if rope_type(rotary, kind) not in GROWING:
            return 2 * len(speeds(rotary, kind))
    return 0


def speeds(rotary: Any, kind: str | None) -> Tensor:
    return getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq")


def turner(formula: Callable[..., Any], tables: Tables, is_part: bool = False) -> Turn:
    """A turn from tables and formula; `is_part`: the numbers after the tables' width stay as they are."""
    turns_keys = "k" in inspect.signature(formula).parameters  # in the same call

    def turn(q: Tensor, by: int | Tensor) -> Tensor:
        where = torch.tensor([[by]], device=q.device) if isinstance(by, int) else by
        x = q.float()
        cos, sin = tables.at(x, where)
        width = cos.shape[-1] if is_part else x.shape[-1]
        # The formula turns keys too; here there are none.
        turned = formula(x[..., :width], *([x[:, :0, :, :width]] if turns_keys else []), cos, sin)
        turned = turned[0] if turns_keys else turned
        return (turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)).to(q.dtype)

    return turn

"""What kinds of layers a model has and what they ask of attention, from its configuration: no weights are read.

transformers names the kind of each layer; those that keep K and V of every token in full attention are what methods
compress. What the kinds do not say, such as caps, heads of another size, or a second softmax, shows in a pass
without numbers: the model's own class on torch's `meta` device, where tensors have shapes alone, with an attention
function that notes what it is called with.

What KVBench cannot do is refused here in one sentence. A pass that fails on the meta device says nothing; then the
loaded model is asked the same (`engine/passes/agreement.py`).

Not here: reading a configuration (`engine/checkpoints/load.py`), whether outputs agree (`engine/passes/agreement.py`).
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.checkpoints.choosing import CHOICES, CHOOSING, is_choosing, more_of_a_token, unhiding_mask
from kvbench.engine.checkpoints.header import MAX_LAYERS, is_positive
from kvbench.engine.checkpoints.text import without_senses
from kvbench.engine.errors import ConfigError, one_line
from kvbench.engine.shapes import ModelShape

HYBRID = "hybrid"  # full attention and a state in addition to it, in one layer
COMPRESSED = ("full_attention", HYBRID)
LOCAL = ("sliding_attention", "chunked_attention")
WITH_STATE = ("linear_attention", "conv")
WITHOUT = ("dummy", "moe", "mlp")  # layers without attention; transformers before 5.23 says which else they are
KNOWN = (*COMPRESSED, *LOCAL, *WITH_STATE, *CHOOSING, *WITHOUT)
# What an attention call may carry besides q, k, v, scale and window; everything else changes its result unseen.
UNDERSTOOD = frozenset(
    {
        *("dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("s_aux", "softcap"),  # sinks and caps, which `engine/softmax.py` knows
        *("cache_position", "is_causal", "layer_idx", "logits_to_keep", "position_embeddings", "return_dict"),
    }
)
SAID = {  # in the sentence that refuses it
    "position_bias": "adds a bias of positions to its logits (position_bias)",
    "block_indices": "attends to blocks of its own choice (block_indices)",
    "attention_mask": "hides tokens by a mask of its own (attention_mask)",
}
INSTEAD = "use a model with plain softmax attention, such as Llama, Qwen or SmolLM"
SURVEY = "kvbench-survey"  # of our noting function in transformers' registry
SURVEY_MASKED = "kvbench-survey-masked"  # of the same for models whose layers choose by a mask
N_SURVEYED = 8  # tokens of the pass without numbers
MOST_MODULES = 200_000  # of a skeleton, more than the largest mixtures of experts have; made in a minute
AGAIN = "copy or download its config.json again"


@dataclass(frozen=True)
class Asked:
    """Sizes and arguments of one attention call."""

    layer: int
    h: int
    h_kv: int
    d_k: int
    d_v: int
    n_keys: int
    window: int | None
    others: tuple[str, ...]  # names of what else would change the result
    is_capped: bool = False
    has_sink: bool = False
    expands: bool = False  # its module makes keys and values of what it caches


def asked(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, window: Any, others: Mapping[str, Any]) -> Asked:
    names = [name for name, value in others.items() if changes(name, value)]
    names += [] if mask is None else ["attention_mask"]
    sizes = q.shape[1], k.shape[1], k.shape[3], v.shape[3], k.shape[2]
    return Asked(
        number_of(module),
        *sizes,
        window,
        tuple(names),
        bool(others.get("softcap")),
        others.get("s_aux") is not None,
        hasattr(module, "expand_kv"),
    )


def number_of(module: Any) -> int:
    """The layer of an attention module; -1 where it serves several and does not know which."""
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else -1


def changes(name: str, value: Any) -> bool:
    """Whether this argument of an attention call would change its result."""
    return name not in UNDERSTOOD and value is not None and value is not False


# --- from the configuration's values ---------------------------------------------------------------


def text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def kinds_of(config: Any, name: str) -> list[str]:
    """The kind of each cache layer, by transformers' names; `ConfigError` for one that KVBench does not know."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    n_layers = getattr(text_config(config), "num_hidden_layers", None)
    if isinstance(n_layers, int) and n_layers > MAX_LAYERS:
        raise ConfigError(f"the model {name!r} has {n_layers} layers, of which {MAX_LAYERS} are allowed; {AGAIN}")
    try:
        kinds, _ = get_layer_types_and_kwargs(text_config(config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the model {name!r} does not say which kinds its layers are ({error}); {INSTEAD}") from error
    strange = Counter(kind for kind in kinds if kind not in KNOWN)
    if strange:
        kind, n = strange.most_common(1)[0]
        raise ConfigError(
            f"the model {name!r} has {n} of {len(kinds)} layers of the kind {kind!r}, with which KVBench compares no "
            f"method yet (it knows {', '.join(KNOWN)}); {INSTEAD}"
        )
    return kinds


def of_layer(text: Any, layer: int) -> Any:
    """The configuration as this layer reads it, where layers differ."""
    layers = getattr(text, "per_layer_config", None)
    return layers[layer] if layers is not None and layer < len(layers) else text


def check_values(config: Any, name: str) -> None:
    """Refuse what the configuration's values alone tell."""
    text = text_config(config)
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is None and getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"the model {name!r} shares K and V between layers and does not say which (kv_sharing_modes, which "
            f"transformers knows from 5.23 on); {INSTEAD}"
        )


def readers_of(text: Any, compressed: Iterable[int], name: str) -> tuple[tuple[int, int], ...]:
    """Layers that attend to K and V of a compressed layer, and which that is: the last of their kind that has some."""
    modes, kinds = getattr(text, "kv_sharing_modes", None) or (), getattr(text, "layer_types", None)
    compressed, owners, found = set(compressed), dict[str, int](), list[tuple[int, int]]()
    for i, mode in enumerate(modes):
        kind = "full_attention" if kinds is None else kinds[i]
        if mode in (None, "store"):
            owners[kind] = i
        elif mode != "reuse" or kind not in owners:
            raise ConfigError(
                f"the model {name!r} shares K and V of layer {i} in a way unknown to KVBench ({mode}); {INSTEAD}"
            )
        elif owners[kind] in compressed:
            found.append((i, owners[kind]))
    return tuple(found)


# --- from a pass without numbers -------------------------------------------------------------------


class Cached(NamedTuple):
    """Heads and numbers, as keys and as values, that a layer gives its cache of a token."""

    heads: int
    d_k: int
    d_v: int
    is_one: bool = False  # both are the same numbers
    more: int = 0  # further numbers of every token, by which the layer chooses


@dataclass(frozen=True)
class Survey:
    """Arguments of the attention calls of one pass; `why_not` where the pass did not come to its end."""

    calls: tuple[Asked, ...]
    why_not: str | None = None
    has_own_code: bool = False  # attention that asks no registered function
    no_cache: str | None = None  # why it takes no cache that KVBench can give it
    own_cache: Any = None  # the class of the only cache that it takes, where that is one of its own
    cached: Mapping[int, Cached] = field(default_factory=dict)  # what each layer gave its cache, where that is known
    state_bytes: Mapping[int, int] = field(default_factory=dict)  # what else a layer caches, of any text
    n_weights: int = 0  # numbers that the model is made of


def survey(config: Any) -> Survey:
    """The pass without numbers, once for each configuration."""
    return _surveyed(Hashed(config))


class Hashed:
    """A configuration, equal to another where their values are."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.key = f"{type(config).__module__}.{type(config).__qualname__} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and other.key == self.key


@lru_cache(maxsize=64)
def _surveyed(hashed: Hashed) -> Survey:
    from transformers import DynamicCache

    calls: list[Asked] = []

    def note(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, *, sliding_window: Any = None, **others: Any
    ):
        others.pop("scaling", None)
        calls.append(asked(module, q, k, v, attention_mask, sliding_window, others))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    register_survey(note)
    has_own_code, why_not, hf = False, None, None
    ids = torch.zeros(1, N_SURVEYED, dtype=torch.long, device="meta")
    is_masked = chooses(hashed.config)
    given = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if is_masked else {})
    try:
        hf = skeleton(hashed.config)
        file = sys.modules[type(backbone(hf)).__module__]
        has_own_code = not hasattr(file, "ALL_ATTENTION_FUNCTIONS")
        hf.set_attn_implementation(SURVEY_MASKED if is_masked else SURVEY)
        with torch.inference_mode():
            hf(**given, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:  # whatever a model's code does with tensors that have no numbers
        why_not = f"{type(error).__name__}: {error}"
    found = Survey(tuple(calls), why_not, has_own_code or (why_not is None and not calls))
    if hf is None:
        return found
    found, cache = replace(found, n_weights=sum(weight.numel() for weight in hf.parameters())), None
    try:
        with torch.inference_mode():
            cache = DynamicCache(config=hashed.config)
            hf(**given, use_cache=True, past_key_values=cache)
    except ValueError as error:
        if why_not is None:  # what ran without a cache refuses this one
            cache = own_cache(hf, ids)
            found = replace(found, own_cache=type(cache)) if cache else replace(found, no_cache=one_line(error))
    except Exception:  # as above; what lies in the cache by then is there
        pass
    if cache is None:
        return found
    with_states = [(i, layer) for i, layer in enumerate(cache.layers) if not more_of_a_token(layer, N_SURVEYED)]
    states = {i: bytes_in(states_of(layer)) for i, layer in with_states}
    return replace(found, cached=cached_by(cache), state_bytes={i: n for i, n in states.items() if n})


def register_survey(note: Callable[..., Any]) -> None:
    """Make the noting function known to transformers, without masks and with them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SURVEY, note)
    AttentionInterface.register(SURVEY_MASKED, note)
    AttentionMaskInterface.register(SURVEY_MASKED, unhiding_mask)


def chooses(config: Any) -> bool:
    """Whether layers attend to tokens of their own choice."""
    return is_choosing(getattr(text_config(config), "layer_types", None) or ())


def states_of(layer: Any) -> list[Any]:
    """What a cache layer holds besides keys and values."""
    return [x for name, x in vars(layer).items() if name not in ("keys", "values")]


def bytes_in(x: Any) -> int:
    """Bytes of all tensors in it that are no counts."""
    if isinstance(x, Tensor):
        return x.nbytes if x.is_floating_point() else 0
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ()
    return sum(map(bytes_in, parts))


def own_cache(hf: Any, ids: Tensor) -> Any:
    """The cache that a model makes itself, where its layers are made as they are asked for; else None."""
    try:
        with torch.inference_mode():
            cache = hf(input_ids=ids, use_cache=True).past_key_values
        is_lazy = type(cache)().layer_class_to_replicate is not None
    except Exception:  # as above
        return None
    return cache if is_lazy else None


def cached_by(cache: Any) -> dict[int, Cached]:
    """What lies in each layer of a cache, where that is keys and values."""
    found = {}
    for i, layer in enumerate(cache.layers):
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(k, Tensor) and isinstance(v, Tensor) and k.ndim == v.ndim == 4:
            found[i] = Cached(k.shape[1], k.shape[3], v.shape[3], v is k, more_of_a_token(layer, N_SURVEYED))
    return found


def skeleton(config: Any) -> Any:
    """The model of a configuration on the meta device, without weights."""
    from kvbench.engine.checkpoints.conversion import quiet

    with quiet(), torch.device("meta"), few_modules():
        hf = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager")
    return hf.eval()


@contextmanager
def few_modules() -> Iterator[None]:
    """Inside, `ConfigError` for a model with so many modules that it would take minutes: of layers, experts or eyes."""
    n = 0

    def count(*_: Any) -> None:
        nonlocal n
        n += 1
        if n > MOST_MODULES:
            raise ConfigError(f"the model's configuration asks for more than {MOST_MODULES:,} modules; {AGAIN}")

    hook = torch.nn.modules.module.register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def auto_class(config: Any) -> Any:
    """The class that makes a text model of a configuration: a causal model, or what is left of one that sees too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return without_senses(AutoModelForImageTextToText._model_mapping[type(config)])
    return AutoModelForCausalLM  # whose own words say what is wrong


def backbone(hf: Any) -> Any:
    """The decoder that reads text, without head and without eyes."""
    decoder = hf.get_decoder()
    if not has_layers(decoder):  # some call their head so
        decoder = getattr(hf, hf.base_model_prefix)
    while (inner := getattr(decoder, "model", None)) is not None and inner is not decoder:
        decoder = inner  # some give their causal model
    return decoder


def has_layers(decoder: Any) -> bool:
    return any(isinstance(part, torch.nn.ModuleList) for part in decoder.modules())


# --- what of it can be compressed ------------------------------------------------------------------


def check_calls(calls: Iterable[Asked], kinds: Iterable[str], name: str) -> None:
    """Refuse what an attention call asks for that KVBench does not do; `calls` are those of one pass."""
    kinds, seen = list(kinds), Counter[int]()
    choosing = choosing_layers(kinds)
    for call in calls:
        seen[call.layer] += 1
        others = [other for other in call.others if not choosing or other not in CHOICES]
        if others:
            what = SAID.get(others[0], f"hands {others[0]} to its attention")
            raise ConfigError(f"the model {name!r} {what} in layer {call.layer}, which KVBench cannot; {INSTEAD}")
        if call.window is not None:
            check_counts(name, {"sliding_window": call.window})
        if call.window == 1:
            raise too_narrow(name, "sliding_window")
    compressed = compressed_layers(kinds)
    twice = [layer for layer, n in seen.items() if layer >= 0 and n > 1]
    if twice:
        raise ConfigError(
            f"the model {name!r} attends {seen[twice[0]]} times in layer {twice[0]} for one token, and KVBench only "
            f"compresses layers that attend once; {INSTEAD}"
        )
    missing = [layer for layer in (*compressed, *choosing) if not seen[layer]]
    if missing and not seen[-1]:  # -1: modules that serve several layers do not say which
        raise own_code(name, missing[0])
    shapes = {(call.h, call.h_kv, call.d_k, call.d_v, call.expands) for call in calls if call.layer in compressed}
    shapes = {tuple(map(int, shape)) for shape in shapes}
    if len(shapes) > 1:
        raise ConfigError(
            f"the model {name!r} has full attention of several shapes (query heads, KV heads, numbers of a key and "
            "of a value, latents: "
            f"{', '.join(map(str, sorted(shapes)))}), and KVBench only compresses layers of one shape yet; {INSTEAD}"
        )


def too_narrow(name: str, key: str) -> ConfigError:
    return ConfigError(
        f"the model {name!r} has {key}=1, with which transformers shows one token to each of a prompt and all of them "
        f"to a step, so that nothing says which is meant; {INSTEAD}"
    )


def own_code(name: str, layer: int) -> ConfigError:
    return ConfigError(
        f"the model {name!r} computes the attention of layer {layer} in code of its own, where KVBench cannot take its "
        f"place; {INSTEAD}"
    )


def compressed_layers(kinds: Sequence[str]) -> tuple[int, ...]:
    """Layers that methods compress: none where the model itself chooses in some."""
    return () if choosing_layers(kinds) else tuple(i for i, kind in enumerate(kinds) if kind in COMPRESSED)


def choosing_layers(kinds: Sequence[str]) -> tuple[int, ...]:
    """Layers of a model that chooses by itself: those that choose and those that attend to everything."""
    mine = (*CHOOSING, *COMPRESSED) if is_choosing(kinds) else ()
    return tuple(i for i, kind in enumerate(kinds) if kind in mine)


def check_compresses(shape: ModelShape) -> None:
    """Refuse a model that leaves methods nothing to do, and does not choose by itself."""
    if not shape.attention_layers and not shape.choosing_layers:
        raise ConfigError(
            f"the model {shape.name!r} has {shape.n_layers} layers and none of them with full attention, so that "
            f"nothing is left to compress; {INSTEAD}"
        )


def shape_of(config: Any, name: str) -> ModelShape:
    """Heads and layers of a model, from its configuration; `ConfigError` for one that KVBench cannot run."""
    text = text_config(config)
    kinds = kinds_of(config, name)
    check_values(config, name)
    found = survey(config)
    layers, choosing = compressed_layers(kinds), choosing_layers(kinds)
    if found.has_own_code and (layers or choosing):
        raise own_code(name, (*layers, *choosing)[0])
    if found.no_cache is not None:
        raise ConfigError(
            f"the model {name!r} only takes a cache of its own kind ({found.no_cache}), and KVBench cannot take that "
            f"one's place yet; {INSTEAD}"
        )
    if found.why_not is None:
        check_calls(found.calls, kinds, name)
    h, h_kv, d_h, d_v, is_latent = heads(text, found, layers or choosing, name)
    d_model = getattr(text, "hidden_size", 0)
    chunked = tuple(i for i, kind in enumerate(kinds) if kind == "chunked_attention")
    chunk = getattr(text, "attention_chunk_size", None) if chunked else 0
    check_counts(name, {"query heads": h, "KV heads": h_kv, "numbers of a head": d_h, "numbers of a value": d_v})
    check_counts(name, {"hidden_size": d_model} if d_model else {})
    check_counts(name, {"attention_chunk_size": chunk} if chunked else {})
    if chunk == 1:
        raise too_narrow(name, "attention_chunk_size")
    if h % h_kv:
        raise ConfigError(
            f"the model {name!r} has {h} query heads for {h_kv} KV heads, which is no multiple; {INSTEAD}"
        )
    return ModelShape(
        name=name,
        n_layers=len(kinds),
        h=h,
        h_kv=h_kv,
        d_h=d_h,
        window=longest(text),
        attention_layers=layers,
        choosing_layers=choosing,
        d_model=d_model or 0,
        chunked_layers=chunked,
        chunk=chunk or 0,
        hybrid_layers=tuple(i for i, kind in enumerate(kinds) if kind == HYBRID),
        value_width=0 if d_v == d_h else d_v,
        is_latent=is_latent,
        readers=readers_of(text, layers, name),
        is_capped=any(call.is_capped for call in found.calls if call.layer in layers or call.layer < 0),
        left=tuple(left_to_the_model(found, layers, chunk or longest(text))),
        state_bytes=sum(found.state_bytes.values()),
    )


def left_to_the_model(found: Survey, compressed: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Numbers of a token in layers that keep K and V and are not compressed, and of how many tokens; `most`: of all."""
    for call in found.calls:
        cached = found.cached.get(call.layer)
        if call.layer not in compressed and cached is not None:
            yield cached.heads * (cached.d_k + (0 if cached.is_one else cached.d_v)), call.window or most
            if cached.more:
                yield cached.more, most


def check_counts(name: str, counts: Mapping[str, Any]) -> None:
    """Refuse numbers that a pass which did not come to its end let through."""
    for what, n in counts.items():
        if not is_positive(n):
            raise ConfigError(f"the model {name!r} has {what}={n!r:.40}, which is no number above 0; {AGAIN}")


def heads(text: Any, found: Survey, layers: tuple[int, ...], name: str) -> tuple[int, int, int, int, bool]:
    """Query heads, KV heads and numbers of a key and of a value, as layers that are compressed cache them; latents.

    A layer that caches one latent and one rotary key per token, and makes keys and values of all heads of them, has one
    KV head: its key is both, and its value the latent. One that repeats what it caches has the KV heads that it caches.
    """
    for call in found.calls:
        if call.expands and call.layer in layers:
            cached = found.cached.get(call.layer)
            if cached is None or cached.heads != 1:
                raise ConfigError(
                    f"the model {name!r} makes keys and values of what layer {call.layer} caches, and not of one "
                    f"latent per token, which KVBench cannot compress; {INSTEAD}"
                )
            return call.h, 1, cached.d_k + cached.d_v, cached.d_k, True
        if call.layer in layers or (call.layer == -1 and layers):
            cached = found.cached.get(call.layer)
            h_kv = cached.heads if cached is not None and call.h_kv % cached.heads == 0 else call.h_kv
            return call.h, h_kv, call.d_k, call.d_v, cached is not None and cached.is_one and h_kv == 1
    of = of_layer(text, layers[0] if layers else 0)
    h = getattr(of, "num_attention_heads", None) or 1  # a model without attention has none
    d_model = getattr(of, "hidden_size", None) or h
    d_h = getattr(of, "head_dim", None) or d_model // h
    return h, getattr(of, "num_key_value_heads", None) or h, d_h, d_h, False


def longest(text: Any) -> int:
    """Tokens of the longest sequence that the model was made for; a model that sets no end has none of ours either."""
    for name in ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "context_length"):
        if isinstance(n := getattr(text, name, None), int) and n > 0:
            return n
    return 1 << 20

"""Whether a loaded model says with our attention what it says with transformers' own: `check_attention`.

A short prompt and a few steps go through both, the steps as two rows of one batch, so that a layer that is left as it
is has to fork what it holds. Logits are compared, not tokens: a mask, a sink or a cap that is lost shows in them long
before a token changes. What only shows beyond a window of thousands of tokens is told from the configuration
(`engine/checkpoints/kinds.py`).

Half precision rounds; there the measure is how far the model's own two ways of attending are apart, and what a last
digit of its input changes: a router between experts that are nearly as good falls to another side.

Not here: when it is asked (`engine/checkpoints/load.py`).
"""

from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend_own, attend_rows
from kvbench.engine.caches.forks import fork
from kvbench.engine.causal import Chunk, causal
from kvbench.engine.checkpoints.kinds import INSTEAD, Asked, check_calls, kinds_of, own_code
from kvbench.engine.errors import ConfigError, one_line
from kvbench.engine.machine import is_out_of_memory
from kvbench.engine.model import Model
from kvbench.engine.passes.chosen import Choices, HearsChoices
from kvbench.engine.softmax import Softmax

N_PROMPT, N_STEPS, N_ROWS = 48, 4, 2
SHARE = 1e-3  # of the logits' range that rounding may move them by in float32
SHARE_HALF = 1e-2  # below which half precision asks no further
LEVEL = 1e-2  # of the largest logit, where all are nearly the same and rounding is wider than their range
TWICE = 2.0  # times as far apart as the model's own ways of attending
N_NUDGES = 8  # of the input's last digit
NEVER = "model.check=never runs it all the same"


def check_attention(model: Model) -> None:
    """Raise `ConfigError` for a model that KVBench would answer wrongly with, or could not run at all."""
    name = model.shape.name
    if model.shape.window <= N_STEPS:
        return  # no prompt and steps fit, and no task does
    with torch.inference_mode():
        ids = prompt_of(model)
    try:
        right = own_logits(model, ids)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"the model {name!r} cannot be run by transformers itself ({one_line(error)})") from error
    session = Short(model)
    try:
        found = our_logits(model, ids, session)
    except ConfigError:
        raise
    except Exception as error:  # whatever an architecture does that this harness has not met
        if is_out_of_memory(error):
            raise
        if session.calls or session.choices.seen:
            session.refuse_shapes()
        raise ConfigError(
            f"the model {name!r} does not run with KVBench's attention ({type(error).__name__}: {one_line(error)}); "
            f"{INSTEAD}"
        ) from error
    session.refuse_shapes()
    if not right.isfinite().all():
        return  # its answers are no numbers either way, and decoding says so
    spread = max((right.max() - right.min()).item(), LEVEL * right.abs().max().item())
    apart = farthest(found, right)
    allowed = SHARE * spread if model.dtype == torch.float32 else SHARE_HALF * spread
    if apart > allowed and model.dtype != torch.float32:
        allowed = max(allowed, TWICE * own_distance(model, ids, right))
    if not apart <= allowed and not is_rounding(model, ids, found, right):
        raise ConfigError(
            f"the model {name!r} answers differently with KVBench's attention than with transformers' own: logits "
            f"differ by {apart:.2g}, with a range of {spread:.2g} and {allowed:.2g} for rounding; {INSTEAD}, or where "
            f"you know better, {NEVER}"
        )


def prompt_of(model: Model) -> Tensor:
    """Token ids that are no marks: from the middle of the vocabulary, the same each time, as many as the model reads.

    After the last position that a model has learned there is none to look up.
    """
    n, length = model.hf.get_input_embeddings().weight.shape[0], min(N_PROMPT + N_STEPS, model.shape.window)
    first = n // 8
    ids = torch.randint(first, max(n // 2, first + 1), (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def own_logits(model: Model, ids: Tensor, attention: str = "eager") -> Tensor:
    """Logits by transformers' own attention, after the prompt and each step: (steps + 1, vocabulary) float32.

    Eagerly: that is the formula in the model's own file, while sdpa leaves out what torch's attention has no argument
    for, such as Gemma 2's cap in transformers before 5.21.
    """
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation(attention)
    model.forget_text()
    try:
        with torch.inference_mode():
            if model.shape.choosing_layers:
                return own_steps(model.hf, ids)
            out = model.hf(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        model.hf.set_attn_implementation(before)
    return out.logits[0, -N_STEPS - 1 :].float()


def own_steps(hf: Any, ids: Tensor) -> Tensor:
    """Logits by generation in steps: a model that chooses chooses otherwise among equals of another number."""
    cache, found, before = None, list[Tensor](), 0
    for end in range(ids.shape[1] - N_STEPS, ids.shape[1] + 1):
        seen = torch.ones_like(ids[:, :end])
        out = hf(input_ids=ids[:, before:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        found.append(out.logits[0, -1].float())
        cache, before = out.past_key_values, end
    return torch.stack(found)


def own_distance(model: Model, ids: Tensor, right: Tensor) -> float:
    """How far the model's own ways of attending are apart."""
    return max(farthest(own_logits(model, ids, way), right) for way in ("eager", "sdpa") if takes(model, way))


def is_rounding(model: Model, ids: Tensor, found: Tensor, right: Tensor) -> bool:
    """Whether in half precision the model's answers to an input rounded another way are apart as much.

    Where a router falls to another side, one token's logits are far off; wrong attention moves those of most tokens.
    """
    if model.dtype == torch.float32:
        return False
    nudges = sorted(usual(nudged_logits(model, ids, seed), right) for seed in range(N_NUDGES))
    return usual(found, right) <= TWICE * nudges[N_NUDGES // 2]


def usual(found: Tensor, right: Tensor) -> float:
    """The largest difference of the token in the middle, in the row where it is most."""
    return (found - right).abs().amax(-1).median(-1).values.max().item()


def nudged_logits(model: Model, ids: Tensor, seed: int) -> Tensor:
    """`own_logits` where each number that stands for a token is one digit up or down, as `seed` draws."""
    draw = torch.Generator().manual_seed(seed)

    def nudge(module: Any, args: Any, out: Tensor) -> Tensor:
        side = 2 * torch.randint(0, 2, out.shape, generator=draw).to(out.device, out.dtype) - 1
        return out + out * side * torch.finfo(out.dtype).eps

    hook = model.hf.get_input_embeddings().register_forward_hook(nudge)
    try:
        return own_logits(model, ids)
    finally:
        hook.remove()


def takes(model: Model, attention: str) -> bool:
    return attention == "eager" or bool(getattr(model.hf, "_supports_sdpa", False))


def our_logits(model: Model, ids: Tensor, session: "Short") -> Tensor:
    """Logits by our attention, (rows, steps + 1, vocabulary) float32."""
    n_prompt = ids.shape[1] - N_STEPS
    with model.hooked():
        cache = model.new_cache()
        logits = model.forward(ids[:, :n_prompt], 0, cache, session)
        found, cache = [logits.expand(N_ROWS, -1)], fork(cache, N_ROWS)
        for position in range(n_prompt, ids.shape[1]):
            session.position = position
            step = ids[:, position : position + 1].expand(N_ROWS, -1)
            found.append(model.forward(step, position, cache, session))
    return torch.stack(found, 1)


def farthest(found: Tensor, right: Tensor) -> float:
    """The largest difference; not a number where one of them is."""
    return (found - right).abs().max().item()


class Short(HearsChoices):
    """Stands in the model's attention: all tokens of a short prompt and of the steps after it, nothing compressed."""

    def __init__(self, model: Model) -> None:
        self.model, self.position = model, 0
        self.compressed = frozenset(model.shape.attention_layers)
        self.owners = dict(model.shape.readers)  # of layers that attend to another's K and V
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.calls: list[Asked] = []  # of the prompt
        self.choices = Choices()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        if self.position == 0:
            of_window = window if isinstance(window, int) else None
            self.calls.append(Asked(layer, q.shape[1], k.shape[1], k.shape[3], v.shape[3], k.shape[2], of_window, ()))
            self.held[layer] = k, v
            return causal(q, k, v, softmax, window)[0]
        if layer in self.owners:
            k, v = self.held[self.owners[layer]]
            rows = [[Part(k[i : i + 1], v[i : i + 1])] for i in range(len(q))]
            return attend_rows(q, rows, softmax, [False] * len(q))[0]
        if layer not in self.compressed:
            return attend_own(q, k, v, softmax, window, self.position)
        before = (old.expand(len(q), -1, -1, -1) for old in self.held[layer])
        k, v = (torch.cat(each, 2) for each in zip(before, (k, v), strict=True))
        self.held[layer] = k, v
        rows = [[Part(k[i : i + 1], v[i : i + 1])] for i in range(len(q))]
        return attend_rows(q, rows, softmax, [False] * len(q))[0]

    def refuse_shapes(self) -> None:
        """Refuse layers whose calls are not of the shape that the configuration told."""
        shape = self.model.shape
        if unheard := [layer for layer in shape.choosing_layers if layer not in self.choices.seen]:
            raise own_code(shape.name, unheard[0])
        if shape.choosing_layers:
            return
        check_calls(self.calls, kinds_of(self.model.hf.config, shape.name), shape.name)
        for call in self.calls:
            sizes = call.h, call.h_kv, call.d_k, call.d_v
            if call.layer in self.compressed and sizes != (shape.h, shape.h_kv, shape.d_h, shape.d_v):
                raise ConfigError(
                    f"the model {shape.name!r} attends in layer {call.layer} with {call.h} query heads and {call.h_kv} "
                    f"KV heads of {call.d_k} and {call.d_v} numbers, where its configuration says {shape.h}, "
                    f"{shape.h_kv}, {shape.d_h} and {shape.d_v}, so that KVBench cannot count its bytes; {INSTEAD}"
                )

"""Attention Matching (Zweiger et al., 2026): a few keys with fitted biases and values in the place of the prompt's.

Of the prompt's keys few stay, with the rotation they have. Each gets a bias, so that the sum of exponentials over the
few is that over all keys, and a new value, so that the attention output is too: both for reference queries, both by
least squares, per KV head. The bias is what lets the compacted prompt hold its own against generated tokens.

Paper     arXiv:2602.16284, 2026; Zweiger, Adam; Fast KV Compaction via Attention Matching
Symbols   paper C1, beta, C2 = kept keys, `bias`, new values; T, t = prompt tokens, kept keys; n = reference queries.
Per step  moved: nothing; resident: h_kv * t * (4 * d_h + 2) bytes, a bias of 2 bytes next to K and V, and generated
          tokens on top, whose bias is 0.
Differs   - reference queries are the prompt's own at even distances, four per kept key and at least 1,024 rows of a KV
            head. `queries: repeat` takes those of a second copy of the prompt. `moved`, which is not published, turns
            the prompt's own to where the answer begins, so that no key comes after them. The authors' main results add
            queries of questions that the model asks itself, which need generation, compact layer upon layer, and divide
            the budget over heads by tables. The label says which queries, since they matter more than the solver.
          - prompts above `chunk` tokens are compacted in parts of equal length.
          - where least squares gives values above 100 times the old ones, they are fitted again with a ridge of 1e-6;
            `method_report` has how many heads. The authors store them.
          - matching pursuit that ends with fewer keys than paid for keeps that many.
          - tokens of the chat template stay as they are, inside the budget.
Fails     where later queries are unlike the reference queries: nothing is matched for them. Biases alone make outputs
          worse, not better, than those of the same keys.
Figures   keep fewer bits, or made keys: #239EBD, circle, :

Not here: the least-squares problems (`methods/compacting/matching.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, exp, floor
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.books.footprint import Footprint
from kvbench.engine.books.spans import span
from kvbench.engine.budget import ELEMENT_BYTES, NO_FRAME, Budget, BudgetRequest, Frame, token_bytes
from kvbench.engine.declared import Count, Filled, Index, Is, Named
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation, SpacedQueries
from kvbench.engine.passes.repetition import RepeatedQueries
from kvbench.engine.passes.second_pass import SecondPass
from kvbench.engine.placement import Made
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.compacting.matching import (
    BiasRule,
    Pursuit,
    fit_values,
    fit_weights,
    highest_keys,
    pursue,
    target,
    weights_of,
)

LEAST_QUERIES = 1024  # rows of a KV head
QUERIES_PER_KEY = 4
REQUEST_TOKENS = 32  # more than any tokenizer makes of the words that ask for a repetition
NAMES = {"highest": "", "omp": "OMP, ", "omp_fast": "OMP fast, "}
LEAST_WEIGHT = 1e-12  # of a key that matching pursuit chose

PURSUITS = {"omp": (1, 1), "omp_fast": (4, 2)}  # keys at a time, rounds between fits

START_SEED = 0  # of the vector that a power iteration begins with


@dataclass(frozen=True)
class Compacted:
    """Keys, biases and values that stand for the tokens of one KV head."""

    idx: Tensor  # (t,) positions of the kept keys
    bias: Tensor  # (t,) float32
    values: Tensor  # (t, d_h) float32
    is_ridged: bool  # values had to be fitted again


class AttentionMatching(SelectiveAttention):
    title = "Attention Matching"
    version = 3  # least squares by products of columns in place of QR: biases and values differ in their last digits
    unchangeable = "Attention Matching makes keys and values of its own"
    no_growth = "makes tokens that stand for the whole context at once"
    no_latents = "fits values apart from keys: here a value is part of its key"
    drops = True

    @dataclass(frozen=True)
    class Params:
        select: Annotated[str, Named((*NAMES,))]
        score: Literal["rms", "mean", "max"]
        biases: Literal["fitted", "none"]
        values: Literal["fitted", "kept"]
        ridge: Annotated[float, Ge(0), Is("a share of the largest, 0 or more")]
        drop_below: float
        queries: Literal["prompt", "moved", "repeat"]
        n_queries: Count | None
        chunk: Annotated[int, Ge(16)]
        bias_steps: Index | None
        frame: Literal["keep", "compact"]
        first_ids: Annotated[tuple[Index, ...], Filled("the tokens of a request")] | None

        @property
        def bounds(self) -> tuple[float, float]:
            """Bounds of a key's weight, which is the exponential of its bias."""
            return (exp(-3), exp(3)) if self.select == "highest" else (LEAST_WEIGHT, exp(7))

        @property
        def n_steps(self) -> int:
            """Steps of projected gradient that follow the clamped least squares of the weights."""
            if self.bias_steps is not None:
                return self.bias_steps
            return 2 if self.select == "highest" else 0

    @dataclass(frozen=True)
    class Plan:
        frame: Frame  # what stays as it is
        chunks: tuple[tuple[int, int, int], ...]  # first token, end, and how many keys stand for them
        n_queries: int  # reference queries of each query head

    params: Params
    plan: Plan
    n_ridged: int
    n_heads: int

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        others = shape.n_own
        if others and params.queries == "repeat":
            raise ConfigError(
                f"{others} of {shape.n_layers} layers of {shape.name} are no full attention, or have a state beside "
                "it, and method.queries=repeat reads the context again behind the whole cache of all layers; use "
                "method.queries=prompt"
            )

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.queries == "moved" and not model.n_rotary:
            raise ConfigError("method.queries=moved needs a model with rotary positions; use method.queries=prompt")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        how = f"{cls.title} ({NAMES[params.select]}{params.queries} queries)"
        return super().label(params, request).replace(cls.title, how)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        biases = ELEMENT_BYTES * shape.h_kv if params.biases == "fitted" else 0
        return Footprint(budget.tokens * (token_bytes(shape) + biases))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s = budget.s_prompt
        frame = budget.frame if params.frame == "keep" else NO_FRAME
        if budget.attends_all:
            return AttentionMatching.Plan(frame, (), 1)
        n_free = budget.tokens - frame.n_prefix - frame.n_suffix
        chunks = divided(frame.n_prefix, s - frame.n_suffix, n_free, params.chunk)
        if min(t for _, _, t in chunks) < 1:
            least = frame.n_prefix + frame.n_suffix + len(chunks)
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {s} leaves no key for each of {len(chunks)} parts "
                f"beside {frame.n_prefix + frame.n_suffix} tokens of the chat template; use "
                f"ratio={ceil(Fraction(1000 * least, s)) / 1000} or more, or method.frame=compact"
            )
        most = max(t for _, _, t in chunks)
        wanted = max(LEAST_QUERIES, QUERIES_PER_KEY * most) if params.n_queries is None else params.n_queries
        n_each = min(ceil(wanted / shape.g), s - frame.n_prefix - frame.n_suffix)
        if n_each * shape.g < 2 * most:
            raise ConfigError(
                f"{most} keys of a part need {2 * most} reference queries or more, and there are {n_each * shape.g}, "
                f"of {shape.g} query heads; use a smaller ratio"
                + ("" if params.n_queries is None else ", or more method.n_queries")
            )
        if params.queries == "repeat" and 2 * s + REQUEST_TOKENS > shape.window:
            raise ConfigError(
                f"to repeat a prompt of {s} tokens takes up to {2 * s + REQUEST_TOKENS} positions, more than the "
                f"{shape.window} of model {shape.name!r}; use method.queries=prompt or shorter prompts"
            )
        return AttentionMatching.Plan(frame, chunks, n_each)

    def setup(self) -> None:
        self.n_ridged = self.n_heads = 0

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        if params.queries == "repeat":
            return ()
        frame = plan.frame
        return (SpacedQueries(plan.n_queries, frame.n_prefix, frame.n_suffix, params.queries == "moved"),)

    @classmethod
    def second_passes(cls, params: Params, plan: Plan) -> tuple[SecondPass, ...]:
        if params.queries != "repeat":
            return ()
        return (RepeatedQueries(plan.n_queries, plan.frame, params.first_ids),)

    def arrange(self, layer: int) -> Made | None:
        if self.params.queries == "repeat":
            return None
        (what,) = self.variant.observations
        return self.compact(layer, self.trace.observed(what, layer))

    def arrange_rest(self) -> Mapping[int, Made]:
        if self.params.queries != "repeat":
            return {}
        (what,) = self.variant.second_passes
        return {
            layer: self.compact(layer, self.trace.of_second_pass(what, layer))
            for layer in self.trace.shape.attention_layers
        }

    def compact(self, layer: int, q: Tensor) -> Made:
        """Put few keys in the place of the layer's, by reference queries (1, h, n, d_h)."""
        key = ("Attention Matching", self.params, self.plan, layer)
        with span("match", layer):
            heads = self.trace.once(key, lambda: self.matched(layer, q))
        self.n_heads += len(heads)
        self.n_ridged += sum(head.is_ridged for head in heads)
        keys = self.trace.keys(layer)[0]
        kept = torch.nn.utils.rnn.pad_sequence([head.idx for head in heads], batch_first=True, padding_value=-1)
        rows = kept.clamp(min=0).unsqueeze(-1).expand(-1, -1, keys.shape[-1])
        bias = kept.new_zeros(kept.shape, dtype=torch.float32)
        values = keys.new_zeros(*kept.shape, self.trace.shape.d_v)
        for i, head in enumerate(heads):
            bias[i, : len(head.idx)] = head.bias
            values[i, : len(head.idx)] = head.values.to(keys.dtype)
        fitted = bias.unsqueeze(0) if self.params.biases == "fitted" else None
        return Made(keys.gather(1, rows).unsqueeze(0), values.unsqueeze(0), kept.unsqueeze(0), fitted)

    def matched(self, layer: int, q: Tensor) -> list[Compacted]:
        """Every KV head's few keys: the frame's as they are, and those of each part."""
        trace, frame = self.trace, self.plan.frame
        keys, values = trace.keys(layer)[0], trace.values(layer)[0]
        queries = q[0].unflatten(0, (len(keys), -1)).flatten(1, 2)  # (h_kv, g * n, d_h), head by head
        ends = [*range(frame.n_prefix), *range(trace.s_prompt - frame.n_suffix, trace.s_prompt)]
        untouched = torch.tensor(ends, dtype=torch.int64, device=keys.device)
        found = []
        for head in range(len(keys)):
            asked = queries[head].float()
            parts = [self.part(asked, keys[head], values[head], layer, *where) for where in self.plan.chunks]
            if ends:
                parts.append(
                    Compacted(
                        untouched, torch.zeros(len(ends), device=keys.device), values[head, untouched].float(), False
                    )
                )
            found.append(Compacted(
                torch.cat([part.idx for part in parts]), torch.cat([part.bias for part in parts]),
                torch.cat([part.values for part in parts]), any(part.is_ridged for part in parts),
            ))  # fmt: skip
        return found

    def part(self, q: Tensor, keys: Tensor, values: Tensor, layer: int, start: int, end: int, t: int) -> Compacted:
        """`t` keys for those from `start` to `end` of one KV head: q (n, d_h), keys and values (s, d_h)."""
        params, softmax = self.params, self.trace.softmax[layer]
        near, own = keys[start:end].float(), values[start:end].float()
        goal = target(q, near, softmax)
        rule = BiasRule(*params.bounds, params.n_steps)
        if params.select == "highest":
            idx = highest_keys(goal, t, params.score)
            weights = None
        else:
            idx, weights = pursue(goal, t, Pursuit(*PURSUITS[params.select], params.drop_below), rule)
        columns = goal.exps.mT[idx].mT  # (n, t)
        if params.biases == "none":
            bias = torch.zeros(len(idx), device=q.device)
        else:
            if weights is None:
                weights = fit_weights(columns, goal.mass, rule, self.power_start(len(idx), q.device))
            bias = weights.log().to(keys.dtype).float()  # as a cache of this type holds it
        if params.values == "kept":
            return Compacted(idx + start, bias, own[idx], False)
        few = weights_of(columns, bias)
        new, is_ridged = fit_values(few, goal.outputs(own), params.ridge, float(own.abs().amax()))
        return Compacted(idx + start, bias, new, is_ridged)

    def power_start(self, t: int, device: torch.device) -> Tensor:
        return torch.randn(t, generator=torch.Generator().manual_seed(START_SEED)).to(device)

    def protected(self, layer: int) -> Sequence[int]:
        n, s, frame = self.store[layer].n_seen, self.trace.s_prompt, self.plan.frame
        return [*range(frame.n_prefix), *range(s - frame.n_suffix, n)]

    def report(self) -> dict[str, Any]:
        rows = self.plan.n_queries * self.trace.shape.g
        report: dict[str, Any] = {"queries": self.params.queries, "n_queries": rows, "n_parts": len(self.plan.chunks)}
        if self.n_ridged:
            report["ridged_heads"] = self.n_ridged / self.n_heads
        kept = [count for layer in self.store.layers.values() for count in layer.kept_counts()]
        if len(set(kept)) > 1:
            report["kept_heads"] = {"min": min(kept), "mean": sum(kept) / len(kept), "max": max(kept)}
        return report


def divided(start: int, end: int, tokens: int, most: int) -> tuple[tuple[int, int, int], ...]:
    """Parts of about equal length, at most `most`, from `start` to `end`, and their shares of the tokens."""
    length = end - start
    n = max(1, ceil(length / most))
    edges = [floor(Fraction(i * length, n)) for i in range(n + 1)]
    shares = [round(Fraction(tokens * edge, max(1, length))) for edge in edges]
    return tuple(
        (start + edges[i], start + edges[i + 1], min(shares[i + 1] - shares[i], edges[i + 1] - edges[i]))
        for i in range(n)
    )

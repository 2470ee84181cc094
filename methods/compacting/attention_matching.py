"""Attention Matching (Zweiger et al., 2026): a few keys with fitted biases and values in the place of the prompt's.

Of the prompt's keys few stay, with the rotation they have. Each gets a bias, so that the sum of exponentials over the
few is that over all keys, and a new value, so that the attention output is too: both for reference queries, both by
least squares, per KV head. The bias is what lets the compacted prompt hold its own against generated tokens.

Symbols   paper C1, beta, C2 = kept keys, `bias`, new values; T, t = prompt tokens, kept keys; n = reference queries.
Per step  moved: nothing; resident: h_kv * t * (4 * d_h + 2) bytes, a bias of 2 bytes beside K and V, and generated
          tokens on top, whose bias is 0.
Differs   - reference queries are the prompt's own at even distances, four per kept key and at least 1,024 rows of a KV
            head. `queries: repeat` takes those of a second copy of the prompt. `moved`, which is not published, turns
            the prompt's own to where the answer begins, so that no key lies behind them. The authors' main results add
            queries of questions that the model asks itself, which need generation, compact layer upon layer, and divide
            the budget over heads by tables. The label says which queries, since they matter more than the solver.
          - prompts above `chunk` tokens are compacted in parts of equal length.
          - where least squares gives values above 100 times the old ones, they are fitted again with a ridge of 1e-6;
            `method_report` has how many heads. The authors store them.
          - matching pursuit that ends with fewer keys than paid for keeps that many.
          - tokens of the chat template stay as they are, inside the budget.
Fails     where later queries are unlike the reference queries: nothing is matched for them. Biases alone make outputs
          worse, not better, than those of the same keys.

Not here: the least-squares problems (`methods/compacting/matching.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attend import Part
from engine.books.spans import span
from engine.observe import Observation, SpacedQueries
from engine.passes.probe import Probe
from engine.passes.repetition import RepeatedQueries
from methods.base import SelectiveAttention
from methods.compacting.matching import BiasRule, Pursuit, fit_values, fit_weights, highest_keys, pursue, target
from methods.rules.compacting.attention_matching import AttentionMatchingRules

PURSUITS = {"omp": (1, 1), "omp_fast": (4, 2)}  # keys at a time, rounds between fits
START_SEED = 0  # of the vector that a power iteration begins with


@dataclass(frozen=True)
class Compacted:
    """What stands for tokens of one KV head."""

    idx: Tensor  # (t,) positions of the kept keys
    bias: Tensor  # (t,) float32
    values: Tensor  # (t, d_h) float32
    is_ridged: bool  # values had to be fitted again


class AttentionMatching(AttentionMatchingRules, SelectiveAttention):
    params: AttentionMatchingRules.Params
    plan: AttentionMatchingRules.Plan
    n_ridged: int
    n_heads: int

    def setup(self) -> None:
        self.n_ridged = self.n_heads = 0

    @classmethod
    def observations(
        cls, params: AttentionMatchingRules.Params, plan: AttentionMatchingRules.Plan
    ) -> tuple[Observation, ...]:
        if params.queries == "repeat":
            return ()
        frame = plan.frame
        return (SpacedQueries(plan.n_queries, frame.n_prefix, frame.n_suffix, params.queries == "moved"),)

    @classmethod
    def probes(cls, params: AttentionMatchingRules.Params, plan: AttentionMatchingRules.Plan) -> tuple[Probe, ...]:
        if params.queries != "repeat":
            return ()
        return (RepeatedQueries(plan.n_queries, plan.frame, params.first_ids),)

    def arrange(self, layer: int) -> None:
        if self.params.queries != "repeat":
            (what,) = self.variant.observations
            self.compact(layer, self.trace.observed(what, layer))

    def arrange_rest(self) -> None:
        if self.params.queries == "repeat":
            (what,) = self.variant.probes
            for layer in self.trace.shape.attention_layers:
                self.compact(layer, self.trace.probed(what, layer))

    def compact(self, layer: int, q: Tensor) -> None:
        """Put few keys in the place of the layer's, by reference queries (1, h, n, d_h)."""
        key = ("Attention Matching", self.params, self.plan, layer)
        with span("match", layer):
            heads = self.trace.once(key, lambda: self.matched(layer, q))
        self.n_heads += len(heads)
        self.n_ridged += sum(head.is_ridged for head in heads)
        keys = self.trace.keys(layer)[0]
        longest = max(len(head.idx) for head in heads)
        kept = torch.nn.utils.rnn.pad_sequence([head.idx for head in heads], batch_first=True, padding_value=-1)
        rows = kept.clamp(min=0).unsqueeze(-1).expand(-1, -1, keys.shape[-1])
        bias = kept.new_zeros(kept.shape, dtype=torch.float32)
        values = torch.zeros_like(rows, dtype=keys.dtype)
        for i, head in enumerate(heads):
            bias[i, : len(head.idx)] = head.bias
            values[i, : len(head.idx)] = head.values.to(keys.dtype)
        mask = None
        if any(len(head.idx) < longest for head in heads):
            mask = (kept >= 0).repeat_interleave(self.trace.shape.g, 0).unsqueeze(0)
        made = Part(
            keys.gather(1, rows).unsqueeze(0), values.unsqueeze(0), mask,
            bias=bias.unsqueeze(0) if self.params.biases == "fitted" else None,
        )  # fmt: skip
        self.store.replace(layer, made, kept.unsqueeze(0))

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
        params, scale = self.params, self.trace.scales[layer]
        near, own = keys[start:end].float(), values[start:end].float()
        goal = target(q, near, scale)
        rule = BiasRule(*params.bounds, params.n_steps)
        if params.select == "highest":
            idx = highest_keys(goal.weights, t, params.score)
            weights = None
        else:
            idx, weights = pursue(goal, t, Pursuit(*PURSUITS[params.select], params.drop_below), rule)
        if params.biases == "none":
            bias = torch.zeros(len(idx), device=q.device)
        else:
            if weights is None:
                weights = fit_weights(goal.exps[:, idx], goal.mass, rule, self.power_start(len(idx), q.device))
            bias = weights.log().to(keys.dtype).float()  # as a cache of this type holds it
        if params.values == "kept":
            return Compacted(idx + start, bias, own[idx], False)
        few = ((q @ near[idx].mT) * scale + bias).softmax(1)  # (n, t)
        new, is_ridged = fit_values(few, goal.weights @ own, params.ridge, float(own.abs().amax()))
        return Compacted(idx + start, bias, new, is_ridged)

    def power_start(self, t: int, device: torch.device) -> Tensor:
        return torch.randn(t, generator=torch.Generator().manual_seed(START_SEED)).to(device)

    def protected(self, layer: int) -> Sequence[int]:
        n, s, frame = self.store[layer].n_seen, self.trace.s_prompt, self.plan.frame
        if self.variant.is_full:
            return range(n)
        return [*range(frame.n_prefix), *range(s - frame.n_suffix, n)]

    def report(self) -> dict[str, Any]:
        if self.variant.is_full:
            return {}
        rows = self.plan.n_queries * self.trace.shape.g
        report: dict[str, Any] = {"queries": self.params.queries, "n_queries": rows, "n_parts": len(self.plan.chunks)}
        if self.n_ridged:
            report["ridged_heads"] = self.n_ridged / self.n_heads
        kept = [count for layer in self.store.layers.values() for count in layer.kept_counts()]
        if len(set(kept)) > 1:
            report["kept_heads"] = {"min": min(kept), "mean": sum(kept) / len(kept), "max": max(kept)}
        return report

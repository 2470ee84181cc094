"""XKV (Li et al.): evict after prefill as SnapKV does, but divide the budget over layers anew for every prompt.

The prompt's last queries score all earlier tokens. A layer's retention is the share of its scores that its kept tokens
hold, and layers differ: some put everything on a few tokens, others spread it. Taking the largest normalised scores of
all layers together keeps the most retention for the tokens that there are. No code of the authors is public.

Paper     arXiv:2412.05896, 2024; Li, Weizhuo; XKV: Personalized KV Cache Memory Reduction for Long-Context LLM
          Inference
Symbols   paper w_i, n_i, N, R_i, R_avg, M, ps = a layer of `weights`, `counted`, `total`, `retention`, `r_avg`,
          `n_past`, `kernel`; l, t = number of layers, `s_prompt`; ows is `ows`, and `plan.ows` where a short budget
          shrinks it.
Per step  moved: nothing; resident: h_kv * sum over layers of (n_i + ows + generated) tokens, 4 * d_h bytes each;
          metadata: none.
Budget    sum of (n_i + ows) = layers * tokens of the common budget, rounded down per layer as for every method, so
          single layers are above and below it and their mean is within. The paper has fixed totals: its 1.6 % of 8,000
          tokens is `budget=128`. `mode: quality` ends at `r_avg`, whatever the budget, and nothing is compensated; the
          ledger marks runs that come out above the budget.
Differs   - the window stays and counts; the paper's scores leave it out and do not say whether it survives.
          - `index_scope: kv_head` lets each KV head of a layer keep its own n_i tokens, as the methods that it is
            compared with do; `layer` is the literal text, one list for all heads. With `query_head` every query head
            has its own n_i; its KV head keeps the union, and the ledger counts that.
          - greedy one by one is replaced by the top `total` of the whole table. Layers are sorted, so these are the
            first of each, and no other `total` entries sum to more; equal lists, since ties go to the lower layer.
            `r_avg` is reached or passed, not met.
          - one prefill instead of a mini-prefill and another: the same tokens, but memory peaks at the whole prompt,
            and time to first token is without the second pass.
          - `sampled`: shares n_i / N are averaged rather than sizes. One list serves all prompts of a run; the paper
            keeps the sampled tenth on their own lists, which are in the exact run.
          - a budget of at most `ows` tokens halves the window instead of keeping the prompt whole.
Fails     where the question is not in the last 8 tokens; where retention is no measure of worth: a flat layer gets
          many tokens, needed or not. Very small budgets serve peaked layers first, and layers are left with the window.

`method.shares` of a finished exact run, seeded: python run.py method=xkv method.allocation=sampled
"method.shares=$(python -m kvbench.methods.dropping.xkv runs/FOLDER)"
Figures   drop after the prompt, by its last queries: #9C5D02, bowtie, -.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest, exact, show
from kvbench.engine.declared import Is, Kernel, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries, Observation
from kvbench.engine.shapes import ModelShape
from kvbench.engine.terminal import say
from kvbench.methods.dropping.allocators import by_need, by_need_until, by_shares, normalised
from kvbench.methods.scorers import layer_vector, pool_scores, reduce_group, window_votes
from kvbench.methods.scoring import ScoringMethod

SAMPLED_SHARE = Fraction(1, 10)  # of the requests, as in the paper

RETENTIONS = tuple(Fraction(i, 10) for i in range(1, 10))  # at which a profile counts tokens


def retention_ratio(weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Share of each layer's sum that its `n` largest hold, (layers,) float64."""
    layers = zip(normalised(weights), counts, strict=True)
    return torch.stack([shares.topk(n, sorted=False).values.sum() for shares, n in layers])


def tokens_for(weights: Tensor, retention: float) -> list[int]:
    """The fewest tokens of each layer by itself that hold this share of its sum (Figure 4 of the paper)."""
    table = normalised(weights)
    kept = table.sort(descending=True).values.cumsum(-1)
    return (1 + (kept < retention).sum(-1)).clamp(max=table.shape[1]).tolist()


def profile(weights: Tensor, n_bins: int) -> Tensor:
    """Shares summed over `n_bins` equal stretches of the prompt, (layers, n_bins): what a heat map shows of them."""
    table = normalised(weights)
    n_past = table.shape[1]
    stretch = torch.arange(n_past, device=table.device) * n_bins // n_past
    return table.new_zeros(len(table), n_bins).index_add_(1, stretch, table)


def average_shares(reports: Sequence[dict[str, Any]], seed: int, share: Fraction = SAMPLED_SHARE) -> list[float]:
    """Mean of n_i / N over a seeded draw of the reports of an exact run, at least one."""
    some = [report["n"] for report in reports if sum(report["n"])]
    if not some:
        raise ConfigError(
            "no sample of this run has a report of XKV with tokens to share out; "
            "name the folder of a run with method=xkv and a ratio below 1"
        )
    n_drawn = max(1, min(len(some), ceil(share * len(reports))))
    drawn = random.Random(seed).sample(some, n_drawn)
    return [
        sum(n / sum(counts) for n, counts in zip(layer, drawn, strict=True)) / n_drawn
        for layer in zip(*drawn, strict=True)
    ]


class XKV(ScoringMethod):
    title = "XKV"
    uneven = "XKV keeps other numbers of tokens in each layer"
    no_growth = "divides layers by what they attend to in the context"
    is_scorer = False  # its own division of the budget is what it is
    comparable = "heads"

    @dataclass(frozen=True)
    class Params:
        ows: Window
        kernel: Kernel
        mode: Literal["size", "quality"]
        r_avg: Annotated[Fraction, Gt(0), Le(1), Is("a retention above 0 and at most 1")] | None
        allocation: Literal["exact", "sampled", "uniform"]
        shares: tuple[Annotated[float, Ge(0)], ...] | None
        index_scope: Literal["kv_head", "layer", "query_head"]
        profile_bins: Annotated[int, Ge(0), Is("0 for no profile, or such as 64")]

        def __post_init__(self) -> None:
            self.check_mode()
            self.check_shares()

        def check_mode(self) -> None:
            if self.mode == "size" and self.r_avg is not None:
                raise ConfigError(
                    f"method.r_avg={show(self.r_avg)} has no effect with method.mode=size; "
                    "leave it out or set method.mode=quality"
                )
            if self.mode == "quality" and self.r_avg is None:
                raise ConfigError("method.mode=quality needs a target; add method.r_avg=… above 0 and at most 1")
            if self.mode == "quality" and self.allocation != "exact":
                raise ConfigError(
                    f"method.mode=quality has no method.allocation={self.allocation}; use method.allocation=exact"
                )

        def check_shares(self) -> None:
            if self.allocation == "sampled" and self.shares is None:
                raise ConfigError(
                    "method.allocation=sampled needs method.shares=[…]; python -m kvbench.methods.dropping.xkv "
                    "RUN prints them for the folder of a finished run with method.allocation=exact"
                )
            if self.shares is None:
                return
            if self.allocation != "sampled":
                raise ConfigError(
                    f"method.shares has no effect with method.allocation={self.allocation}; "
                    "leave it out or set method.allocation=sampled"
                )
            if not any(self.shares):
                raise ConfigError("method.shares has no positive number; give one of 0 or more for each layer")

    @dataclass(frozen=True)
    class Plan:
        """The division as far as it is known before any score is."""

        ows: int  # tokens of the window, kept in every layer
        total: int  # earlier tokens, over all layers

    params: Params
    plan: Plan
    counted: Sequence[int]
    weights: Tensor  # (layers, n_past) float64, once all layers were seen

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        n_layers = len(shape.attention_layers)
        if params.shares is not None and len(params.shares) != n_layers:
            raise ConfigError(
                f"method.shares has {len(params.shares)} numbers and the model {n_layers} layers to compress; "
                "give one for each, from a run with the same model"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        limit = budget.tokens if params.mode == "size" else budget.s_prompt
        ows = params.ows if limit > params.ows else max(1, limit // 2)
        return XKV.Plan(ows, max(0, len(shape.attention_layers) * (budget.tokens - ows)))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return super().label(params, request) if params.r_avg is None else f"{cls.title} ({exact(params.r_avg)} kept)"

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (LastQueries(params.ows),)

    @property
    def needs_all_layers(self) -> bool:
        return True

    def ends(self) -> tuple[int, int]:
        return 0, self.plan.ows

    def scores(self, layer: int) -> Tensor:
        if self.params.index_scope == "query_head":
            return pool_scores(self.mass(layer), self.params.kernel, "avg")
        scores = self.mean_scores(layer)
        return scores if self.params.index_scope == "kv_head" else layer_vector(scores)[None, None]

    def arrange(self, layer: int) -> None:
        self.mean_scores(layer)  # while the layer is at hand; its size is known after the last one

    def mean_scores(self, layer: int) -> Tensor:
        """Pooled scores of the tokens before the window, (1, h_kv, n_past) float32; the variants share them."""
        ows, kernel = self.plan.ows, self.params.kernel

        def make() -> Tensor:
            # Pooling is linear: after the mean it is the same and has fewer heads to do.
            means = reduce_group(self.mass(layer), self.trace.shape.h_kv, "mean")
            return pool_scores(means, kernel, "avg")

        return self.trace.once(("xkv scores", layer, ows, kernel), make)

    def mass(self, layer: int) -> Tensor:
        """Mean weights of the window's queries on the tokens before it, (1, h, n_past)."""
        ows = self.plan.ows
        return window_votes(self.trace, LastQueries(self.params.ows), ows, layer) / ows

    def counts(self) -> Sequence[int]:
        layers = self.trace.shape.attention_layers
        self.weights = self.trace.once(
            ("xkv weights", self.plan.ows, self.params.kernel),
            lambda: torch.stack(self.trace.gathered(layer_vector(self.mean_scores(layer)) for layer in layers)),
        )
        n_layers, n_past = self.weights.shape
        if self.params.r_avg is not None:
            return by_need_until(self.weights, float(self.params.r_avg))
        if self.params.allocation == "exact":
            return by_need(self.weights, self.plan.total)
        shares = self.params.shares or [1.0] * n_layers  # uniform, without any
        return by_shares(shares, self.plan.total, [n_past] * n_layers)

    def report(self) -> dict[str, Any]:
        """Plan and retention per layer; with `profile_bins` also what the paper's Figures 2 to 4 draw."""
        retention = retention_ratio(self.weights, self.counted)
        n_kept = sum(self.counted) + self.plan.ows * len(self.counted)
        report = {
            "layers": list(self.trace.shape.attention_layers),
            "ows": self.plan.ows,
            "n": list(self.counted),
            "retention": retention.tolist(),
            "r_avg": retention.mean().item(),
            "compression_ratio": n_kept / (len(self.counted) * self.trace.s_prompt),
        }
        if self.params.profile_bins:
            report["w"] = profile(self.weights, self.params.profile_bins).tolist()
            report["n_at_retention"] = {exact(r): tokens_for(self.weights, float(r)) for r in RETENTIONS}
        return report


def main(arguments: list[str]) -> int:
    """Print the averaged shares of a finished exact run, as `method.shares` takes them."""
    path = Path(arguments[0]) / "samples.jsonl" if arguments else None
    if path is None or not path.is_file() or not all(word.isdecimal() for word in arguments[1:2]):
        say(
            "usage: python -m kvbench.methods.dropping.xkv RUN [SEED], the folder of a finished run of method=xkv",
            file=sys.stderr,
        )
        return 2
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    reports = [sample["method_report"] for sample in samples if "method_report" in sample]
    try:
        shares = average_shares(reports, seed=int((arguments[1:2] or ["0"])[0]))
    except (ConfigError, KeyError) as error:
        say(f"{path}: {error}", file=sys.stderr)
        return 1
    say(f"[{','.join(map(repr, shares))}]")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

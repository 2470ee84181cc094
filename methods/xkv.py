"""XKV (Li et al.): evict after prefill as SnapKV does, but divide the budget over layers anew for every prompt.

The prompt's last queries score all earlier tokens. A layer's retention is the share of its scores that its kept tokens
hold, and layers differ: some put everything on a few tokens, others spread it. Taking the largest normalised scores of
all layers together keeps the most retention for the tokens that there are. No code of the authors is public.

Symbols   paper w_i, n_i, N, R_i, R_avg, M, ps = a row of `weights`, `counts`, `total`, `retention`, `r_avg`, `n_past`,
          `kernel`; l, t = number of layers, `s_prompt`; ows is `ows`, and `plan.ows` where a short budget shrinks it.
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
          - greedy one by one is replaced by the top `total` of the whole table. Rows are sorted, so these are the
            first of each row, and no other `total` entries sum to more; equal lists, since ties go to the lower layer.
            `r_avg` is reached or passed, not met.
          - one prefill instead of a mini-prefill and another: the same tokens, but memory peaks at the whole prompt,
            and time to first token is without the second pass.
          - `sampled`: shares n_i / N are averaged rather than sizes. One list serves all prompts of a run; the paper
            keeps the sampled tenth on their own lists, which are in the exact run.
          - a budget of at most `ows` tokens halves the window instead of keeping the prompt whole.
Fails     where the question is not in the last 8 tokens; where retention is no measure of worth: a flat layer gets
          many tokens, needed or not. Very small budgets serve peaked layers first, and layers are left with the window.

`method.shares` of a finished exact run, seeded: python run.py method=xkv method.allocation=sampled
"method.shares=$(python -m methods.xkv runs/FOLDER)"
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from engine.budget import Budget, BudgetRequest, show
from engine.checks import one_of
from engine.errors import ConfigError
from engine.observe import LastQueries, Observation
from engine.shapes import ModelShape
from methods.base import SelectiveAttention
from methods.snapkv import window_votes

SAMPLED_SHARE = Fraction(1, 10)  # of the requests, as in the paper
RETENTIONS = tuple(Fraction(i, 10) for i in range(1, 10))  # at which a profile counts tokens


def pooled_scores(scores: Tensor, kernel: int) -> Tensor:
    """Moving average over (1, heads, n_past); zeros beyond both ends count."""
    return avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)


def group_scores(scores: Tensor, h_kv: int) -> Tensor:
    """Mean over the query heads of each KV head, (1, h, n_past) -> (1, h_kv, n_past)."""
    return scores.unflatten(1, (h_kv, -1)).mean(2)


def layer_vector(scores: Tensor) -> Tensor:
    """Mean over heads, (1, heads, n_past) -> (n_past,) float64; means over groups give the same."""
    return scores[0].double().mean(0)


def normalised(weights: Tensor) -> Tensor:
    """Rows (layers, n_past) as shares of their sums, float64: every layer is worth 1. A row of zeros is uniform."""
    weights = weights.double()
    sums = weights.sum(-1, keepdim=True)
    return torch.where(sums > 0, weights / sums, 1 / weights.shape[-1])


def allocate_total(weights: Tensor, total: int) -> list[int]:
    """Tokens per layer that keep most: how many of the `total` largest shares of the table lie in each row.

    Ties go to the lower layer. A threshold is found in place of sorting: 0.1 s against 0.5 for 32 layers of 128K.
    """
    table = normalised(weights)
    assert 0 <= total <= table.numel(), (total, table.shape)
    if total == 0:
        return [0] * len(table)
    least = table.flatten().kthvalue(table.numel() - total + 1).values
    counts, tied = (table > least).sum(-1), (table == least).sum(-1)
    room = total - counts.sum()
    before = tied.cumsum(0) - tied  # in lower layers
    return (counts + torch.minimum((room - before).clamp(min=0), tied)).tolist()


def allocate_target(weights: Tensor, r_avg: float) -> list[int]:
    """The fewest tokens whose mean retention is `r_avg` or more; everything for 1, whatever sums round to."""
    table = normalised(weights)
    if r_avg >= 1:
        return [table.shape[1]] * len(table)
    kept = table.flatten().sort(descending=True).values.cumsum(0) / len(table)
    total = 1 + int((kept < r_avg).sum())  # the first that crosses: the sums ascend
    return allocate_total(weights, min(total, table.numel()))


def retention_ratio(weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Share of each row's sum that its `n` largest hold, (layers,) float64."""
    rows = zip(normalised(weights), counts, strict=True)
    return torch.stack([row.topk(n, sorted=False).values.sum() for row, n in rows])


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


def share_out(shares: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """`total` in proportion to `shares`: whole numbers with that sum, none above its cap.

    What a cap cuts off is shared out again among the others; those with no share get something only when all others
    are at their caps.
    """
    assert 0 <= total <= sum(caps), f"{total} tokens, room for {sum(caps)}"
    sizes = [0] * len(shares)
    while left := total - sum(sizes):
        free = [i for i, size in enumerate(sizes) if size < caps[i]]
        wanted = [shares[i] for i in free]
        for i, more in zip(free, largest_remainder(wanted, left), strict=True):
            sizes[i] = min(caps[i], sizes[i] + more)
    return sizes


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round `total * share` so that the sum is `total`; equal fractions favour the first."""
    whole = sum(shares)
    exact = [total * s / whole if whole > 0 else total / len(shares) for s in shares]
    sizes = [floor(x) for x in exact]
    # Fractions as decimals, since 0.8 of two products differs in the last bits.
    order = sorted(range(len(shares)), key=lambda i: -round(exact[i] - sizes[i], 9))
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


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


def top_tokens(scores: Tensor, n: int) -> Tensor:
    """Positions of the `n` best, ascending, (1, heads, n_past) -> (1, heads, n); equal scores go to the lower one."""
    if n == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    least = scores.kthvalue(scores.shape[-1] - n + 1, -1, keepdim=True).values
    above, tied = scores > least, scores == least
    room = n - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= room))
    return keep.nonzero()[:, -1].view(*scores.shape[:-1], n)


@dataclass(frozen=True)
class Sizes:
    """What is known of the division before any score is."""

    ows: int  # tokens of the window, kept in every layer
    total: int  # earlier tokens, over all layers


class XKV(SelectiveAttention):
    title = "XKV"
    drops = True

    @dataclass(frozen=True)
    class Params:
        ows: int
        kernel: int
        mode: str
        r_avg: Fraction | None
        allocation: str
        shares: tuple[float, ...] | None
        index_scope: str
        profile_bins: int

        def __post_init__(self) -> None:
            for key, allowed in (
                ("mode", ("size", "quality")),
                ("allocation", ("exact", "sampled", "uniform")),
                ("index_scope", ("kv_head", "layer", "query_head")),
            ):
                one_of(f"method.{key}", getattr(self, key), allowed)
            if self.ows < 1:
                raise ConfigError(f"method.ows={self.ows} is out of range; it is a number of tokens, 1 or more")
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise ConfigError(
                    f"method.kernel={self.kernel} is not possible; use an odd number of tokens, such as 7"
                )
            if self.profile_bins < 0:
                raise ConfigError(
                    f"method.profile_bins={self.profile_bins} is out of range; use 0 for no profile, or such as 64"
                )
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
            if self.r_avg is not None and not 0 < self.r_avg <= 1:
                raise ConfigError(
                    f"method.r_avg={show(self.r_avg)} is out of range; it is a retention above 0 and at most 1"
                )
            if self.mode == "quality" and self.allocation != "exact":
                raise ConfigError(
                    f"method.mode=quality has no method.allocation={self.allocation}; use method.allocation=exact"
                )

        def check_shares(self) -> None:
            if self.allocation == "sampled" and self.shares is None:
                raise ConfigError(
                    "method.allocation=sampled needs method.shares=[…]; python -m methods.xkv RUN prints them "
                    "for the folder of a finished run with method.allocation=exact"
                )
            if self.shares is None:
                return
            if self.allocation != "sampled":
                raise ConfigError(
                    f"method.shares has no effect with method.allocation={self.allocation}; "
                    "leave it out or set method.allocation=sampled"
                )
            if not all(0 <= share < float("inf") for share in self.shares) or not any(self.shares):
                raise ConfigError(
                    "method.shares has a negative or no positive number; give one of 0 or more for each layer"
                )

    params: Params
    plan: Sizes
    weights: Tensor  # (layers, n_past) float64, once all layers were seen
    counts: list[int]  # tokens before the window that each layer keeps

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        n_layers = len(shape.full_layers)
        if params.shares is not None and len(params.shares) != n_layers:
            raise ConfigError(
                f"method.shares has {len(params.shares)} numbers and the model {n_layers} layers to compress; "
                "give one for each, from a run with the same model"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Sizes:
        limit = budget.tokens if params.mode == "size" else budget.s_prompt
        ows = params.ows if limit > params.ows else max(1, limit // 2)
        return Sizes(ows, max(0, len(shape.full_layers) * (budget.tokens - ows)))

    @classmethod
    def observations(cls, params: Params, plan: Sizes) -> tuple[Observation, ...]:
        return (LastQueries(params.ows),)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return super().label(params, request) if params.r_avg is None else f"{cls.title} ({show(params.r_avg)} kept)"

    def arrange(self, layer: int) -> None:
        self.scores(layer)  # while the layer is at hand; its size is known after the last one

    def arrange_rest(self) -> None:
        layers = self.trace.shape.full_layers
        self.weights = self.trace.once(
            ("xkv weights", self.plan.ows, self.params.kernel),
            lambda: torch.stack([layer_vector(self.scores(layer)) for layer in layers]),
        )
        self.counts = self.allocate()
        for layer, n in zip(layers, self.counts, strict=True):
            idx = top_tokens(self.selection_scores(layer), n)
            if self.params.index_scope == "layer":
                idx = idx.expand(-1, self.trace.shape.h_kv, -1).contiguous()  # (1, h_kv, n)
            self.store.keep(layer, idx, n_window=self.plan.ows)

    def scores(self, layer: int) -> Tensor:
        """Pooled scores of the tokens before the window, (1, h_kv, n_past) float32; the variants share them."""
        ows, kernel = self.plan.ows, self.params.kernel

        def make() -> Tensor:
            # Pooling is linear: after the mean it is the same and has fewer heads to do.
            return pooled_scores(group_scores(self.mass(layer), self.trace.shape.h_kv), kernel)

        return self.trace.once(("xkv scores", layer, ows, kernel), make)

    def mass(self, layer: int) -> Tensor:
        """Mean weights of the window's queries on the tokens before it, (1, h, n_past)."""
        ows = self.plan.ows
        return window_votes(self.trace, LastQueries(self.params.ows), ows, layer) / ows

    def selection_scores(self, layer: int) -> Tensor:
        """What chooses within a layer: (1, h_kv or h, n_past), or (1, 1, n_past) for all heads alike."""
        if self.params.index_scope == "query_head":
            return pooled_scores(self.mass(layer), self.params.kernel)
        scores = self.scores(layer)
        return scores if self.params.index_scope == "kv_head" else layer_vector(scores)[None, None]

    def allocate(self) -> list[int]:
        """Tokens before the window that each layer keeps."""
        n_layers, n_past = self.weights.shape
        if self.params.r_avg is not None:
            return allocate_target(self.weights, float(self.params.r_avg))
        if self.params.allocation == "exact":
            return allocate_total(self.weights, self.plan.total)
        shares = self.params.shares or [1.0] * n_layers  # uniform, without any
        return share_out(shares, self.plan.total, [n_past] * n_layers)

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        return range(0 if self.budget.is_full else self.trace.s_prompt - self.plan.ows, n)

    def report(self) -> dict[str, Any]:
        """Sizes and retention per layer; with `profile_bins` also what the paper's Figures 2 to 4 draw."""
        if self.budget.is_full:
            return {}
        retention = retention_ratio(self.weights, self.counts)
        n_kept = sum(self.counts) + self.plan.ows * len(self.counts)
        report = {
            "layers": list(self.trace.shape.full_layers),
            "ows": self.plan.ows,
            "n": self.counts,
            "retention": retention.tolist(),
            "r_avg": retention.mean().item(),
            "compression_ratio": n_kept / (len(self.counts) * self.trace.s_prompt),
        }
        if self.params.profile_bins:
            report["w"] = profile(self.weights, self.params.profile_bins).tolist()
            report["n_at_retention"] = {show(r): tokens_for(self.weights, float(r)) for r in RETENTIONS}
        return report


def main(arguments: list[str]) -> int:
    """Print the averaged shares of a finished exact run, as `method.shares` takes them."""
    path = Path(arguments[0]) / "samples.jsonl" if arguments else None
    if path is None or not path.is_file() or not all(word.isdecimal() for word in arguments[1:2]):
        sys.stderr.write("usage: python -m methods.xkv RUN [SEED], the folder of a finished run of method=xkv\n")
        return 2
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    reports = [sample["method_report"] for sample in samples if "method_report" in sample]
    try:
        shares = average_shares(reports, seed=int((arguments[1:2] or ["0"])[0]))
    except (ConfigError, KeyError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    sys.stdout.write(f"[{','.join(map(repr, shares))}]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Append-only decoding over any scorer: each new token is kept or skipped once, and what is kept never leaves.

The prompt stays whole. A token of the answer is attended to until `window` newer ones are there, then each KV head
judges it, or all heads of a layer together, or all layers. What an engine has written to a page therefore stays valid,
and its blocks can be shared.

Paper     none: FilteringPress and UniformFilteringPress of kvpress' pull request 258, which was closed
Symbols   kvpress: target_compression_ratio, compression_interval = `share`, `interval`; UniformFilteringPress is
          `per: layer`.
Budget    none, and tables have it where it was measured. A share of 1/2 leaves more than half: the prompt cannot leave
          while it counts, and what came early met few that were better. method=append_only_budget holds one.
Per step  moved: nothing; resident: what each head kept, 4 * d_h bytes a token, a bit for each generated token of a
          head, and where tokens are ranked by numbers that never change, 4 bytes for each. A scorer that compares keys
          reads those of all held tokens, as `flops_per_token` says. Memory for generated tokens is taken at once.
Differs   - `window` (theirs 0), `decide: threshold` and `per: token` are this harness's own.
          - a product of a share is rounded half to even, and no head's rank is below 1.
          - skipped slots are hidden, where theirs are filled by tokens that move. The sets are the same.
          - with `per: token` a token is ranked while it is one step younger, as all layers have to be through.
Fails     where a token matters that was like nothing before it when it came. Per head, hardly a slot is free in a block
          table that heads share: `pages` of `method_report` has both counts.
Figures   skip while decoding: #D63D3D, kite, --
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from kvbench.engine.budget import EVERYTHING, BudgetRequest, show
from kvbench.engine.declared import Count, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.placement import Delayed, Judged, Placement, Queries
from kvbench.engine.selection import Cost
from kvbench.methods.named import Scorer
from kvbench.methods.over import OverScorer, kind_of, refuse_query_heads
from kvbench.methods.scorers import by_heads
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

LEAST_QUERIES = 8  # with fewer, what a token is worth is what it and its neighbours make of themselves
PAGE_LEN = 16  # tokens of an engine's page
SCORE_BYTES = 4


@dataclass(frozen=True)
class Judging:
    """Who judges a token, and when."""

    scorer: Scorer
    window: Tokens
    per: Literal["head", "layer", "token"]
    match_published: ClassVar[bool] = False  # what a scorer protects stays with the prompt

    def __post_init__(self) -> None:
        kind, title = kind_of(self.scorer), self.scorer.rules.title
        refuse_query_heads(self.scorer, "append-only decoding")
        judges = kind.traits_of(self.scorer.params).judges
        if not judges and kind.score is ScoringMethod.score:
            raise ConfigError(
                f"{title} has no score for a token that is generated; use method.scorer=knorm, keydiff, qfilters, "
                "kvzap, random or snapkv"
            )
        if judges == "queries" and self.window < LEAST_QUERIES:
            raise ConfigError(
                f"{title} scores a token by the queries of the method.window={self.window} tokens after it, which are "
                f"too few; use method.window={LEAST_QUERIES} or more"
            )
        if self.per == "token" and not self.window:
            raise ConfigError(
                "method.per=token wants the scores of all layers, which a step has once it is over; use "
                "method.window=1 or more"
            )


class Appending(OverScorer):
    """Tokens of the answer are judged once, by whether fewer than `limit` of those that are held score higher."""

    title = "Append-only"
    eager = "judges each new token"
    evicts = "append-only decoding skips tokens while it decodes"
    unreadable = "it keeps the whole prompt"
    takes = ()
    is_scorer = False

    params: Judging
    known: dict[int, Tensor]  # by layer, numbers that never change: (h_kv, n) of the latest tokens, or of all
    margins: dict[int, Tensor]  # by layer, of the token that all layers judge at the next step
    together: Tensor  # whether they keep that of this step
    n_scored: int  # keys of KV heads that were scored

    @classmethod
    def traits_of(cls, params: Judging) -> Traits:
        return replace(super().traits_of(params), reads_inputs=judges_by(params) == "input")

    @classmethod
    def label(cls, params: Judging, request: BudgetRequest) -> str:
        rules, n = params.scorer.rules, params.window
        notes = [rules.label(params.scorer.params, EVERYTHING), *cls.notes(params)]
        notes += [f"one set per {params.per}"] * (params.per != "head") + [f"window {n}"] * bool(n)
        return f"{cls.title} ({', '.join(notes)})"

    def setup(self) -> None:
        super().setup()
        self.known, self.margins, self.n_scored = {}, {}, 0
        self.judges = judges_by(self.params)
        self.wants_input = self.judges == "input"
        self.compares_keys = self.judges in ("", "queries")

    @property
    def needs_all_layers(self) -> bool:
        return False

    @property
    def ranks(self) -> bool:
        """Whether a token's number is compared with those of others."""
        return True

    def limit(self, n: Tensor, p: int) -> Tensor | float:
        """Fewer tokens than that may score higher than the one at position `p`, by how many each head holds."""
        raise NotImplementedError

    def is_tested(self, p: int) -> bool:
        return True

    def arrange(self, layer: int) -> Placement:
        trace, h_kv, w = self.trace, self.trace.shape.h_kv, self.params.window
        every = torch.arange(trace.s_prompt, device=trace.device_of(layer))
        none, queries = torch.empty(h_kv, 0, dtype=torch.bool, device=every.device), None
        if self.judges == "queries":  # those of the prompt have left the ring when the first token is judged
            queries = Queries(w, trace.observed(LastQueries(self.params.scorer.params.window), layer)[:, :, -1:])
        if not self.compares_keys:
            self.known[layer] = self.of_prompt(layer, every) if self.ranks else every.new_empty(h_kv, 0).float()
        return Delayed([every] * h_kv, stays=none, delay=w, queries=queries)

    def of_prompt(self, layer: int, positions: Tensor) -> Tensor:
        """Numbers of the prompt's tokens, (h_kv, s); what a scorer protects is beyond all others."""
        if self.judges == "place":
            return self.inner.scores_at(layer, positions, self.draw)
        scores = self.inner.shared_scores(layer)[0].expand(self.trace.shape.h_kv, -1)
        return torch.nn.functional.pad(scores, self.inner.ends(), value=inf)

    def behind(self, layer: int, weights: Tensor | None) -> Judged | None:
        at, w, n_before = self.store[layer], self.params.window, self.n_scored
        if not self.compares_keys:
            self.take_in(layer)
        p, s, held = at.n_seen - 1 - w, self.trace.s_prompt, at.judged()  # those before p
        found = self.passing(layer, held, p) if p >= s else None
        if self.params.per == "token" and p + 1 >= s:
            held = held if found is None else torch.cat([held, found.unsqueeze(1)], 1)
            self.margins[layer] = self.margin(layer, held, p + 1)
        read = self.n_scored - n_before
        key_bytes = self.trace.shape.d_h * 2
        return None if found is None else Judged(~found, w, cost=Cost(rebuilt_bytes=read * key_bytes))

    def take_in(self, layer: int) -> None:
        """Score the current token, by what is known of it now."""
        at = self.store[layer]
        if self.judges == "place":
            now = self.inner.scores_at(layer, torch.tensor([at.n_seen - 1], device=at.device), self.draw)
        else:
            inputs = self.x_now if self.wants_input else None
            now = self.inner.scores_of(layer, at.newest[0], inputs).mT.expand(self.trace.shape.h_kv, -1)
        known = torch.cat([self.known[layer], now], 1)
        self.known[layer] = known if self.ranks else known[:, -1 - self.params.window :]
        self.n_scored += len(now) * (self.judges == "keys")

    def passing(self, layer: int, held: Tensor, p: int) -> Tensor:
        """Which KV heads keep the token at position `p`, (h_kv,) bool."""
        if not self.is_tested(p):
            return held.new_ones(len(held))
        if self.params.per == "token":
            if layer == self.trace.shape.attention_layers[0]:  # the margins are those of the step before
                self.together = torch.stack(self.trace.gathered(self.margins.values())).mean() > 0
            return self.together.to(held.device).expand(len(held))
        passes = self.margin(layer, held, p) > 0
        return passes if self.params.per == "head" else (passes.float().mean() >= 0.5).expand(len(held))

    def margin(self, layer: int, held: Tensor, p: int) -> Tensor:
        """By which share of its tokens the one at `p` passes in each head, (h_kv,); 0 and below: it does not."""
        n = held.sum(1)
        return (self.limit(n, p) - self.higher(layer, held, p)) / n

    def higher(self, layer: int, held: Tensor, p: int) -> Tensor:
        """How many of the tokens that a head holds score strictly higher than the one at position `p`, (h_kv,)."""
        if not self.compares_keys:
            known = self.known[layer]
            return ((known[:, :p] > known[:, p : p + 1]) & held).sum(1)
        found, keys, g = list[Tensor](), self.store[layer].keys(), self.trace.shape.g
        newer = keys[:, :, p + 1 :]
        for i, mask in enumerate(held):
            one, heads = slice(i, i + 1), slice(i * g, (i + 1) * g)
            own = torch.cat([keys[:, one, :p][:, :, mask], keys[:, one, p : p + 1]], 2)
            self.n_scored += own.shape[2]
            if self.judges == "queries":
                q = self.store[layer].queries.latest()[:, heads, -newer.shape[2] :]
                scores = self.inner.votes(layer, q, torch.cat([own, newer[:, one]], 2), heads)
            else:
                scores = by_heads(self.trace, layer, own, self.inner.score)[0, 0]
            found.append((scores[:-1] > scores[-1]).sum())
        return torch.stack(found)

    def token_bytes(self, layer: int) -> int:
        return SCORE_BYTES * self.trace.shape.h_kv if self.ranks and not self.compares_keys else 0

    def protected(self, layer: int) -> list[int]:
        n, s = self.store[layer].n_seen, self.trace.s_prompt
        return [*range(s), *range(max(s, n - 1 - self.params.window), n)]

    def report(self) -> dict[str, Any]:
        """Tokens that heads hold, in how many whole pages they would lie, and what it took to score them."""
        layers = [self.store[layer].judged() for layer in self.store.layers]
        held = torch.stack(self.trace.gathered(layers))  # (layers, h_kv, n)
        counts, n_new = held.sum(-1), max(1, held.shape[-1] - self.trace.s_prompt)
        return super().report() | {
            "held": {"min": int(counts.min()), "mean": counts.double().mean().item(), "max": int(counts.max())},
            "pages": {"head": in_pages(counts), "layer": in_pages(held.any(1).sum(-1)),
                      "table": in_pages(held.any(0).any(0).sum())},
            "flops_per_token": 2 * self.trace.shape.d_h * self.n_scored / n_new,
        }  # fmt: skip


def judges_by(params: Judging) -> str:
    """By what the scorer judges a token."""
    return params.scorer.rules.traits_of(params.scorer.params).judges


def in_pages(counts: Tensor) -> float:
    """Tokens that whole pages have room for, in the mean."""
    return (-(-counts // PAGE_LEN) * PAGE_LEN).double().mean().item()


class AppendOnly(Appending):
    adapts = True

    @dataclass(frozen=True)
    class Params(Judging):
        decide: Literal["rank", "threshold", "budget"]
        share: Annotated[Fraction, Ge(0), Lt(1)]
        threshold: float
        interval: Count

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.decide == "budget":
                raise ConfigError(
                    "method.decide=budget holds a number of tokens; use method=append_only_budget budget=N for it"
                )
            if self.decide == "threshold" and judges_by(self) in ("", "queries"):
                raise ConfigError(
                    f"{self.scorer.rules.title} judges a token by others, which no threshold holds for; use "
                    "method.decide=rank, or a scorer such as knorm or kvzap"
                )
            if self.decide == "threshold" and self.per == "token":
                raise ConfigError(
                    "method.per=token takes the mean of ranks, and method.decide=threshold has none; use "
                    "method.decide=rank, or method.per=layer"
                )

    params: Params

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        if params.decide == "threshold":
            return [f"from {params.threshold:g}"]
        return [f"{show(params.share)} skipped"] + [f"every {params.interval}"] * (params.interval > 1)

    @property
    def ranks(self) -> bool:
        return self.params.decide == "rank"

    def is_tested(self, p: int) -> bool:
        return (p + 1 - self.trace.s_prompt) % self.params.interval == 0

    def margin(self, layer: int, held: Tensor, p: int) -> Tensor:
        if self.ranks:
            return super().margin(layer, held, p)
        return (self.known[layer][:, 0] >= self.params.threshold).float()

    def limit(self, n: Tensor, p: int) -> int:
        """kvpress' rank, in double precision, as it computes a share."""
        stays = 1 - float(self.params.share)
        if self.params.per == "head":
            return max(1, min(round((p + 1) * stays), int(n.max()) + 1))
        return max(1, int((int(n[0]) + 1) * stays))

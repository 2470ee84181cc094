"""InfiniGen (Lee et al., 2024): fetch the tokens that the input of the layer below says this layer will attend to.

The inputs of neighbouring layers are alike, so a layer's own projection of the layer below's input is nearly its query,
and its keys can be on their way before it runs. That query meets a few channels of every key: a rotation A, made from
the prompt's queries, first turns most of their energy into few channels.

Paper     arXiv:2406.19707, 2024; Lee, Wonbeom; InfiniGen: Efficient Generative Inference of Large Language Models
          with Dynamic KV Cache Management
Symbols   paper A, alpha, K = `basis`, `alpha`, tokens per head; r, d', T = `partial_ratio`, `n_channels`, `k_most`; x =
          input of a layer's attention, after its norm; q~ = `q_ahead`; S = tokens that compete, D = `d_model`.
Per step  moved: K and V of K tokens per query head, 4 * d_h bytes each, a token of a KV head once, nothing of it left
          from the step before; to find them nothing moves, so any `comm` is met. Read to find: partial keys,
          2 * h_kv * S * d' bytes, resident as are 2 * h * d' * D bytes of query weights (with `lookahead: 1`) and
          2 * h_kv * d_h ** 2 of A (with `skew`).
Differs   - the prefill is exact; the authors' accuracy path masks every query of the whole sequence.
          - A and channels come from the prompt at hand, A after rotation. The authors make A of 2,048 tokens of a book,
            and their accuracy path takes the union of the query's and the key's channels of fixed sentences, up to
            2 * d'. `channels: query`, `skew: false` is their serving code with nothing folded into its weights.
          - under GQA, which they do not have: A, channels and partial keys once per KV head, from all queries of its
            group; tokens per query head, or with `agg` per group.
          - without `alpha` the number of tokens is the budget's. With it the budget is the cap, and `method_report`
            says how often which of the two bound. Published: 4 for OPT, 5 for Llama-2.
          - generated tokens stay on the device; `generated: compete` treats them like the prompt's, as published. The
            current one is always attended to, as in the authors' serving code.
          - q~ is computed when its layer selects, from the stored input of the layer below: the same numbers, without
            the overlap that they are for. With rotary positions it takes the whole projection, not only the rows that
            are counted, since rotation and A lie between it and the channels.
          - no pool of limited size on the host, so no eviction from it.
          - `comm_mode: matched` takes comm * d_h channels, at least one: at d_h = 64 and comm=1/128 twice what comm
            says. `native` has the published fifth. `proxy_ratio` of `method_report` has the real share.
          - the first `full_layers` layers stay whole, as published. A budget is that of the other layers;
            `method_report` has the share over all of them as `overall_ratio`.
Fails     where a layer changes its input much, as the first do, and where so few channels carry too little of q·k.
          `lookahead: 0` asks with the layer's true query and shows what that costs. A published `alpha` need not suit
          another model: with 4 the embedded one took some 30 of 83 tokens and found few needles, with all 83 most. The
          cost of finding grows with the prompt.
Figures   retrieve single tokens: #457902, bar, :

Not here: how the model makes q~ (`engine/model.py`), the basis (`engine/observe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Gt, Le
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from kvbench.engine.declared import Index, Is
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import ChannelSums, Observation
from kvbench.engine.placement import Offloaded
from kvbench.engine.search import Launch, Units, best_tokens, products
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.clock import Since
from kvbench.kernels.rows.logits import channel_keys
from kvbench.methods.base import overall_ratio
from kvbench.methods.indexed import Indexed

WITHOUT = "a number above 0, such as 4, or null for as many tokens as the budget has"
Alpha = Annotated[float, Gt(0), Is(WITHOUT)]


@dataclass(frozen=True)
class Proxy:
    """The few channels of one layer, the same for all variants that ask for as many."""

    chosen: Tensor  # (h_kv, n_channels) int64, the heaviest first
    basis: Tensor  # (h_kv, d_h, n_channels) float32, their columns of A
    keys: Tensor  # (h_kv, s_prompt, n_channels) float32, rounded to the model's dtype


def make_proxy(sums: Tensor, keys: Tensor, n_channels: int, channels: str) -> Proxy:
    """Take the heaviest channels of `ChannelSums` (h_kv, d_h + 2, d_h), and with them the keys (1, h_kv, s, d_h)."""
    basis, of_q, of_k = sums[:, :-2], sums[:, -2], sums[:, -1]
    weight = of_q if channels == "query" else of_q + of_k  # (h_kv, d_h)
    chosen = weight.topk(n_channels).indices
    columns = basis.gather(2, chosen.unsqueeze(1).expand(-1, basis.shape[1], -1))
    return Proxy(chosen, columns, partial_keys(keys, columns))


def partial_keys(keys: Tensor, columns: Tensor) -> Tensor:
    """Keys (1, h_kv, s, d_h) times columns (h_kv, d_h, n_channels); a head at a time, since float copies are large."""
    heads = zip(keys[0], columns, strict=True)
    return torch.stack([(head.float() @ some).to(keys.dtype).float() for head, some in heads])


def common_count(logits: Tensor, alpha: float) -> int:
    """How many tokens come within `alpha` of their head's best, as a mean over the heads (heads, s), rounded down."""
    near = logits > logits.amax(-1, keepdim=True) - alpha
    # The best itself counts even where alpha is lost in rounding.
    return int(near.sum(-1).clamp(min=1).sum()) // len(logits)


class InfiniGen(Indexed):
    title = "InfiniGen"
    unshared = "chooses a layer's tokens in the layer below, so that anchors would stand one lower"
    eager = "asks each layer for a query from the input of the one below"
    no_growth = "fetches by a threshold, up to a number that follows from the context's length"
    skips = True
    ops = ("logits", "topk")

    @dataclass(frozen=True)
    class Params:
        comm_mode: Literal["native", "matched"]
        partial_ratio: Annotated[Fraction, Gt(0), Le(1), Is("a share of the channels above 0 and at most 1, like 0.2")]
        skew: bool
        channels: Literal["query_key", "query"]
        alpha: Alpha | None
        agg: Literal["query_head", "group_max", "group_mean"]
        generated: Literal["stay", "compete"]
        lookahead: Literal[0, 1]
        full_layers: Index

        def __post_init__(self) -> None:
            if self.lookahead and self.full_layers == 0:
                raise ConfigError(
                    "method.full_layers=0 has a first layer without a layer below to look ahead from; use "
                    "method.full_layers=1 or more, or method.lookahead=0"
                )

    @dataclass(frozen=True)
    class Plan:
        n_channels: int
        k_most: int  # tokens that a head may select

    params: Params
    plan: Plan
    index: dict[int, Proxy]
    late: dict[int, Tensor]  # per layer, partial keys of generated tokens (h_kv, n_new, n_channels)

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.comm_mode == "native" and int(params.partial_ratio * shape.d_h) < 1:
            raise ConfigError(
                f"method.partial_ratio={show(params.partial_ratio)} is no channel of the {shape.d_h} of "
                f"{shape.name}; use method.partial_ratio=1/{shape.d_h} or more"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.comm_mode == "native":
            return InfiniGen.Plan(int(params.partial_ratio * shape.d_h), budget.tokens)
        return InfiniGen.Plan(max(1, round(budget.comm * shape.d_h)), budget.tokens)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(max(1, int(params.partial_ratio * shape.d_h)), shape.d_h)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["matched"] if params.comm_mode == "matched" and request.comm is not None else []
        notes += [] if params.alpha is None else [f"alpha={params.alpha:g}"]
        notes += [] if params.lookahead else ["lookahead=0"]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        elements = shape.h_kv * budget.s_prompt * plan.n_channels
        elements += shape.h * plan.n_channels * shape.d_model if params.lookahead else 0
        elements += shape.h_kv * shape.d_h**2 if params.skew else 0
        fetched = plan.k_most * (shape.g if params.agg == "query_head" else 1)
        return held(budget, shape, 0, ELEMENT_BYTES * elements, fetched, len(cls.whole_layers(params, shape)))

    def setup(self) -> None:
        self.wants_lookahead = self.params.lookahead == 1 and not self.variant.is_full
        super().setup()
        self.late = {}
        self.n_selections = self.n_selected = self.n_capped = 0

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (ChannelSums(params.skew),)

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        trace, store, plan = self.trace, self.store, self.plan
        competes = self.params.generated == "compete"
        what = (self.params.skew, plan.n_channels, self.params.channels)

        def make() -> Proxy:
            sums = trace.observed(ChannelSums(self.params.skew), layer)
            return make_proxy(sums, trace.keys(layer), plan.n_channels, self.params.channels)

        self.index[layer] = trace.once(("InfiniGen's partial keys", layer, *what), make)
        if competes:
            room = (trace.shape.h_kv, store.n_new, plan.n_channels)
            self.late[layer] = self.index[layer].keys.new_empty(room)
        return Offloaded(0, 0, capacity=1 if competes else None)

    # A decode step.

    @classmethod
    def asked(cls, rows: Sequence[Self], q: Tensor) -> Tensor:
        """The queries that the layer below foretold, for rows that want them."""
        if not any(row.wants_lookahead for row in rows):
            return q
        queries = [row.q_ahead if row.wants_lookahead else q[i : i + 1] for i, row in enumerate(rows)]
        return queries[0] if len(queries) == 1 else torch.cat(queries)

    def question(self, layer: int, q: Tensor) -> Tensor:
        """Partial queries, (n, h_kv, g, n_channels)."""
        basis = self.index[layer].basis.mT.unsqueeze(0)
        return products(super().question(layer, q), basis) * self.trace.softmax[layer].scale  # that of whole queries

    def score(self, layer: int, question: Tensor, index: Tensor) -> Tensor:
        """Logits by partial keys."""
        return self.trace.softmax[layer].capped(products(question, index))

    def seen(self, layer: int) -> Tensor:
        return self.index[layer].keys.unsqueeze(0)

    @classmethod
    def generated(cls, rows: Sequence[Self], layer: int) -> Tensor | None:
        """Partial keys of generated tokens before the current one, where these compete."""
        first = rows[0]
        if layer not in first.late or (t := first.store[layer].n_generated - 1) == 0:
            return None
        return torch.stack([row.late[layer][:, :t] for row in rows])

    def append(self, layer: int) -> None:
        if layer in self.late:
            t = self.store[layer].n_generated
            self.late[layer][:, t - 1 : t] = partial_keys(self.store[layer].newest[0], self.index[layer].basis)

    def units(self, layer: int) -> Units:
        n = self.store[layer].n_seen - 1 if layer in self.late else self.trace.s_prompt
        return Units(self.plan.k_most, n)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor | None:
        units = self.units(layer)
        if self.params.alpha is not None:
            units = units._replace(k=min(common_count(ranking[0], self.params.alpha), units.k))
        self.note(units.k)
        return best_tokens(ranking, units)

    def has_kernel(self, layer: int) -> bool:
        return super().has_kernel(layer) and self.repeats and not self.trace.softmax[layer].cap

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        index, agg, found = rows[0].index[layer], rows[0].params.agg, keys()
        basis = index.basis * rows[0].trace.softmax[layer].scale

        def launch(q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> Tensor:
            return channel_keys(cls.asked(rows, q), basis, index.keys, agg, found)

        return launch

    def count_search(self, layer: int) -> None:
        self.note(self.plan.k_most)

    @property
    def repeats(self) -> bool:
        """The prompt's partial keys stay what they are; `alpha` says anew how many tokens are near enough."""
        return self.variant.is_full or (self.params.generated == "stay" and self.params.alpha is None)

    def selects_feeds(self, layer: int) -> bool:
        return False

    def note(self, k: int) -> None:
        """Note one selection."""
        self.n_selections += 1
        self.n_selected += k
        self.n_capped += k == self.plan.k_most

    def cost(self, layer: int) -> Cost:
        """Bytes that stay on the device and are read: partial keys, the projection's part for the channels, A."""
        shape, n_channels = self.trace.shape, self.plan.n_channels
        n_keys = self.store[layer].n_seen if layer in self.late else self.trace.s_prompt
        elements = shape.h_kv * n_keys * n_channels
        if self.params.lookahead:
            elements += shape.h * n_channels * shape.d_model
        if self.params.skew:
            elements += shape.h_kv * shape.d_h**2
        own = shape.h_kv * n_channels if layer in self.late else 0  # the current token's key, which nobody looks for
        return Cost(ELEMENT_BYTES * elements, read_bytes=ELEMENT_BYTES * (elements - own))

    def report(self) -> dict[str, Any]:
        """Tokens selected, as a mean over steps and layers, and how often the budget bound and not `alpha`."""
        n = max(1, self.n_selections)
        k_mean = self.n_selected / n if self.n_selections else float(self.plan.k_most)
        share = k_mean / self.trace.s_prompt
        return {
            "comm_mode": self.params.comm_mode,
            "n_channels": self.plan.n_channels,
            "proxy_ratio": self.plan.n_channels / self.trace.shape.d_h,
            "k_most": self.plan.k_most,
            "k_mean": k_mean,
            "budget_bound_share": self.n_capped / n if self.n_selections else 1.0,
            "achieved_ratio": share,
            "overall_ratio": overall_ratio(self, share),
        }

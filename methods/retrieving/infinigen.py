"""InfiniGen (Lee et al., 2024): fetch the tokens that the input of the layer below says this layer will attend to.

The inputs of neighbouring layers are alike, so a layer's own projection of the layer below's input is nearly its query,
and its keys can be on their way before it runs. That query meets a few channels of every key: a rotation A, made from
the prompt's queries, first turns most of their energy into few channels.

Paper     arXiv:2406.19707, 2024; Lee, Wonbeom; InfiniGen: Efficient Generative Inference of Large Language Models
          with Dynamic KV Cache Management
Symbols   paper A, alpha, K = `basis`, `alpha`, tokens per head; r, d', T = `partial_ratio`, `n_channels`, `k_most`; x =
          input of a layer's attention, behind its norm; q~ = `q_ahead`; S = tokens that compete, D = `d_model`.
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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from kvbench.engine.checks import each_one_of, whole_number
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import ChannelSums, Observation
from kvbench.engine.placement import Offloaded
from kvbench.engine.selection import Cost, Found, Search, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.rows.logits import channel_keys
from kvbench.kernels.scratch import Scratch, empty
from kvbench.kernels.topk import KeyChoice, top_stable
from kvbench.methods.base import SelectiveAttention

CHOICES = {
    "comm_mode": ("native", "matched"),
    "channels": ("query_key", "query"),
    "agg": ("query_head", "group_max", "group_mean"),
    "generated": ("stay", "compete"),
    "lookahead": (0, 1),
}


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


def foretold_logits(q: Tensor, proxy: Proxy, soft: Softmax) -> tuple[Tensor, Tensor]:
    """Queries (n, h, 1, d_h) in the proxy's channels, (n, h_kv, g, n_channels), and their logits (n, h_kv, g, s)."""
    h_kv = len(proxy.keys)
    n, h = q.shape[:2]
    grouped = q.reshape(n, h_kv, h // h_kv, -1).float().transpose(0, 1).flatten(1, 2)
    partial = grouped @ proxy.basis * soft.scale  # (h_kv, n * g, n_channels); the scale is that of whole queries
    logits = soft.capped(partial @ proxy.keys.mT)  # all rows at once: the keys are read once
    return tuple(x.view(h_kv, n, h // h_kv, -1).transpose(0, 1) for x in (partial, logits))  # type: ignore[return-value]


def merged(logits: Tensor, agg: str) -> Tensor:
    """What ranks tokens, from logits (h_kv, g, s): (h, s) per query head, else (h_kv, s) per group."""
    if agg == "query_head":
        return logits.flatten(0, 1)
    return logits.amax(1) if agg == "group_max" else logits.mean(1)


def common_count(logits: Tensor, alpha: float) -> int:
    """How many tokens come within `alpha` of their head's best, as a mean over the heads (heads, s), rounded down."""
    near = logits > logits.amax(-1, keepdim=True) - alpha
    # The best itself counts even where alpha is lost in rounding.
    return int(near.sum(-1).clamp(min=1).sum()) // len(logits)


class InfiniGen(SelectiveAttention):
    title = "InfiniGen"
    no_growth = "fetches by a threshold, up to a number that follows from the context's length"
    drops = False
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: str
        partial_ratio: Fraction
        skew: bool
        channels: str
        alpha: float | None
        agg: str
        generated: str
        lookahead: int
        full_layers: int

        def __post_init__(self) -> None:
            each_one_of("method", self, **CHOICES)
            if not 0 < self.partial_ratio <= 1:
                raise ConfigError(
                    f"method.partial_ratio={show(self.partial_ratio)} is out of range; it is a share of the "
                    "channels above 0 and at most 1, like 0.2"
                )
            if self.alpha is not None and not 0 < self.alpha < float("inf"):
                raise ConfigError(
                    f"method.alpha={self.alpha} is out of range; use a number above 0, such as 4, or null for "
                    "as many tokens as the budget has"
                )
            whole_number("method.full_layers", self.full_layers, 0)
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
    proxies: dict[int, Proxy]
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
        return held(budget, shape, 0, ELEMENT_BYTES * elements, fetched, cls.n_whole(params, shape))

    def setup(self) -> None:
        self.wants_lookahead = self.params.lookahead == 1 and not self.variant.is_full
        self.proxies, self.late = {}, {}
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

        self.proxies[layer] = trace.once(("InfiniGen's partial keys", layer, *what), make)
        if competes:
            room = (trace.shape.h_kv, store.n_new, plan.n_channels)
            self.late[layer] = self.proxies[layer].keys.new_empty(room)
        return Offloaded(0, 0, capacity=1 if competes else None)

    # A decode step.

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """Rows with the same partial keys are foretold in one product."""
        q, soft = foretold(rows, q), rows[0].trace.softmax[layer]
        in_torch = soft.cap or any(layer in row.late or row.params.alpha is not None for row in rows)
        if q.is_cuda and not in_torch:
            return choose_keys(rows, layer, q)
        partial, logits = foretold_logits(q, rows[0].proxies[layer], soft)
        return [row.choose(layer, partial[i], logits[i]) for i, row in enumerate(rows)]

    @classmethod
    def search_again(cls, rows: Sequence[Self], layer: int, q: Tensor, scratch: Scratch) -> Search | None:
        is_alike = all(row.repeats for row in rows) and not rows[0].trace.softmax[layer].cap
        return ForetoldSearch(rows, layer, q, scratch) if is_alike else None

    @property
    def repeats(self) -> bool:
        """The prompt's partial keys stay what they are; `alpha` says anew how many tokens are near enough."""
        return self.variant.is_full or (self.params.generated == "stay" and self.params.alpha is None)

    def kind(self, layer: int) -> Hashable:
        return id(self.proxies[layer]), self.params.agg

    def choose(self, layer: int, partial: Tensor, logits: Tensor) -> Selection:
        """Tokens by logits (h_kv, g, s) of the prompt, and of generated tokens where these compete."""
        if layer in self.late:
            late = self.take_in(layer)
            if late.shape[1]:
                logits = torch.cat([logits, self.trace.softmax[layer].capped(partial @ late.mT)], -1)
        ranking, k = merged(logits, self.params.agg), self.plan.k_most
        if self.params.alpha is not None:
            k = min(common_count(ranking, self.params.alpha), k)
        self.note(k)
        return Selection(top_stable(ranking, k).unsqueeze(0), self.cost(layer))  # (1, h or h_kv, k)

    def take_in(self, layer: int) -> Tensor:
        """Append the current token's partial key; those of generated tokens before it, (h_kv, t - 1, n_channels)."""
        late, proxy = self.late[layer], self.proxies[layer]
        t = self.store[layer].n_seen - self.trace.s_prompt
        key = self.store[layer].newest[0]
        late[:, t - 1 : t] = partial_keys(key, proxy.basis)
        return late[:, : t - 1]

    def note(self, k: int) -> None:
        """Note one selection."""
        self.n_selections += 1
        self.n_selected += k
        self.n_capped += k == self.plan.k_most

    def cost(self, layer: int) -> Cost:
        """What stays on the device and is read: partial keys, the projection's part for the channels, A."""
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
            "overall_ratio": self.overall_ratio(share),
        }


def choose_keys(rows: Sequence[InfiniGen], layer: int, q: Tensor) -> list[Selection]:
    """The best tokens of rows with the same partial keys, on a GPU: positions in the lower halves."""
    search = ForetoldSearch(rows, layer, q)
    search.choose(q)
    return [Selection(idx, cost) for idx, cost in zip(search.idx, search.spent, strict=True)]


def foretold(rows: Sequence[InfiniGen], q: Tensor) -> Tensor:
    """What rows search by, of the layer's queries (n, h, 1, d_h): those that the layer below foretold, if wanted."""
    if not any(row.wants_lookahead for row in rows):
        return q
    queries = [row.q_ahead if row.wants_lookahead else q[i : i + 1] for i, row in enumerate(rows)]
    return queries[0] if len(queries) == 1 else torch.cat(queries)


class ForetoldSearch(Search):
    """Rows with the same partial keys that select as many tokens as they may, on a GPU: positions in lower halves."""

    def __init__(self, rows: Sequence[InfiniGen], layer: int, q: Tensor, scratch: Scratch | None = None) -> None:
        self.rows, self.proxy, self.agg = rows, rows[0].proxies[layer], rows[0].params.agg
        self.spent = [row.cost(layer) for row in rows]
        (h_kv, self.n, _), ks = self.proxy.keys.shape, [row.plan.k_most for row in rows]
        heads = q.shape[1] if self.agg == "query_head" else h_kv
        room = empty if scratch is None else scratch.take
        self.keys = room("keys", q.device, torch.int64, len(rows), heads, self.n)
        self.choice = KeyChoice(len(rows), heads, ks, q.device, scratch)
        self.idx = [self.choice.out[i : i + 1, :, :k] for i, k in enumerate(ks)]

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, age: int) -> None:
        self.choose(foretold(self.rows, q))

    def choose(self, q: Tensor) -> None:
        channel_keys(q, self.proxy.basis, self.proxy.keys, self.agg, self.keys)
        self.choice.take(self.keys, self.n)
        for row in self.rows:
            row.note(row.plan.k_most)

    def costs(self, age: int) -> Sequence[Cost]:
        return self.spent

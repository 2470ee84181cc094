"""ClusterKV (Liu et al., 2024): keys that point the same way form a cluster, and each query recalls whole clusters.

Once per prompt the keys of every KV head after the sinks are clustered by k-means over their directions. At each step
a query head ranks the clusters by the inner product with their mean keys and fetches their tokens, best cluster first,
until the budget is used up; the last cluster gives its first tokens. Generated tokens are always attended to, until
`decode_period` of them have come: these become clusters of their own and leave the device.

Paper     arXiv:2412.03213, 2024; Liu, Guangda; ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable
          Compression
Symbols   paper B, C0, C+, m = budget, `n_clusters`, `n_decode_clusters`, `decode_period`; L, R = `s_prompt`,
          `cache_steps`.
Per step  moved: K and V of the chosen k = B - n_sink tokens per query head that the last R steps did not bring,
          4 * d_h bytes each, a token of a KV head once; to find them nothing moves, so any `comm` is met. Resident:
          sinks, unclustered tokens and the last R selections, and h_kv * (C * (2 * d_h + 8) + 4 * n) bytes of metadata:
          centroids, sizes, their sums, and the ids of the n clustered tokens.
Differs   - authors' two code paths differ from the paper and from each other. Here: `s_prompt // 80` clusters as in the
            paper, random initial keys, at most 20 rounds; sinks inside the budget and selections cut to exactly B as in
            the path that made their accuracy figures. That path never clusters generated tokens: decode_clusters=0.
          - at most half of a budget is sinks, so that the smallest ones select something.
          - `comm_mode: matched` gives as many clusters as `comm` would let another method read, though none move.
          - the first `full_layers` layers of the model stay whole, as published. A budget is that of the other layers;
            `method_report` has the share over all of them as `overall_ratio`.
          - the cache holds tokens once per KV head; the authors' holds them once per query head.
Fails     where the key that matters sits in a cluster whose mean points elsewhere, above all with few clusters. The
          prompt's last tokens have no privilege. On latents it clusters whole rows: two that point the same way need
          not be alike for a single head.
Figures   retrieve pages, blocks, clusters: #0472AA, plus, -.

Not here: the order of tokens within a selection (`kernels/clusters.py`), rounds of k-means (`kernels/kmeans.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction
from time import perf_counter
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.books.spans import span
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.declared import Count, Index, Named, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.beside import Beside
from kvbench.engine.placement import Offloaded, Release
from kvbench.engine.sampling.draws import seeded
from kvbench.engine.search import KernelSearch, Units, products
from kvbench.engine.selection import ALWAYS, Cost
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.choices import METRICS
from kvbench.kernels.clock import Since
from kvbench.kernels.clusters import cluster_keys_triton, cluster_order, cluster_tokens, cluster_tokens_triton
from kvbench.kernels.kmeans import draw_points, kmeans
from kvbench.kernels.scratch import Scratch, empty, finer, finest
from kvbench.kernels.topk import sort_keys_triton
from kvbench.methods.base import overall_ratio
from kvbench.methods.indexed import Indexed
from kvbench.methods.rules import refuse_cap

TOKENS_PER_CLUSTER = 80  # paper: 400 clusters of 32,000 tokens, 4 of 320

FOLD_STEPS = 16  # steps whose hits are counted together: 5 us a step against 35 one by one


@dataclass(frozen=True)
class Clusters:
    """The clusters of one layer; tokens are numbered from the first one after the sinks."""

    centroids: Tensor  # (h_kv, c, d_h) float32, rounded to the model's dtype
    sizes: Tensor  # (h_kv, c) int64
    ends: Tensor  # (h_kv, c) int64, sizes summed up in the order of ids
    tokens: Tensor  # (h_kv, n) int64, by cluster and then by position
    seconds: float = 0.0  # that clustering took
    rounds: float = 0.0  # of k-means, mean over KV heads

    def nbytes(self) -> int:
        """Bytes as counted: 16-bit centroids, 32-bit integers."""
        h_kv = len(self.centroids)
        return self.ranked_bytes() + 4 * h_kv * self.tokens.shape[-1]

    def ranked_bytes(self) -> int:
        """Bytes that ranking reads: centroids, sizes, and where the tokens of a cluster lie."""
        h_kv, c, d_h = self.centroids.shape
        return h_kv * c * (2 * d_h + 8)


def cluster_keys(keys: Tensor, c: int, metric: str, n_rounds: int, generator: torch.Generator) -> Clusters:
    """The clusters of keys (h_kv, n, d_h), each KV head apart, from `c` initial keys that are drawn without repeats."""
    start = perf_counter()
    done = kmeans(keys, draw_points(keys, c, generator), n_rounds, metric)
    return Clusters(
        done.centroids.to(keys.dtype).float(),
        done.sizes,
        done.sizes.cumsum(-1),
        done.labels.sort(dim=-1, stable=True).indices,
        perf_counter() - start,
        float(done.rounds.float().mean()),
    )


def append_clusters(old: Clusters, new: Clusters) -> Clusters:
    """`new` appended to `old`: ids of clusters and tokens go on where those of `old` end."""
    n = old.tokens.shape[-1]
    return Clusters(
        torch.cat([old.centroids, new.centroids], 1),
        torch.cat([old.sizes, new.sizes], 1),
        torch.cat([old.ends, new.ends + n], 1),
        torch.cat([old.tokens, new.tokens + n], 1),
        old.seconds,
        old.rounds,
    )


def touched(order: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Which clusters the first `k` tokens come from, by id: (..., heads, c) bool from order and sizes (heads, c)."""
    sizes = sizes.expand(order.shape).gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, (before < k) & (sizes > 0))


def hit_rates(flags: Tensor, n_steps: int) -> Tensor:
    """Share of each step's clusters that the `n_steps` steps before it had: (steps, heads, c) -> (steps - n_steps,).

    Mean over heads, float64 where the device has it.
    """
    if len(flags) <= n_steps:
        return flags.new_empty(0, dtype=finest(flags.device))
    now = flags[n_steps:]
    recent = torch.zeros_like(now)
    for age in range(1, n_steps + 1):
        recent |= flags[n_steps - age : len(flags) - age]
    return (finer((now & recent).sum(-1)) / now.sum(-1)).mean(-1)


@dataclass
class Hits:
    """Counts a layer's cluster hits, some steps at a time."""

    n_steps: int  # R
    rates: list[Tensor] = field(default_factory=list)  # (steps,) each, read at the end
    # Not yet counted: rows of (n, heads, c), ids in the lower halves.
    orders: list[tuple[Tensor, int]] = field(default_factory=list)
    last: Tensor | None = None  # (<= R, heads, c) bool

    def fold(self, sizes: Tensor, k: int) -> None:
        """Count what has come, with the sizes (heads, c) that held all the while."""
        flags = touched(torch.stack([order[i] for order, i in self.orders]).int().long(), sizes, k)
        self.orders.clear()
        if self.last is not None:
            missing = flags.shape[-1] - self.last.shape[-1]  # clusters were appended since
            last = torch.nn.functional.pad(self.last, (0, missing)) if missing else self.last
            flags = torch.cat([last, flags])
        self.rates.append(hit_rates(flags, self.n_steps))
        self.last = flags[-self.n_steps :]


class ClusterKV(Indexed):
    title = "ClusterKV"
    no_growth = (
        "holds what it reads behind the context until there is enough for clusters, which may be more than a budget"
    )
    ops = ("clusters", "topk")
    packs_host = True
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: Literal["native", "matched"]
        num_clusters: Count | None
        metric: Annotated[str, Named(METRICS)]
        max_rounds: Count
        n_sink: Tokens
        agg: Literal["query_head", "group_mean"]
        decode_period: Count
        decode_clusters: Index | None
        full_layers: Index
        cache_steps: Index
        overlap: bool
        seed: Index

        def __post_init__(self) -> None:
            if (self.decode_clusters or 0) > self.decode_period:
                raise ConfigError(
                    f"method.decode_clusters={self.decode_clusters} is more than the "
                    f"method.decode_period={self.decode_period} tokens that they are made of; use fewer"
                )
            if self.comm_mode == "matched" and (self.num_clusters or self.decode_clusters):
                raise ConfigError(
                    "method.comm_mode=matched makes as many clusters as comm says; leave "
                    "method.num_clusters and method.decode_clusters at null, or use comm_mode=native"
                )

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided, and the clusters that are made of a prompt and of generated tokens."""

        n_sink: int
        k: int  # tokens that a query head selects
        n_clusters: int
        n_decode_clusters: int  # of every `decode_period` generated tokens; 0: they stay as they are

    params: Params
    plan: Plan
    index: dict[int, Clusters]  # once its clustering was waited for
    pending: dict[int, Future[Clusters]]
    hits: dict[int, Hits]
    n_appended: dict[int, int]  # how often generated tokens became clusters

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.agg == "group_mean":
            refuse_cap(shape, "method.agg=group_mean adds up scores of a group", "method.agg=query_head")

    @classmethod
    def check_cache(cls, params: Params, cache: BlockCacheSpec) -> None:
        if cache.tokens and params.cache_steps:
            raise ConfigError(
                f"cache.tokens={cache.tokens} and method.cache_steps={params.cache_steps} are two caches for the "
                "same tokens; set one of them to 0"
            )

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(1, TOKENS_PER_CLUSTER)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (matched)" if params.comm_mode == "matched" and request.comm is not None else cls.title

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        n_sink = min(params.n_sink, budget.tokens // 2)
        n, period = budget.s_prompt - n_sink, params.decode_period
        if params.comm_mode == "matched":
            n_clusters, decode = round(budget.comm * budget.s_prompt), round(budget.comm * period)
        else:
            n_clusters, decode = budget.s_prompt // TOKENS_PER_CLUSTER, period // TOKENS_PER_CLUSTER
        decode = max(1, decode) if params.decode_clusters is None else params.decode_clusters
        return ClusterKV.Plan(n_sink, budget.tokens - n_sink, min(n, max(1, params.num_clusters or n_clusters)), decode)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        index = shape.h_kv * (plan.n_clusters * (ELEMENT_BYTES * shape.d_h + 8) + 4 * (budget.s_prompt - plan.n_sink))
        wide = shape.g if params.agg == "query_head" else 1
        fetched = min(plan.k * wide, budget.s_prompt - plan.n_sink)
        recent = min(params.cache_steps * fetched, budget.s_prompt - plan.n_sink)
        return held(budget, shape, plan.n_sink, index, fetched, len(cls.whole_layers(params, shape)), recent)

    def setup(self) -> None:
        if self.variant.cache is not None:
            self.check_cache(self.params, self.variant.cache)
        super().setup()
        self.pending, self.hits, self.n_appended = {}, {}, {}

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        period = self.params.decode_period if self.plan.n_decode_clusters else self.store.n_new
        if self.params.cache_steps:
            self.hits[layer] = Hits(self.params.cache_steps)
        self.pending[layer] = self.start_clustering(layer)
        if not self.params.overlap:
            self.pending[layer].result()
        return Offloaded(self.plan.n_sink, 0, min(period, self.store.n_new), self.params.cache_steps)

    def start_clustering(self, layer: int) -> Future[Clusters]:
        """Cluster the prompt's keys on a thread during the prefill; variants that would get the same share the work.

        One thread for all layers: it works through them while the prefill goes on above.
        """
        trace, params, plan = self.trace, self.params, self.plan
        keys = trace.keys(layer)[0, :, plan.n_sink :]  # (h_kv, n, d_h)
        what = (plan.n_clusters, params.metric, params.max_rounds)

        def start() -> Future[Clusters]:
            thread = trace.once("ClusterKV's thread", lambda: Beside("clusters"))
            draw = seeded(params.seed, layer, 0)
            c, metric, n_rounds = what
            return thread.ask(
                "cluster", layer, keys.device, lambda: cluster_keys(keys, c, metric, n_rounds, draw),
                tensors=lambda made: (made.centroids, made.sizes, made.ends, made.tokens),
            )  # fmt: skip

        return trace.once(("ClusterKV", layer, plan.n_sink, *what, params.seed), start)

    # A decode step.

    def ready(self, layer: int) -> Clusters:
        """The layer's clusters; waits for them at the first step."""
        if layer not in self.index:
            with span("wait", layer):
                self.index[layer] = self.pending.pop(layer).result()
        return self.index[layer]

    def score(self, layer: int, question: Tensor, index: Clusters) -> Tensor:
        """Inner products with centroids."""
        if self.agg == "group_mean":
            question = question.mean(2, keepdim=True)  # the mean of scores is the score of the mean
        return products(question, index.centroids.unsqueeze(0))

    def units(self, layer: int) -> Units:
        """The tokens of clusters."""
        return Units(self.plan.k, self.store[layer].n_seen - self.store[layer].n_window, self.plan.n_sink)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor:
        """The first tokens of the best clusters."""
        clusters, order = self.index[layer], cluster_order(ranking)
        note([self], layer, order.to(torch.int32))
        owned = clusters.sizes, clusters.ends, clusters.tokens
        return cluster_tokens(order, *owned, self.plan.k) + self.plan.n_sink

    @classmethod
    def plan_search(cls, rows: Sequence[Self], layer: int, scratch: Scratch | None, ahead: int) -> ClusterSearch:
        return ClusterSearch(rows, layer, scratch, ahead)

    def kind(self, layer: int) -> Hashable:
        return id(self.ready(layer)), self.agg

    def selects_feeds(self, layer: int) -> bool:
        return False

    def cost(self, layer: int) -> Cost:
        """Cost of one selection."""
        clusters = self.index[layer]
        return Cost(clusters.nbytes(), read_bytes=clusters.ranked_bytes() + 4 * self.n_choosing * self.plan.k)

    def fold_hits(self, layer: int) -> None:
        """Count the hits of the steps since the last time."""
        hits = self.hits[layer]
        if hits.orders:
            sizes = self.index[layer].sizes
            heads = hits.orders[0][0].shape[1]
            hits.fold(sizes.repeat_interleave(heads // len(sizes), 0), self.plan.k)

    def behind(self, layer: int, weights: Tensor | None) -> Release | None:
        """Make clusters of the last tokens once `decode_period` have come; they leave the device."""
        at, n_clusters, params = self.store[layer], self.plan.n_decode_clusters, self.params
        if not n_clusters or not at.can_fetch or at.n_window != params.decode_period:
            return None
        if layer in self.hits:
            self.fold_hits(layer)
        self.n_appended[layer] = self.n_appended.get(layer, 0) + 1
        keys = at.kept_and_window()[1].k[0]  # (h_kv, decode_period, d_h)
        generator = seeded(params.seed, layer, self.n_appended[layer])
        late = cluster_keys(keys, n_clusters, params.metric, params.max_rounds, generator)
        self.index[layer] = append_clusters(self.index[layer], late)
        return Release(cost=Cost(rebuilt_bytes=keys.numel() * ELEMENT_BYTES))

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "comm_mode": self.params.comm_mode,
            "n_clusters": self.plan.n_clusters,
            "overall_ratio": overall_ratio(self, Fraction(self.budget.tokens, self.budget.s_prompt)),
        }
        for layer in self.hits:
            self.fold_hits(layer)
        rates = [torch.cat(hits.rates) for hits in self.hits.values() if hits.rates]
        import numpy as np  # slow to import, and a refused command reports nothing

        means = [np.mean(layer.tolist()) for layer in rates if len(layer)]
        if means:
            report["cluster_hit_rate"] = float(np.mean(means))
        clusters = list(self.index.values())
        if clusters:
            report["clustering_s"] = sum(layer.seconds for layer in clusters)
            report["kmeans_rounds"] = sum(layer.rounds for layer in clusters) / len(clusters)
            # Of one layer: every round, and the labels at the end, compare all keys with all centroids.
            n, shape = self.budget.s_prompt - self.plan.n_sink, self.trace.shape
            one_round = 2 * n * self.plan.n_clusters * shape.h_kv * shape.d_h
            report["build_flops"] = one_round * (report["kmeans_rounds"] + 1)
        return report


class ClusterSearch(KernelSearch):
    """Rows with the same clusters: small budgets get the first tokens of larger ones."""

    def __init__(self, rows: Sequence[ClusterKV], layer: int, scratch: Scratch | None, ahead: int) -> None:
        first, clusters = rows[0], rows[0].index[layer]
        self.rows, self.layer, self.agg, self.n_sink, self.clusters = (
            rows,
            layer,
            first.agg,
            first.plan.n_sink,
            clusters,
        )
        self.centroids, device = clusters.centroids.contiguous(), clusters.centroids.device
        size = len(rows), first.n_choosing, clusters.centroids.shape[1]
        self.keys = (empty if scratch is None else scratch.take)("keys", device, torch.int64, *size)
        self.tokens = torch.empty(*size[:2], max(row.plan.k for row in rows), dtype=torch.int64, device=device)
        self.idx = [self.tokens[i : i + 1, :, : row.plan.k] for i, row in enumerate(rows)]
        # At the step that fills a period its tokens become clusters.
        periods = [(row.params.decode_period, row.store[layer]) for row in rows if row.plan.n_decode_clusters]
        self.n_steps = min(ahead, max(0, min((period - at.n_window - 1 for period, at in periods), default=ALWAYS)))
        self.orders: Tensor | None = None  # of the latest steps, which hits are counted by
        if any(layer in row.hits for row in rows):
            self.orders = self.keys.new_empty(FOLD_STEPS if ahead else 1, *size)

    @property
    def is_settled(self) -> bool:
        return True

    def holds(self) -> bool:
        return self.rows[0].index[self.layer] is self.clusters

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        clusters = self.clusters
        keys = cluster_keys_triton(q, self.centroids, self.agg, self.keys)
        order = sort_keys_triton(keys, self.orders, since)  # ids in the lower halves
        owned = clusters.sizes, clusters.ends, clusters.tokens
        cluster_tokens_triton(order, *owned, self.tokens.shape[2], self.n_sink, self.tokens)

    def enter(self, age: int) -> None:
        if self.orders is not None:
            note(self.rows, self.layer, self.orders[age % len(self.orders)])


def note(rows: Sequence[ClusterKV], layer: int, order: Tensor) -> None:
    """Note in which order (n, heads, c) clusters were chosen, for rows that count hits."""
    for i, row in enumerate(rows):
        if (hits := row.hits.get(layer)) is not None:
            hits.orders.append((order, i))
            if len(hits.orders) == FOLD_STEPS:
                row.fold_hits(layer)

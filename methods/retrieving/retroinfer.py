"""RetroInfer (Chen et al., 2025): the best clusters are attended to token by token, the next ones as one token each.

Once per prompt the keys between sinks and window are clustered, within segments. At each step the query heads of a
group rank the clusters by the softmax over their mean keys. There are three zones. Steady: sinks, window and generated
tokens. Retrieved: the tokens of the best clusters. Estimated: each of the next clusters stands in attention as a
pseudo-token with its mean key, its mean value and the logarithm of its size added to the logit. All share one softmax,
and what lies outside the zones has no weight. Generated tokens become clusters when `update` of them have come.

Paper     arXiv:2505.02922, 2025; Chen, Yaoqi; RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM
          Inference
Symbols   paper wave index = `Index`; spec C, s, nr, ne = `n_clusters`, `n_segments`, `n_retrieved`, `n_estimated`;
          ns, w = `n_sink`, `window`; t = tokens to a cluster.
Per step  read to find: every centroid, 2 * h_kv * C * d_h bytes, and of the estimated clusters the value and the size,
          h_kv * ne * (2 * d_v + 4); moved: K and V of the retrieved tokens, 4 * h_kv * d_h bytes each; resident: steady
          zone and h_kv * C * (4 * d_h + 8) bytes of clusters. The host holds 4 bytes a token in addition to K and V.
Differs   - sinks and window are inside the budget, and the rest of it says how many clusters are retrieved, where the
            authors retrieve 1.8 % of them (preset `retroinfer_paper`). Clusters differ in size, so the budget holds in
            the mean; `fill: exact` takes the clusters that fit, best first, up to the first that does not.
          - a `comm` below (1 + estimated_share) / 16 = 0.077 makes clusters larger; the label says how large. Where it
            does not pay for the published multiple of 8, there are as many as it pays for.
          - generated tokens become clusters only while `comm`, a share of the prompt's keys, pays for reading those
            too; then they stay.
          - an estimated cluster keeps the mean of its values and not their sum, since the size is in the logit already.
          - prompts of two clusters or more have an index; the authors' need 1,024 tokens between sinks and window.
          - the device cache is the store's, whose blocks are neighbours; the authors' holds parts of clusters.
Fails     where the tokens of an estimated cluster differ: its weight is a lower bound of theirs, the lower the more
          they differ. A token that matters in a cluster whose mean does not is not found. On latents it clusters
          whole rows: two that point the same way need not be alike for a single head.
Figures   retrieve pages, blocks, clusters: #067FDE, bowtie, :

Not here: rounds of k-means (`kernels/kmeans.py`), the order of tokens within a selection (`kernels/clusters.py`).
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import ceil, floor, lcm
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.books.spans import span
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, find_bytes, key_bytes, show, token_bytes
from kvbench.engine.declared import Count, Is, Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.beside import Beside
from kvbench.engine.placement import Offloaded, Release
from kvbench.engine.selection import Cost, Found, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.clusters import (
    cluster_order,
    cluster_tokens,
    cluster_tokens_triton,
    mass_keys_triton,
    mass_scores,
    stand_in_ref,
    stand_in_triton,
)
from kvbench.kernels.fast import takes
from kvbench.kernels.kmeans import cluster_means, kmeans
from kvbench.kernels.topk import sort_keys
from kvbench.methods.base import SelectiveAttention, shortened

TOKENS_PER_CLUSTER = 16  # as published, where `comm` pays for it
SIZE_BYTES, OFFSET_BYTES, MEMBER_BYTES = 4, 4, 4  # of a cluster's size, of where its tokens begin, of a token's place
STEP = 8  # clusters come in multiples of it
FEWEST = 2  # clusters: one would be no choice


@dataclass(frozen=True)
class Index:
    """The clusters of one layer; tokens are numbered from the first one after the sinks."""

    centroids: Tensor  # (h_kv, c, d_h), in the model's dtype
    values: Tensor  # (h_kv, c, d_h), mean values, in the model's dtype; zeros where there is no token
    sizes: Tensor  # (h_kv, c) int64
    ends: Tensor  # (h_kv, c) int64, sizes summed up in the order of ids
    tokens: Tensor  # (h_kv, n) int64, by cluster and then by position
    ranked: Tensor  # (h_kv, c, d_h), the centroids as a search takes them: float32 on a CPU
    largest: tuple[int, ...]  # how many tokens the first i clusters of a KV head have at most, for i = 0 to c

    @property
    def n_clusters(self) -> int:
        return self.sizes.shape[1]

    def tensors(self) -> list[Tensor]:
        return [self.centroids, self.values, self.sizes, self.ends, self.tokens, self.ranked]


def initial_centroids(x: Tensor, c: int) -> Tensor:
    """The `c` points at even distances among x (h_kv, n, d_h): (h_kv, c, d_h)."""
    n = x.shape[1]
    places = torch.arange(c, dtype=torch.float32) * (n / c) + n / c / 2
    return x[:, places.long().to(x.device)]


def cluster_in_segments(x: Tensor, c: int, n_segments: int, n_rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centroids (h_kv, c, d_h), labels (h_kv, n) and sizes (h_kv, c) of centred keys x (h_kv, n, d_h), float32.

    `n_rounds` rounds within segments by inner product with directions, then one over all tokens and clusters, whose
    centroids are plain means. A centroid without tokens stays as it is.
    """
    h_kv, n, d_h = x.shape
    first = initial_centroids(x, c)
    length = n // n_segments
    points = x[:, : n_segments * length].reshape(h_kv * n_segments, length, d_h)
    own = first.reshape(h_kv * n_segments, c // n_segments, d_h)
    rough = kmeans(points, own, n_rounds, "dot", unit=True).centroids.view(h_kv, c, d_h)
    labels = kmeans(x, rough, 0, "dot").labels
    centroids, sizes = cluster_means(x, labels, rough)
    return centroids, labels, sizes


def build_index(keys: Tensor, values: Tensor, c: int, n_segments: int, iterations: int) -> Index:
    """The clusters of keys and values (h_kv, n, d_h), each KV head apart."""
    mean = keys.float().mean(1, keepdim=True)
    centroids, labels, sizes = cluster_in_segments(keys.float() - mean, c, n_segments, iterations - 1)
    none = centroids.new_zeros(*centroids.shape[:2], values.shape[2])
    means, _ = cluster_means(values, labels, none)
    tokens = labels.sort(dim=-1, stable=True).indices
    return index_of((centroids + mean).to(keys.dtype), means.to(values.dtype), sizes, tokens)


def index_of(centroids: Tensor, values: Tensor, sizes: Tensor, tokens: Tensor) -> Index:
    """An index of clusters, with all that follows from them; on an accelerator this waits for the sizes."""
    most = sizes.sort(dim=-1, descending=True).values.cumsum(-1).amax(0).tolist()
    ranked = centroids if takes("clusters", centroids.device) else centroids.float()
    return Index(centroids, values, sizes, sizes.cumsum(-1), tokens, ranked, (0, *most))


def append_index(old: Index, new: Index) -> Index:
    """`new` appended to `old`: ids of clusters and tokens go on where those of `old` end."""
    tokens = torch.cat([old.tokens, new.tokens + old.tokens.shape[-1]], 1)
    return index_of(
        torch.cat([old.centroids, new.centroids], 1), torch.cat([old.values, new.values], 1),
        torch.cat([old.sizes, new.sizes], 1), tokens,
    )  # fmt: skip


def cluster_ranking(q: Tensor, index: Index, softmax: Softmax) -> Tensor:
    """Clusters by falling score, for queries (n, h, 1, d_h): (n, h_kv, c), on a GPU as keys.

    No size takes part: a cluster is ranked by its mass per token. Those without tokens come last.
    """
    if takes("clusters", q.device):
        return sort_keys(mass_keys_triton(q, index.ranked, index.sizes, softmax.scale, softmax.cap, softmax.sink))
    return cluster_order(mass_scores(q, index.ranked, index.sizes, softmax.scale, softmax.cap, softmax.sink))


def fitting(order: Tensor, sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The most clusters of each head's order (n, h_kv, c) with `k` tokens at most, and their tokens: (n, h_kv) each."""
    ranked = sizes.expand(len(order), -1, -1).gather(-1, order)
    fits = ranked.cumsum(-1) <= k
    return fits.sum(-1), (ranked * fits).sum(-1)


@dataclass
class Zones:
    """How many clusters a layer's step retrieves and estimates; it grows with the clusters."""

    n_retrieved: int
    n_estimated: int
    k: int
    n_updates: int = 0  # how often generated tokens became clusters


class RetroInfer(SelectiveAttention):
    title = "RetroInfer"
    unshared = "estimates what it does not fetch from clusters of the layer's own"
    eager = "lets other clusters stand in for their tokens at each step"
    no_growth = "estimates what it does not fetch from clusters laid out for the context's length"
    drops = False
    keeps_budget_in = "mean"
    pads = True

    @dataclass(frozen=True)
    class Params:
        tokens_per_cluster: Count | Literal["auto"]
        retrieved_share: Annotated[float, Gt(0), Le(1), Is("a share of the clusters above 0 and at most 1")] | None
        estimated_share: Annotated[float, Ge(0), Le(1), Is("a share of the clusters from 0 to 1")]
        fill: Literal["expected", "exact"]
        n_sink: Tokens
        window: Window
        segment: Count
        iterations: Count
        update: Count

        def __post_init__(self) -> None:
            if self.retrieved_share is not None and self.fill == "exact":
                raise ConfigError(
                    f"method.retrieved_share={self.retrieved_share} gives a number of clusters and method.fill=exact "
                    "one of tokens; use fill=expected, or retrieved_share=null"
                )

    @dataclass(frozen=True)
    class Plan:
        """The clusters of a prompt, and what a step does with them."""

        n_sink: int
        window: int  # the prompt's last tokens
        k: int  # tokens that the retrieved clusters have: in the mean, or at most
        n_clusters: int
        n_segments: int
        n_retrieved: int
        n_estimated: int
        n_update: int  # clusters of every `update` generated tokens
        n_updates: int | None = None  # how often `comm` pays for those; None: no limit

    params: Params
    plan: Plan
    pending: dict[int, Future[Index]]
    indexes: dict[int, Index]  # by layer, once its clusters were waited for
    zones: dict[int, Zones]

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and params.tokens_per_cluster == "auto":
            raise ConfigError(
                "comm=0 pays for no cluster; use 1/64 or more, or give method.tokens_per_cluster as a number"
            )

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        said = [] if params.fill == "exact" else ["budget in the mean"]
        if request.ratio != 1 and (request.comm or params.tokens_per_cluster != "auto"):
            t = tokens_per_cluster(params, request.comm)
            said += [] if t == TOKENS_PER_CLUSTER else [f"{t} tokens a cluster"]
        return f"{cls.title} ({', '.join(said)})" if said else cls.title

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        t = params.tokens_per_cluster
        return comm_of(params, TOKENS_PER_CLUSTER if isinstance(t, str) else t)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, (n_sink, window) = budget.s_prompt, ends(params, budget.tokens)
        if budget.attends_all:
            return RetroInfer.Plan(n_sink, window, 0, 0, 1, 0, 0, 0)
        t, k, n = tokens_per_cluster(params, budget.comm), budget.tokens - n_sink - window, s - n_sink - window
        if n < FEWEST:
            raise ConfigError(
                f"a prompt of {s} tokens has {n} between {n_sink} sinks and a window of {window}, and "
                f"{FEWEST} clusters need as many; use a smaller method.window"
            )
        c, n_segments = clusters(s, t, params.segment)
        paid = None
        if params.tokens_per_cluster == "auto" and not budget.finds_freely:
            paid = paid_clusters(find_bytes(shape, budget), params.estimated_share, shape)
            if paid < FEWEST:
                least = Fraction(shape.h_kv * cost(FEWEST, params.estimated_share, shape), key_bytes(shape, s))
                raise ConfigError(
                    f"comm={show(budget.comm)} does not pay for {FEWEST} clusters of a prompt of {s} tokens; use "
                    f"comm={ceil(10_000 * least) / 10_000} or more"
                )
        c, n_segments = at_most(c, n_segments, n if paid is None else min(n, paid))
        # Their mean size, where `comm` pays for fewer than were asked for.
        size = max(Fraction(t), Fraction(n, c))
        if params.retrieved_share is not None:
            n_retrieved = share_of(c, params.retrieved_share)
        elif k < size:
            least = next(b for b in count(ceil(size)) if b - sum(ends(params, b)) >= size)
            ratio = min(1.0, ceil(Fraction(1000 * least, s)) / 1000)
            raise ConfigError(
                f"a budget of {budget.tokens} tokens has no room for a cluster of {ceil(size)} beside {n_sink} sinks "
                f"and a window of {window}; use budget={least} or ratio={ratio} or more, or a larger comm"
            )
        else:
            n_retrieved = min(floor(k / size), c)
        n_estimated = min(round(c * params.estimated_share), c - n_retrieved)
        n_update = min(params.update, max(params.update // t // STEP * STEP, STEP))
        n_updates = None if paid is None else (paid - c) // n_update
        return RetroInfer.Plan(n_sink, window, k, c, n_segments, n_retrieved, n_estimated, n_update, n_updates)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        of_cluster = (shape.d_h + shape.d_v) * ELEMENT_BYTES + SIZE_BYTES + OFFSET_BYTES  # centroid, sum of values
        return held(budget, shape, plan.n_sink + plan.window, shape.h_kv * plan.n_clusters * of_cluster, plan.k)

    def setup(self) -> None:
        self.pending, self.indexes, self.zones = {}, {}, {}

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        plan, trace, period = self.plan, self.trace, self.params.update
        n_new, n_updates = self.store.n_new, self.plan.n_updates
        # Tokens that `comm` makes no clusters of stay.
        most = period if n_updates is None else max(period, n_new - period * n_updates)
        key = ("RetroInfer", layer, plan.n_sink, plan.window, plan.n_clusters, plan.n_segments, self.params.iterations)
        middle = slice(plan.n_sink, trace.s_prompt - plan.window)

        keys, values = (x[0, :, middle] for x in (trace.keys(layer), trace.values(layer)))

        def build() -> Index:
            return build_index(keys, values, plan.n_clusters, plan.n_segments, self.params.iterations)

        def start() -> Future[Index]:
            thread = trace.once("RetroInfer's thread", lambda: Beside("clusters"))
            return thread.ask("cluster", layer, keys.device, build, tensors=Index.tensors)

        self.pending[layer] = trace.once(key, start)
        self.zones[layer] = Zones(plan.n_retrieved, plan.n_estimated, plan.k)
        index_bytes = MEMBER_BYTES * keys.shape[0] * keys.shape[1]
        return Offloaded(plan.n_sink, plan.window, plan.window + min(n_new, most), index_bytes=index_bytes)

    # A decode step.

    def index(self, layer: int) -> Index:
        """The layer's clusters; waits for them at the first step."""
        if layer not in self.indexes:
            with span("wait", layer):
                self.indexes[layer] = self.pending.pop(layer).result()
        return self.indexes[layer]

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """Rows with the same clusters rank them in one product."""
        order = cluster_ranking(q, rows[0].index(layer), rows[0].trace.softmax[layer])
        return [row.choose(layer, order[i : i + 1]) for i, row in enumerate(rows)]

    def kind(self, layer: int) -> Hashable:
        return id(self.index(layer))

    def choose(self, layer: int, order: Tensor) -> Selection:
        """The tokens of the best clusters in order (1, h_kv, c), (1, h_kv, k); the next clusters are estimated."""
        index, zones, n_sink = self.index(layer), self.zones[layer], self.plan.n_sink
        if self.params.fill == "exact":
            order = order.int().long()  # on a GPU the lower halves of keys
            n_retrieved, n_tokens = fitting(order, index.sizes, zones.k)
            tokens = tokens_of(order, index, zones.k, n_sink)
            slots = torch.arange(tokens.shape[-1], device=order.device)
            tokens = tokens.where(slots < n_tokens.unsqueeze(-1), -1)
            ranks = n_retrieved.unsqueeze(-1) + torch.arange(zones.n_estimated, device=order.device)
            ids = order.gather(-1, ranks.clamp(max=index.n_clusters - 1))
            chosen, bias = stand_ins(ids, index.sizes)
            estimated = chosen.where(ranks < index.n_clusters, -1), bias
        else:
            n, ne = zones.n_retrieved, zones.n_estimated
            tokens = tokens_of(order[..., :n], index, index.largest[n], n_sink)
            estimated = stand_ins(order[..., n : n + ne], index.sizes)
        cost, parts = self.estimate(index, *estimated)
        return Selection(tokens if tokens.shape[-1] else None, cost, stand_ins=parts)

    def estimate(self, index: Index, ids: Tensor, bias: Tensor) -> tuple[Cost, list[Part]]:
        """Clusters `ids` (1, h_kv, ne) stand in attention as a token each, -1 for none, with these log-sizes."""
        shape = self.trace.shape
        n_estimated, of_key, of_value = ids.shape[-1], ELEMENT_BYTES * shape.d_h, ELEMENT_BYTES * shape.d_v
        c = index.n_clusters
        cost = Cost(
            shape.h_kv * c * (of_key + of_value + SIZE_BYTES + OFFSET_BYTES),
            shape.h_kv * (c * of_key + n_estimated * (of_value + SIZE_BYTES)),
        )
        if n_estimated == 0:
            return cost, []
        mask = None if takes("step", ids.device) else ids >= 0  # whose kernels read -1
        keys, values = index.centroids.unsqueeze(0), index.values.unsqueeze(0)
        return cost, [Part(keys, values, mask, idx=ids, bias=bias, is_pseudo=True)]

    def behind(self, layer: int, weights: Tensor | None) -> Release | None:
        """Make clusters of the window's oldest tokens once `update` have come; they leave the device."""
        at, plan, n = self.store[layer], self.plan, self.params.update
        if not at.can_fetch or at.n_window != plan.window + n:
            return None
        zones, share = self.zones[layer], self.params.estimated_share
        if plan.n_updates is not None and zones.n_updates >= plan.n_updates:
            return None
        window = at.kept_and_window()[1]
        late = build_index(window.k[0, :, :n], window.v[0, :, :n], plan.n_update, 1, self.params.iterations)
        index = self.indexes[layer] = append_index(self.index(layer), late)
        retrieved = share_of(plan.n_update, plan.n_retrieved / plan.n_clusters)
        zones.n_updates += 1
        zones.n_retrieved += retrieved
        zones.n_estimated += share_of(plan.n_update, share) if share else 0
        zones.n_estimated = min(zones.n_estimated, index.n_clusters - zones.n_retrieved)
        zones.k += retrieved * n // plan.n_update
        return Release(
            n, MEMBER_BYTES * index.tokens.numel(), cost=Cost(rebuilt_bytes=n * token_bytes(self.trace.shape))
        )

    def report(self) -> dict[str, Any]:
        plan = self.plan
        report: dict[str, Any] = shortened(self) | {
            "n_clusters": plan.n_clusters,
            "n_segments": plan.n_segments,
            "n_retrieved": plan.n_retrieved,
            "n_estimated": plan.n_estimated,
        }
        if plan.window < self.params.window:
            report["window"] = plan.window
        if self.params.fill == "expected":
            report["budget_holds_in"] = "mean"
        if updates := sum(zones.n_updates for zones in self.zones.values()):
            report["updates"] = updates // len(self.zones)
        return report


def ends(params: RetroInfer.Params, tokens: int) -> tuple[int, int]:
    """Sinks and window of a budget: at most a quarter and a half of it, so that short ones retrieve something."""
    return min(params.n_sink, tokens // 4), min(params.window, tokens // 2)


def tokens_per_cluster(params: RetroInfer.Params, comm: Fraction | None) -> int:
    """The number that was asked for; else 16, or as many more as it takes until `comm` pays for the clusters."""
    if not isinstance(params.tokens_per_cluster, str):
        return params.tokens_per_cluster
    return TOKENS_PER_CLUSTER if comm is None else max(TOKENS_PER_CLUSTER, ceil(comm_of(params, 1) / comm))


def comm_of(params: RetroInfer.Params, t: int) -> Fraction:
    """The `comm` that pays for clusters of `t` tokens: their centroids, and the mean values of the estimated ones."""
    return (1 + Fraction(str(params.estimated_share))) / t


def clusters(s: int, t: int, segment: int) -> tuple[int, int]:
    """How many clusters a prompt of `s` tokens has, `t` tokens to each, and how many segments they lie in.

    The nearest multiple of 8 and of the segments, the lower of two that are as near, and one multiple at least.
    """
    n_segments = max(round(s / segment), 1)
    multiple = lcm(STEP, n_segments)
    return max(ceil(Fraction(s, t * multiple) - Fraction(1, 2)), 1) * multiple, n_segments


def at_most(c: int, n_segments: int, most: int) -> tuple[int, int]:
    """A number of clusters up to `most`, as many in each segment; in one segment where they are fewer than segments."""
    if c <= most:
        return c, n_segments
    return (most // n_segments * n_segments, n_segments) if most >= n_segments else (most, 1)


def cost(c: int, share: float, shape: ModelShape) -> int:
    """Bytes that a KV head reads of `c` clusters: centroids, and of the estimated ones value sums and sizes."""
    return c * shape.d_h * ELEMENT_BYTES + round(c * share) * (shape.d_v * ELEMENT_BYTES + SIZE_BYTES)


def paid_clusters(n_bytes: int, share: float, shape: ModelShape) -> int:
    """The most clusters of which a step may read its part, in a layer."""
    of_head = n_bytes // shape.h_kv
    c = floor(of_head / cost(1000, share, shape) * 1000) + 2
    while cost(c, share, shape) > of_head:
        c -= 1
    return c


def share_of(c: int, share: float) -> int:
    """How many a share of `c` clusters is, at least one."""
    return max(round(c * share), 1)


def stand_ins(order: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-sizes of the clusters in order (1, h_kv, r), -1 for one without tokens."""
    return stand_in_triton(order, sizes) if takes("clusters", order.device) else stand_in_ref(order, sizes)


def tokens_of(order: Tensor, index: Index, k: int, n_sink: int) -> Tensor:
    """Positions of the first `k` tokens of the clusters in order (1, h_kv, r), -1 after the last one: (1, h_kv, k)."""
    owned = index.sizes, index.ends, index.tokens
    if takes("clusters", order.device):
        return cluster_tokens_triton(order, *owned, k, n_sink)
    k = min(k, int(index.sizes.unsqueeze(0).gather(-1, order).sum(-1).max()))
    tokens = cluster_tokens(order, *owned, k)
    return torch.where(tokens >= 0, tokens + n_sink, -1)

"""RocketKV (Behnam et al., 2025): keep as SnapKV does, but more; then search what was kept at every step.

The first stage drops: the prompt's last queries vote, and every KV head keeps the winners, about the square root of
the compression. The second stage retrieves: kept tokens form chunks, a step bounds each chunk's logits from above by
the maxima of the few channels that the query weighs most, and attends to the tokens of the best chunks.

Paper     arXiv:2502.14051, 2025; Behnam, Payman; RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV
          Cache Compression
Symbols   paper token budget, chunk size, head-dimension subset = budget, `chunk`, `r` channels; P = `n_kept`,
          n = kept and generated tokens, c2 = compression of the second stage, k = `k`, generated tokens on top.
Per step  read to find: r of 2 * d_h columns of maxima and minima, 2 * h_kv * ceil(n / chunk) * r bytes; resident: all
          of them, 4 * h_kv * ceil(n / chunk) * d_h, and K and V of the n tokens, which `tier: host` leaves on the host:
          then K and V of the selected ones move, 4 * h_kv * d_h bytes each.
Differs   - a `ratio` is the share of the prompt that is attended to, and `comm` is what the second stage may read. The
            first stage keeps sqrt(ratio) of the prompt, which is more than a dropping method with that budget: see the
            resident bytes. `budget_rule: official` has the authors' split of `budget=T`, which attends to T // 2
            tokens: compare it with others at half of their tokens.
          - as chunks of generated tokens come, fewer channels are read, so that `comm` holds at every step.
          - of tokens of equal score the lower place is selected; in the authors' code any.
          - no token is protected, not even the current one, as published.
          - several turns: a turn is a sample whose prompt has the turns before it, read densely, with the question as
            the window (`method.window` shrinks to it). Then nothing is lost between turns, which is the authors'
            multi-turn form, whose memory is that of the full cache.
Fails     where a later query needs what the window did not look at, as SnapKV; where a chunk's maxima come from
          different tokens, its bound is loose.
Figures   retrieve pages, blocks, clusters: #1494FE, up, :

Not here: the window's votes (`methods/scorers.py`), a query's channels (`methods/retrieving/sparq.py`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isqrt, log2
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, key_bytes, show
from kvbench.engine.declared import Kernel, Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries, Observation
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Searched
from kvbench.engine.search import Launch, Units
from kvbench.engine.selection import ALWAYS, Cost
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.gather import gather_tokens
from kvbench.kernels.pages import page_bounds
from kvbench.kernels.rows.chunks import Chunked, chunk_keys, table_of
from kvbench.kernels.topk import top_stable
from kvbench.methods.indexed import Indexed
from kvbench.methods.retrieving.sparq import query_weights, top_components
from kvbench.methods.scorers import keep_top, pool_scores, reduce_group, window_votes

USUAL_ANSWER = 256  # tokens whose chunks a byte budget pays for, where no length of answers is given


def kept_tokens(scores: Tensor, n: int, window: int) -> Tensor:
    """The `n` best by scores of the past (1, h_kv, s - window), ascending, and the window: (1, h_kv, n + window)."""
    best, n_past = keep_top(scores, n), scores.shape[-1]
    last = torch.arange(n_past, n_past + window, device=scores.device).expand(1, best.shape[1], -1)
    return torch.cat([best, last], -1)


def chunk_bounds(keys: Tensor, chunk: int, n_chunks: int) -> Tensor:
    """Maxima, then minima of keys (1, h_kv, n, d_h) over chunks, by channel, with room for `n_chunks`.

    (h_kv, 2 * d_h, n_chunks); float32 on a CPU, where to convert them at every step takes longer than to score them.
    """
    low, high = page_bounds(keys, chunk)
    bounds = torch.cat([high, low], -1)[0].mT  # (h_kv, 2 * d_h, chunks)
    room = bounds.new_zeros(*bounds.shape[:2], n_chunks, dtype=None if keys.is_cuda else torch.float32)
    room[:, :, : bounds.shape[2]] = bounds
    return room


def take_in(bounds: Tensor, key: Tensor, place: int, chunk: int) -> None:
    """The key (h_kv, d_h) at `place` joins its chunk, in place."""
    at, d_h = place // chunk, key.shape[1]
    high, low = bounds[:, :d_h, at], bounds[:, d_h:, at]
    if place % chunk == 0:
        high.copy_(key)
        low.copy_(key)
    else:
        torch.maximum(high, key, out=high)
        torch.minimum(low, key, out=low)


def chunk_scores(q: Tensor, bounds: Tensor, r: int, sizes: Tensor, softmax: Softmax) -> Tensor:
    """Mean over the group of softmaxes of chunks' bounds, each token's share: q (1, h, 1, d_h) -> (h_kv, chunks).

    A channel's maximum counts where the group's summed query is positive, its minimum elsewhere; `sizes` (chunks,) says
    how many tokens a chunk has.
    """
    h_kv, both, _ = bounds.shape
    d_h, n_chunks = both // 2, len(sizes)
    channels = top_components(q, h_kv, r)  # (1, h_kv, r)
    weights = query_weights(q, channels, softmax.scale)[0]  # (h_kv, g, r)
    grouped = q.reshape(h_kv, -1, d_h).float().sum(1)  # (h_kv, d_h)
    turned = grouped.gather(-1, channels[0]) <= 0
    rows = channels[0] + d_h * turned + torch.arange(0, h_kv * both, both, device=q.device).unsqueeze(1)
    read = bounds.view(h_kv * both, -1)[:, :n_chunks].index_select(0, rows.flatten()).view(h_kv, r, n_chunks)
    logits = softmax.capped(weights @ read.float())  # (h_kv, g, chunks)
    lse = softmax.lse(logits + sizes.log(), (h_kv, -1)).unsqueeze(-1)
    return (logits - lse).exp().mean(1)


def top_tokens(scores: Tensor, chunk: int, n: int, k: int) -> Tensor:
    """The `k` best of `n` tokens by the scores of their chunks (h_kv, chunks), lower first among equals: (h_kv, k)."""
    few = min(scores.shape[-1], ceil(k / chunk) + 1)  # one of them may be short
    found = top_stable(scores, few).sort(-1).values
    order = scores.gather(-1, found).sort(dim=-1, descending=True, stable=True).indices
    tokens = found.gather(-1, order).unsqueeze(-1) * chunk + torch.arange(chunk, device=scores.device)
    tokens = tokens.flatten(1)
    real = tokens < n
    return tokens[real & (real.cumsum(-1) <= k)].view(len(scores), min(k, n))


class RocketKV(Indexed):
    title = "RocketKV"
    unshared = "keeps other tokens in each layer"
    no_growth = "searches what its first stage kept of the context"
    ops = ("chunks", "topk")
    takes_newest = True
    sends_all = False  # the chosen tokens alone may go there
    attends_current = False
    version = 2  # 2: a dense feed reads what the first stage kept, and no places beyond it

    @dataclass(frozen=True)
    class Params:
        window: Window
        kernel: Kernel
        tier: Literal["device", "host"]
        budget_rule: Literal["harness", "official"]
        longest_answer: Tokens

    @dataclass(frozen=True)
    class Plan:
        """How much the two stages keep, read and select of a prompt."""

        n_kept: int  # tokens of the prompt, the window included
        window: int  # the prompt's last tokens, whose queries choose them
        chunk: int  # kept tokens that share their maxima
        r: int  # channels of them that a step reads
        k: int  # tokens that a step selects
        grows: bool = True  # generated tokens come on top of k
        n_paid: int | None = None  # maxima of a KV head that `comm` pays for at a step; None: no limit

        def channels(self, n_chunks: int) -> int:
            """How many channels of so many chunks a step reads."""
            return self.r if self.n_paid is None else max(1, min(self.r, self.n_paid // n_chunks))

        def n_alike(self, n: int) -> int:
            """How many steps after one that searches `n` tokens read as many channels and select as it does."""
            r, more = self.channels(ceil(n / self.chunk)), ALWAYS
            if self.n_paid is not None and r > 1:
                more = self.n_paid // r * self.chunk - n
            return more if self.grows or n >= self.k else min(more, self.k - n)

    params: Params
    plan: Plan
    index: dict[int, Tensor]  # bounds (h_kv, 2 * d_h, chunks), generated tokens' too

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and params.budget_rule == "harness":
            raise ConfigError(f"comm=0 pays for no channel of a chunk; use comm=1/{shape.d_h**2} or more")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (official)" if params.budget_rule == "official" else cls.title

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, d_h = budget.s_prompt, shape.d_h
        if budget.attends_all:
            return RocketKV.Plan(s, min(params.window, s), 1, d_h, s)
        if params.budget_rule == "official":
            return official(params, budget.tokens, s, d_h)
        n_kept = min(s, isqrt(floor(budget.ratio * s * s)))
        if n_kept < params.window:
            raise ConfigError(
                f"a first stage that keeps {n_kept} tokens of a prompt of {s} has no room for "
                f"method.window={params.window}; use ratio={least_ratio(params.window, s)} or more, or a shorter window"
            )
        # As published, the maxima that a step reads are as many numbers as the keys that it attends to.
        comm = budget.comm * budget.ratio if budget.finds_freely else budget.comm
        chunk, r = chunk_and_channels(n_kept / (comm * s), d_h)
        n_paid = floor(comm * s * d_h)
        r = min(r, n_paid // ceil(Fraction(n_kept, chunk)))
        if r < 1:
            raise ConfigError(
                f"comm={show(budget.comm)} pays for no channel of the chunks of {n_kept} tokens that a prompt of {s} "
                f"keeps; use comm={least_comm(n_kept, s, d_h)} or more"
            )
        paid = None if budget.finds_freely else n_paid
        return RocketKV.Plan(n_kept, params.window, chunk, r, budget.tokens, n_paid=paid)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        """Relative to the budget's share of the tokens."""
        return Fraction(1)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        # Chunks of generated tokens come on top of what a generated token may take, and are paid for beforehand.
        n_chunks = ceil(Fraction(plan.n_kept + (params.longest_answer or USUAL_ANSWER), plan.chunk))
        index = 2 * shape.h_kv * n_chunks * shape.d_h * ELEMENT_BYTES
        near = params.tier == "device"
        return held(budget, shape, plan.n_kept if near else 0, index, 0 if near else plan.k)

    # While the prompt is read.

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (LastQueries(params.window),)

    def arrange(self, layer: int) -> Searched:
        plan, trace, chosen = self.plan, self.trace, self.kept(layer)
        most = ceil((min(plan.n_kept, trace.s_prompt) + self.store.n_new) / plan.chunk)
        keys = trace.keys(layer) if chosen is None else gather_tokens(trace.keys(layer), chosen)
        self.index[layer] = chunk_bounds(keys, plan.chunk, most)
        return Searched(chosen, on_device=self.params.tier == "device")

    def kept(self, layer: int) -> Tensor | None:
        """The first stage's positions, (1, h_kv, n_kept) ascending; None: all."""
        plan, trace = self.plan, self.trace
        if trace.s_prompt <= plan.n_kept:
            return None
        scores = voted_scores(trace, self.params, plan.window, layer)
        return kept_tokens(scores, plan.n_kept - plan.window, plan.window)

    # A decode step.

    def append(self, layer: int) -> None:
        n = self.store[layer].n_host
        take_in(self.index[layer], self.store[layer].newest[0][0, :, 0], n - 1, self.plan.chunk)

    def question(self, layer: int, q: Tensor) -> Tensor:
        return q

    def score(self, layer: int, question: Tensor, index: Tensor) -> Tensor:
        """Scores that a group gives to the tokens of chunks, were every key as large as their bounds."""
        n, _, r, _ = self.counted(layer)
        sizes = torch.full((ceil(n / self.plan.chunk),), float(self.plan.chunk), device=question.device)
        sizes[-1] = n - (len(sizes) - 1) * self.plan.chunk
        return chunk_scores(question, index, r, sizes, self.trace.softmax[layer])[None, :, None]

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor:
        """The places of the tokens to attend to, of the last chunk as many as there is room for."""
        n, k, *_ = self.counted(layer)
        return top_tokens(ranking[0], self.plan.chunk, n, k).unsqueeze(0)

    def units(self, layer: int) -> Units:
        n, k, *_ = self.counted(layer)
        return Units(k, n, more=int(self.plan.grows or n < self.plan.k))

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h_kv

    def n_static(self, layer: int) -> int:
        return self.plan.n_alike(self.counted(layer).n)

    def selects_feeds(self, layer: int) -> bool:
        return False

    def kind(self, layer: int) -> Hashable:
        return None if self.has_kernel(layer) else id(self)

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        counts = [row.counted(layer) for row in rows]
        planned = table_of(chunked(rows, layer, counts), rows[0].index[layer].device, ahead)
        softmax = rows[0].trace.softmax[layer]
        return lambda q, k_new, v_new, since: chunk_keys(
            q, k_new, planned, softmax.scale, softmax.cap, softmax.sink, since
        )

    def cost(self, layer: int) -> Cost:
        return self.counted(layer).cost

    def counted(self, layer: int) -> "Counted":
        """Counts of the step at hand."""
        plan, shape, at = self.plan, self.trace.shape, self.store[layer]
        n_chunks = ceil(at.n_host / plan.chunk)
        r = plan.channels(n_chunks)
        cost = Cost(2 * key_bytes(shape, n_chunks), shape.h_kv * n_chunks * r * ELEMENT_BYTES)
        return Counted(at.n_host, min(plan.k + at.n_generated * plan.grows, at.n_host), r, cost)

    def report(self) -> dict[str, Any]:
        plan, s = self.plan, self.trace.s_prompt
        return {
            "kept": min(plan.n_kept, s),
            "kept_ratio": min(plan.n_kept, s) / s,
            "chunk": plan.chunk,
            "n_channels": plan.r,
        }


class Counted(NamedTuple):
    """How much a step searches and selects."""

    n: int  # tokens that are searched
    k: int  # of which so many are selected
    r: int  # channels
    cost: Cost


def chunked(rows: Sequence[RocketKV], layer: int, counts: Sequence[Counted]) -> list[Chunked]:
    """The rows' chunks as kernels take them."""
    each = zip(rows, counts, strict=True)
    return [Chunked(row.index[layer], count.n, row.plan.chunk, count.r) for row, count in each]


def chunk_and_channels(c2: Fraction | float, d_h: int) -> tuple[int, int]:
    """Length of a chunk and channels to read, so that together they read one number of `c2`, which is at least 1."""
    c2 = max(c2, Fraction(1))
    chunk = ceil_sqrt(c2)
    chunk = 1 if chunk > c2 else chunk
    return chunk, int(d_h * chunk / c2)


def ceil_sqrt(x: Fraction | float) -> int:
    """The smallest whole number whose square is at least x."""
    root = isqrt(floor(x))
    return root if root * root >= x else root + 1


def official(params: RocketKV.Params, tokens: int, s: int, d_h: int) -> RocketKV.Plan:
    """The authors' own integers of a budget in tokens, in double precision as they compute them.

    Both stages share the compression; half of the tokens are attended to, and the maxima cost as much as they do.
    """
    n_new = params.longest_answer
    length = s + n_new
    ratio = max(1.0, length / tokens)
    capacity = max(int(length / ratio ** min(0.2 + 0.06 * log2(ratio), 0.8)), min(2 * n_new, length))
    n_kept = capacity - n_new
    if n_kept < params.window:
        raise ConfigError(
            f"budget={tokens} makes the first stage keep {n_kept} tokens of a prompt of {s}, less than "
            f"method.window={params.window}; use a larger budget, or a smaller method.longest_answer than {n_new}"
        )
    if tokens < 2:
        raise ConfigError(f"budget={tokens} selects half as many tokens, and that is none; use 2 or more")
    chunk, r = chunk_and_channels(max(1.0, capacity / tokens), d_h)
    return RocketKV.Plan(min(n_kept, s), params.window, chunk, max(1, r), tokens // 2, grows=False)


def least_ratio(window: int, s: int) -> float:
    """The smallest ratio in thousandths whose first stage has room for the window; at most 1."""
    exact = Fraction(window * window, s * s)
    return min(1.0, ceil(1000 * exact) / 1000)


def least_comm(n_kept: int, s: int, d_h: int) -> float:
    """The smallest `comm`, in millionths, that pays for a channel of every chunk."""
    most = max(min(Fraction(c * c), Fraction(n_kept * d_h, ceil(Fraction(n_kept, c)))) for c in range(1, d_h + 1))
    return ceil(1_000_000 * n_kept / (most * s)) / 1_000_000


def voted_scores(trace: Trace, params: RocketKV.Params, window: int, layer: int) -> Tensor:
    """The first stage: the window's votes for the tokens before it, summed over a group, then pooled, (1, h_kv, n)."""
    voted = window_votes(trace, LastQueries(params.window), window, layer)
    return pool_scores(reduce_group(voted, trace.shape.h_kv, "sum"), params.kernel, "max")

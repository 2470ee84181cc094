"""PQCache (Zhang et al., 2025): a product quantiser of the prompt's keys finds the tokens that are then read in full.

Every key is cut into `m` parts, and each part is replaced by the nearest of 2^b centroids: k-means over the prompt, per
layer, KV head and part, while the prefill goes on. At a step inner products of the query with all centroids are looked
up by the tokens' codes and added up; K and V of the tokens with the largest sums are fetched. Nothing is dropped.

Paper     arXiv:2407.12820, 2024; Zhang, Hailin; PQCache: Product Quantization-based KVCache for Long Context LLM
          Inference
Symbols   paper m, b, h, d_h, s, k, T = `m`, `b`, `h_kv`, `d_h`, `s_prompt`, `k`, `iterations`; candidates = tokens that
          are neither sink nor in the window, n of them.
Per step  moved to find: ceil(h_kv * m * n * b / 8) bytes of codes; fetched: K and V of k tokens per KV head,
          4 * h_kv * k * d_h bytes less what a block cache has; to the host: the token that leaves the window, of
          4 * h_kv * d_h bytes, and its code. Resident: sinks, window, centroids of 2 * h_kv * 2^b * d_h bytes. A
          token's codes are m * b / (16 * d_h) of its key.
Differs   - sinks and window are inside the budget; `budget_rule: official` has the authors' integers, sinks on top.
          - a token leaves the window for the host with its own K, V and code. The authors' code loses it, shifts all
            layers but the first by a slot, and clusters old contents of a buffer in place of the prompt's last tokens.
          - codes of generated tokens count as well, and where `comm` is filled by the prompt's, long answers would
            exceed it. The window then has room for as many generated tokens as keep the last step within `comm`; with
            `official` it slides from the first step on, and results may be marked.
          - scores and softmax are float32, lower positions first among equals; theirs are float16, ties arbitrary.
          - `m`, `b` follow from `comm` unless given: 32 bits 4x8, 12 bits 2x6, 8 bits 2x4, 4 bits 2x2 per token and KV
            head. At d_h = 64, comm=1/128 pays for 8 bits only: 2x4, not the published 2x6.
          - a prompt with fewer tokens than centroids has its keys as centroids; theirs then attends to one token.
          - `iterations: auto` is their adaptive bound, with times of this machine in place of built-in ones, so that
            answers depend on the machine: for latency only.
          - on a GPU keys are clustered there, on a stream of its own during the prefill; theirs on idle CPUs, as here
            by `cluster_on: cpu`.
          - on a GPU codes are read over the link by the kernel that scores, not copied ahead of the layer; the ledger
            counts the same bytes.
          - `rebuild_every` is only proposed in the paper. Each new quantiser starts from the old centroids and replaces
            centroids and codes of a layer at once, at the same step whether it was made while the model ran or not.
Fails     where few bits meet keys that are alike: tokens with equal codes are chosen by position. What is generated is
          coded by centroids of the prompt.
Figures   retrieve single tokens: #0A8E63, right, -

Long because the parameters, the search of one row and of many, and what is read while an index grows are one method.

Not here: k-means, codes and their scores (`kernels/pq_fit.py`, `kernels/pq_codes.py`, `kernels/pq_scores.py`), a
layer's quantiser (`pqcache_quantiser.py`), the adaptive bound (`pqcache_rounds.py`), the block cache
(`engine/caches/blocks.py`), and a quantiser per turn of a conversation: every sample is one prompt and one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil, floor
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.books.spans import span
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, find_bytes, show, split
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.declared import Count, Index, Is, Named, Share, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.streams import sent_so_far
from kvbench.engine.placement import Offloaded, Placement
from kvbench.engine.search import Launch, Units
from kvbench.engine.selection import Cost, FeedSelection, Found
from kvbench.engine.shapes import ModelShape
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.choices import EMPTY, MERGES
from kvbench.kernels.pq_codes import counted_bytes, pq_codes
from kvbench.kernels.pq_scores import Coded, pq_keys_triton, pq_tables, pq_top, table_of
from kvbench.methods.indexed import Indexed
from kvbench.methods.retrieving.pqcache_quantiser import (
    Quantiser,
    first_centroids,
    n_threads,
    quantise,
    threads_on,
    with_room,
)
from kvbench.methods.retrieving.pqcache_rounds import Clock, Profile, profile_of

PAIRS = ((4, 8), (2, 6), (2, 4), (2, 2))  # m x b, the first that `comm` pays for
MOST_BITS = 8  # of one code


class PQCache(Indexed):
    title = "PQCache"
    ops = ("pq_scores", "logits", "topk")
    takes_newest = True  # and codes it
    extends = True
    packs_host = True

    @dataclass(frozen=True)
    class Params:
        m: Count | Literal["auto"]
        b: Annotated[int, Ge(1), Le(MOST_BITS)] | Literal["auto"]
        n_sink: Tokens
        local_share: Share
        budget_rule: Literal["fair", "official"]
        fit: Literal["all_but_sinks", "middle"]
        iterations: Count | Literal["auto"]
        tol: Annotated[float, Ge(0), Is("a share of the variance, 0 or more")]
        empty: Annotated[str, Named(EMPTY)]
        group_merge: Annotated[str, Named(MERGES)]
        rebuild_every: Index
        overlap: bool
        cluster_on: Literal["auto", "cpu"]
        cache_includes_centroids: bool
        seed: Index

        @property
        def clusters_on_gpu(self) -> bool:
            """Whether keys are clustered where the model is; the adaptive bound is that of a CPU next to it."""
            return self.cluster_on == "auto" and self.iterations != "auto"

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided, and the quantiser's shape."""

        n_sink: int
        n_local: int  # past tokens of the window; the current one comes on top
        k: int  # tokens that are selected
        m: int
        b: int
        n_paid: int | None = None  # candidates whose codes `comm` pays for; None: no limit

    params: Params
    plan: Plan
    index: dict[int, Quantiser]  # once its clustering was waited for
    pending: dict[int, Future[Quantiser]]
    own_layers: set[int]  # layers whose codes no other variant reads
    rounds: dict[int, int]  # per layer, most rounds of k-means

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm is not None:
            code_shape(params, request.comm, shape.d_h)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        (m, b), (most_m, most_b) = (params.m, params.b), PAIRS[0]
        bits = (m if isinstance(m, int) else most_m) * (b if isinstance(b, int) else most_b)
        return Fraction(bits, 16 * shape.d_h)

    @classmethod
    def fit_with_index(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan]:
        """Two pairs are published, 4x8 and 2x6."""
        fitted, plan = super().fit_with_index(params, budget, shape)
        m, b = PAIRS[1]
        return replace(fitted, index_share=min(Fraction(1), Fraction(plan.m * plan.b, m * b))), plan

    @classmethod
    def check_cache(cls, params: Params, cache: BlockCacheSpec) -> None:
        least = cache.block_len + centroid_tokens(params.b if isinstance(params.b, int) else MOST_BITS)
        if params.cache_includes_centroids and 0 < cache.tokens < least:
            raise ConfigError(
                f"cache.tokens={cache.tokens} has no room for a block beside centroids; use {least} or more, or "
                "method.cache_includes_centroids=false"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return PQCache.Plan(0, budget.s_prompt, 0, 1, 1)
        m, b = code_shape(params, budget.comm, shape.d_h)
        if params.budget_rule == "fair":
            parts = split(budget.tokens, params.n_sink, params.local_share)
            n_paid = None if budget.finds_freely else 8 * find_bytes(shape, budget) // (shape.h_kv * m * b)
            return PQCache.Plan(parts.n_sink, parts.n_local, parts.k, m, b, n_paid)
        # As the authors compute them, in double precision; sinks are on top.
        n_sink, share = min(params.n_sink, budget.s_prompt), float(params.local_share)
        besides = (budget.s_prompt - n_sink) * float(budget.ratio)
        return PQCache.Plan(n_sink, int(besides * share), int(besides * (1 - share)), m, b)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["official"] if params.budget_rule == "official" else []
        given = [(key, getattr(params, key)) for key in ("m", "b") if getattr(params, key) != "auto"]
        notes += [f"{params.m}x{params.b}"] if len(given) == 2 else [f"{x}={y}" for x, y in given]
        notes += [] if params.group_merge == "softmax_sum" else [params.group_merge]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_centroids = min(1 << plan.b, budget.s_prompt - plan.n_sink) if plan.k else 0
        index = shape.h_kv * n_centroids * shape.d_h * ELEMENT_BYTES
        codes = 2 * counted_bytes(shape.h_kv, plan.m, plan.b, budget.s_prompt) if plan.k else 0
        return replace(held(budget, shape, plan.n_sink + plan.n_local, index, plan.k), uncounted_bytes=codes)

    def setup(self) -> None:
        cache = self.variant.cache
        if cache is not None and cache.tokens and self.params.cache_includes_centroids:
            self.check_cache(self.params, cache)
            tokens = cache.tokens - centroid_tokens(self.plan.b)
            self.store.cache_spec = replace(cache, tokens=tokens)
        super().setup()
        self.pending, self.own_layers, self.rounds = {}, set(), {}
        self.seconds, self.n_rebuilds = 0.0, 0

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        trace, plan, params = self.trace, self.plan, self.params
        if params.iterations == "auto":
            self.clock.enter(layer, trace.device_of(layer))
        trace.offload(layer)  # what is clustered while the model runs is on its way
        n_fit = self.n_fit
        if plan.k:
            self.rounds[layer] = self.most_rounds(layer, n_fit)
            what = (plan.n_sink, n_fit, plan.m, plan.b, self.rounds[layer])
            self.pending[layer] = trace.once(
                ("PQCache", layer, *what, params.tol, params.empty, params.seed, params.clusters_on_gpu),
                lambda: self.start(layer, n_fit),
            )
        if params.iterations == "auto":
            self.clock.leave()
        return Offloaded(plan.n_sink, plan.n_local, self.window())

    def window(self) -> int:
        """Slots of the window, so that the codes of all candidates of the last step are paid for."""
        plan, n = self.plan, self.trace.s_prompt + self.store.n_new
        slides_at = plan.n_local + 1
        if plan.n_paid is None:
            return slides_at
        return max(slides_at, n - plan.n_sink - plan.n_paid)

    def start(self, layer: int, n: int, old: Quantiser | None = None) -> Future[Quantiser]:
        """Cluster the `n` tokens after the sinks, on a thread while the model runs or at once."""
        trace, plan, params = self.trace, self.plan, self.params
        first, begin = first_centroids(params.seed, n, 1 << plan.b), None
        if old is not None and old.centroids.shape[2] == 1 << plan.b:
            begin = old.centroids
        device = trace.device_of(layer)
        where = device if params.clusters_on_gpu else trace.host_device
        stop = plan.n_sink + n
        here = trace.exact.keys(layer)[0, :, plan.n_sink : stop] if where == device and old is None else None
        written = sent_so_far(device)  # the copy of the keys to the host

        def work() -> Quantiser:
            keys = here
            if keys is None:
                if written is not None:
                    written.synchronize()
                keys = self.keys(layer, plan.n_sink, stop).to(where)
            rounds = self.rounds[layer]
            return quantise(keys, plan.m, plan.b, first, rounds, params.tol, params.empty, begin, device)

        if params.overlap:
            threads = trace.once(("PQCache's threads", where.type), lambda: threads_on(where, trace))
            return threads.ask("cluster", layer, where, work, tensors=lambda made: [made.resident])
        done: Future[Quantiser] = Future()
        with torch.inference_mode(), span("cluster", layer):
            done.set_result(work())
        return done

    def keys(self, layer: int, start: int, stop: int) -> Tensor:
        """Keys of the tokens at these positions on the host, (h_kv, n, d_h)."""
        if stop <= self.trace.s_prompt:  # exact, whatever the tier makes of them: variants share the clusters
            return self.trace.host(layer)[0][0, :, start:stop]
        return self.store[layer].host.keys(start, stop)

    # The adaptive bound.

    @property
    def clock(self) -> Clock:
        return self.trace.once("PQCache's clock", Clock)

    @property
    def profile(self) -> Profile:
        trace, plan = self.trace, self.plan

        def read() -> Profile:
            host = trace.host_device  # measured where clustering is done
            ask: Callable[[], Profile] = lambda: profile_of(  # noqa: E731
                trace.shape, trace.device, plan.m, plan.b, n_threads(trace)
            )
            return threads_on(host, trace).ask("profile", 0, host, ask).result()

        return trace.once(("PQCache's profile", plan.m, plan.b), read)

    def most_rounds(self, layer: int, n: int) -> int:
        if isinstance(self.params.iterations, int):
            return self.params.iterations
        two_lines = self.params.budget_rule == "official"
        return self.trace.once(
            ("PQCache's rounds", layer, n, self.plan.m, self.plan.b, two_lines),
            lambda: self.profile.rounds(n, self.clock.latest(), two_lines),
        )

    def arrange_rest(self) -> Mapping[int, Placement]:
        """Add the times of this prompt's layers to the profile."""
        if self.params.iterations == "auto" and self.plan.k:
            seconds = self.clock.middle()
            if seconds is not None:
                self.profile.add_layer(self.trace.s_prompt - self.plan.n_sink, seconds)
        return {}

    # A decode step.

    def question(self, layer: int, q: Tensor) -> Tensor:
        return q[:, :, 0]

    def score(self, layer: int, question: Tensor, index: Quantiser) -> Tensor:
        """Inner products with centroids, (n, h, m, c)."""
        return pq_tables(question, index.resident)

    def merge(self, layer: int, scores: Tensor) -> Tensor:
        return scores  # which tokens' codes look up first

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor:
        """The tokens whose codes look up the most."""
        units = self.units(layer)
        n = units.stop - units.start
        if n <= units.k:
            return torch.arange(units.start, units.stop, device=ranking.device).expand(1, self.trace.shape.h_kv, n)
        return self.best(layer, ranking[0], n).unsqueeze(0)

    def best(self, layer: int, tables: Tensor, n: int) -> Tensor:
        """Positions of the best of the first `n` candidates by inner products (h, m, c)."""
        plan, softmax = self.plan, self.trace.softmax[layer]
        idx = pq_top(
            tables, self.index[layer].codes, n, plan.k, softmax.scale, self.params.group_merge, softmax.cap,
            softmax.sink,
        )  # fmt: skip
        return idx + plan.n_sink

    def units(self, layer: int) -> Units:
        """Tokens that are neither sinks nor in the window."""
        at = self.store[layer]
        return Units(self.plan.k, at.n_seen - at.n_window, self.plan.n_sink, grows=at.slides)

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h_kv

    def cost(self, layer: int) -> Cost:
        """Centroids stay and are read; the codes of candidates move, and the newest one's went to the host."""
        units = self.units(layer)
        return self.cost_of(layer, units.stop - units.start)

    def cost_of(self, layer: int, n: int) -> Cost:
        """Cost of a search among `n` candidates."""
        quantiser, plan = self.index[layer], self.plan
        return search_cost(self.trace.shape.h_kv, plan.m, plan.b, n, quantiser.index_bytes, n > quantiser.n_fit)

    def kind(self, layer: int) -> Hashable:
        """The quantiser's shape where a kernel searches, else each row apart; None: there is nothing to choose from."""
        units = self.units(layer)
        if not units.n_chosen:
            return None
        index = self.ready(layer, units.stop - units.start)
        return (self.plan.b, index.resident.shape) if self.has_kernel(layer) else id(self)

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        chooses = rows[0].units(layer).n_chosen > 0
        return super().search(rows, layer, q) if chooses else [None] * len(rows)

    def has_kernel(self, layer: int) -> bool:
        """Whether a kernel searches: none merges in other ways."""
        merges = self.params.group_merge == "softmax_sum"
        return merges and super().has_kernel(layer) and self.units(layer).n_chosen > 0

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        planned = table_of([row.coded(layer) for row in rows], rows[0].store[layer].device, ahead)
        softmax = rows[0].trace.softmax[layer]
        return lambda q, k_new, v_new, since: pq_keys_triton(
            q, k_new, planned, softmax.scale, softmax.cap, softmax.sink, since
        )

    def coded(self, layer: int) -> Coded:
        """The candidates' codes as kernels take them."""
        index, units = self.index[layer], self.units(layer)
        codes, newest = index.codes, self.store[layer].n_seen - 1 - self.plan.n_sink
        if newest >= codes.capacity:  # never a candidate
            newest = -1
        assert newest <= codes.n, f"layer {layer}: token {newest} has a code before {codes.n}"
        return Coded(index.resident, codes, units.start, units.stop, newest, units.grows)

    def count_search(self, layer: int) -> None:
        """The kernel has stored the newest token's code, where there is room for it."""
        codes = self.index[layer].codes
        codes.n = min(codes.n + 1, codes.capacity)

    @property
    def repeats(self) -> bool:
        return self.variant.is_full or not self.params.rebuild_every

    # A feed.

    def selects_feeds(self, layer: int) -> bool:
        """While there are more candidates than are fetched, and the quantiser stays."""
        units = self.units(layer)
        return not self.params.rebuild_every and (units.k == 0 or units.stop - units.start >= units.k)

    def select_feed(self, layer: int, feed: Feed) -> FeedSelection:
        """`choose` for each token by itself, among as many candidates as it has."""
        if self.plan.k == 0:
            return FeedSelection()
        counts = [n_seen - self.plan.n_sink - n_window for n_seen, n_window in feed.moments]
        index = self.ready(layer, counts[-1], feed.moments[-1].n_seen)
        queries = self.question(layer, feed.queries).split(1)
        found = [self.best(layer, self.score(layer, q, index)[0], n) for q, n in zip(queries, counts, strict=True)]
        return FeedSelection(torch.stack(found), [self.cost_of(layer, n) for n in counts])

    # The quantiser.

    def ready(self, layer: int, n: int, n_seen: int | None = None) -> Quantiser:
        """The layer's quantiser with codes of `n` candidates; waits for it at the first step.

        Where tokens are on the host that the store does not count yet, there are `n_seen`.
        """
        if layer in self.pending:
            with span("wait", layer):
                self.index[layer] = self.pending.pop(layer).result()
            self.seconds += self.index[layer].seconds
            self.own_layers.discard(layer)
            if self.has_kernel(layer) and self.most_candidates > self.index[layer].n_fit:
                self.code_late(layer)  # what the kernel does not code as it comes
        index = self.index[layer]
        return index if index.codes.n >= n else self.code_late(layer, n_seen)

    def code_late(self, layer: int, n_seen: int | None = None) -> Quantiser:
        """Code all tokens so far that have no code: those in the window will need one, and many at once are cheaper."""
        at, n_sink, by_kernel = self.store[layer], self.plan.n_sink, self.has_kernel(layer)
        if layer not in self.own_layers:
            self.index[layer] = with_room(self.index[layer], self.most_codes)
            self.own_layers.add(layer)
        if not by_kernel:
            synchronize([at.device])  # the newest key may be on its way to the host
        index = self.index[layer]
        keys = self.keys(layer, n_sink + index.codes.n, (n_seen or at.n_seen) - by_kernel)
        index.codes.extend(pq_codes(keys, index.centroids))
        self.store.spend(layer, Cost(rebuilt_bytes=keys.numel() * ELEMENT_BYTES))
        return index

    @property
    def n_fit(self) -> int:
        """Tokens that the first quantiser is made of."""
        return self.trace.s_prompt - self.plan.n_sink - (self.plan.n_local if self.params.fit == "middle" else 0)

    @property
    def most_candidates(self) -> int:
        """The last step's candidates."""
        return self.most_codes - self.window()

    @property
    def most_codes(self) -> int:
        """Most codes of a layer, with those that generated tokens get."""
        return self.trace.s_prompt + self.store.n_new - self.plan.n_sink

    def behind(self, layer: int, weights: Tensor | None) -> None:
        """Every `rebuild_every` tokens the layer begins to be clustered anew, for the next step."""
        every = self.params.rebuild_every
        if every and self.plan.k and self.store[layer].can_fetch:
            n = self.store[layer].n_seen
            if (n - self.trace.s_prompt) % every == 0:
                if self.params.fit == "middle":
                    n -= self.store[layer].n_window
                old = self.ready(layer, 0)
                self.pending[layer] = self.start(layer, n - self.plan.n_sink, old)
                self.n_rebuilds += 1

    def report(self) -> dict[str, Any]:
        plan, d_h = self.plan, self.trace.shape.d_h
        report: dict[str, Any] = {
            "m": plan.m,
            "b": plan.b,
            "comm_nominal": plan.m * plan.b / (16 * d_h),
            "n_local": plan.n_local,
            "n_window": self.window(),
            "k": plan.k,
            "iterations": [self.rounds[layer] for layer in sorted(self.rounds)],
        }
        if self.index:
            report["clustering_s"] = self.seconds
            report["clustered_on"] = self.trace.device.type if self.params.clusters_on_gpu else "cpu"
            report["kmeans_rounds"] = fmean(x.rounds for x in self.index.values())
            # Of one layer: every round, and the codes at the end, compare all keys with all centroids.
            n_fit = fmean(x.n_fit for x in self.index.values())
            one_round = 2 * n_fit * (1 << plan.b) * self.trace.shape.h_kv * d_h
            report["build_flops"] = one_round * (report["kmeans_rounds"] + 1)
        if self.n_rebuilds:
            report["n_rebuilds"] = self.n_rebuilds
        warm = [entry for entry in self.store.ledger.entries if entry.step > 1]
        lookups = sum(entry.cache_lookups for entry in warm)
        if lookups:
            report["cache_hit_rate_warm"] = sum(entry.cache_hits for entry in warm) / lookups
        return report


def code_shape(params: PQCache.Params, comm: Fraction, d_h: int) -> tuple[int, int]:
    """(m, b) that `comm` pays for: m * b bits per token and KV head, of 16 * d_h; `ConfigError` where there is none."""
    bits = floor(comm * 16 * d_h)
    m, b = (x if isinstance(x, int) else None for x in (params.m, params.b))  # None: auto
    if m is not None and d_h % m:
        divisors = [str(x) for x in range(1, d_h + 1) if d_h % x == 0]
        raise ConfigError(f"method.m={m} does not divide d_h={d_h}; use {', '.join(divisors[:-1])} or {divisors[-1]}")
    fitting = [(x, y) for x, y in PAIRS if x * y <= bits and d_h % x == 0]
    if m is None and b is None:
        if fitting:
            return fitting[0]
        least = min(x * y for x, y in PAIRS)
        raise ConfigError(
            f"comm={show(comm)} pays for {bits} of the 16 x {d_h} bits of a key; "
            f"use comm={show(Fraction(least, 16 * d_h))} or more, or give method.m and method.b"
        )
    if m is None:
        b = int(params.b)
        m = max((x for x in (1, 2, 4, 8, 16) if d_h % x == 0 and x * b <= bits), default=1)
    elif b is None:
        b = min(MOST_BITS, max(1, bits // m))
    if m * b > bits:
        instead = f", or a smaller pair such as {fitting[0][0]}x{fitting[0][1]}" if fitting else ""
        raise ConfigError(
            f"method.m={m}, method.b={b} are {m * b} bits per key, of which comm={show(comm)} pays for {bits} "
            f"at d_h={d_h}; use comm={show(Fraction(m * b, 16 * d_h))} or more{instead}"
        )
    return m, b


def centroid_tokens(b: int) -> int:
    """Tokens whose K and V take as much room as the centroids."""
    return ceil((1 << b) / 2)


@cache
def search_cost(h_kv: int, m: int, b: int, n: int, index_bytes: int, is_late: bool) -> Cost:
    """Cost of a search, the same for all layers."""
    one = counted_bytes(h_kv, m, b, 1) if is_late else 0
    return Cost(index_bytes, counted_bytes(h_kv, m, b, n), index_bytes, released_bytes=one)

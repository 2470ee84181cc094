"""What PQCache may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/pqcache.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, find_bytes, show, split
from engine.caches.blocks import BlockCacheSpec
from engine.checks import each_one_of, share, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from kernels.choices import EMPTY, MERGES
from methods.rules.base import Rules

PAIRS = ((4, 8), (2, 6), (2, 4), (2, 2))  # m x b, the first that `comm` pays for
MOST_BITS = 8  # of one code


class PQCacheRules(Rules):
    title = "PQCache"
    drops = False
    packs_host = True

    @dataclass(frozen=True)
    class Params:
        m: int | str
        b: int | str
        n_sink: int
        local_share: Fraction
        budget_rule: str
        fit: str
        iterations: int | str
        tol: float
        empty: str
        group_merge: str
        rebuild_every: int
        overlap: bool
        cluster_on: str
        cache_includes_centroids: bool
        seed: int

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                budget_rule=("fair", "official"),
                fit=("all_but_sinks", "middle"),
                empty=EMPTY,
                group_merge=MERGES,
                cluster_on=("auto", "cpu"),
            )
            for key in ("m", "b", "iterations"):
                value = getattr(self, key)
                if isinstance(value, str) and value != "auto":
                    raise ConfigError(f"method.{key}={value} is not a number; use a whole number from 1, or auto")
            whole_numbers("method", self, m=1, b=1, n_sink=0, iterations=1, rebuild_every=0, seed=0)
            if isinstance(self.b, int) and self.b > MOST_BITS:
                raise ConfigError(f"method.b={self.b} is out of range; a code has 1 to {MOST_BITS} bits")
            share("method.local_share", self.local_share)
            if not 0 <= self.tol < float("inf"):
                raise ConfigError(f"method.tol={self.tol} is out of range; it is a share of the variance, 0 or more")

        @property
        def clusters_on_gpu(self) -> bool:
            """Whether keys are clustered where the model is; the adaptive bound is that of a CPU beside it."""
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

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1:
            code_shape(params, request.comm, shape.d_h)

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
            return PQCacheRules.Plan(0, budget.s_prompt, 0, 1, 1)
        m, b = code_shape(params, budget.comm, shape.d_h)
        if params.budget_rule == "fair":
            parts = split(budget.tokens, params.n_sink, params.local_share)
            n_paid = 8 * find_bytes(shape, budget) // (shape.h_kv * m * b)
            return PQCacheRules.Plan(parts.n_sink, parts.n_local, parts.k, m, b, n_paid)
        # As the authors compute them, in double precision; sinks are on top.
        n_sink, share = min(params.n_sink, budget.s_prompt), float(params.local_share)
        besides = (budget.s_prompt - n_sink) * float(budget.ratio)
        return PQCacheRules.Plan(n_sink, int(besides * share), int(besides * (1 - share)), m, b)

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
        return held(budget, shape, plan.n_sink + plan.n_local, index, plan.k)


def code_shape(params: PQCacheRules.Params, comm: Fraction, d_h: int) -> tuple[int, int]:
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

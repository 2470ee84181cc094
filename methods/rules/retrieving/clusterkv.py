"""What ClusterKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/clusterkv.py`).
"""

from dataclasses import dataclass

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from engine.caches.blocks import BlockCacheSpec
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from kernels.choices import METRICS
from methods.rules.base import Rules

TOKENS_PER_CLUSTER = 80  # paper: 400 clusters of 32,000 tokens, 4 of 320


class ClusterKVRules(Rules):
    title = "ClusterKV"
    drops = False
    packs_host = True
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: str
        num_clusters: int | None
        metric: str
        max_rounds: int
        n_sink: int
        agg: str
        decode_period: int
        decode_clusters: int | None
        full_layers: int
        cache_steps: int
        overlap: bool
        seed: int

        def __post_init__(self) -> None:
            each_one_of(
                "method", self, comm_mode=("native", "matched"), metric=METRICS, agg=("query_head", "group_mean")
            )
            whole_numbers("method", self, num_clusters=1, max_rounds=1, n_sink=0, decode_period=1)
            whole_numbers("method", self, decode_clusters=0, full_layers=0, cache_steps=0, seed=0)
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

    @classmethod
    def check_cache(cls, params: Params, cache: BlockCacheSpec) -> None:
        if cache.tokens and params.cache_steps:
            raise ConfigError(
                f"cache.tokens={cache.tokens} and method.cache_steps={params.cache_steps} are two caches for the "
                "same tokens; set one of them to 0"
            )

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (matched)" if params.comm_mode == "matched" else cls.title

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        n_sink = min(params.n_sink, budget.tokens // 2)
        n, period = budget.s_prompt - n_sink, params.decode_period
        if params.comm_mode == "matched":
            n_clusters, decode = round(budget.comm * budget.s_prompt), round(budget.comm * period)
        else:
            n_clusters, decode = budget.s_prompt // TOKENS_PER_CLUSTER, period // TOKENS_PER_CLUSTER
        decode = max(1, decode) if params.decode_clusters is None else params.decode_clusters
        return ClusterKVRules.Plan(
            n_sink, budget.tokens - n_sink, min(n, max(1, params.num_clusters or n_clusters)), decode
        )

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        index = shape.h_kv * (plan.n_clusters * (ELEMENT_BYTES * shape.d_h + 8) + 4 * (budget.s_prompt - plan.n_sink))
        wide = shape.g if params.agg == "query_head" else 1
        fetched = min(plan.k * wide, budget.s_prompt - plan.n_sink)
        recent = min(params.cache_steps * fetched, budget.s_prompt - plan.n_sink)
        return held(budget, shape, plan.n_sink, index, fetched, cls.n_whole(params, shape), recent)

"""What RetroInfer may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/retroinfer.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import ceil, floor, lcm

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, find_bytes, key_bytes, show
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

TOKENS_PER_CLUSTER = 16  # as published, where `comm` pays for it
SIZE_BYTES, OFFSET_BYTES, MEMBER_BYTES = 4, 4, 4  # of a cluster's size, of where its tokens begin, of a token's place
STEP = 8  # clusters come in multiples of it
FEWEST = 2  # clusters: one would be no choice


class RetroInferRules(Rules):
    title = "RetroInfer"
    drops = False
    keeps_budget_in = "mean"

    @dataclass(frozen=True)
    class Params:
        tokens_per_cluster: int | str
        retrieved_share: float | None
        estimated_share: float
        fill: str
        n_sink: int
        window: int
        segment: int
        iterations: int
        update: int

        def __post_init__(self) -> None:
            if isinstance(self.tokens_per_cluster, str) and self.tokens_per_cluster != "auto":
                raise ConfigError(
                    f"method.tokens_per_cluster={self.tokens_per_cluster} is not a number; use a whole number from 1, "
                    "or auto"
                )
            each_one_of("method", self, fill=("expected", "exact"))
            whole_numbers("method", self, tokens_per_cluster=1, n_sink=0, window=1, segment=1, iterations=1, update=1)
            for name, least in (("retrieved_share", None), ("estimated_share", 0)):
                value = getattr(self, name)
                if value is not None and not (0 <= value <= 1 and (value > 0 or least == 0)):
                    raise ConfigError(f"method.{name}={value} is out of range; it is a share of the clusters, up to 1")
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
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, (n_sink, window) = budget.s_prompt, ends(params, budget.tokens)
        if budget.attends_all:
            return RetroInferRules.Plan(n_sink, window, 0, 0, 1, 0, 0, 0)
        t, k, n = tokens_per_cluster(params, budget.comm), budget.tokens - n_sink - window, s - n_sink - window
        if n < FEWEST:
            raise ConfigError(
                f"a prompt of {s} tokens has {n} between {n_sink} sinks and a window of {window}, and "
                f"{FEWEST} clusters need as many; use a smaller method.window"
            )
        c, n_segments = clusters(s, t, params.segment)
        paid = None
        if params.tokens_per_cluster == "auto":
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
        return RetroInferRules.Plan(n_sink, window, k, c, n_segments, n_retrieved, n_estimated, n_update, n_updates)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        of_cluster = 2 * shape.d_h * ELEMENT_BYTES + SIZE_BYTES + OFFSET_BYTES  # centroid, sum of values
        return held(budget, shape, plan.n_sink + plan.window, shape.h_kv * plan.n_clusters * of_cluster, plan.k)


def ends(params: RetroInferRules.Params, tokens: int) -> tuple[int, int]:
    """Sinks and window of a budget: at most a quarter and a half of it, so that short ones retrieve something."""
    return min(params.n_sink, tokens // 4), min(params.window, tokens // 2)


def tokens_per_cluster(params: RetroInferRules.Params, comm: Fraction) -> int:
    """Those that were asked for; else 16, or as many more as it takes until `comm` pays for the clusters."""
    if not isinstance(params.tokens_per_cluster, str):
        return params.tokens_per_cluster
    return max(TOKENS_PER_CLUSTER, ceil((1 + Fraction(str(params.estimated_share))) / comm))


def clusters(s: int, t: int, segment: int) -> tuple[int, int]:
    """How many clusters a prompt of `s` tokens has, `t` tokens to each, and how many segments they lie in.

    The nearest multiple of 8 and of the segments, the lower of two that are as near, and one multiple at least.
    """
    n_segments = max(round(s / segment), 1)
    multiple = lcm(STEP, n_segments)
    return max(ceil(Fraction(s, t * multiple) - Fraction(1, 2)), 1) * multiple, n_segments


def at_most(c: int, n_segments: int, most: int) -> tuple[int, int]:
    """No more than `most` clusters, as many in each segment; where there are fewer than segments, in one segment."""
    if c <= most:
        return c, n_segments
    return (most // n_segments * n_segments, n_segments) if most >= n_segments else (most, 1)


def cost(c: int, share: float, shape: ModelShape) -> int:
    """Bytes that a KV head reads of `c` clusters: centroids, and of the estimated ones value sums and sizes."""
    of_vector = shape.d_h * ELEMENT_BYTES
    return c * of_vector + round(c * share) * (of_vector + SIZE_BYTES)


def paid_clusters(n_bytes: int, share: float, shape: ModelShape) -> int:
    """The most clusters of which a step may read its part, in a layer."""
    of_head = n_bytes // shape.h_kv
    c = floor(of_head / cost(1000, share, shape) * 1000) + 2
    while cost(c, share, shape) > of_head:
        c -= 1
    return c


def share_of(c: int, share: float) -> int:
    """At least one of `c` clusters."""
    return max(round(c * share), 1)

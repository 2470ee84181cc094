"""What RocketKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/rocketkv.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isqrt, log2

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

TIERS = ("device", "host")
USUAL_ANSWER = 256  # tokens whose chunks a byte budget pays for, where no length of answers is given


class RocketKVRules(Rules):
    title = "RocketKV"
    drops = False
    attends_current = False
    version = 2  # 2: a dense feed reads what the first stage kept, and no places beyond it

    @dataclass(frozen=True)
    class Params:
        window: int
        kernel: int
        tier: str
        budget_rule: str
        longest_answer: int

        def __post_init__(self) -> None:
            each_one_of("method", self, tier=TIERS, budget_rule=("harness", "official"))
            whole_numbers("method", self, window=1, kernel=1, longest_answer=0)
            if self.kernel % 2 == 0:
                raise ConfigError(
                    f"method.kernel={self.kernel} has no middle; use an odd number of tokens, 1 for no pooling"
                )

    @dataclass(frozen=True)
    class Plan:
        """What the two stages keep, read and select of a prompt."""

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
            return RocketKVRules.Plan(s, min(params.window, s), 1, d_h, s)
        if params.budget_rule == "official":
            return official(params, budget.tokens, s, d_h)
        n_kept = min(s, isqrt(floor(budget.ratio * s * s)))
        if n_kept < params.window:
            raise ConfigError(
                f"a first stage that keeps {n_kept} tokens of a prompt of {s} has no room for "
                f"method.window={params.window}; use ratio={least_ratio(params.window, s)} or more, or a shorter window"
            )
        chunk, r = chunk_and_channels(n_kept / (budget.comm * s), d_h)
        n_paid = floor(budget.comm * s * d_h)
        r = min(r, n_paid // ceil(Fraction(n_kept, chunk)))
        if r < 1:
            raise ConfigError(
                f"comm={show(budget.comm)} pays for no channel of the chunks of {n_kept} tokens that a prompt of {s} "
                f"keeps; use comm={least_comm(n_kept, s, d_h)} or more"
            )
        return RocketKVRules.Plan(n_kept, params.window, chunk, r, budget.tokens, n_paid=n_paid)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        # Chunks of generated tokens come on top of what a generated token may take, and are paid for beforehand.
        n_chunks = ceil(Fraction(plan.n_kept + (params.longest_answer or USUAL_ANSWER), plan.chunk))
        index = 2 * shape.h_kv * n_chunks * shape.d_h * ELEMENT_BYTES
        near = params.tier == "device"
        return held(budget, shape, plan.n_kept if near else 0, index, 0 if near else plan.k)


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


def official(params: RocketKVRules.Params, tokens: int, s: int, d_h: int) -> RocketKVRules.Plan:
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
    return RocketKVRules.Plan(min(n_kept, s), params.window, chunk, max(1, r), tokens // 2, grows=False)


def least_ratio(window: int, s: int) -> float:
    """The smallest ratio in thousandths whose first stage has room for the window; at most 1."""
    exact = Fraction(window * window, s * s)
    return min(1.0, ceil(1000 * exact) / 1000)


def least_comm(n_kept: int, s: int, d_h: int) -> float:
    """The smallest `comm`, in millionths, that pays for a channel of every chunk."""
    most = max(min(Fraction(c * c), Fraction(n_kept * d_h, ceil(Fraction(n_kept, c)))) for c in range(1, d_h + 1))
    return ceil(1_000_000 * n_kept / (most * s)) / 1_000_000

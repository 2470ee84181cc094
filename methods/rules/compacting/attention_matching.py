"""What Attention Matching may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/compacting/attention_matching.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, exp, floor

from engine.books.footprint import Footprint
from engine.budget import ELEMENT_BYTES, NO_FRAME, Budget, BudgetRequest, Frame, token_bytes
from engine.checks import each_one_of, whole_number, whole_numbers
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.rules.base import Rules

LEAST_QUERIES = 1024  # rows of a KV head
QUERIES_PER_KEY = 4
REQUEST_TOKENS = 32  # more than any tokenizer makes of the words that ask for a repetition
NAMES = {"highest": "", "omp": "OMP, ", "omp_fast": "OMP fast, "}
LEAST_WEIGHT = 1e-12  # of a key that matching pursuit chose


class AttentionMatchingRules(Rules):
    title = "Attention Matching"
    drops = True

    @dataclass(frozen=True)
    class Params:
        select: str
        score: str
        biases: str
        values: str
        ridge: float
        drop_below: float
        queries: str
        n_queries: int | None
        chunk: int
        bias_steps: int | None
        frame: str
        first_ids: tuple[int, ...] | None

        def __post_init__(self) -> None:
            each_one_of(
                "method", self, select=tuple(NAMES), score=("rms", "mean", "max"), biases=("fitted", "none"),
                values=("fitted", "kept"), queries=("prompt", "moved", "repeat"), frame=("keep", "compact"),
            )  # fmt: skip
            whole_numbers("method", self, n_queries=1, bias_steps=0)
            whole_number("method.chunk", self.chunk, 16)
            if not self.ridge >= 0:
                raise ConfigError(f"method.ridge={self.ridge} is out of range; it is a share of the largest, 0 or more")
            if self.first_ids is not None and (not self.first_ids or min(self.first_ids) < 0):
                raise ConfigError("method.first_ids are the tokens of a request, one or more, each 0 or more")

        @property
        def bounds(self) -> tuple[float, float]:
            """Of a key's weight, the exponential of its bias."""
            return (exp(-3), exp(3)) if self.select == "highest" else (LEAST_WEIGHT, exp(7))

        @property
        def n_steps(self) -> int:
            """Of projected gradients behind the clamped least squares of the weights."""
            if self.bias_steps is not None:
                return self.bias_steps
            return 2 if self.select == "highest" else 0

    @dataclass(frozen=True)
    class Plan:
        frame: Frame  # what stays as it is
        chunks: tuple[tuple[int, int, int], ...]  # first token, end, and how many keys stand for them
        n_queries: int  # reference queries of each query head

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        others = shape.n_own
        if others and params.queries == "repeat":
            raise ConfigError(
                f"{others} of {shape.n_layers} layers of {shape.name} are no full attention, or have a state beside "
                "it, and method.queries=repeat reads the context again behind the whole cache of all layers; use "
                "method.queries=prompt"
            )

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.queries == "moved" and not model.n_rotary:
            raise ConfigError("method.queries=moved needs a model with rotary positions; use method.queries=prompt")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        how = f"{cls.title} ({NAMES[params.select]}{params.queries} queries)"
        return super().label(params, request).replace(cls.title, how)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        biases = ELEMENT_BYTES * shape.h_kv if params.biases == "fitted" else 0
        return Footprint(budget.tokens * (token_bytes(shape) + biases))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s = budget.s_prompt
        frame = budget.frame if params.frame == "keep" else NO_FRAME
        if budget.attends_all:
            return AttentionMatchingRules.Plan(frame, (), 1)
        n_free = budget.tokens - frame.n_prefix - frame.n_suffix
        chunks = divided(frame.n_prefix, s - frame.n_suffix, n_free, params.chunk)
        if min(t for _, _, t in chunks) < 1:
            least = frame.n_prefix + frame.n_suffix + len(chunks)
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {s} leaves no key for each of {len(chunks)} parts "
                f"beside {frame.n_prefix + frame.n_suffix} tokens of the chat template; use "
                f"ratio={ceil(Fraction(1000 * least, s)) / 1000} or more, or method.frame=compact"
            )
        most = max(t for _, _, t in chunks)
        wanted = max(LEAST_QUERIES, QUERIES_PER_KEY * most) if params.n_queries is None else params.n_queries
        n_each = min(ceil(wanted / shape.g), s - frame.n_prefix - frame.n_suffix)
        if n_each * shape.g < 2 * most:
            raise ConfigError(
                f"{most} keys of a part need {2 * most} reference queries or more, and there are {n_each * shape.g}, "
                f"of {shape.g} query heads; use a smaller ratio"
                + ("" if params.n_queries is None else ", or more method.n_queries")
            )
        if params.queries == "repeat" and 2 * s + REQUEST_TOKENS > shape.window:
            raise ConfigError(
                f"to repeat a prompt of {s} tokens takes up to {2 * s + REQUEST_TOKENS} positions, more than the "
                f"{shape.window} of model {shape.name!r}; use method.queries=prompt or shorter prompts"
            )
        return AttentionMatchingRules.Plan(frame, chunks, n_each)


def divided(start: int, end: int, tokens: int, most: int) -> tuple[tuple[int, int, int], ...]:
    """Parts of about equal length, at most `most`, from `start` to `end`, and their shares of the tokens."""
    length = end - start
    n = max(1, ceil(length / most))
    edges = [floor(Fraction(i * length, n)) for i in range(n + 1)]
    shares = [round(Fraction(tokens * edge, max(1, length))) for edge in edges]
    return tuple(
        (start + edges[i], start + edges[i + 1], min(shares[i + 1] - shares[i], edges[i + 1] - edges[i]))
        for i in range(n)
    )

"""What tokens kept by lot may be asked for, and what that makes of a budget: arithmetic, without torch.

Not here: the method (`methods/ranking/random.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

MOST_SEED = 2**63 - 1


class RandomRules(Rules):
    title = "Random tokens"
    drops = True
    is_scorer = True
    comparable = "none"  # pooled, random numbers are random sizes of heads

    @dataclass(frozen=True)
    class Params:
        per: str
        n_sink: int
        window: int
        seed: int
        draws: str

        def __post_init__(self) -> None:
            each_one_of("method", self, per=("head", "layer", "prompt"), draws=("counter", "kvpress"))
            whole_numbers("method", self, n_sink=0, window=0, seed=0)
            if self.seed > MOST_SEED:
                raise ConfigError(f"method.seed={self.seed} is out of range; it is a whole number up to {MOST_SEED}")
            if self.draws == "kvpress" and self.per != "head":
                raise ConfigError(
                    f"method.per={self.per} with method.draws=kvpress is not allowed; kvpress draws for every KV head, "
                    "the same in all layers: use method.per=head with it"
                )

    @dataclass(frozen=True)
    class Plan:
        n_sink: int
        window: int

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        """Ends that would fill the budget shrink, so that half of it is left to the lot."""
        window = min(params.window, budget.tokens // 4)
        return RandomRules.Plan(min(params.n_sink, budget.tokens // 4), window)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if params.per == "head" else [f"one set per {params.per}"]
        notes += ["with ends"] * bool(params.n_sink or params.window) + ["kvpress"] * (params.draws == "kvpress")
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name

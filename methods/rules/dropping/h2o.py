"""What H2O may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/h2o.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.budget import Budget, split
from engine.checks import each_one_of, share, tokens
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules


class H2ORules(Rules):
    title = "H2O"
    drops = True
    comparable = "heads"
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        n_sink: int
        heavy_share: Fraction
        reduce: str
        generated: str
        budget_rule: str

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                reduce=("sum", "max", "query_head"),
                generated=("inside", "on_top"),
                budget_rule=("fair", "official"),
            )
            if self.reduce == "query_head" and self.generated == "inside":
                raise ConfigError(
                    "method.reduce=query_head evicts nothing while decoding; use it with method.generated=on_top"
                )
            tokens("method.n_sink", self.n_sink)
            share("method.heavy_share", self.heavy_share)

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided; the current token comes on top."""

        n_sink: int
        n_heavy: int
        n_recent: int

        @property
        def tokens(self) -> int:
            return self.n_sink + self.n_heavy + self.n_recent

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.budget_rule == "official":
            return official_shares(params, budget)
        fair = split(budget.tokens, params.n_sink, 1 - params.heavy_share)
        return H2ORules.Plan(fair.n_sink, fair.k, fair.n_local)

    @classmethod
    def extends(cls, params: Params) -> bool:
        return params.generated == "inside"

    @classmethod
    def evicts(cls, params: Params) -> str:
        inside = params.generated == "inside"
        return "H2O evicts while it decodes; use method.generated=on_top with it" if inside else ""


def official_shares(params: H2ORules.Params, budget: Budget) -> H2ORules.Plan:
    """The integers of PQCache's authors, sinks on top of the ratio; in double precision, as they compute them.

    They compensate by calling with a larger ratio.
    """
    paid = budget.tokens > budget.nominal_tokens
    ratio = float(budget.ratio + (budget.comm / 2 if paid else 0))
    n_sink = min(params.n_sink, budget.s_prompt)
    besides = budget.s_prompt - n_sink
    n_heavy = int(ratio * float(params.heavy_share) * besides)
    n_recent = int(ratio * float(1 - params.heavy_share) * besides)
    if n_sink + n_heavy + n_recent < 1:
        raise ConfigError(
            f"a share of {ratio:.3g} keeps no token of a prompt of {budget.s_prompt} with "
            "method.budget_rule=official; raise ratio or budget"
        )
    return H2ORules.Plan(n_sink, n_heavy, n_recent)

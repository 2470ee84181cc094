"""Append-only decoding within a budget: a new token is kept or skipped once, by what is left of budget and answer.

A token enters with the chance that the budget has left for it: the tokens that may still be kept over those that the
answer is still expected to have, as a rank among the tokens that are held. Once the budget is full nothing enters.

Paper     none: a rule of this harness for what method=append_only does without a budget
Budget    B tokens of prompt and answer, the last `window` within it; a prompt that it does not hold is refused.
Per step  moved: nothing; resident: h_kv * (B + 1) tokens at most, the current one included, and what method=append_only
          keeps besides.
Fails     where an answer is much longer than `expect`: of what comes after it only the window stays.
Figures   skip while decoding: #6197B3, kite, :
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvbench.engine.declared import Count
from kvbench.methods.decoding.append_only import Appending, Judging
from kvbench.methods.decoding.schedule import DecodingRules, Schedule


class AppendBudget(Appending, DecodingRules):
    takes = ("answer",)

    @dataclass(frozen=True)
    class Params(Judging):
        expect: Count
        interval: ClassVar[int] = 1  # between two judgements

    params: Params

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return [f"{params.expect} expected"]

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return params.window + 1, f"the last method.window={params.window} tokens stay, and one before them"

    @classmethod
    def beside_prompt(cls, params: Params) -> tuple[int, str, dict[str, Any]]:
        return params.window, f"method.window={params.window}", {}

    @classmethod
    def schedule(cls, params: Params, target: int) -> Schedule:
        return Schedule(target, 1)

    @classmethod
    def cycle(cls, plan: Any, s_prompt: int) -> tuple[int, int]:
        return 0, 1

    def limit(self, n: Tensor, p: int) -> Tensor:
        """What is left of the budget over what is expected, as a share of the tokens held."""
        left = self.budget.tokens - n - self.params.window
        to_come = max(1, self.trace.s_prompt + self.params.expect - p)
        return (left / to_come).clamp(0, 1) * (n + 1)

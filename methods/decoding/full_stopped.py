"""Full attention that stops thinking early: what any compression of an answer has to beat.

The cache stays whole, and the answer is cut short where it has cost as many entries as a method that cuts its cache
would have: then the marker that ends a thought and the beginning of an answer are put in its mouth, and it answers. One
length per prompt follows from the budget, never from the question.

Paper     none: full attention with a limit on its answer
Symbols   B, R' of the page = `target`, `stopping_length`.
Per step  moved: nothing; resident: K and V of all tokens.
Differs   the length of the answers that it is compared with is `answer_tokens`, as measured, or the task's allowance.
          An answer that has ended its thought by itself is let go on. Entries after the stop come on top.
Fails     where the thought that is left out was needed.
Figures   others: #6E6E8F, thin diamond, --
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from kvbench.engine.budget import EVERYTHING, Budget, BudgetRequest, resolve
from kvbench.engine.declared import Count, Filled
from kvbench.engine.placement import Whole
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.decoding.schedule import DecodingRules, Schedule


class FullStopped(DecodingRules, SelectiveAttention):
    title = "Full, stopped"
    drops = False

    @dataclass(frozen=True)
    class Params:
        interval: Count
        answer_tokens: Count | None
        marker: str | None
        cue: Annotated[str, Filled("the words that an answer begins with")]

    params: Params
    plan: Schedule

    @classmethod
    def schedule(cls, params: Params, target: int) -> Schedule:
        return Schedule(target, params.interval)

    @classmethod
    def budget_for(cls, params: Params, request: BudgetRequest, s_prompt: int) -> Budget:
        """The budget of full attention, which the method is until it stops; its plan has what was asked for."""
        return replace(resolve(EVERYTHING, s_prompt, drops=False), nominal_tokens=cls.target(params, request))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Schedule:
        return cls.schedule(params, budget.nominal_tokens)

    def arrange(self, layer: int) -> Whole:
        return Whole()

    def cue(self, encode: Callable[[str], Sequence[int]]) -> Cue:
        longest = self.params.answer_tokens or self.store.n_new
        marker = self.params.marker
        text = f"\n{marker}\n\n{self.params.cue}" if marker else self.params.cue
        after = stopping_length(self.plan, self.trace.s_prompt, longest)
        return Cue(after, encode(text), encode(marker or ""))


def stopping_length(schedule: Schedule, s_prompt: int, n_answer: int) -> int:
    """Tokens of a full-attention answer with as many entries as `n_answer` tokens have under a schedule."""
    allowed, n = 0, schedule.target if schedule.cuts_prompt(s_prompt) else s_prompt
    for n_seen in range(s_prompt + 1, s_prompt + n_answer + 1):
        n += 1
        allowed += n
        if schedule.is_due(n, n_seen, s_prompt):
            n = schedule.target
    length = 0
    while length < n_answer and allowed >= s_prompt + length + 1:
        length += 1
        allowed -= s_prompt + length
    return length

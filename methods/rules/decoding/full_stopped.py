"""What the early stop of full attention may be asked for, and when it stops: arithmetic, without torch.

Not here: the method (`methods/decoding/full_stopped.py`).
"""

from dataclasses import dataclass, replace

from engine.budget import EVERYTHING, Budget, BudgetRequest, resolve
from engine.checks import whole_number, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.decoding.schedule import DecodingRules, Schedule


class FullStoppedRules(DecodingRules):
    title = "Full, stopped"
    drops = False

    @dataclass(frozen=True)
    class Params:
        interval: int
        answer_tokens: int | None
        marker: str | None
        cue: str

        def __post_init__(self) -> None:
            whole_number("method.interval", self.interval, 1)
            whole_numbers("method", self, answer_tokens=1)
            if not self.cue:
                raise ConfigError("method.cue is empty; give the words that an answer begins with")

    @classmethod
    def schedule(cls, params: Params, target: int) -> Schedule:
        return Schedule(target, params.interval)

    @classmethod
    def budget_with(cls, params: Params, request: BudgetRequest, s_prompt: int) -> Budget:
        """That of full attention, which it is until it stops; its plan has what was asked for."""
        return replace(resolve(EVERYTHING, s_prompt, drops=False), nominal_tokens=cls.target(params, request))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Schedule:
        return cls.schedule(params, budget.nominal_tokens)


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

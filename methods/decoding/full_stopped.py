"""Full attention that stops thinking early: what any compression of an answer has to beat.

The cache stays whole, and the answer is cut short where it has cost as many entries as a method that cuts its cache
would have: then the marker that ends a thought and the beginning of an answer are put in its mouth, and it answers. One
length per prompt follows from the budget, never from the question.

Symbols   B, R' of the page = `target`, `stopping_length`.
Per step  moved: nothing; resident: K and V of all tokens.
Differs   the length of the answers that it is compared with is `answer_tokens`, as measured, or the task's allowance.
          An answer that has ended its thought by itself is let go on. Entries behind the stop come on top.
Fails     where the thought that is left out was needed.
"""

from engine.sampling.cues import Interruption
from methods.base import SelectiveAttention
from methods.rules.decoding.full_stopped import FullStoppedRules, stopping_length
from methods.rules.decoding.schedule import Schedule


class FullStopped(FullStoppedRules, SelectiveAttention):
    params: FullStoppedRules.Params
    plan: Schedule

    def arrange(self, layer: int) -> None:
        self.store.keep_all(layer)

    def interruption(self) -> Interruption:
        longest = self.params.answer_tokens or self.store.n_new
        marker = self.params.marker
        text = f"\n{marker}\n\n{self.params.cue}" if marker else self.params.cue
        return Interruption(stopping_length(self.plan, self.trace.s_prompt, longest), text, marker)

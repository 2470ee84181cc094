"""Teacher forcing: every variant reads the same given continuation, token by token, through its compressed cache.

A task that asks gets text and scores it. A task that teaches knows what comes next: its `probe` looks on while the
variants read (`engine.decode.Watch`) and says afterwards what each of them was worth. Because all of them read the same
tokens, they can be compared step by step, whatever they would have said themselves.

The first token of a continuation is predicted by the prefill, for all variants alike and without any compression; it is
fed and never scored. The last one is predicted and never fed.

Where a task `wants_full`, a row of full attention is decoded in the same batch, its prompt read by an ordinary pass
even where the variants' own is thinned or sparse. Where a sample has no continuation, full attention's own greedy
answer is it; it is made alone, before anybody reads it, so that it does not depend on who is beside.

Not here: what is measured (`evals/tasks/pg19.py`, `evals/tasks/fidelity.py`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engine.decode import Watch, decode
from engine.errors import ConfigError
from engine.prefill import Trace, prefill
from evals.tasks.base import Sample, Task
from evals.tasks.prompt import Prompt
from methods.base import SelectiveAttention
from methods.full import full_attention

if TYPE_CHECKING:
    from engine.model import Model


@dataclass(frozen=True)
class Mark:
    """What one variant was worth on one sample."""

    score: float
    fields: dict[str, Any]  # columns of its line; `measures` among them are averaged in result.json


class Probe(Watch, Protocol):
    """Looks on while a lesson is read, and marks the variants afterwards."""

    def marks(self) -> list[Mark]:
        """One per variant, in the order of the rows that the probe was given."""
        ...


class Taught(Task):
    """A task whose samples have a continuation, or get full attention's."""

    teaches = True
    wants_full: ClassVar[bool] = False  # whether a row of full attention is decoded beside

    @abstractmethod
    def probe(self, sample: Sample, lesson: "Lesson", rows: Sequence[SelectiveAttention]) -> Probe:
        """Who looks on; row i of the decoding is `rows[i]`, and with `wants_full` one of full attention is behind."""

    def score(self, sample: Sample, prediction: str) -> float:
        raise AssertionError(f"{self.name} scores what a probe saw, not an answer")


def distinct(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples, refused where two have one id: the second would count as answered."""
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise ConfigError(f"two samples are called {sample.id!r}; give texts names of their own")
        seen.add(sample.id)
    return samples


class Lesson:
    """A sample in class: its continuation, and the ordinary pass over its prompt."""

    def __init__(self, model: "Model", task: Taught, sample: Sample, prompt: Prompt, stop_ids: frozenset[int]) -> None:
        self.model, self.task, self.sample, self.prompt = model, task, sample, prompt
        self.stop_ids = stop_ids
        self.forced = sample.forced
        self.plain: Trace | None = None

    @property
    def feed(self) -> tuple[int, ...]:
        """What is fed: all but the last token."""
        assert self.forced, f"sample {self.sample.id} has no continuation yet"
        return self.forced[:-1] or self.forced

    @property
    def n_new(self) -> int:
        return self.sample.max_new_tokens

    def beside(self, trace: Trace, is_plain: bool) -> list[SelectiveAttention]:
        """Rows to decode behind the variants, built; call it before the trace settles."""
        if is_plain:
            self.plain = trace
        elif self.plain is None and (self.task.wants_full or self.forced is None):
            self.plain = prefill(self.model, self.prompt.context_ids)
        if self.forced is None:
            answer = decode(
                self.model, self._plain(), [self._full()], max_new_tokens=self.n_new, stop_ids=self.stop_ids
            ).answers[0]  # fmt: skip
            # A stop token ends an answer and says nothing of what comes behind it.
            self.forced = tuple(answer.ids)
        return [self._full()] if self.task.wants_full else []

    def truth(self) -> Trace:
        """K and V of the prompt as an ordinary pass left them."""
        return self._plain()

    def _plain(self) -> Trace:
        assert self.plain is not None, "no ordinary pass was made or kept"
        return self.plain

    def _full(self) -> SelectiveAttention:
        trace = self._plain()
        row = full_attention(trace.shape, trace.s_prompt).row(trace, self.n_new)
        for layer in self.model.shape.attention_layers:
            row.build(layer)
        row.complete()
        return row

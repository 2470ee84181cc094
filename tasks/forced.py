"""Teacher forcing: every variant reads the same given continuation, token by token, through its compressed cache.

Most tasks score the text that a variant writes. A `ForcedTask` knows the continuation in advance: its `watch` looks on
while rows decode (`kvbench.engine.batch.Watch`) and gives the outcome of each variant at the end. All variants read
the same tokens, so they can be compared step by step, whatever they would have written themselves.

The prefill predicts the first token of a continuation, for all variants alike and without any compression; that token
is fed and never scored. The last token is predicted and never fed.

Where a task `wants_full`, a row of full attention is decoded in the same batch. An ordinary pass reads the prompt for
that row, even where the variants' own pass is pruned or sparse. A sample without a continuation gets full attention's
greedy answer; that answer is decoded in a batch of its own first, so that it does not depend on the variants.

Not here: what is measured (`tasks/pg19.py`, `tasks/fidelity.py`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvbench.engine.batch import Watch
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError, NotFiniteError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.sampling.finite import why_lost
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.full import full_attention
from kvbench.tasks.base import Sample, Task

if TYPE_CHECKING:
    from kvbench.engine.model import Model


@dataclass(frozen=True)
class Outcome:
    """The score of one variant on one sample, and what was measured with it."""

    score: float
    fields: dict[str, Any]  # columns of its line in samples.jsonl; `measures` among them are averaged in result.json
    lost_at: int | None = None  # the first step whose logits, the variant's or full attention's, are no numbers


class ForcedWatch(Watch, Protocol):
    """Watches the decoding of one sample and gives the outcome of every variant."""

    def outcomes(self) -> list[Outcome]:
        """Outcomes, one per variant, in the order of the rows that it was given."""
        ...


class ForcedTask(Task):
    """A task that feeds a continuation to all variants: the sample's own, or full attention's answer."""

    is_forced = True
    wants_full: ClassVar[bool] = False  # whether a row of full attention is decoded with the variants

    @abstractmethod
    def watch(
        self, sample: Sample, continuation: "ForcedContinuation", rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        """The watch on the decoding, whose row i is `rows[i]`; with `wants_full` the last row is full attention."""

    def score(self, sample: Sample, prediction: str) -> float:
        raise AssertionError(f"{self.name} scores what it saw, not an answer")


def distinct(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples themselves. Two with one id are an error: the second would count as answered."""
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise ConfigError(f"two samples are called {sample.id!r}; give texts names of their own")
        seen.add(sample.id)
    return samples


@dataclass
class ForcedContinuation:
    """Tokens that all variants read after one sample's prompt, and the ordinary pass over it."""

    task: ForcedTask
    sample: Sample
    ids: tuple[int, ...] | None  # None: full attention has not answered yet
    prompt_ids: Sequence[int] = ()  # of the ordinary pass, where the variants' own is none
    stop_ids: frozenset[int] = frozenset()  # that end full attention's answer
    plain: Trace | None = None  # the ordinary pass, once it was made

    @property
    def needs_plain(self) -> bool:
        """Whether an ordinary pass has to be made, as the variants' own is none."""
        return self.plain is None and (self.task.wants_full or self.ids is None)

    @property
    def feed(self) -> tuple[int, ...]:
        """The tokens to feed: all but the last one."""
        assert self.ids, f"sample {self.sample.id} has no continuation yet"
        return self.ids[:-1] or self.ids

    def truth(self) -> Trace:
        """K and V of the prompt as the ordinary pass left them."""
        assert self.plain is not None, "no ordinary pass was made or kept"
        return self.plain

    def beside(self, model: "Model") -> list[SelectiveAttention]:
        """The rows to decode after the variants, built: one of full attention, or none.

        Call it before the trace settles.
        """
        if self.needs_plain:
            self.plain = prefill(model, self.prompt_ids)
        if self.ids is None:
            n_new, ends = self.sample.max_new_tokens, self.stop_ids
            (answer,) = decode(model, self.truth(), [self.full()], max_new_tokens=n_new, stop_ids=ends).answers
            if not answer.is_finite:
                raise NotFiniteError(f"full attention, whose answer is fed: {why_lost(len(answer.ids))}")
            self.ids = tuple(answer.ids)  # its last one is never fed
        return [self.full()] if self.task.wants_full else []

    def full(self) -> SelectiveAttention:
        trace = self.truth()
        row = full_attention(trace.shape, trace.s_prompt).row(trace, self.sample.max_new_tokens)
        for layer in trace.shape.attention_layers:
            row.build(layer)
        row.complete()
        return row

"""Parameters of tasks that ask several questions on one context, and what follows from them.

Not here: how a conversation is asked (`evals/batch/answers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.tasks.base import Sample
from kvbench.tasks.lazy import LazySamples
from kvbench.tasks.turns.conversation import Asking, Base, Conversation, Feed, Mode, Turn, line_id


@dataclass(frozen=True, kw_only=True)
class QuestionParams:
    """The keys that such tasks share."""

    questions: Count  # on each context; 1: one question each, asked as ever
    mode: Mode | None  # None: independent, where there are several questions
    feed: Feed
    budget_base: Base

    def __post_init__(self) -> None:
        if self.mode is not None and self.questions == 1:
            raise ConfigError(f"task.mode={self.mode} needs several questions; give task.questions=4, or leave it away")

    @property
    def asking(self) -> Asking | None:
        """How conversations are asked; None where each context has one question."""
        asking = Asking(self.mode or "independent", self.feed, self.budget_base)
        return None if self.questions == 1 else asking


def asked(sample: Sample, turns: Sequence[Turn], asking: Asking) -> Sample:
    """The sample with these turns in place of its question."""
    return replace(
        sample,
        question="",
        answer_prefix="",
        references=(),
        max_new_tokens=max(turn.max_new_tokens for turn in turns),
        conversation=Conversation(tuple(turns), asking),
    )


def one_question(sample: Sample, turn: int) -> Sample:
    """One turn as an ordinary sample, whose question is compressed with the context; turns count from 0."""
    talk = sample.conversation
    assert talk is not None, sample.id
    this = talk.turns[turn]
    own = {"sample": sample.id, "turn": turn + 1, "turns": len(talk.turns), "mode": talk.asking.mode}
    return replace(
        sample,
        id=line_id(sample.id, turn + 1),
        context=sample.context + "".join(this.reads),
        question=this.question,
        answer_prefix=this.answer_prefix,
        references=this.references,
        max_new_tokens=this.max_new_tokens,
        fields={**sample.fields, **this.fields, **own},
        conversation=None,
    )


def apart(
    samples: Sequence[Sample], asking: Asking | None, n_turns: int | Sequence[int] | None = None
) -> Sequence[Sample]:
    """The samples, or where `query_aware` asks so each of their questions as one; `n_turns` that each has."""
    if asking is None or asking.mode != "query_aware":
        return samples
    if n_turns is None:
        n_turns = [len(one.conversation.turns) if one.conversation else 0 for one in samples]
    return QueryAware(samples, [n_turns] * len(samples) if isinstance(n_turns, int) else n_turns)


class QueryAware(LazySamples):
    """Every question of samples with turns as a sample of its own."""

    def __init__(self, samples: Sequence[Sample], n_turns: Sequence[int]) -> None:
        """`n_turns` says how many each sample has."""
        self.samples = samples
        self.places = [(i, turn) for i, n in enumerate(n_turns) for turn in range(n)]
        self.last: tuple[int, Sample] | None = None  # that was made, whose questions follow each other

    def sample(self, i: int) -> Sample:
        place, turn = self.places[i]
        if self.last is None or self.last[0] != place:
            self.last = place, self.samples[place]
        return one_question(self.last[1], turn)

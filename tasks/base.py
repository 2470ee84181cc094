"""`Sample` and `Task`: the interface of a benchmark, which the runner asks and scores through.

A task says where its samples come from and what one answer is worth. Tokenising, chat templates and the split of a
prompt are in `tasks/prompt.py`; the loop over samples is in `evals/loop.py`.

An answer is scored when it is given. A scorer that takes minutes, such as another model, runs later instead: a task
with `scores_later = True` leaves its answers without a score, and `python -m kvbench.evals.rescore --write RUN…` calls
`verdict` for each of them. There a task has its `params`, and nothing else that `__init__` or `samples` would set.

Not here: averages over samples with their intervals (`plots/stats.py` and the runner's result).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvbench.engine.shapes import ModelShape
from kvbench.tasks.download import Piece
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn


@dataclass(frozen=True)
class Sample:
    """One prompt with its references, cut where `compression_scope=context_only` needs it."""

    id: str  # unique within the task and stable between runs
    context: str  # from the template's first character to the end of the block that carries the context
    question: str  # the rest of the user's turn, after the context
    answer_prefix: str = ""  # an answer cue after the user's turn; "" where the template has none
    references: tuple[str, ...] = ()
    max_new_tokens: int = 32
    stop_at_newline: bool = False
    stop_texts: tuple[str, ...] = ()  # the last token of each of these texts ends an answer too
    min_new_tokens: int = 0  # no token ends an answer before it has so many
    system_prompt: str = ""  # the task's own system turn; one that the user sets for the model takes its place
    is_rendered: bool = False  # its texts hold a chat template already, whose ends of turns end an answer too
    use_chat: bool = True  # whether `chat=auto` may wrap this prompt into the model's chat template
    thinks: bool = False  # whether a chat template that can switch thinking on does so
    evidence: tuple[str, ...] = ()  # parts of the context that hold the answer, which a report shows
    fields: Mapping[str, Any] = field(default_factory=dict)  # task-specific columns, written to samples.jsonl
    ids: tuple[int, ...] | None = None  # the prompt as tokens, in a task that cuts its text at tokens
    conversation: Conversation | None = None  # several turns on the context, in place of one question
    forced: tuple[int, ...] | None = None  # the continuation that a `ForcedTask` feeds after the prompt

    @property
    def texts_read(self) -> str:
        """The context, and what its turns read before they ask."""
        return self.context + "".join(text for turn in self.turns for text in turn.reads)

    @property
    def turns(self) -> Sequence[Turn]:
        """Its turns; none where it has one question."""
        return () if self.conversation is None else self.conversation.turns


@dataclass(frozen=True)
class Data:
    """A benchmark's files below a data folder, as `make check` says them and `kvbench fetch` gets them."""

    files: tuple[str, ...]
    without: str  # what can be asked where they are not there
    what: str = "files"  # or "datasets", "folders"
    by_hand: str = ""  # where those are that are put there by hand
    pieces: tuple[Piece, ...] = ()  # that are downloaded
    shipped: Callable[[str], Path | None] | None = None  # where a package brings a file of this name

    def here(self, find: Callable[[str, None], Path | None]) -> list[Path]:
        """The files that are here: in the data folders, where `find` looks, or in a package."""
        found = [find(file, None) or (self.shipped and self.shipped(Path(file).name)) for file in self.files]
        return [path for path in found if path]


class Task(ABC):
    """A benchmark with one set of parameters. `check` runs before a model is loaded, `samples` after."""

    name: ClassVar[str]
    version: ClassVar[int]  # raised whenever a prompt or a score changes; part of a run's identity
    dataset: str  # which part of the benchmark this is, as printed in tables
    data_source: str  # "embedded", "local" or "hub"
    data_digest: str | None = None  # hash of the files that were read; part of a run's identity
    notes: Sequence[str] = ()  # what a reader of the result must know: own wording, excerpts, …
    metric: ClassVar[str | None] = None  # what a score is, by its name in METRICS of results/schema.py
    asking: Asking | None = None  # how its conversations are asked, in a task whose samples have several turns
    is_timed: ClassVar[bool] = False  # cells are timed one after another; such a task is a `Latency`
    is_forced: ClassVar[bool] = False  # a continuation is fed; such a task is a `ForcedTask`
    data: ClassVar[Data | None] = None  # None: it needs none
    packages: ClassVar[Mapping[str, str]] = {}  # optional ones that it needs, and for what of it
    scores_later: ClassVar[bool] = (
        False  # answers get their scores from `kvbench.evals.rescore`, not while a run answers
    )

    @abstractmethod
    def check(self, shape: ModelShape) -> None:
        """Raise `ConfigError` where data are missing or the model's window is too short."""

    def shortest_prompt(self) -> int | None:
        """Tokens that its shortest prompt has at most, where that is known without a tokenizer; `check` ran before."""
        return None

    @abstractmethod
    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        """All samples in their fixed order; the runner applies `limit`."""

    @property
    def is_embedded(self) -> bool:
        """Whether its samples come with the harness, or are drawn."""
        return self.data_source == "embedded"

    def score(self, sample: Sample, prediction: str) -> float:
        """The score of one answer, 0 to 1. A task writes this or `verdict`."""
        return self.verdict(sample, prediction)[0]

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        """The score, and other figures by name that the same look at the answer gives; the run averages both."""
        return self.score(sample, prediction), {}

    def verdict_now(self, sample: Sample, prediction: str) -> tuple[float | None, dict[str, float | None]]:
        """The verdict on an answer that was just given; no score where it is given later."""
        return (None, {}) if self.scores_later else self.verdict(sample, prediction)

    def right_answer(self, sample: Sample) -> str:
        """An answer that is worth the whole score; its references on lines, where the task reads no other form."""
        return "\n".join(sample.references)

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:  # noqa: B027
        """Write the task's own pictures and tables into a finished run's folder; `rows` are its samples.

        They are made again when the answers are scored again, from `rows` and `params` alone.
        """

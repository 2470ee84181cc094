"""Oolong: questions on all lines of a long list, or on all of an episode: how often, which most, when.

Names       Oolong; drawn lists with labels
Asks        counts and comparisons over all lines of a list
Lengths     1k to 4M published, any with source=embedded
Answers     up to 64 tokens
Licence     code MIT; the data's is not stated

Sources     oolong/synth.jsonl and real.jsonl of the data folder, put there by hand from the hub. With `source=embedded`
            lists are drawn (`made.py`), each line with its label, so that nothing needs classifying.
Prompts     the context is a system turn, the question the user's; a model without a chat template gets both as text.
Questions   all those of one context are asked on it, `independent` by default, so that one prefill serves them.
Score       the authors' (`scores.py`); `task.scoring=ours` reads what follows the last word that was asked for. A
            finished run's oolong.csv has means by kind, and what always giving a kind's most frequent answer scores.
Oracle      is no ceiling here: a choice of tokens by attention cannot count what it leaves out.

Not here: lists (`made.py`), scores (`scores.py`).
"""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample, Task
from kvbench.tasks.checks import SLACK, check_choices, check_counts, check_numbers
from kvbench.tasks.lazy import LazySamples, most_units
from kvbench.tasks.oolong import made, scores
from kvbench.tasks.prompt import first_ids, render
from kvbench.tasks.rows import LONGEST_ID, ON_BAD_ROW, BadRow, read_rows
from kvbench.tasks.texts import digest, sentences
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn
from kvbench.tasks.turns.questions import QueryAware

UPSTREAM = "the hub (oolongbench/oolong-synth, oolongbench/oolong-real: one row a line)"
OPENING = "You are a helpful assistant."
HEAD = "The list below has a line for each instance, with its date, its user, its text and its label.\n\n"
CHARACTERS = 8  # of a token at most, by which rows are left out before they are tokenised
FEWEST = 12  # lines
DRAWN_QUESTIONS = 5  # on a list, where nothing else is said


@dataclass(frozen=True)
class Params:
    source: str  # auto: the files; embedded: drawn lists
    form: str  # of files: synth | real
    with_labels: bool  # of synth's files: whether each line shows its label
    lengths: tuple[int, ...]  # tokens of a drawn context with its longest question
    questions: int | None  # on each context, at most; None: all, or 5 on a drawn list
    rows: int | None  # contexts; None: all, or 10 drawn ones of each length
    scoring: str
    max_new_tokens: int
    on_bad_row: str
    mode: str
    feed: str
    budget_base: str

    def __post_init__(self) -> None:
        check_choices(
            self, source=("auto", "local", "embedded"), form=("synth", "real"), scoring=("official", "ours"),
            on_bad_row=ON_BAD_ROW, mode=("independent", "query_aware"),
        )  # fmt: skip
        check_counts(self, "questions", "rows", "max_new_tokens")
        check_numbers(self, lengths=500)
        _ = self.asking

    @property
    def asking(self) -> Asking:
        return Asking(self.mode, self.feed, self.budget_base)


@dataclass(frozen=True)
class Asked:
    """A question on a context."""

    question: str
    answer: str  # as a row has it
    answer_type: str
    kind: str


class Oolong(Task):
    """A conversation for each context, a turn for each question."""

    asking: Asking
    name = "oolong"
    version = 1
    Params = Params
    data = Data(
        ("oolong/synth.jsonl", "oolong/real.jsonl"), "without them drawn lists (task.source=embedded)",
        by_hand=UPSTREAM,
    )  # fmt: skip

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed, self.asking = params, data_dir, seed, params.asking
        self.data_source = "embedded" if params.source == "embedded" else "local"
        labels = "-with-labels" if params.with_labels and params.form == "synth" else ""
        size = f"{'+'.join(map(str, params.lengths))}-tokens"
        self.dataset = f"{size}/drawn" if self.is_embedded else f"{params.form}{labels}"
        self.windows: dict[str, tuple[str, list[Asked]]] = {}
        self.notes: list[str] = []

    @property
    def n_drawn(self) -> int:
        """Questions on a drawn list."""
        return self.params.questions or DRAWN_QUESTIONS

    @property
    def is_real(self) -> bool:
        return self.params.form == "real" and self.params.source != "embedded"

    def check(self, shape: ModelShape) -> None:
        params = self.params
        self.room = shape.window - params.max_new_tokens - SLACK
        self.notes = [f"scoring: {params.scoring}"]
        if self.is_embedded:
            if max(params.lengths) > self.room:
                raise ConfigError(
                    f"task.lengths={list(params.lengths)} and an answer do not fit the {shape.window} tokens of "
                    f"{shape.name}; give shorter ones"
                )
            self.notes += ["drawn lists, not comparable with Oolong", f"instances: {prose.prose_name()}"]
            return
        names = [f"oolong/{params.form}.jsonl"]
        paths = sources.obtain(names, "local", self.data_dir, UPSTREAM, instead="drawn lists")
        key = "context_window_text_with_labels" if params.with_labels and not self.is_real else "context_window_text"
        fields = {"id": (int, str), "context_window_id": (int, str), key: str, "question": str, "answer": (int, str)}
        found = read_rows(paths[0], fields, params.on_bad_row, unique="id", check=check_row(self.is_real))
        for _, row in found.rows:
            _, asked = self.windows.setdefault(str(row["context_window_id"]), (row[key], []))
            kind = str(row.get("task_group") or row.get("task") or row.get("question_type") or "")[:LONGEST_ID]
            asked.append(Asked(row["question"], str(row["answer"]), str(row.get("answer_type", "")), kind))
        self.notes += found.notes
        self.data_digest = digest(paths)

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        samples = Drawn(self, tokenizer) if self.is_embedded else self.published(tokenizer)
        if self.asking.mode != "query_aware":
            return samples
        if isinstance(samples, Drawn):
            return QueryAware(samples, [self.n_drawn] * len(samples))
        return QueryAware(samples, [len(one.conversation.turns) if one.conversation else 0 for one in samples])

    def published(self, tokenizer: Any) -> list[Sample]:
        found, left_out = list[Sample](), 0
        for id, (context, asked) in self.windows.items():
            if len(found) == self.params.rows:
                break
            if len(context) > CHARACTERS * self.room:
                left_out += 1
                continue
            sample = self.sample(tokenizer, id, context, asked[: self.params.questions], {})
            if sample.fields["tokens"] > self.room:
                left_out += 1
            else:
                found.append(sample)
        note = f"{left_out} contexts left out that do not fit {self.room} tokens"
        if left_out and note not in self.notes:
            self.notes.append(note)
        if not found:
            raise ConfigError("no context of Oolong fits the model's window; use a longer model")
        return found

    def sample(
        self, tokenizer: Any, id: str, context: str, asked: Sequence[Asked], fields: Mapping[str, Any]
    ) -> Sample:
        texts = [written(tokenizer, context, one.question) for one in asked]
        cut = texts[0].index(context) + len(context)
        turns = [
            Turn(
                question=text[cut:],
                references=(one.answer,),
                max_new_tokens=self.params.max_new_tokens,
                fields={"kind": one.kind, "answer_type": one.answer_type},
            )
            for one, text in zip(asked, texts, strict=True)
        ]
        return Sample(
            id=id,
            context=texts[0][:cut],
            question="",
            max_new_tokens=self.params.max_new_tokens,
            is_rendered=bool(tokenizer.chat_template),
            use_chat=False,
            conversation=Conversation(tuple(turns), self.asking, is_rendered=True),
            fields={
                "dataset": self.params.form if not self.is_embedded else "drawn",
                "tokens": max(len(first_ids(tokenizer, text)) for text in texts), **fields,
            },
        )  # fmt: skip

    # -- scores --

    def score(self, sample: Sample, prediction: str) -> float:
        (answer,), kind = sample.references, sample.fields["answer_type"]
        if self.is_real:
            return scores.real(prediction, answer).score
        return scores.synth(prediction, answer, kind, ours=self.params.scoring == "ours").score

    def right_answer(self, sample: Sample) -> str:
        (answer,) = sample.references
        return answer if self.is_real else f"Answer: {scores.truth_of(answer)}".removesuffix(" 00:00:00")

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """oolong.csv: by kind, with what the kind's most frequent answer scores on the same questions."""
        kinds: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["score"] is not None:
                kinds.setdefault(row["kind"], []).append(row)
        lines = list[list[Any]]()
        for kind, mine in kinds.items():
            answers = Counter(row["references"][0] for row in mine)
            prior = answers.most_common(1)[0][1] / len(mine)
            mean = sum(row["score"] for row in mine) / len(mine)
            lines.append([kind, len(mine), round(100 * mean, 2), round(100 * prior, 2)])
        write_csv(folder / "oolong.csv", ["kind", "questions", "score_percent", "most_frequent_answer_percent"], lines)


def written(tokenizer: Any, context: str, question: str) -> str:
    """The whole prompt of one question."""
    if not tokenizer.chat_template:
        return f"{OPENING}\n{context}\n\n{question}\n"
    turns = [{"role": "system", "content": f"{OPENING}\n{context}"}, {"role": "user", "content": question}]
    try:
        text = render(tokenizer, turns, False)
    except ConfigError:  # a template without system turns
        text = render(tokenizer, [{"role": "user", "content": f"{OPENING}\n{context}\n\n{question}"}], False)
    if context.strip() not in text or question.strip() not in text:
        raise ConfigError(
            "this model's chat template changes the words of a turn or leaves them out; use another model for Oolong"
        )
    return text


class Drawn(LazySamples):
    """The first list of every length, then the second of every one."""

    def __init__(self, task: Oolong, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.places = [(length, i) for i in range(task.params.rows or 10) for length in task.params.lengths]
        self.lines: dict[int, int] = {}  # that fitted a length last

    def sample(self, i: int) -> Sample:
        length, number = self.places[i]

        def size(n: int) -> int:
            return self.made(length, number, n).fields["tokens"]

        n = most_units(size, length, FEWEST, self.lines.get(length) or length // 40)
        if n is None:
            raise ConfigError(f"task.lengths={length} is too short for a list of {FEWEST} lines; give more tokens")
        self.lines[length] = n
        return self.made(length, number, n)

    def made(self, length: int, number: int, n: int) -> Sample:
        rng = random.Random(f"oolong {self.task.seed} {length} {number}")
        lines = made.draw_lines(rng, n, sentences())
        asked = list[Asked]()
        for kind in itertools.islice(itertools.cycle(made.KINDS), number % len(made.KINDS), None):
            if len(asked) == self.task.n_drawn:
                break
            found = made.draw(random.Random(f"{number} {kind} {len(asked)} {n}"), lines, kind)
            if found is None:  # the next kind instead; labels that come so often can be counted on any list
                continue
            question, right = found
            type = f"ANSWER_TYPE.{made.TYPES[kind]}"
            asked.append(Asked(made.asks(question), made.written(kind, right), type, kind))
        context = HEAD + "\n".join(map(str, lines))
        return self.task.sample(
            self.tokenizer, f"drawn-{length}-{number}", context, asked, {"length": length, "lines": n}
        )


def check_row(is_real: bool) -> Any:
    """A check of what a row must hold beyond the types of its fields."""

    def check(row: Mapping[str, Any]) -> None:
        for key in ("question", "context_window_text", "context_window_text_with_labels"):
            if key in row and (not isinstance(row[key], str) or not row[key].strip()):
                raise BadRow(f"field {key!r} is no text or an empty one")
        if len(str(row["context_window_id"])) > LONGEST_ID:
            raise BadRow(f"field 'context_window_id' has more than {LONGEST_ID} characters")
        if not str(row["answer"]).strip():
            raise BadRow("field 'answer' is empty")
        if not is_real:
            try:
                scores.truth_of(str(row["answer"]))
            except ValueError as error:
                raise BadRow(f"field 'answer' is no list of one value ({str(error)[:80]})") from None

    return check

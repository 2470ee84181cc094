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
from typing import Any, Literal

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import SLACK, Lengths, OnBadRow
from kvbench.tasks.lazy import Drawn, fitting, note_left_out
from kvbench.tasks.oolong import made, scores
from kvbench.tasks.prompt import first_ids, render
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import LONGEST_ID, BadRow
from kvbench.tasks.texts import sentences
from kvbench.tasks.turns.conversation import Asking, Base, Conversation, Feed, Turn
from kvbench.tasks.turns.questions import apart

UPSTREAM = "the hub (oolongbench/oolong-synth, oolongbench/oolong-real: one row a line)"
OPENING = "You are a helpful assistant."
HEAD = "The list below has a line for each instance, with its date, its user, its text and its label.\n\n"
CHARACTERS = 8  # of a token at most, by which rows are left out before they are tokenised
FEWEST = 12  # lines
DRAWN_QUESTIONS = 5  # on a list, where nothing else is said


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local", "embedded"]  # auto: the files; embedded: drawn lists
    form: Literal["synth", "real"]  # of files
    with_labels: bool  # of synth's files: whether each line shows its label
    lengths: Lengths  # of a drawn context with its longest question
    questions: Count | None  # on each context, at most; None: all, or 5 on a drawn list
    rows: Count | None  # contexts; None: all, or 10 drawn ones of each length
    scoring: Literal["official", "ours"]
    max_new_tokens: Count
    on_bad_row: OnBadRow
    mode: Literal["independent", "query_aware"]
    feed: Feed
    budget_base: Base

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


class Oolong(RowsTask):
    """A conversation for each context, a turn for each question."""

    asking: Asking
    name = "oolong"
    version = 1
    Params = Params
    data = Data(
        ("oolong/synth.jsonl", "oolong/real.jsonl"), "without them drawn lists (task.source=embedded)",
        by_hand=UPSTREAM,
    )  # fmt: skip
    place, upstream, instead, unique = "oolong/{name}.jsonl", UPSTREAM, "drawn lists", "id"

    def title(self) -> str:
        labels = "-with-labels" if self.params.with_labels and self.params.form == "synth" else ""
        size = f"{'+'.join(map(str, self.params.lengths))}-tokens"
        return f"{size}/drawn" if self.is_embedded else f"{self.params.form}{labels}"

    @property
    def names(self) -> Sequence[str]:
        return (self.params.form,)

    @property
    def is_real(self) -> bool:
        return self.params.form == "real" and self.params.source != "embedded"

    @property
    def key(self) -> str:
        """The field that has the context."""
        is_labelled = self.params.with_labels and not self.is_real
        return "context_window_text_with_labels" if is_labelled else "context_window_text"

    def fields_of(self, name: str) -> Fields:
        return {
            "id": int | str, "context_window_id": int | str, self.key: str, "question": str, "answer": int | str,
        }  # fmt: skip

    def prepare(self, shape: ModelShape) -> None:
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

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        params = self.params
        if self.is_embedded:
            n = params.questions or DRAWN_QUESTIONS
            cells = dict.fromkeys([(length,) for length in params.lengths], params.rows or 10)
            lists = Lists(self, tokenizer, cells)
            return apart(lists, self.asking, n)
        return apart(self.published(tokenizer), self.asking)

    def published(self, tokenizer: Any) -> list[Sample]:
        windows: dict[str, tuple[str, list[Asked]]] = {}  # contexts with their questions
        for _, row in self.rows[self.params.form]:
            _, asked = windows.setdefault(str(row["context_window_id"]), (row[self.key], []))
            kind = str(row.get("task_group") or row.get("task") or row.get("question_type") or "")[:LONGEST_ID]
            asked.append(Asked(row["question"], str(row["answer"]), str(row.get("answer_type", "")), kind))

        def make(window: tuple[str, tuple[str, list[Asked]]]) -> Sample | None:
            id, (context, asked) = window
            if len(context) > CHARACTERS * self.room:
                return None
            sample = self.context(tokenizer, id, context, asked[: self.params.questions], {})
            return None if sample.fields["tokens"] > self.room else sample

        found, left_out = fitting(windows.items(), self.params.rows, make)
        note_left_out(self.notes, left_out, "contexts", self.room)
        if not found:
            raise ConfigError("no context of Oolong fits the model's window; use a longer model")
        return found

    def context(self, tokenizer: Any, id: str, context: str, asked: Sequence[Asked], fields: Row) -> Sample:
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

    def check_row(self, name: str, row: Row) -> None:
        for key in ("question", "context_window_text", "context_window_text_with_labels"):
            if key in row and (not isinstance(row[key], str) or not row[key].strip()):
                raise BadRow(f"field {key!r} is no text or an empty one")
        if len(str(row["context_window_id"])) > LONGEST_ID:
            raise BadRow(f"field 'context_window_id' has more than {LONGEST_ID} characters")
        if not str(row["answer"]).strip():
            raise BadRow("field 'answer' is empty")
        if not self.is_real:
            try:
                scores.truth_of(str(row["answer"]))
            except ValueError as error:
                raise BadRow(f"field 'answer' is no list of one value ({str(error)[:80]})") from None

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


class Lists(Drawn):
    """Drawn lists, whose units are lines."""

    fewest, of_fewest = FEWEST, f"a list of {FEWEST} lines"

    def size(self, sample: Sample) -> int:
        return sample.fields["tokens"]

    def draw(self, length: int, number: int, n: int) -> Sample:
        rng = random.Random(f"oolong {self.task.seed} {length} {number}")
        lines = made.draw_lines(rng, n, sentences())
        asked = list[Asked]()
        for kind in itertools.islice(itertools.cycle(made.KINDS), number % len(made.KINDS), None):
            if len(asked) == (self.task.params.questions or DRAWN_QUESTIONS):
                break
            found = made.draw(random.Random(f"{number} {kind} {len(asked)} {n}"), lines, kind)
            if found is None:  # the next kind instead; labels that come so often can be counted on any list
                continue
            question, right = found
            type = f"ANSWER_TYPE.{made.TYPES[kind]}"
            asked.append(Asked(made.asks(question), made.written(kind, right), type, kind))
        context = HEAD + "\n".join(map(str, lines))
        fields = {"length": length, "lines": n}
        return self.task.context(self.tokenizer, f"drawn-{length}-{number}", context, asked, fields)

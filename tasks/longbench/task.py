"""LongBench: 21 datasets in six kinds, English, Chinese and code, each with its official metric; LongBench-E's 13.

Names       LongBench; embedded texts
Asks        questions, summaries, examples, lookups and code on texts
Lengths     1.2k to 18k words; 1.5k to 6k tokens with source=embedded
Answers     32 to 512 tokens
Licence     MIT; texts have terms of their own

Sources     longbench/data/<dataset>.jsonl below a data folder. The hub's files are downloaded with `source=hub`, and
            where `task.datasets` names a dataset that is missing and no `data_dir` is given. The set of `embedded.py`
            next to this file is asked with `source=embedded` or by the names of its datasets; it is called "embedded
            texts" wherever scores are shown, and never shares a run with published datasets.
Prompts     longbench/config/dataset2prompt.json; without it wording of our own, and the result says `prompts: own`.
            Six datasets continue a text and are never wrapped into a chat template.
Length      a prompt longer than `max_prompt_tokens` loses its middle: half of the tokens are kept from each end, before
            the chat wrapper comes on top.
Scope       the context part ends where the template's `{context}` ends; `compression_scope=context_only` leaves what
            follows out of the compression.
Question    `question_position=before` moves the question in front of the context, where it no longer helps methods that
            judge tokens by the last queries; `both` has it before and after. Datasets whose query is the text to be
            continued are left out of such a run, and the result says so.
Order       the first row of every dataset, then the second of every one, and so on: `limit` sees all datasets.

A finished run's datasets.csv has a line per dataset, longbench.json the averages: of datasets (as papers on KV caches
have them) and of categories (as the authors have them).

Not here: what is fixed for a dataset, how a row becomes a prompt, and the scores (`datasets.py`, `prompts.py` and
`scores.py` next to this file).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from platform import python_version
from typing import Annotated, Any, Literal

from kvbench.engine.declared import Count, Index, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_json, write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow, Prompts, check_room, chosen, prompt_room
from kvbench.tasks.lazy import in_turns
from kvbench.tasks.longbench import embedded
from kvbench.tasks.longbench.datasets import E13, EMBEDDED, EMBEDDED_ROWS, LISTS, NAMES, PIECES, base_name, facts_of
from kvbench.tasks.longbench.prompts import OWN_PROMPTS, parts_of, shortened, takes_question_first
from kvbench.tasks.longbench.scores import (
    LENGTHS,
    SCORES,
    by_length,
    mean_of,
    official_gives_up,
    percent,
    row_score,
    segmenter,
)
from kvbench.tasks.longbench.shared import WITH_QUESTIONS, by_context, has_questions, history_of
from kvbench.tasks.published import Fields, Made, Row, RowsTask
from kvbench.tasks.rows import BadRow, Text, Texts
from kvbench.tasks.turns.conversation import Turn
from kvbench.tasks.turns.questions import QuestionParams, apart, asked

PROMPTS = "longbench/config/dataset2prompt.json"
MAXLEN = "longbench/config/dataset2maxlen.json"
UPSTREAM = "hub dataset THUDM/LongBench (data.zip; `kvbench fetch longbench` does it, or task.source=hub)"
PROMPTS_SOURCE = "GitHub THUDM/LongBench (LongBench/config; `kvbench fetch longbench` does it)"
INSTEAD = "texts of Python's own manual and sources"
Datasets = Annotated[str | tuple[str, ...], Some(NAMES, tuple(LISTS))]
FIELDS: Fields = {
    "input": str,
    "context": Text,
    "answers": Texts,
    "length": int,
    "all_classes": list[str] | None,
    "_id": str,
}


# --- the task ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params(QuestionParams):
    source: Literal["auto", "hub", "local", "embedded"]  # auto: files, or the embedded datasets by their names
    datasets: Datasets | None  # None: en16, or embedded with source=embedded
    rows: Count | None  # of each dataset; None: all, or six embedded ones
    prompts: Prompts
    question_position: Literal["after", "before", "both"]
    max_prompt_tokens: Count | None  # None: what the window leaves besides the answer
    max_new_tokens: Count | None  # instead of the dataset's own
    extra_new_tokens: Index
    strip: bool
    code_sim: Literal["difflib", "levenshtein"]
    on_bad_row: OnBadRow

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < sum(name in EMBEDDED for name in self.names) < len(self.names):
            raise ConfigError(
                f"task.datasets={list(self.names)} mixes embedded datasets with published ones; run them apart"
            )
        self._check_source()
        self._check_questions()

    def _check_questions(self) -> None:
        if self.questions > 1 and self.question_position != "after":
            raise ConfigError(
                f"task.question_position={self.question_position} puts a question into the context that "
                f"task.questions={self.questions} share; use after"
            )
        without = [name for name in self.names if not has_questions(name)]
        if self.questions > 1 and self.datasets is not None and without:
            raise ConfigError(
                f"{', '.join(without)} has one question for each context, not task.questions={self.questions}; use "
                f"others, such as {', '.join(WITH_QUESTIONS)}"
            )

    def _check_source(self) -> None:
        is_embedded = self.names[0] in EMBEDDED
        if self.datasets is not None and self.source == "embedded" and not is_embedded:
            raise ConfigError(
                f"task.source=embedded has {', '.join(EMBEDDED)}, not {self.names[0]}; leave task.datasets away, or "
                "choose another source"
            )
        if self.datasets is not None and self.source in ("hub", "local") and is_embedded:
            raise ConfigError(
                f"{self.names[0]} is an embedded dataset, not one of task.source={self.source}; use embedded or auto"
            )

    @property
    def listed(self) -> str:
        """One name for the chosen datasets together."""
        usual = "embedded" if self.source == "embedded" else "en16"
        return self.datasets if isinstance(self.datasets, str) else "+".join(self.datasets or (usual,))

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen datasets."""
        return chosen(self.listed if self.datasets is None else self.datasets, LISTS)


class LongBench(RowsTask):
    """The rows of each chosen dataset, in turns."""

    params: Params
    name = "longbench"
    version = 1
    Params = Params
    data = Data(
        tuple(f"longbench/data/{name}.jsonl" for name in LISTS["all21"]), what="datasets", pieces=PIECES,
        without="without all English ones only Python's own texts (task.source=embedded)",
    )  # fmt: skip
    place, upstream, instead, unique = "longbench/data/{name}.jsonl", UPSTREAM, INSTEAD, "_id"
    fields = FIELDS
    words_first = False

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.asked = params.names
        super().__init__(params, data_dir, seed)
        if self.names[0] in EMBEDDED:
            self.data_source = "embedded"
        self.grouped: dict[str, list[list[Row]]] = {}

    def title(self) -> str:
        position = self.params.question_position
        return self.params.listed + ("" if position == "after" else f"/question-{position}")

    # -- what is asked --

    @property
    def names(self) -> Sequence[str]:
        return self.asked

    @property
    def most(self) -> int | None:
        return self.params.rows or (EMBEDDED_ROWS if self.is_embedded else None)

    @property
    def can_be_drawn(self) -> bool:
        return self.params.datasets is None

    def prepare(self, shape: ModelShape) -> None:
        params = self.params
        if not self.is_embedded:
            self.paths = self.files()
        self._leave_out()
        self.templates, self.whose = self._templates()
        self.new_tokens = self._new_tokens()
        metrics = [SCORES[facts_of(name).metric] for name in self.names]
        if any(metric.needs_jieba for metric in metrics):
            segmenter()
        self.notes.append(f"prompts: {self.whose}")
        if params.question_position != "after":
            self.notes.append(f"question_position: {params.question_position}")
        if any(metric.needs_backend for metric in metrics):
            self.notes.append(f"code_sim: {params.code_sim}")
        for name in self.names:
            check_room("dataset", name, self.new_tokens[name], params.max_prompt_tokens, shape)
        if self.is_embedded:
            self.notes.append(f"embedded set {embedded.content_hash(self.names)}, Python {python_version()}")
            self.rows = {name: [*enumerate(embedded.rows_of(name, params.rows))] for name in self.names}

    def files(self) -> dict[str, Path]:
        """The files of rows; where they are fetched, upstream's configuration is fetched with them."""
        return super().files(only=())

    def _find(self, name: str) -> Path | None:
        """A file of upstream's configuration; from the hub, it lies next to the rows."""
        if self.data_source == "hub":
            root = next(iter(self.paths.values())).parents[2]
            return sources.find(name, str(root))
        return None if self.is_embedded else sources.find(name, self.data_dir)

    def _leave_out(self) -> None:
        """Drop the datasets whose question cannot be moved."""
        names = [name for name in self.params.names if self.params.questions == 1 or has_questions(name)]
        position = self.params.question_position
        self.asked = [name for name in names if position == "after" or takes_question_first(name)]
        left_out = ", ".join(name for name in names if name not in self.names)
        if not self.names:
            raise ConfigError(
                f"task.question_position={position} has no meaning for {left_out}, whose query is the text to be "
                "continued; use after, or other task.datasets"
            )
        if left_out:
            self.notes.append(f"left out, since their query is the text to be continued: {left_out}")
        self.paths = {name: path for name, path in self.paths.items() if name in self.names}

    def _templates(self) -> tuple[Mapping[str, str], str]:
        """Prompt templates by dataset, and whose they are."""
        wanted, path = self.params.prompts, self._find(PROMPTS)
        if wanted == "official" and path is None:
            if self.is_embedded:
                raise ConfigError("task.prompts=official has none for embedded datasets; use auto or own")
            path = sources.require(PROMPTS, self.data_dir, PROMPTS_SOURCE)
        self.words = [] if wanted == "own" or path is None else [path]
        return (checked_config(self.words[0], self.names, str), "official") if self.words else (OWN_PROMPTS, "own")

    def _new_tokens(self) -> dict[str, int]:
        """Longest answer of each dataset, in tokens."""
        fixed = {name: facts_of(name).max_new_tokens for name in self.names}
        if (path := self._find(MAXLEN)) is not None:
            self.words = [*self.words, path]
            table = checked_config(path, self.names, int)
            fixed = {name: table[base_name(name)] for name in self.names}
        given, extra = self.params.max_new_tokens, self.params.extra_new_tokens
        return {name: (given or n) + extra for name, n in fixed.items()}

    def check_row(self, name: str, row: Row) -> None:
        if SCORES[facts_of(name).metric].needs_classes and not row["all_classes"]:
            raise BadRow("field 'all_classes' is empty, and the score needs it")

    def check(self, shape: ModelShape) -> None:
        super().check(shape)
        if self.asking is not None:
            self._check_contexts()

    def _check_contexts(self) -> None:
        """Refuse more questions than any context has, and note where contexts have fewer."""
        asked_for = self.params.questions
        counts = [len(group) for name in self.names for group in self.contexts(name)]
        if max(counts, default=0) < asked_for:
            raise ConfigError(
                f"task.questions={asked_for} is more than any context of {', '.join(self.names)} has; give "
                f"{max(counts, default=0)} or fewer"
            )
        if min(counts) < asked_for:
            fewer = sum(n < asked_for for n in counts)
            self.notes.append(
                f"questions: {fewer} of {len(counts)} contexts have fewer than {asked_for}, the least {min(counts)}"
            )

    # -- samples --

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if self.asking is None:
            return super().samples(tokenizer)
        places = in_turns([[(name, group) for group in self.contexts(name)] for name in self.names])
        samples = Made(places, partial(self.conversation, tokenizer))
        return apart(samples, self.asking, [len(group) for _, group in places])

    def contexts(self, name: str) -> list[list[Row]]:
        """The rows of a dataset that are asked on each of its contexts."""
        if name not in self.grouped:
            self.grouped[name] = by_context(name, [row for _, row in self.rows[name]], self.params.questions)
        return self.grouped[name][: self.most]

    def conversation(self, tokenizer: Any, name: str, rows: Sequence[Row]) -> Sample:
        """Several rows with one context, which is cut for the longest of their questions."""
        assert self.asking is not None, name
        samples = [self.sample(tokenizer, name, 0, row, len(rows)) for row in rows]
        first = min(samples, key=lambda sample: len(sample.context))
        turns = [
            Turn(
                question=sample.question,
                references=sample.references,
                max_new_tokens=sample.max_new_tokens,
                history=history_of(name, sample.references[0]),
                fields={"all_classes": sample.fields["all_classes"]},
            )
            for sample in samples
        ]
        return asked(first, turns, self.asking)

    def sample(self, tokenizer: Any, name: str, number: int, row: Row, n_turns: int = 1) -> Sample:
        """One row in its prompt, cut to the longest that is allowed with as many turns of its kind."""
        facts, new_tokens = facts_of(name), self.new_tokens[name]
        position = self.params.question_position
        parts = parts_of(name, self.templates[base_name(name)], row, position)
        limit = self.params.max_prompt_tokens or prompt_room(self.window, (2 * n_turns - 1) * new_tokens)
        context, question, n_before, n_after = shortened(tokenizer, *parts, limit)
        return Sample(
            id=f"{name}-{row['_id']}",
            context=context,
            question=question,
            references=tuple(row["answers"]),
            max_new_tokens=new_tokens,
            stop_at_newline=facts.stop_at_newline,
            stop_texts=("\n",) if base_name(name) == "samsum" else (),
            min_new_tokens=int(base_name(name) == "samsum" or name in EMBEDDED),
            use_chat=facts.use_chat,
            fields={
                "dataset": name,
                "all_classes": row["all_classes"],
                "length": row["length"],
                "prompts": self.whose,
                "question_position": position,
                "original_prompt_tokens": n_before,
                "was_cut": n_after != n_before,
            },
        )

    # -- scores --

    def judge(self, row: Mapping[str, Any], prediction: str, references: Sequence[str]) -> float:
        facts = facts_of(row["dataset"])
        return row_score(
            facts.metric,
            prediction.lstrip() if self.params.strip else prediction,
            references,
            all_classes=row["all_classes"],
            one_line=facts.one_line,
            backend=self.params.code_sim,
        )

    def score(self, sample: Sample, prediction: str) -> float:
        return self.judge(sample.fields, prediction, sample.references)

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """datasets.csv, and the averages in longbench.json."""
        scored = [row for row in rows if row["score"] is not None]
        names = list(dict.fromkeys(row["dataset"] for row in scored))
        table = {name: summary([row for row in scored if row["dataset"] == name]) for name in names}
        header = ["dataset", "category", "metric", "rows", "score_percent", *LENGTHS, "official_gives_up"]
        lines = ([name, facts_of(name).category, facts_of(name).metric, *table[name].values()] for name in names)
        write_csv(folder / "datasets.csv", header, lines)
        averages = averages_of({name: line["score"] for name, line in table.items()})
        text = json.dumps({"title": title, **averages, "notes": list(self.notes)}, indent=1)
        (folder / "longbench.json").write_text(text + "\n", encoding="utf-8")


# --- summaries ---------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A dataset's line: rows, score, LongBench-E's three scores, and rows on which the official script gives up."""
    scores = [row["score"] for row in rows]
    name = rows[0]["dataset"]
    buckets: dict[str, float | None] = dict.fromkeys(LENGTHS)
    if name in E13:
        buckets = by_length(scores, [row["length"] for row in rows])
    metric = facts_of(name).metric
    lost = [official_gives_up(metric, row["prediction"], row["references"]) for row in rows]
    return {"rows": len(rows), "score": percent(scores), **buckets, "lost": sum(lost)}


def averages_of(scores: Mapping[str, float]) -> dict[str, Any]:
    """Means of datasets' scores, and of categories' means of them; rounded where the official tables round."""
    categories: dict[str, list[float]] = {}
    for name, score in scores.items():
        categories.setdefault(facts_of(name).category, []).append(score)
    means = {category: mean_of(each) for category, each in categories.items()}
    return {
        "datasets": dict(scores),
        "mean_of_datasets": mean_of(list(scores.values())),
        "categories": means,
        "mean_of_categories": mean_of([mean for mean in means.values() if mean is not None]),
    }


def checked_config(path: Path, names: Sequence[str], kind: type) -> Mapping[str, Any]:
    """One of upstream's two tables, with a value of that kind for every chosen dataset."""
    table = read_json(path, "fetch it again")
    for name in map(base_name, names):
        value = table.get(name) if isinstance(table, dict) else None
        is_usable = "{context}" in value if isinstance(value, str) else type(value) is int and value > 0
        if not isinstance(value, kind) or not is_usable:
            raise ConfigError(f"{path} has nothing usable for {name}; get it from {PROMPTS_SOURCE}")
    return table

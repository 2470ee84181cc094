"""LongBench: 21 datasets in six kinds, English, Chinese and code, each with its official metric; LongBench-E's 13.

Sources     longbench/data/<dataset>.jsonl below a data folder, or fetched from the hub: with `source=hub`, or where
            `task.datasets` names what is missing and `data_dir` no folder. Without both the set of
            `embedded.py` beside this file, whose datasets have names of their own and are never mixed with published
            ones.
Prompts     longbench/config/dataset2prompt.json; without it wording of our own, and the result says `prompts: own`.
            Six datasets continue a text and are never wrapped into a chat template.
Length      a prompt longer than `max_prompt_tokens` loses its middle: half of the tokens are kept from each end, before
            the chat wrapper comes on top.
Scope       the context part ends where the template's `{context}` ends; `compression_scope=context_only` leaves what
            follows out of the compression.
Question    `question_position=before` moves it in front of the context, which takes the hint from methods that judge
            tokens by the last queries; `both` repeats it there. Datasets whose query is the text to be continued are
            left out of such a run, and the result says so.
Order       the first row of every dataset, then the second of every one, and so on: `limit` sees all datasets.

A finished run's datasets.csv has a line per dataset, longbench.json the averages: of datasets (as papers on KV caches
have them) and of categories (as the authors have them).

Not here: the scores (`evals/tasks/longbench/scores.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from platform import python_version
from typing import Any

from engine.errors import ConfigError, unknown_name
from engine.shapes import ModelShape
from evals.foreign import CsvWriter, read_json
from evals.tasks import download as fetch
from evals.tasks import sources as data
from evals.tasks.base import Sample, Task
from evals.tasks.longbench import embedded as longbench_embedded
from evals.tasks.longbench.scores import (
    BACKENDS,
    LENGTHS,
    SCORES,
    by_length,
    mean_of,
    official_gives_up,
    percent,
    row_score,
    segmenter,
)
from evals.tasks.prompt import middle_truncate
from evals.tasks.rows import ON_BAD_ROW, BadRow, read_rows
from evals.tasks.texts import digest

FOLDER = "longbench/data"
PROMPTS = "longbench/config/dataset2prompt.json"
MAXLEN = "longbench/config/dataset2maxlen.json"
UPSTREAM = "hub dataset THUDM/LongBench (data.zip; `python -m evals.fetch longbench` does it, or task.source=hub)"
PROMPTS_SOURCE = "GitHub THUDM/LongBench (LongBench/config; `python -m evals.fetch longbench` does it)"
POSITIONS = ("after", "before", "both")
SLACK = 100  # tokens kept free for a chat wrapper, and for what a second tokenising may add
E_SUFFIX = "_e"
FIELDS: dict[str, type | tuple[type, ...]] = {
    "input": str,
    "context": str,
    "answers": list,
    "length": int,
    "all_classes": (list, type(None)),
    "_id": str,
}


@dataclass(frozen=True)
class Dataset:
    """What is fixed for a dataset, whoever's prompts are used."""

    category: str
    metric: str
    max_new_tokens: int
    language: str = "en"
    use_chat: bool = True  # whether the prompt is an instruction; otherwise a text to be continued
    in_e: bool = False
    one_line: bool = False  # the score looks at the first line alone
    stop_at_newline: bool = False  # of the embedded datasets


SINGLE, MULTI, SUMMARY, SHOTS = "single-doc QA", "multi-doc QA", "summarization", "few-shot"
DATASETS = {
    "narrativeqa": Dataset(SINGLE, "qa_f1", 128),
    "qasper": Dataset(SINGLE, "qa_f1", 128, in_e=True),
    "multifieldqa_en": Dataset(SINGLE, "qa_f1", 64, in_e=True),
    "multifieldqa_zh": Dataset(SINGLE, "qa_f1_zh", 64, "zh"),
    "hotpotqa": Dataset(MULTI, "qa_f1", 32, in_e=True),
    "2wikimqa": Dataset(MULTI, "qa_f1", 32, in_e=True),
    "musique": Dataset(MULTI, "qa_f1", 32),
    "dureader": Dataset(MULTI, "rouge_zh", 128, "zh"),
    "gov_report": Dataset(SUMMARY, "rouge", 512, in_e=True),
    "qmsum": Dataset(SUMMARY, "rouge", 512),
    "multi_news": Dataset(SUMMARY, "rouge", 512, in_e=True),
    "vcsum": Dataset(SUMMARY, "rouge_zh", 512, "zh"),
    "trec": Dataset(SHOTS, "classification", 64, use_chat=False, in_e=True, one_line=True),
    "triviaqa": Dataset(SHOTS, "qa_f1", 32, use_chat=False, in_e=True, one_line=True),
    "samsum": Dataset(SHOTS, "rouge", 128, use_chat=False, in_e=True, one_line=True),
    "lsht": Dataset(SHOTS, "classification", 64, "zh", use_chat=False, one_line=True),
    "passage_count": Dataset("synthetic", "count", 32, in_e=True),
    "passage_retrieval_en": Dataset("synthetic", "retrieval", 32, in_e=True),
    "passage_retrieval_zh": Dataset("synthetic", "retrieval_zh", 32, "zh"),
    "lcc": Dataset("code", "code_sim", 64, "code", use_chat=False, in_e=True),
    "repobench-p": Dataset("code", "code_sim", 64, "code", use_chat=False, in_e=True),
}
EMBEDDED = {
    name: Dataset(one.category, one.metric, one.max_new_tokens, use_chat=False, stop_at_newline=True)
    for name, one in longbench_embedded.DATASETS.items()
}
EMBEDDED_ROWS = 6  # of each embedded dataset, without task.rows: a run then takes minutes on two cores
E13 = tuple(f"{name}{E_SUFFIX}" for name, one in DATASETS.items() if one.in_e)
LISTS = {
    "all21": tuple(DATASETS),
    "en16": tuple(name for name, one in DATASETS.items() if one.language != "zh"),
    "zh5": tuple(name for name, one in DATASETS.items() if one.language == "zh"),
    # PQCache's Table 2: the English ones without code
    "paper14": tuple(name for name, one in DATASETS.items() if one.language == "en"),
    "e13": E13,
    "embedded": tuple(EMBEDDED),
}
NAMES = (*DATASETS, *E13, *EMBEDDED)

TEXT_QA = (
    "A text:\n\n{context}\n\nA question about the text, to be answered in a few words.\nQuestion: {input}\nAnswer:"
)
PASSAGES_QA = (
    "Some passages:\n\n{context}\n\nA question that these passages answer, to be answered in a few words.\n"
    "Question: {input}\nAnswer:"
)
CODE = "Source code that breaks off, and its next line.\n"
OWN_PROMPTS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), TEXT_QA),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), PASSAGES_QA),
    "multifieldqa_zh": "一篇文章\n\n{context}\n\n请用几个字回答关于这篇文章的问题\n问题: {input}\n答案:",
    "dureader": "几篇文章\n\n{context}\n\n请根据这些文章回答问题\n问题: {input}\n答案:",
    "gov_report": "A report:\n\n{context}\n\nSum this report up on one page.\nSummary:",
    "qmsum": "The record of a meeting:\n\n{context}\n\nA request about the meeting, to be met in a few sentences.\n"
    "Request: {input}\nAnswer:",
    "multi_news": "Articles on one event:\n\n{context}\n\nSum these articles up on one page.\nSummary:",
    "vcsum": "一次会议的记录\n\n{context}\n\n会议的总结:",
    "trec": "Questions and the type of each.\n\n{context}\n{input}",
    "triviaqa": "Passages, each with a question and its short answer.\n\n{context}\n\n{input}",
    "samsum": "Conversations, each with a summary of a few sentences.\n\n{context}\n\n{input}",
    "lsht": "新闻和它们的类别\n\n{context}\n{input}",
    "passage_count": "Paragraphs, some of which stand there more than once.\n\n{context}\n\nSay how many different "
    "paragraphs there are, as a number alone.\nThe number: ",
    "passage_retrieval_en": "Numbered paragraphs:\n\n{context}\n\nA summary of one of them:\n\n{input}\n\nSay which "
    'paragraph it is of, in the form "Paragraph 1".\nIt is of: ',
    "passage_retrieval_zh": "编了号的段落\n\n{context}\n\n其中一段的摘要\n\n{input}\n\n请说出它是哪一段的摘要, "
    '例如"段落1"\n答案:',
    "lcc": CODE + "{context}Next line:\n",
    "repobench-p": CODE + "{context}{input}Next line:\n",
    **{name: one.template for name, one in longbench_embedded.DATASETS.items()},
}  # fmt: skip


def base_name(dataset: str) -> str:
    """`qasper` for `qasper_e`."""
    return dataset.removesuffix(E_SUFFIX) if dataset in E13 else dataset


def facts_of(dataset: str) -> Dataset:
    return EMBEDDED.get(dataset) or DATASETS[base_name(dataset)]


# --- one prompt --------------------------------------------------------------------------------


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Named fields put in their places, once: braces in a context stay."""
    parts = template.split("{context}")
    return row["context"].join(part.replace("{input}", row["input"]) for part in parts)


def question_block(dataset: str, template: str) -> tuple[str, str] | None:
    """What follows the context, cut into the question and the cue; None where a template has only a cue or a query."""
    if not takes_question_first(dataset):
        return None
    tail = template.partition("{context}")[2]
    if dataset in EMBEDDED:
        return tail, longbench_embedded.DATASETS[dataset].cue
    if "{input}" in tail and "passage_retrieval" not in dataset:
        head, _, cue = tail.partition("{input}")
        return head + "{input}", cue
    block, _, cue = tail.rpartition("\n")
    return (block, cue) if block.strip() else None


def parts_of(dataset: str, template: str, row: Mapping[str, Any], position: str) -> tuple[str, str]:
    """The filled prompt up to the end of its context, and the rest."""
    head, _, tail = template.partition("{context}")
    before, after = fill(head, row) + row["context"], fill(tail, row)
    found = question_block(dataset, template)
    if position == "after" or found is None:
        return before, after
    question = fill(found[0], row).strip()
    if position == "before":
        after = f"\n\n{fill(found[1], row).lstrip()}"
    return f"{question}\n\n{before}", after


def takes_question_first(dataset: str) -> bool:
    """Whether the question can stand before the context: not where the query is continued."""
    if dataset in EMBEDDED:
        return bool(longbench_embedded.DATASETS[dataset].cue)
    return facts_of(dataset).use_chat


def shortened(tokenizer: Any, before: str, after: str, limit: int) -> tuple[str, str, int, int]:
    """`middle_truncate` of the whole prompt, parted again; with the token counts."""
    text, n_before, n_after = middle_truncate(tokenizer, before + after, limit)
    if n_before <= limit or text.endswith(after):
        cut = len(text) - len(after)
    elif text.startswith(before):  # the question is what was cut
        cut = len(before)
    else:  # the seam is within what was cut, or the tokenizer changes what goes through it
        n_tail = min(len(tokenizer.encode(after, add_special_tokens=False)), limit // 2)
        ids = tokenizer.encode(before + after)
        cut = len(text) - len(tokenizer.decode(ids[len(ids) - n_tail :], skip_special_tokens=True))
    return text[:cut], text[cut:], n_before, n_after


def check_row(dataset: str) -> Any:
    """What a row must hold beyond the types of its fields."""
    needs_classes = SCORES[facts_of(dataset).metric].needs_classes

    def check(row: Mapping[str, Any]) -> None:
        answers = row["answers"]
        if not answers or not all(isinstance(one, str) for one in answers):
            raise BadRow("field 'answers' is no list of texts, or empty")
        if not row["context"]:
            raise BadRow("field 'context' is empty")
        classes = row["all_classes"]
        if needs_classes and not classes:
            raise BadRow("field 'all_classes' is empty, and the score needs it")
        if classes and not all(isinstance(one, str) for one in classes):
            raise BadRow("field 'all_classes' is no list of texts")

    return check


# --- the task ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params:
    source: str  # auto: files if all are there, else embedded
    datasets: str | tuple[str, ...] | None  # names, or a list's; None: en16 or embedded
    rows: int | None  # of each dataset; None: all, or six embedded ones
    prompts: str  # auto: upstream's if they are there
    question_position: str
    max_prompt_tokens: int | None  # None: what the window leaves beside the answer
    max_new_tokens: int | None  # instead of the dataset's own
    extra_new_tokens: int
    strip: bool
    code_sim: str
    on_bad_row: str

    def __post_init__(self) -> None:
        choices = {
            "source": ("auto", "hub", "local", "embedded"),
            "prompts": ("auto", "official", "own"),
            "question_position": POSITIONS,
            "code_sim": BACKENDS,
            "on_bad_row": ON_BAD_ROW,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(f"task.{name}", str(getattr(self, name)), allowed)
        for name in ("rows", "max_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"task.{name}={value} is below 1; give 1 or more")
        if self.extra_new_tokens < 0:
            raise ConfigError(f"task.extra_new_tokens={self.extra_new_tokens} is negative; give 0 or more")
        for name in self.names:
            if name not in NAMES:
                raise unknown_name("task.datasets", name, (*NAMES, *LISTS))
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ConfigError(f"task.datasets={list(self.names)} is empty or has a name twice")
        if 0 < sum(name in EMBEDDED for name in self.names) < len(self.names):
            raise ConfigError(
                f"task.datasets={list(self.names)} mixes embedded datasets with published ones; run them apart"
            )
        self._check_source()

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
    def names(self) -> tuple[str, ...]:
        """The chosen datasets, where it does not matter what is found; `LongBench` decides on null."""
        chosen = "embedded" if self.datasets is None else self.datasets
        return LISTS.get(chosen, (chosen,)) if isinstance(chosen, str) else chosen


class LongBench(Task):
    """The rows of each chosen dataset, in turns."""

    name = "longbench"
    version = 1
    Params = Params

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir = params, data_dir
        self.names, self.paths = self._choose()
        self.notes: list[str] = []
        self.word_files: list[Path] = []  # upstream's configuration, as far as it is used
        self._leave_out()
        self.templates, self.whose = self._templates()
        self.new_tokens = self._new_tokens()
        given = params.datasets
        listed = given if isinstance(given, str) else "+".join(given or ())
        self.dataset = listed or ("en16" if self.paths else "embedded")
        if params.question_position != "after":
            self.dataset += f"/question-{params.question_position}"
        self.rows: dict[str, tuple[Mapping[str, Any], ...]] = {}
        self.window = 0

    # -- what is asked --

    def _choose(self) -> tuple[tuple[str, ...], dict[str, Path]]:
        """The datasets and their files; no files where they are embedded ones."""
        params, names = self.params, self.params.names
        if params.datasets is None and params.source != "embedded":
            names = LISTS["en16"]
        self.data_source = "embedded"
        if names[0] in EMBEDDED:
            return names, {}
        found = {name: data.find(f"{FOLDER}/{name}.jsonl", self.data_dir) for name in names}
        if params.source == "hub":
            found = self._fetched(names)
        elif params.source == "auto" and self.data_dir is None and not all(found.values()):
            if params.datasets is None:
                return LISTS["embedded"], {}
            fetch.fetch("longbench", fetch.cache_root())  # where `find` looks too
            found = {name: data.find(f"{FOLDER}/{name}.jsonl", None) for name in names}
        self.data_source = "hub" if params.source == "hub" else "local"
        return names, {
            name: path or data.require(f"{FOLDER}/{name}.jsonl", self.data_dir, UPSTREAM)
            for name, path in found.items()
        }

    def _fetched(self, names: Sequence[str]) -> dict[str, Path | None]:
        """The hub's files, downloaded where they are missing, into the folder that was named or the cache."""
        self.root = Path(self.data_dir).expanduser() if self.data_dir else fetch.cache_root()
        fetch.fetch("longbench", self.root)
        return {name: self.root / FOLDER / f"{name}.jsonl" for name in names}

    def _find(self, name: str) -> Path | None:
        """A file of upstream's configuration."""
        folder = str(self.root) if self.data_source == "hub" else self.data_dir
        return data.find(name, folder)

    def _leave_out(self) -> None:
        """Without the datasets whose question cannot be moved."""
        if self.params.question_position == "after":
            return
        kept = tuple(name for name in self.names if takes_question_first(name))
        left_out = [name for name in self.names if name not in kept]
        if not kept:
            raise ConfigError(
                f"task.question_position={self.params.question_position} has no meaning for "
                f"{', '.join(left_out)}, whose query is the text to be continued; use after, or other task.datasets"
            )
        if left_out:
            self.notes.append(f"left out, since their query is the text to be continued: {', '.join(left_out)}")
        self.names, self.paths = kept, {n: p for n, p in self.paths.items() if n in kept}

    def _templates(self) -> tuple[Mapping[str, str], str]:
        """Prompt templates by dataset, and whose they are."""
        wanted = self.params.prompts
        path = None if self.data_source == "embedded" else self._find(PROMPTS)
        if wanted == "official" and path is None:
            if self.data_source == "embedded":
                raise ConfigError("task.prompts=official has none for embedded datasets; use auto or own")
            path = data.require(PROMPTS, self.data_dir, PROMPTS_SOURCE)
        if wanted == "own" or path is None:
            return OWN_PROMPTS, "own"
        self.word_files.append(path)
        return checked_config(path, self.names, str), "official"

    def _new_tokens(self) -> dict[str, int]:
        """Longest answer of each dataset, in tokens."""
        fixed = {name: facts_of(name).max_new_tokens for name in self.names}
        path = None if self.data_source == "embedded" else self._find(MAXLEN)
        if path is not None:
            self.word_files.append(path)
            table = checked_config(path, self.names, int)
            fixed = {name: table[base_name(name)] for name in self.names}
        given, extra = self.params.max_new_tokens, self.params.extra_new_tokens
        return {name: (given or n) + extra for name, n in fixed.items()}

    def check(self, shape: ModelShape) -> None:
        self.window = shape.window
        if any(SCORES[facts_of(name).metric].needs_jieba for name in self.names):
            segmenter()
        self.notes.append(f"prompts: {self.whose}")
        if self.params.question_position != "after":
            self.notes.append(f"question_position: {self.params.question_position}")
        if any(SCORES[facts_of(name).metric].needs_backend for name in self.names):
            self.notes.append(f"code_sim: {self.params.code_sim}")
        if self.data_source == "embedded":
            content = longbench_embedded.content_hash()
            self.notes.append(f"embedded set {content}, Python {python_version()}")
        else:
            self.data_digest = digest([*self.paths.values(), *self.word_files])
        for name in self.names:
            self._check_room(name, shape)
            if self.data_source == "embedded":
                self.rows[name] = longbench_embedded.rows()[name]
                continue
            rows = read_rows(
                self.paths[name], FIELDS, self.params.on_bad_row, unique="_id", check=check_row(name)
            )  # fmt: skip
            self.notes += rows.notes
            self.rows[name] = tuple(row for _, row in rows.rows)

    def _check_room(self, name: str, shape: ModelShape) -> None:
        room = shape.window - self.new_tokens[name] - SLACK
        limit = self.params.max_prompt_tokens
        if room < 2 * SLACK or (limit or 0) > room:
            raise ConfigError(
                f"{name} answers with up to {self.new_tokens[name]} tokens, which leaves {max(room, 0)} of the "
                f"{shape.window} of {shape.name} for the prompt"
                + (f", not task.max_prompt_tokens={limit}" if limit else "")
                + "; give smaller ones, or leave the dataset out of task.datasets"
            )

    # -- samples --

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return InTurns(self, tokenizer)

    def n_rows(self, name: str) -> int:
        """How many rows of a dataset are asked."""
        most = self.params.rows
        if most is None and self.data_source == "embedded":
            most = EMBEDDED_ROWS
        there = len(self.rows[name])
        return there if most is None else min(most, there)

    def sample(self, tokenizer: Any, name: str, row: Mapping[str, Any]) -> Sample:
        """One row in its prompt, as long as it may be."""
        facts, new_tokens = facts_of(name), self.new_tokens[name]
        position = self.params.question_position
        parts = parts_of(name, self.templates[base_name(name)], row, position)
        limit = self.params.max_prompt_tokens or self.window - new_tokens - SLACK
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
        asked = [row for row in rows if row["score"] is not None]
        names = list(dict.fromkeys(row["dataset"] for row in asked))
        table = {name: summary([row for row in asked if row["dataset"] == name]) for name in names}
        with (folder / "datasets.csv").open("w", newline="", encoding="utf-8") as file:
            writer = CsvWriter(file)
            writer.writerow(
                [
                    "dataset",
                    "category",
                    "metric",
                    "rows",
                    "score_percent",
                    *LENGTHS,
                    "official_gives_up",
                ]
            )
            for name in names:
                facts, line = facts_of(name), table[name]
                writer.writerow([name, facts.category, facts.metric, *line.values()])
        averages = averages_of({name: line["score"] for name, line in table.items()})
        text = json.dumps({"title": title, **averages, "notes": list(self.notes)}, indent=1)
        (folder / "longbench.json").write_text(text + "\n", encoding="utf-8")


class InTurns(Sequence[Sample]):
    """The first row of every dataset, then the second of every one; made when asked for."""

    def __init__(self, task: LongBench, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        columns = [[(name, i) for i in range(task.n_rows(name))] for name in task.names]  # a list per dataset
        turns = zip_longest(*columns)
        self.places = [place for turn in turns for place in turn if place is not None]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        name, number = self.places[i]
        return self.task.sample(self.tokenizer, name, self.task.rows[name][number])


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
    means = {category: mean_of(found) for category, found in categories.items()}
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

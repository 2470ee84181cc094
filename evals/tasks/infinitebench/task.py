"""InfiniteBench: twelve tasks on prompts of 44k to 200k tokens and more, cut in the middle to what a model can read.

Sources     one <task>.jsonl per task in infinitebench/data/, or for six of them (`SYNTHETIC`) rows generated at any
            length: no download. `auto` takes the files if there are any, else generates if all chosen tasks can be
            generated; single files that it lacks are fetched, unless `data_dir` names a folder. Generated rows are
            tagged `synthetic` and never share a run with published ones.
Prompts     infinitebench/prompt_templates.json from the data folder, or the authors' prompt.py, which `source=hub`
            fetches (for published rows: it lacks the sentences of generated ones), by family: `yarn_mistral`
            (completion, plain text), `gpt4` and `claude2` (instructions, a chat turn). Without them wording of our
            own, plain text, and the result says `prompts: own`.
Length      generated rows fill `task.length` tokens, answer included, as full as their units allow. Published rows are
            cut to `task.max_prompt_tokens`: half of it from each end.
Differs     from the published open-model runs: greedy decoding, with the answer lengths of the authors' table
            (`length_table=official`; `chat` has InfLLM's, for models that begin with words).

math_calc's references start at the second number, so a model that prints the first one scores 0:
`task.drop_first_number=true` is what the authors do for GPT-4 only.

Not here: scorers (`scores.py` beside this file), generators (`synthetic.py`), and how a row gets into its template
(`prompts.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, unknown_name
from engine.shapes import ModelShape
from evals.foreign import CsvWriter
from evals.tasks import sources as data
from evals.tasks.base import Sample, Task
from evals.tasks.download import fetch
from evals.tasks.infinitebench.prompts import (
    OWN_TEMPLATES,
    checked_row,
    fill,
    ground_truth,
    template_fields,
    upstream_templates,
)
from evals.tasks.infinitebench.scores import SCORERS, checked_score
from evals.tasks.infinitebench.synthetic import GENERATORS, OWN_STRINGS, Place
from evals.tasks.prompt import encode, middle_truncate
from evals.tasks.rows import ON_BAD_ROW, Rows, read_rows
from evals.tasks.texts import digest

FOLDER = "infinitebench/data"
TEMPLATES = "infinitebench/prompt_templates.json"
STRINGS = "infinitebench/synthetic_strings.json"
HUB = "hub dataset xinrongzhang2022/InfiniteBench (`python -m evals.fetch infinitebench`)"
UPSTREAM_TEMPLATES = "infinitebench/prompt.py"
TEMPLATES_SOURCE = "GitHub OpenBMB/InfiniteBench (src/prompt.py), put into JSON by family and task"
SYNTHETIC = tuple(GENERATORS)
DATASETS = tuple(SCORERS)
LISTS = {"synthetic": SYNTHETIC, "all": DATASETS}
FAMILIES = ("yarn_mistral", "gpt4", "claude2")
SLACK = 100  # tokens kept free for a chat wrapper, and for what a second tokenising may add

NEW_TOKENS = {
    "official": {
        **{"passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200},
        **{"longbook_choice_eng": 40, "longbook_qa_eng": 40, "longbook_qa_chn": 40},
        **{"longdialogue_qa_eng": 40, "math_find": 3, "math_calc": 30_000},
        **{"code_run": 5, "code_debug": 5},
    },
    "chat": dict.fromkeys(DATASETS, 32) | {"kv_retrieval": 100, "longbook_sum_eng": 1536},
}


def file_of(dataset: str) -> str:
    """Where a task's rows are, below a data folder."""
    return f"{FOLDER}/{dataset}.jsonl"


@dataclass(frozen=True)
class Params:
    source: str  # auto: the files if they are there, else generated rows
    datasets: str | tuple[str, ...]  # names, or a list's: synthetic, all
    template_family: str  # auto: yarn_mistral, or our own wording without the file
    length: int  # tokens of a generated row, answer included
    rows: int | None  # generated rows per dataset; None: as many as the published file has
    max_prompt_tokens: int | None  # of published rows; None: what the window leaves
    length_table: str
    max_new_tokens: int | None  # instead of the table's
    drop_first_number: bool
    lenient_dialogue: bool
    on_bad_row: str

    def __post_init__(self) -> None:
        choices = {
            "source": ("auto", "hub", "local", "embedded"),
            "template_family": ("auto", "own", *FAMILIES),
            "length_table": tuple(NEW_TOKENS),
            "on_bad_row": ON_BAD_ROW,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(f"task.{name}", str(getattr(self, name)), allowed)
        for name in ("length", "rows", "max_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"task.{name}={value} is below 1; give 1 or more")
        for name in self.names:
            if name not in DATASETS:
                raise unknown_name("task.datasets", name, (*DATASETS, *LISTS))
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ConfigError(f"task.datasets={list(self.names)} is empty or has a name twice")
        real = [name for name in self.names if name not in SYNTHETIC]
        if self.source == "embedded" and real:
            raise ConfigError(
                f"task.source=embedded generates {', '.join(SYNTHETIC)} only, not {real[0]}; "
                "leave it out of task.datasets or choose another source"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen tasks."""
        if isinstance(self.datasets, str):
            return LISTS.get(self.datasets, (self.datasets,))
        return self.datasets

    def new_tokens(self, dataset: str) -> int:
        """Longest answer, in tokens."""
        return self.max_new_tokens or NEW_TOKENS[self.length_table][dataset]


class InfiniteBench(Task):
    """The rows of the chosen tasks, the first of each and then the second of each: `limit` sees all of them."""

    name = "infinitebench"
    version = 1
    Params = Params

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed = params, data_dir, seed
        self.is_synthetic = self._is_synthetic()
        self.data_source = "hub" if params.source == "hub" else "local"
        if self.is_synthetic:
            self.data_source = "embedded"
        self._choose_words()
        size = f"{params.length}-tokens/" if self.is_synthetic else ""
        listed = params.datasets if isinstance(params.datasets, str) else "+".join(params.names)
        self.dataset = f"{size}{listed}"
        self.rows: dict[str, Rows] = {}
        self.window = 0

    def _is_synthetic(self) -> bool:
        """Whether rows are generated."""
        names = self.params.names
        if self.params.source != "auto":
            return self.params.source == "embedded"
        found = any(data.find(file_of(name), self.data_dir) for name in names)
        return not found and set(names) <= set(SYNTHETIC)

    def _path(self, name: str) -> Path:
        """A task's file, fetched where that is allowed."""
        source, file = self.params.source, file_of(name)
        path = None if source == "hub" else data.find(file, self.data_dir)
        if path is None and (source == "local" or (source == "auto" and self.data_dir is not None)):
            path = data.require(file, self.data_dir, HUB)
        return path or self._fetch(file)

    def _fetch(self, file: str) -> Path:
        """A file from upstream, downloaded into the folder that was named or the cache."""
        root = Path(self.data_dir).expanduser() if self.data_dir else None
        return fetch("infinitebench", root, only=[file])[0]

    def _choose_words(self) -> None:
        """Templates and sentences: upstream's, or our own."""
        self.word_files: tuple[Path, ...] = ()
        self.templates, self.strings, self.family = OWN_TEMPLATES, OWN_STRINGS, "own"
        wanted = self.params.template_family
        found = [data.find(name, self.data_dir) for name in (TEMPLATES, STRINGS)]
        upstream = None if self.is_synthetic else data.find(UPSTREAM_TEMPLATES, self.data_dir)
        if wanted == "own" or (wanted == "auto" and None in found and upstream is None):
            return
        self.family = "yarn_mistral" if wanted == "auto" else wanted
        if None in found and upstream is not None:
            self.word_files = (upstream,)
            self.templates = upstream_templates(upstream, self.family)
            return
        self.word_files = tuple(data.require(name, self.data_dir, TEMPLATES_SOURCE) for name in (TEMPLATES, STRINGS))
        templates = data.read_json(self.word_files[0], TEMPLATES_SOURCE)
        self.strings = data.read_json(self.word_files[1], TEMPLATES_SOURCE, like=OWN_STRINGS)
        family = templates.get(self.family)
        self.templates = family if isinstance(family, dict) else {}
        for name in self.params.names:
            if not isinstance(words := self.templates.get(name), str) or "{context}" not in words:
                raise ConfigError(
                    f"{self.word_files[0]} has no template of {self.family} for {name}; get it again from "
                    f"{TEMPLATES_SOURCE}"
                )

    def _first_notes(self) -> list[str]:
        """What the result says whatever the rows are like."""
        notes = [f"prompts: {self.family}", f"length_table: {self.params.length_table}"]
        if self.is_synthetic:
            notes.append(f"synthetic: true ({self.params.length} tokens)")
        if "math_calc" in self.params.names:
            dropped = str(self.params.drop_first_number).lower()
            notes.append(f"math_calc: drop_first_number={dropped}")
        is_own = self.family == "own"
        if "math_find" in self.params.names and self.strings is OWN_STRINGS and not is_own:
            notes.append("math_find: own first line")
        return notes

    @property
    def use_chat(self) -> bool:
        """Whether the template is an instruction and not a text to be continued."""
        return self.family in ("gpt4", "claude2")

    def check(self, shape: ModelShape) -> None:
        self.window = shape.window
        if self.params.source == "hub" and self.params.template_family != "own":
            self._fetch(UPSTREAM_TEMPLATES)
            self._choose_words()
        self.notes = self._first_notes()
        self.data_digest = digest(self.word_files) if self.word_files else None
        if self.is_synthetic:
            if self.params.length > shape.window:
                raise ConfigError(
                    f"task.length={self.params.length} is more than the {shape.window} tokens of "
                    f"{shape.name}; give that or less"
                )
            return
        for name in self.params.names:
            self._check_room(name, shape)
        paths = {name: self._path(name) for name in self.params.names}
        self.data_digest = digest([*self.word_files, *paths.values()])
        notes = list(self.notes)
        for name, path in paths.items():
            has_options = name in ("code_debug", "longbook_choice_eng")
            self.rows[name] = read_rows(
                path,
                {"id": (int, str), "context": str, "input": str}
                | {"answer": (str, int, float, list)}
                | ({"options": list} if has_options else {}),
                self.params.on_bad_row,
                unique="id",
                check=checked_row(name),
            )
            notes += self.rows[name].notes
        self.notes = notes

    def _check_room(self, name: str, shape: ModelShape) -> None:
        room = shape.window - self.params.new_tokens(name) - SLACK
        limit = self.params.max_prompt_tokens
        if room < 2 * SLACK or (limit or 0) > room:
            raise ConfigError(
                f"{name} answers with up to {self.params.new_tokens(name)} tokens, which leaves "
                f"{max(room, 0)} of the {shape.window} of {shape.name} for the prompt"
                + (f", not task.max_prompt_tokens={limit}" if limit else "")
                + "; give smaller ones, or leave the task out of task.datasets"
            )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Generated(self, tokenizer) if self.is_synthetic else Published(self, tokenizer)

    def sample(self, dataset: str, id: str, row: Mapping[str, Any], fields: Mapping[str, Any]) -> Sample:
        """One row in its prompt, uncut."""
        values = template_fields(dataset, row, self.strings["math"]["find_prefix"])
        context, question = fill(self.templates[dataset], values)
        truth = ground_truth(dataset, row)
        return Sample(
            id=id,
            context=context,
            question=question,
            references=tuple(map(str, truth)) if isinstance(truth, list) else (str(truth),),
            max_new_tokens=self.params.new_tokens(dataset),
            use_chat=self.use_chat,
            fields={
                "dataset": dataset,
                "ground_truth": truth,  # with its type, which two scorers look at
                "prompts": self.family,
                "synthetic": self.is_synthetic,
                **fields,
            },
        )

    def judge(self, dataset: str, prediction: str, truth: Any) -> tuple[float, str | None]:
        """The score, and what the authors' scorer raises."""
        return checked_score(
            dataset,
            prediction,
            truth,
            drop_first_number=self.params.drop_first_number,
            is_lenient=self.params.lenient_dialogue,
        )

    def score(self, sample: Sample, prediction: str) -> float:
        return self.judge(sample.fields["dataset"], prediction, sample.fields["ground_truth"])[0]

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """datasets.csv: rows, the score in percent, and on how many rows the authors' scorer raises."""
        asked = [row for row in rows if row["score"] is not None]
        with (folder / "datasets.csv").open("w", newline="", encoding="utf-8") as file:
            writer = CsvWriter(file)
            writer.writerow(["dataset", "rows", "score_percent", "official_scorer_raises"])
            for name in dict.fromkeys(row["dataset"] for row in asked):
                judged = [
                    self.judge(name, row["prediction"], row["ground_truth"]) for row in asked if row["dataset"] == name
                ]
                percent = 100 * sum(score for score, _ in judged) / len(judged)
                n_raised = sum(error is not None for _, error in judged)
                writer.writerow([name, len(judged), round(percent, 2), n_raised])


def in_turn(by_task: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of each task, then the second of each."""
    turns = zip_longest(*by_task)
    return [one for turn in turns for one in turn if one is not None]


class Published(Sequence[Sample]):
    """The rows of the files, cut to fit when asked for."""

    def __init__(self, task: InfiniteBench, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        by_task = [[(name, row) for _, row in task.rows[name].rows] for name in task.params.names]
        self.rows = in_turn(by_task)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        name, row = self.rows[i]
        whole = self.task.sample(name, f"{name}-{row['id']}", row, {})
        room = self.task.window - whole.max_new_tokens - SLACK
        limit = self.task.params.max_prompt_tokens or room
        text, before, after = middle_truncate(self.tokenizer, whole.context + whole.question, limit)
        question = whole.question
        if not text.endswith(question):  # some tokenizers change blanks when they decode
            question = self.tokenizer.decode(self.tokenizer.encode(question, add_special_tokens=False))
        if not text.endswith(question):
            raise ConfigError(
                f"{whole.id}: the question alone is longer than half of the {limit} tokens that "
                "the prompt may have; give a larger task.max_prompt_tokens or a longer model"
            )
        fields = {"original_prompt_tokens": before, "was_cut": after < before}
        return replace(
            whole,
            context=text.removesuffix(question),
            question=question,
            fields={**whole.fields, **fields},
        )


class Generated(Sequence[Sample]):
    """Rows made when asked for, each as full as the length allows."""

    def __init__(self, task: InfiniteBench, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        by_task = [self._places(name) for name in task.params.names]
        self.places = in_turn(by_task)
        self.units: dict[str, int] = {}
        self.made = lru_cache(maxsize=64)(self._make)  # the runner asks twice

    def _places(self, name: str) -> list[tuple[str, Place]]:
        n = self.task.params.rows or GENERATORS[name].n_rows
        return [(name, Place(row, n, f"{self.task.seed} {name}")) for row in range(n)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.made(range(len(self))[i])

    def _make(self, i: int) -> Sample:
        name, place = self.places[i]
        fewest = GENERATORS[name].fewest
        if name not in self.units:
            self.units[name] = self._most(name, place)
        units = self.units[name]
        while units >= fewest:
            sample = self._sample(name, place, units)
            over = self._tokens(sample) - self.task.params.length
            if over <= 0:
                return sample
            units -= max(1, over * units // (2 * self.task.params.length))
        raise self._too_short(name)

    def _most(self, name: str, place: Place) -> int:
        """The largest number of units that fits, found on one row."""
        low, high = GENERATORS[name].fewest, GENERATORS[name].fewest

        def fits(units: int) -> bool:
            return self._tokens(self._sample(name, place, units)) <= self.task.params.length

        if not fits(low):
            raise self._too_short(name)
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _sample(self, name: str, place: Place, units: int) -> Sample:
        row = GENERATORS[name].make(self.task.strings, place, units)
        about = {key: row[key] for key in row if key not in ("context", "input", "answer")}
        fields = {"length": self.task.params.length, "units": units, **about}
        sample = self.task.sample(name, f"{name}-{place.row}", row, fields)
        if name == "math_calc" and self.task.params.max_new_tokens is None:
            # 30,000 tokens are for 30,000 numbers; the first one may be written too.
            answer = self.tokenizer.encode(f" {[0, *row['answer']]}", add_special_tokens=False)
            sample = replace(sample, max_new_tokens=len(answer) + len(answer) // 10 + 8)
        return sample

    def _tokens(self, sample: Sample) -> int:
        """Of prompt and answer."""
        prompt = encode(self.tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        return len(prompt) + sample.max_new_tokens

    def _too_short(self, name: str) -> ConfigError:
        return ConfigError(
            f"task.length={self.task.params.length} is too short for {name}; give more tokens, or "
            "leave it out of task.datasets"
        )

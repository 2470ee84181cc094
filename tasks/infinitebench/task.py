"""InfiniteBench: twelve tasks on prompts of 44k to 200k tokens and more, cut in the middle to what a model can read.

Names       InfiniteBench; rows like InfiniteBench's
Asks        keys, numbers, code, choices and summaries of books
Lengths     44k to 200k published, six tasks any with source=embedded
Answers     50 to 1,200 tokens
Licence     MIT

Sources     one <task>.jsonl per task in infinitebench/data/. Rows of six tasks (`SYNTHETIC`) can be generated instead,
            at any length and without a download, with `source=embedded`. `auto` takes the files. Where one is missing
            it is refused if all chosen tasks can be generated, since either may be meant; else it is downloaded, unless
            `data_dir` names a folder. Generated rows are tagged `synthetic` and never share a run with published ones.
Prompts     infinitebench/prompt_templates.json from the data folder, or for published rows the authors' prompt.py,
            which `source=hub` downloads (it lacks the sentences of generated rows). They come by family:
            `yarn_mistral` (completion, plain text), `gpt4` and `claude2` (instructions, a chat turn). Without them the
            wording is our own, plain text, and the result says `prompts: own`.
Length      generated rows fill `task.length` tokens, answer included, as full as their units allow. Published rows are
            cut to `task.max_prompt_tokens`: half of it from each end.
Differs     from the published open-model runs: greedy decoding, with the answer lengths of the authors' table
            (`length_table=official`; `chat` has InfLLM's, for models that begin with words).

math_calc's references start at the second number, so a model that prints the first one scores 0:
`task.drop_first_number=true` is what the authors do for GPT-4 only.

Not here: scorers (`scores.py` next to this file), generators (`synthetic.py`), and how a row gets into its template
(`prompts.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from kvbench.engine.declared import Count, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import (
    OfDatasets,
    OnBadRow,
    check_length,
    check_room,
    prompt_room,
)
from kvbench.tasks.download import Piece
from kvbench.tasks.infinitebench.prompts import (
    OWN_TEMPLATES,
    check_row,
    fill,
    ground_truth,
    template_fields,
    upstream_templates,
)
from kvbench.tasks.infinitebench.scores import SCORERS, checked_score
from kvbench.tasks.infinitebench.synthetic import GENERATORS, OWN_STRINGS, Place
from kvbench.tasks.lazy import Alike
from kvbench.tasks.prompt import middle_truncate
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import Id

TEMPLATES = "infinitebench/prompt_templates.json"
STRINGS = "infinitebench/synthetic_strings.json"
HUB = "hub dataset xinrongzhang2022/InfiniteBench (`kvbench fetch infinitebench`)"
UPSTREAM_TEMPLATES = "infinitebench/prompt.py"
TEMPLATES_SOURCE = "GitHub OpenBMB/InfiniteBench (src/prompt.py), put into JSON by family and task"
INFINITEBENCH_REVISION = "90f0394333616266d9fe85824ceaf505093cbaa5"
INFINITEBENCH_CODE = "753b69f2b0d4a03d866c1c4ab2f673635971ee35"
INFINITEBENCH_FILES = {
    **dict.fromkeys(("passkey", "number_string", "kv_retrieval", "longbook_sum_eng")),
    **dict.fromkeys(("longbook_choice_eng", "longbook_qa_chn", "longdialogue_qa_eng")),
    **dict.fromkeys(("code_debug", "code_run", "math_calc", "math_find")),
    "longbook_qa_eng": "7f53a3aabd5445fa29f168914f13569c348406cfc88a3e495f3f2c13a0966ca4",
}
PIECES = (
    Piece(
        "OpenBMB/InfiniteBench", INFINITEBENCH_CODE, "src/prompt.py", "infinitebench/prompt.py",
        site="github",
    ),
    *(
        Piece(
            "xinrongzhang2022/InfiniteBench", INFINITEBENCH_REVISION, f"{name}.jsonl",
            f"infinitebench/data/{name}.jsonl", sha256=sha256,
        )
        for name, sha256 in sorted(INFINITEBENCH_FILES.items())
    ),
)  # fmt: skip
SYNTHETIC = tuple(GENERATORS)
DATASETS = tuple(SCORERS)
LISTS = {"synthetic": SYNTHETIC, "all": DATASETS}

FIELDS: Fields = {"id": Id, "context": str, "input": str, "answer": str | int | float | list[Any]}
NEW_TOKENS = {
    "official": {
        **{"passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200},
        **{"longbook_choice_eng": 40, "longbook_qa_eng": 40, "longbook_qa_chn": 40},
        **{"longdialogue_qa_eng": 40, "math_find": 3, "math_calc": 30_000},
        **{"code_run": 5, "code_debug": 5},
    },
    "chat": dict.fromkeys(DATASETS, 32) | {"kv_retrieval": 100, "longbook_sum_eng": 1536},
}


@dataclass(frozen=True)
class Params(OfDatasets):
    lists, drawn = LISTS, SYNTHETIC
    source: Literal["auto", "hub", "local", "embedded"]  # auto: the files; embedded: generated rows
    datasets: Annotated[str | tuple[str, ...], Some(DATASETS, tuple(LISTS))]
    template_family: Literal["auto", "own", "yarn_mistral", "gpt4", "claude2"]  # auto: yarn_mistral, or own
    length: Count  # tokens of a generated row, answer included
    rows: Count | None  # generated rows per dataset; None: as many as the published file has
    max_prompt_tokens: Count | None  # of published rows; None: what the window leaves
    length_table: Literal["official", "chat"]
    max_new_tokens: Count | None  # instead of the table's
    drop_first_number: bool
    lenient_dialogue: bool
    on_bad_row: OnBadRow

    def new_tokens(self, dataset: str) -> int:
        """Longest answer, in tokens."""
        return self.max_new_tokens or NEW_TOKENS[self.length_table][dataset]


class InfiniteBench(RowsTask):
    """The rows of the chosen tasks, the first of each and then the second of each: `limit` sees all of them."""

    params: Params
    name = "infinitebench"
    version = 1
    Params = Params
    data = Data(
        tuple(f"infinitebench/data/{name}.jsonl" for name in DATASETS), what="datasets", pieces=PIECES,
        without=f"without them only {len(SYNTHETIC)}, generated (task.source=embedded)",
    )  # fmt: skip
    place, upstream, instead, unique = "infinitebench/data/{name}.jsonl", HUB, "generated rows", "id"

    @property
    def most(self) -> int | None:
        return None  # task.rows is of generated ones

    def title(self) -> str:
        size = f"{self.params.length}-tokens/" if self.is_embedded else ""
        return f"{size}{self.params.listed}"

    def prepare(self, shape: ModelShape) -> None:
        params = self.params
        if self.is_embedded:
            check_length(params.length, shape)
        else:
            for name in params.names:
                check_room("task", name, params.new_tokens(name), params.max_prompt_tokens, shape)
        if params.source == "hub" and params.template_family != "own":
            sources.obtain([UPSTREAM_TEMPLATES], "hub", self.data_dir, HUB)
        self._choose_words()
        self.notes += [f"prompts: {self.family}", f"length_table: {params.length_table}"]
        if self.is_embedded:
            self.notes.append(f"synthetic: true ({params.length} tokens)")
        if "math_calc" in params.names:
            self.notes.append(f"math_calc: drop_first_number={str(params.drop_first_number).lower()}")
        if "math_find" in params.names and self.strings is OWN_STRINGS and self.family != "own":
            self.notes.append("math_find: own first line")

    def _choose_words(self) -> None:
        """Templates and sentences: upstream's, or our own."""
        self.templates, self.strings, self.family = OWN_TEMPLATES, OWN_STRINGS, "own"
        wanted = self.params.template_family
        paths = [sources.find(name, self.data_dir) for name in (TEMPLATES, STRINGS)]
        upstream = None if self.is_embedded else sources.find(UPSTREAM_TEMPLATES, self.data_dir)
        if wanted == "own" or (wanted == "auto" and None in paths and upstream is None):
            return
        self.family = "yarn_mistral" if wanted == "auto" else wanted
        if None in paths and upstream is not None:
            self.words = [upstream]
            self.templates = upstream_templates(upstream, self.family)
            return
        self.words = [sources.require(name, self.data_dir, TEMPLATES_SOURCE) for name in (TEMPLATES, STRINGS)]
        templates = sources.read_json(self.words[0], TEMPLATES_SOURCE)
        self.strings = sources.read_json(self.words[1], TEMPLATES_SOURCE, like=OWN_STRINGS)
        family = templates.get(self.family)
        self.templates = family if isinstance(family, dict) else {}
        for name in self.params.names:
            if not isinstance(words := self.templates.get(name), str) or "{context}" not in words:
                raise ConfigError(
                    f"{self.words[0]} has no template of {self.family} for {name}; get it again from {TEMPLATES_SOURCE}"
                )

    def fields_of(self, name: str) -> Fields:
        return {**FIELDS, "options": list[Any]} if name in ("code_debug", "longbook_choice_eng") else FIELDS

    def check_row(self, name: str, row: Row) -> None:
        check_row(name, row)

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if not self.is_embedded:
            return super().samples(tokenizer)
        params = self.params
        cells = {(name, params.length): params.rows or GENERATORS[name].n_rows for name in params.names}
        return Generated(self, tokenizer, cells)

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        """A row of a file in its prompt, cut to fit."""
        whole = self.whole(name, f"{name}-{row['id']}", row, {})
        limit = self.params.max_prompt_tokens or prompt_room(self.window, whole.max_new_tokens)
        text, before, after = middle_truncate(tokenizer, whole.context + whole.question, limit)
        question = whole.question
        if not text.endswith(question):  # some tokenizers change blanks when they decode
            question = tokenizer.decode(tokenizer.encode(question, add_special_tokens=False))
        if not text.endswith(question):
            raise ConfigError(
                f"{whole.id}: the question alone is longer than half of the {limit} tokens that "
                "the prompt may have; give a larger task.max_prompt_tokens or a longer model"
            )
        cut = {"original_prompt_tokens": before, "was_cut": after < before}
        return replace(
            whole, context=text.removesuffix(question), question=question, fields={**whole.fields, **cut}
        )  # fmt: skip

    def whole(self, dataset: str, id: str, row: Row, fields: Mapping[str, Any]) -> Sample:
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
            use_chat=self.family in ("gpt4", "claude2"),  # their templates are instructions, no texts to be continued
            fields={
                "dataset": dataset,
                "ground_truth": truth,  # with its type, which two scorers look at
                "prompts": self.family,
                "synthetic": self.is_embedded,
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
        scored = [row for row in rows if row["score"] is not None]
        judged: dict[str, list[tuple[float, str | None]]] = {}
        for row in scored:
            name = row["dataset"]
            judged.setdefault(name, []).append(self.judge(name, row["prediction"], row["ground_truth"]))
        lines = []
        for name, pairs in judged.items():
            percent = 100 * sum(score for score, _ in pairs) / len(pairs)
            n_raised = sum(error is not None for _, error in pairs)
            lines.append([name, len(pairs), round(percent, 2), n_raised])
        write_csv(folder / "datasets.csv", ["dataset", "rows", "score_percent", "official_scorer_raises"], lines)


class Generated(Alike):
    """Rows in the units of their task."""

    def least(self, dataset: str) -> int:
        return GENERATORS[dataset].fewest

    def surplus(self, units: int, excess: int) -> int:
        return excess * units // (2 * self.task.params.length)

    def draw(self, name: str, length: int, number: int, units: int) -> Sample:
        place = Place(number, self.cells[name, length], f"{self.task.seed} {name}")
        row = GENERATORS[name].make(self.task.strings, place, units)
        about = {key: row[key] for key in row if key not in ("context", "input", "answer")}
        sample = self.task.whole(name, f"{name}-{number}", row, {"length": length, "units": units, **about})
        if name == "math_calc" and self.task.params.max_new_tokens is None:
            # 30,000 tokens are for 30,000 numbers; the first one may be written too.
            answer = self.tokenizer.encode(f" {[0, *row['answer']]}", add_special_tokens=False)
            sample = replace(sample, max_new_tokens=len(answer) + len(answer) // 10 + 8)
        return sample

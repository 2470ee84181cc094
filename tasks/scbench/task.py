"""SCBench: conversations on one long context, twelve tasks; six of them can be generated at any length.

Names       SCBench; conversations like SCBench's
Asks        several questions on one long context
Lengths     up to 200k published, any with source=embedded
Answers     5 to 1,024 tokens
Licence     MIT

Sources     scbench/data/<task>.jsonl below a data folder, as the hub dataset microsoft/SCBench has them. With
            `source=embedded` rows are generated (`synthetic.py`), and are not comparable.
Prompts     scbench/prompt_templates.json; without it wording of our own, and the result says `prompts: own`.
Modes       `golden` is what the authors publish; `independent` is their multi-request mode, `dialogue` their mode
            without golden contexts. `query_aware` asks each question in a prompt of its own.
Length      the first piece loses its middle where it is longer than the window leaves besides all turns.

A finished run's turns.csv has a line per task and turn, and the authors' own line of numbers.

Not here: scorers (`scores.py`, `functions.py`), wording (`prompts.py`), how turns are asked
(`evals/batch/answers.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from kvbench.engine.declared import Count, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Sample
from kvbench.tasks.checks import SLACK, Lengths, OfDatasets, OnBadRow, Prompts
from kvbench.tasks.lazy import doubled, in_turns
from kvbench.tasks.prompt import middle_truncate
from kvbench.tasks.published import Made, Row, RowsTask
from kvbench.tasks.rows import BadRow, Fields, Id
from kvbench.tasks.scbench import functions, synthetic
from kvbench.tasks.scbench.prompts import NAMES, own_templates, pieces_of, reference_of
from kvbench.tasks.scbench.scores import SUBTASKS, TurnScore, official_at_once, official_by_turn, turn_means, turn_score
from kvbench.tasks.turns.conversation import Asking, Base, Conversation, Feed, Mode, Turn
from kvbench.tasks.turns.questions import apart

TEMPLATES = "scbench/prompt_templates.json"
UPSTREAM = "hub dataset microsoft/SCBench (one file for each task, put into scbench/data)"
TEMPLATES_SOURCE = "GitHub microsoft/MInference (scbench/eval_utils.py, put into JSON by kind of piece and task)"
LISTS = {"synthetic": tuple(synthetic.GENERATORS), "all": NAMES}
NEW_TOKENS = {
    "scbench_kv": 150, "scbench_prefix_suffix": 150, "scbench_vt": 30, "scbench_repoqa": 1024, "scbench_qa_eng": 40,
    "scbench_qa_chn": 40, "scbench_choice_eng": 40, "scbench_many_shot": 10, "scbench_mf": 5, "scbench_summary": 200,
    "scbench_passkey": 15,
}  # fmt: skip
MIXED = {"scbench_summary_with_needles": {"scbench_summary": 800}, "scbench_repoqa_and_kv": {"scbench_kv": 80}}


@dataclass(frozen=True)
class Params(OfDatasets):
    lists, drawn = LISTS, tuple(synthetic.GENERATORS)
    source: Literal["auto", "local", "embedded"]  # auto: the files; embedded: generated rows
    datasets: Annotated[str | tuple[str, ...], Some(NAMES, tuple(LISTS))]
    lengths: Lengths  # of a generated context
    rows: Count | None  # of each dataset and length; None: all, or four generated ones
    prompts: Prompts
    use_chat: Literal["auto", "yes", "no"]  # auto: of published rows, where the model has a template
    max_prompt_tokens: Count | None
    max_new_tokens: Count | None
    on_bad_row: OnBadRow
    mode: Mode
    feed: Feed
    budget_base: Base

    @property
    def asking(self) -> Asking:
        return Asking(self.mode, self.feed, self.budget_base)

    def new_tokens(self, name: str, subtask: str) -> int:
        """Longest answer of a turn."""
        return self.max_new_tokens or MIXED.get(name, {}).get(subtask) or NEW_TOKENS[subtask]


class SCBench(RowsTask):
    """The rows of each chosen task, in turns."""

    params: Params
    asking: Asking
    name = "scbench"
    version = 1
    Params = Params
    packages: ClassVar[Mapping[str, str]] = dict.fromkeys(functions.PACKAGES, "")
    place, upstream, instead, unique = "scbench/data/{name}.jsonl", UPSTREAM, "generated rows", "id"
    fields: ClassVar[Fields] = {"id": Id, "context": str, "multi_turns": list[Any]}

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        super().__init__(params, data_dir, seed)
        self.pools: dict[str, list[tuple[str, str]]] = {}  # functions that answers are held against, by repository
        self.units: dict[tuple[str, int], int] = {}  # that fill a generated context

    def title(self) -> str:
        lengths = "+".join(map(str, self.params.lengths))
        return f"{lengths}-tokens/{self.params.listed}" if self.is_embedded else self.params.listed

    def prepare(self, shape: ModelShape) -> None:
        self.words = self.wording(TEMPLATES, TEMPLATES_SOURCE)
        self.templates = sources.read_json(self.words[0], TEMPLATES_SOURCE) if self.words else own_templates()
        self.notes.append(f"prompts: {'official' if self.words else 'own'}")
        if any("repoqa" in name for name in self.names):
            self.notes.append(f"functions found by {functions.finder()}")
        if self.is_embedded:
            self.notes.append("generated rows, not comparable with SCBench")
            if max(self.params.lengths) + 2 * SLACK > shape.window:
                raise ConfigError(
                    f"task.lengths={list(self.params.lengths)} asks for contexts that leave no room for turns in the "
                    f"{shape.window} tokens of {shape.name}; give shorter ones, or use a longer model"
                )

    def check_row(self, name: str, row: Row) -> None:
        if not row["multi_turns"]:
            raise BadRow("field 'multi_turns' is empty: the row has no turns")
        for turn in row["multi_turns"]:
            if not isinstance(turn, dict) or not isinstance(turn.get("input"), str) or "answer" not in turn:
                raise BadRow("a turn has no 'input' or no 'answer'")
            if name == "scbench_choice_eng" and turn["answer"] not in turn.get("options", ()):
                raise BadRow("a turn's 'answer' is none of its 'options'")
            if turn.get("task", name) not in NEW_TOKENS:
                raise BadRow(f"a turn has the unknown task {turn.get('task', name)!r}")

    def read(self) -> None:
        """Read the rows, and collect all functions asked for in a repository: each answer is held against them all."""
        super().read()
        for row in (row for rows in self.rows.values() for _, row in rows):
            asked = [(turn["name"], str(turn["answer"])) for turn in row["multi_turns"] if "name" in turn]
            self.pools.setdefault(str(row.get("repo", "")), []).extend(asked)

    # -- samples --

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if self.is_embedded:
            cells = [(name, length) for name in self.names for length in self.params.lengths]
            places = in_turns([[(*cell, i) for i in range(self.most or 4)] for cell in cells])
            return apart(Made(places, partial(self.generated, tokenizer)), self.asking, synthetic.N_TURNS)
        n_turns = [len(row["multi_turns"]) for _, _, row in self.places()]
        return apart(super().samples(tokenizer), self.asking, n_turns)

    def generated(self, tokenizer: Any, name: str, length: int, number: int) -> Sample:
        """A conversation on a generated context of so many tokens."""

        def fits(units: int) -> bool:
            return len(tokenizer.encode(synthetic.row(name, units, 0, self.seed)["context"])) <= length

        if (name, length) not in self.units:
            self.units[name, length] = doubled(fits, synthetic.fewest(name), 50)
        row = synthetic.row(name, self.units[name, length], number, self.seed)
        return self.conversation(tokenizer, name, length, row)

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        return self.conversation(tokenizer, name, None, row)

    def conversation(self, tokenizer: Any, name: str, length: int | None, row: Row) -> Sample:
        """A row as a conversation, its first piece cut to what the window leaves."""
        chat = self.params.use_chat
        uses_chat = chat == "yes" or (chat == "auto" and not self.is_embedded)
        uses_chat = uses_chat and bool(tokenizer.chat_template)
        mode = "independent" if self.asking.mode == "query_aware" else self.asking.mode
        pieces = pieces_of(name, row, mode, self.templates, tokenizer if uses_chat else None)
        subtasks = [str(turn.get("task", name)) for turn in row["multi_turns"]]
        new_tokens = [self.params.new_tokens(name, subtask) for subtask in subtasks]
        limit = self.params.max_prompt_tokens or self.window - 1 - sum(new_tokens) - sum(
            len(tokenizer.encode(piece)) + 2 for piece in pieces[1:]
        )  # fmt: skip
        if limit < SLACK:
            raise ConfigError(
                f"{name} row {row['id']} has turns that leave {max(limit, 0)} of the {self.window} tokens of the model "
                "for its context; use a longer model, or give task.max_new_tokens"
            )
        context, n_before, n_after = middle_truncate(tokenizer, pieces[0], limit)
        questions = pieces[1:] if mode == "independent" else ["", *pieces[1:]]
        joint = "\n\n" if mode == "independent" and not uses_chat else ""
        repo = f"{name}-{row['id']}-{length}" if self.is_embedded else str(row.get("repo", ""))
        if "functions" in row:
            self.pools[repo] = [(one, code) for one, code in row["functions"]]
        turns = [
            Turn(
                question=f"{joint}{question}",
                references=tuple(map(str, truth)) if isinstance(truth, list) else (str(truth),),
                max_new_tokens=most,
                fields={"subtask": subtask, "ground_truth": truth}
                | ({"function": turn["name"], "repo": repo} if "name" in turn else {}),
            )
            for question, turn, subtask, most in zip(questions, row["multi_turns"], subtasks, new_tokens, strict=True)
            for truth in [reference_of(subtask, turn)]
        ]
        suffix = "" if length is None else f"-{length}"
        return Sample(
            id=f"{name}{suffix}-{row['id']}",
            context=context,
            question="",
            max_new_tokens=max(new_tokens),
            use_chat=False,  # pieces hold the template where it is used
            conversation=Conversation(tuple(turns), self.asking, is_rendered=True),
            fields={
                "dataset": name,
                "lang": row.get("lang", ""),
                "prompts": self.notes[0].removeprefix("prompts: "),
                "original_prompt_tokens": n_before,
                "was_cut": n_after != n_before,
            },
        )

    # -- scores --

    def judge(self, fields: Mapping[str, Any], prediction: str) -> tuple[float, str | None]:
        """The score of one turn, and what the authors' scorer raises."""
        if "function" in fields:
            pool = self.pools.get(fields["repo"]) or [(fields["function"], str(fields["ground_truth"]))]
            found = functions.match(prediction, fields["lang"], fields["function"], pool)
            return float(found.is_right()), None
        return turn_score(fields["subtask"], prediction, fields["ground_truth"])

    def score(self, sample: Sample, prediction: str) -> float:
        return self.judge(sample.fields, prediction)[0]

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        scored = [row for row in rows if row["score"] is not None]
        lines: list[list[Any]] = []
        for name in dict.fromkeys(row["dataset"] for row in scored):
            mine = [row for row in scored if row["dataset"] == name]
            subtasks = SUBTASKS.get(name, ("",))
            each = [
                TurnScore(row["sample"], row["turn"] - 1, row["score"], row["subtask"] if subtasks[0] else "")
                for row in mine
            ]
            for task in subtasks:
                for turn, mean in sorted(turn_means(each, task).items()):
                    lines.append([name, task or name, turn + 1, round(100 * mean, 3)])
            official = official_by_turn if self.asking.mode in ("golden", "dialogue") else official_at_once
            lines.append([name, "official line", "", official(each, subtasks)])
        write_csv(folder / "turns.csv", ["dataset", "subtask", "turn", "score_percent"], lines)

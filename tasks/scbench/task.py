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
from pathlib import Path
from typing import Any, ClassVar

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.checks import SLACK, OfDatasets, check_choices, check_counts, check_datasets
from kvbench.tasks.lazy import LazySamples, in_turns
from kvbench.tasks.prompt import middle_truncate
from kvbench.tasks.rows import ON_BAD_ROW, BadRow, read_rows
from kvbench.tasks.scbench import functions, synthetic
from kvbench.tasks.scbench.prompts import NAMES, own_templates, pieces_of, reference_of
from kvbench.tasks.scbench.scores import SUBTASKS, TurnScore, official_at_once, official_by_turn, turn_means, turn_score
from kvbench.tasks.texts import digest
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn
from kvbench.tasks.turns.questions import QueryAware

FOLDER = "scbench/data"
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
    lists = LISTS
    source: str  # auto: the files; embedded: generated rows
    datasets: str | tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of a generated context
    rows: int | None  # of each dataset and length; None: all, or four generated ones
    prompts: str
    use_chat: str  # auto: of published rows, where the model has a template
    max_prompt_tokens: int | None
    max_new_tokens: int | None
    on_bad_row: str
    mode: str
    feed: str
    budget_base: str

    def __post_init__(self) -> None:
        check_choices(
            self, source=("auto", "local", "embedded"), prompts=("auto", "official", "own"),
            use_chat=("auto", "yes", "no"), on_bad_row=ON_BAD_ROW,
        )  # fmt: skip
        check_counts(self, "rows", "max_prompt_tokens", "max_new_tokens")
        check_datasets(self.names, NAMES, LISTS)
        real = [name for name in self.names if name not in synthetic.GENERATORS]
        if self.source == "embedded" and real:
            raise ConfigError(
                f"task.source=embedded generates {', '.join(synthetic.GENERATORS)} only, not {real[0]}; leave it out "
                "of task.datasets, or choose another source"
            )
        if not self.lengths or min(self.lengths) < 500 or len(set(self.lengths)) < len(self.lengths):
            raise ConfigError(
                f"task.lengths={list(self.lengths)} are no lengths of contexts; give some from 500 tokens on, each once"
            )
        _ = self.asking

    @property
    def asking(self) -> Asking:
        return Asking(self.mode, self.feed, self.budget_base)

    def new_tokens(self, name: str, subtask: str) -> int:
        """Longest answer of a turn."""
        return self.max_new_tokens or MIXED.get(name, {}).get(subtask) or NEW_TOKENS[subtask]


class SCBench(Task):
    """The rows of each chosen task, in turns."""

    asking: Asking
    name = "scbench"
    version = 1
    Params = Params
    packages: ClassVar[Mapping[str, str]] = dict.fromkeys(functions.PACKAGES, "")

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed, self.asking = params, data_dir, seed, params.asking
        is_embedded = params.source == "embedded"
        self.data_source = "embedded" if is_embedded else "local"
        size = "+".join(map(str, params.lengths)) + "-tokens/" if is_embedded else ""
        self.dataset = f"{size}{params.listed}"
        self.rows: dict[str, list[Mapping[str, Any]]] = {}
        self.pools: dict[str, list[tuple[str, str]]] = {}  # functions that answers are held against, by repository

    def check(self, shape: ModelShape) -> None:
        self.window = shape.window
        path = None if self.params.prompts == "own" or self.is_embedded else sources.find(TEMPLATES, self.data_dir)
        if path is None and self.params.prompts == "official":
            path = sources.require(TEMPLATES, self.data_dir, TEMPLATES_SOURCE)
        self.templates = own_templates() if path is None else sources.read_json(path, TEMPLATES_SOURCE)
        self.notes = [f"prompts: {'own' if path is None else 'official'}"]
        if any("repoqa" in name for name in self.params.names):
            self.notes.append(f"functions found by {functions.finder()}")
        if self.is_embedded:
            self.notes.append("generated rows, not comparable with SCBench")
            if max(self.params.lengths) + 2 * SLACK > shape.window:
                raise ConfigError(
                    f"task.lengths={list(self.params.lengths)} asks for contexts that leave no room for turns in the "
                    f"{shape.window} tokens of {shape.name}; give shorter ones, or use a longer model"
                )
            return
        words = [] if path is None else [path]
        instead = "generated rows" if {*self.params.names} <= {*synthetic.GENERATORS} else ""
        wanted = [f"{FOLDER}/{name}.jsonl" for name in self.params.names]
        files = sources.obtain(wanted, "local", self.data_dir, UPSTREAM, instead=instead)
        self.data_digest = digest([*words, *files])
        for name, file in zip(self.params.names, files, strict=True):
            found = read_rows(
                file, {"id": (int, str), "context": str, "multi_turns": list}, self.params.on_bad_row, unique="id",
                check=check_row(name),
            )  # fmt: skip
            self.notes += found.notes
            self.rows[name] = [one for _, one in found.rows]
            self.learn_functions(self.rows[name])

    def learn_functions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Collect all functions asked for in a repository: an answer is held against each of them."""
        for row in rows:
            asked = [(turn["name"], str(turn["answer"])) for turn in row["multi_turns"] if "name" in turn]
            self.pools.setdefault(str(row.get("repo", "")), []).extend(asked)

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        rows = Conversations(self, tokenizer)
        if self.asking.mode != "query_aware":
            return rows
        return QueryAware(rows, [len(rows.row(i)["multi_turns"]) for i in range(len(rows))])

    def sample(self, tokenizer: Any, name: str, length: int | None, row: Mapping[str, Any]) -> Sample:
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


class Conversations(LazySamples):
    """The first row of every task and length, then the second of every one."""

    def __init__(self, task: SCBench, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.units: dict[tuple[str, int], int] = {}
        lengths = task.params.lengths if task.is_embedded else (None,)
        columns = []
        for name in task.params.names:
            n = task.params.rows or (4 if task.is_embedded else len(task.rows[name]))
            n = n if task.is_embedded else min(n, len(task.rows[name]))
            columns += [[(name, length, i) for i in range(n)] for length in lengths]
        self.places: list[tuple[str, int | None, int]] = in_turns(columns)

    def row(self, i: int) -> Mapping[str, Any]:
        name, length, number = self.places[i]
        if length is None:
            return self.task.rows[name][number]
        return synthetic.row(name, self.units_of(name, length), number, self.task.seed)

    def units_of(self, name: str, length: int) -> int:
        """How many units of a task's first row so many tokens hold."""
        if (name, length) not in self.units:
            few = synthetic.fewest(name)
            low, high = few, 2 * few
            while self.n_tokens(name, high) <= length and high < 1 << 20:
                low, high = high, 2 * high
            while high - low > max(1, low // 50):
                middle = (low + high) // 2
                low, high = (middle, high) if self.n_tokens(name, middle) <= length else (low, middle)
            self.units[name, length] = low
        return self.units[name, length]

    def n_tokens(self, name: str, units: int) -> int:
        return len(self.tokenizer.encode(synthetic.row(name, units, 0, self.task.seed)["context"]))

    def sample(self, i: int) -> Sample:
        name, length, _ = self.places[i]
        return self.task.sample(self.tokenizer, name, length, self.row(i))


def check_row(name: str) -> Any:
    """A check of what a row must hold beyond the types of its fields."""

    def check(row: Mapping[str, Any]) -> None:
        if not row["multi_turns"]:
            raise BadRow("field 'multi_turns' is empty: the row has no turns")
        for turn in row["multi_turns"]:
            if not isinstance(turn, dict) or not isinstance(turn.get("input"), str) or "answer" not in turn:
                raise BadRow("a turn has no 'input' or no 'answer'")
            if name == "scbench_choice_eng" and turn["answer"] not in turn.get("options", ()):
                raise BadRow("a turn's 'answer' is none of its 'options'")
            if turn.get("task", name) not in NEW_TOKENS:
                raise BadRow(f"a turn has the unknown task {turn.get('task', name)!r}")

    return check

"""BFCL v4: calls of tools that a user's request needs, by the rules of the Berkeley Function-Calling Leaderboard.

Names       BFCL v4
Asks        one call, several, none, or calls over turns on simulated tools
Lengths     250 to 5k tokens, 41k in multi_turn_long_context; any with task.lengths
Answers     256 tokens, or twice the right ones
Licence     Apache-2.0

Sources     bfcl/BFCL_v4_NAME.json of the data folder, with bfcl/possible_answer/BFCL_v4_NAME.json beside it (JSON lines
            both, rows of one's own, too); else those of the package bfcl-eval, which is read and not imported. Its
            simulated tools are needed for turns, whosever the rows are.
Left out    java and javascript (another language's values), web_search and memory (a network, an embedding model),
            format_sensitivity (the same questions in other formats).
Score       1 where the official checker says valid (`checker.py`, `world.py`). Of irrelevance it asks that nothing is
            called, so that an empty answer scores 1 there; of live_relevance that anything is. Next to it the share of
            each kind of damage (`tasks/calls/damage.py`). A finished run's bfcl.csv has means by dataset.
Turns       each is asked after the recorded calls of earlier ones and their outputs (`task.mode=golden`), or as a
            prompt of its own (`query_aware`); upstream lets the model go on from its own calls, several times a turn.
Long forms  `task.lengths` puts other tools' outputs in front of the question: tokens, those of the first answer
            included. Outputs are drawn (`filler.py`); their tools are listed with the row's own.

Not here: prompts (`plans.py`), where the package is (`package.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from kvbench.engine.declared import Count, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.agent_traces.render import Message, Renderer, Talk
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.bfcl import filler, layout
from kvbench.tasks.bfcl.checker import are_right
from kvbench.tasks.bfcl.package import INSTALL, data_file
from kvbench.tasks.bfcl.plans import NO_CALL, Asked, Plan, of_question, of_turns
from kvbench.tasks.bfcl.world import CLASSES, turn_is_right
from kvbench.tasks.calls.damage import Wanted, damage, is_empty, shares
from kvbench.tasks.calls.read import read_calls
from kvbench.tasks.checks import Lengths, OfDatasets, OnBadRow, check_lengths
from kvbench.tasks.lazy import in_turns, most_units, note_left_out
from kvbench.tasks.prompt import first_ids, n_alike
from kvbench.tasks.published import Fields, Made, Row, RowsTask
from kvbench.tasks.rows import BadRow, read_rows
from kvbench.tasks.turns.conversation import Asking, Base, Conversation, Feed, Turn
from kvbench.tasks.turns.questions import apart

FOLDER = "bfcl"
ONE = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance")
TURNS = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
ANY_CALL = "live_relevance"
UNANSWERED = ("irrelevance", "live_irrelevance", ANY_CALL)  # without a file of right answers
NEW_TOKENS = 256
NOTE = "turns: each is asked once, after recorded calls; upstream's figures are of the model's own ones, in steps"


@dataclass(frozen=True)
class Params(OfDatasets):
    lists: ClassVar[Mapping[str, tuple[str, ...]]] = {"non_live": ONE, "live": LIVE, "multi_turn": TURNS}
    source: Literal["auto", "local"]  # auto: files of a data folder, else those of the package
    datasets: Annotated[str | tuple[str, ...], Some((*ONE, *LIVE, *TURNS), ("non_live", "live", "multi_turn"))]
    rows: Count | None  # of each dataset, from its first on
    lengths: Lengths | None  # None: as published
    template: Literal["auto", "plain"]
    max_new_tokens: Count | None  # None: twice the right answer's tokens, and 256 at least
    on_bad_row: OnBadRow
    mode: Literal["golden", "query_aware"]  # of turns
    feed: Feed
    budget_base: Base | None  # None: conversation in golden, else context

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({name in TURNS for name in self.names}) > 1:
            raise ConfigError(f"task.datasets={self.listed} has questions and turns; ask {', '.join(TURNS)} apart")

    @property
    def asking(self) -> Asking | None:
        usual = "conversation" if self.mode == "golden" else "context"
        asking = Asking(self.mode, self.feed, self.budget_base or usual)
        return asking if self.names[0] in TURNS else None


class Bfcl(RowsTask):
    """A sample for each row: a question, or a conversation."""

    params: Params
    name = "bfcl"
    version = 1
    Params = Params
    data: ClassVar[Data | None] = Data(
        tuple(f"{FOLDER}/BFCL_v4_{name}.json" for name in ONE),
        f"those of the package bfcl-eval are asked ({INSTALL})", by_hand="one's own rows, or copies of the package's",
        shipped=data_file,
    )  # fmt: skip
    upstream, unique, suffix = f"the package bfcl-eval ({INSTALL})", "id", ".jsonl"  # in files that end in .json
    means: ClassVar[Mapping[str, str]] = {"dataset": "dataset"}

    def title(self) -> str:
        lengths = self.params.lengths
        return self.params.listed + (f"/{'+'.join(map(str, lengths))}-tokens" if lengths else "")

    def prepare(self, shape: ModelShape) -> None:
        self.answers: dict[str, Mapping[str, Any]] = {}  # of each dataset, by the id of a row
        self.functions: dict[str, Sequence[Any]] = {}  # of each class
        self.beside: list[Path] = []  # files that belong to those of rows
        self.fitted: dict[int, int] = {}  # events that filled a length last
        if self.params.lengths:
            check_lengths(self.params.lengths, shape)
            self.notes.append("drawn outputs stand before the question")
        if self.params.asking:
            self.notes.append(NOTE)

    # -- files and rows --

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        """Those of a data folder; else the package's."""
        names = {name: f"BFCL_v4_{name}.json" for name in self.names}
        found = {name: self.path_of(file) for name, file in names.items()}
        for name, path in found.items():
            if name not in UNANSWERED:
                self.beside.append(path.parent / "possible_answer" / path.name)
        if self.params.asking:
            self.beside += [self.path_of(f"multi_turn_func_doc/{module}.json") for module in CLASSES.values()]
        return found

    def path_of(self, file: str) -> Path:
        path = sources.find(f"{FOLDER}/{file}", self.data_dir)
        if path is None and self.params.source != "local":
            path = data_file(file)
        if path is None:
            looked = ", ".join(map(str, sources.data_roots(self.data_dir)))
            raise ConfigError(
                f"{FOLDER}/{file} is missing (looked in {looked}); put it into one of these folders, or get the "
                f"package that ships it, for task.source=auto: {INSTALL}"
            )
        return path

    def digested(self, files: Sequence[Path]) -> Sequence[Path]:
        return [*files, *self.beside]

    def read(self) -> None:
        self.paths = self.files()
        if self.params.asking:
            if data_file("README.md") is None:
                raise ConfigError(f"task.datasets={self.params.listed} needs the tools of a package: {INSTALL}")
            for name, module in CLASSES.items():
                path = next(one for one in self.beside if one.name == f"{module}.json")
                found = read_rows(path, layout.FUNCTION, "refuse", unique="name", suffix=self.suffix)
                self.functions[name] = [function for _, function in found.rows]
        for name, path in self.paths.items():
            if name not in UNANSWERED:
                file = path.parent / "possible_answer" / path.name
                found = read_rows(file, layout.ANSWER, self.params.on_bad_row, unique="id", suffix=self.suffix)
                self.answers[name] = {str(row["id"]): row["ground_truth"] for _, row in found.rows}
                self.notes += found.notes
        super().read()

    def fields_of(self, name: str) -> Fields:
        return layout.TURNS if name in TURNS else layout.QUESTION

    def check_row(self, name: str, row: Row) -> None:
        if name not in UNANSWERED and str(row["id"]) not in self.answers[name]:
            raise BadRow("its id stands nowhere in the file of right answers")
        if name not in TURNS:
            layout.check_question(row, self.wanted(name, row))
            return
        layout.check_turns(row, self.wanted(name, row) or ())
        try:
            self.plan(name, row)
        except Exception as error:  # tools of the package that a row sets up may raise what they like
            raise BadRow(f"its tools cannot be set up or called as it says ({error!s:.120})") from None

    def wanted(self, name: str, row: Row) -> Sequence[Any] | None:
        """A row's right answer: calls, or those of each turn; None: any call."""
        return None if name == ANY_CALL else self.answers[name][str(row["id"])] if name not in UNANSWERED else []

    # -- prompts --

    def plan(self, name: str, row: Row) -> Plan:
        wanted = self.wanted(name, row)
        if name not in TURNS:
            return of_question(row, wanted)
        functions = [one for each in row["involved_classes"] for one in self.functions[each]]
        return of_turns(row, wanted or (), functions, name == "multi_turn_long_context")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        """The rows that fit, each of which is made when it is asked for."""
        columns, n_unknown, left_out = list[list[Any]](), 0, 0
        for name, numbered in self.rows.items():
            plans = [(row, self.plan(name, row)) for _, row in numbered[: self.most]]
            n_unknown += sum(plan.n_unknown for _, plan in plans)
            for length in self.params.lengths or (None,):
                column = [
                    ((name, length, row), len(plan.asked)) for row, plan in plans
                    if plan.asked and self.fits(tokenizer, plan, length)
                ]  # fmt: skip
                left_out += len(plans) - len(column)
                columns.append(column)
        found = in_turns(columns)
        note_left_out(self.notes, left_out, "rows", self.window)
        note = f"{n_unknown} turns not asked, whose calls need an output of the same turn"
        self.notes += [note] if n_unknown and note not in self.notes else []
        if not found:
            raise ConfigError(
                f"no row of task.datasets={self.params.listed} fits; give longer task.lengths, or use a longer model"
            )
        samples = Made([place for place, _ in found], partial(self.row_sample, tokenizer))
        return apart(samples, self.params.asking, [n for _, n in found])

    def fits(self, tokenizer: Any, plan: Plan, length: int | None) -> bool:
        """Whether a row fits the length with its first answer, and the window with its last one."""
        renderer = self.renderer(tokenizer, plan, None if length is None else [])
        first, last = (self.size(tokenizer, renderer, asked) for asked in (plan.asked[0], plan.asked[-1]))
        return last <= self.window if length is None else first <= length and length + last - first <= self.window

    def renderer(self, tokenizer: Any, plan: Plan, before: Sequence[Message] | None) -> Renderer:
        """A row behind other tools' outputs; None: as it is, without their tools."""
        tools = plan.tools if before is None else [*filler.TOOLS, *plan.tools]
        talk = Talk(plan.policy, tools, [*(before or ()), *plan.messages])
        return Renderer(tokenizer, talk, self.params.template)

    def size(self, tokenizer: Any, renderer: Renderer, asked: Asked, n_before: int = 0) -> int:
        """Tokens up to the end of an answer."""
        return len(first_ids(tokenizer, renderer.before(n_before + asked.index))) + self.new_tokens(tokenizer, asked)

    def new_tokens(self, tokenizer: Any, asked: Asked) -> int:
        right = tokenizer.encode(asked.right, add_special_tokens=False)
        return self.params.max_new_tokens or max(NEW_TOKENS, 2 * len(right))

    def filling(self, tokenizer: Any, plan: Plan, length: int, seed: str) -> list[Message]:
        """As many outputs of other tools as the length holds in front of the first question."""

        def size(n: int) -> int:
            before = filler.messages(seed, n)
            return self.size(tokenizer, self.renderer(tokenizer, plan, before), plan.asked[0], len(before))

        n = most_units(size, length, 0, self.fitted.get(length) or length // filler.PER_EVENT) or 0
        self.fitted[length] = n
        return filler.messages(seed, n)

    def row_sample(self, tokenizer: Any, name: str, length: int | None, row: Row) -> Sample:
        """A row as a sample: what stands before its first question is the context."""
        plan, id = self.plan(name, row), str(row["id"]) if str(row["id"]).startswith(name) else f"{name}-{row['id']}"
        before = None if length is None else self.filling(tokenizer, plan, length, f"bfcl {self.seed} {id}")
        renderer = self.renderer(tokenizer, plan, before)
        self.notes += [note] if (note := f"template: {renderer.name}") not in self.notes else []
        n_before = len(before or ())
        texts = renderer.steps([n_before + asked.index for asked in plan.asked])
        new = [self.new_tokens(tokenizer, asked) for asked in plan.asked]
        context = before_question(renderer, n_before + plan.asked[0].index, texts[0])
        sample = Sample(
            id=id if length is None else f"{id}-{length}",
            context=context,
            question=texts[0].removeprefix(context),
            references=references(plan.asked[0]),
            max_new_tokens=max(new),
            is_rendered=bool(tokenizer.chat_template),
            use_chat=False,
            fields={"dataset": name, "tokens": len(first_ids(tokenizer, texts[-1])), **plan.fields}
            | ({} if length is None else {"length": length}),
        )
        if self.params.asking is None:
            return sample
        starts = [context, *texts[:-1]] if self.params.mode == "golden" else [context] * len(texts)
        turns = [
            Turn(text.removeprefix(start), references(asked), n, fields=asked.fields)
            for text, start, asked, n in zip(texts, starts, plan.asked, new, strict=True)
        ]
        talk = Conversation(tuple(turns), self.params.asking, is_rendered=True)
        return replace(sample, question="", references=(), conversation=talk)

    # -- scores --

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        fields, answer = sample.fields, read_calls(prediction)
        if fields["dataset"] in TURNS:
            recorded, at = fields["recorded"], fields["at"]
            before = [call for turn in recorded[:at] for call in turn]
            wanted = [Wanted.of(call) for call in recorded[at]]
            right = turn_is_right(
                fields["classes"], fields["scenario"], fields["is_long"], before, recorded[at], answer.calls
            )
        elif fields["wanted"] is None:
            wanted, right = [Wanted("", ())], bool(answer.calls)
        else:
            wanted = [wanted_call(one) for one in fields["wanted"]]
            right = are_right(answer.calls, fields["wanted"], fields["signatures"])
        tools = [*fields["tools"], *(filler.NAMES if "length" in fields else ())]
        return float(right), shares(damage(answer, wanted, tools, is_right=right))

    def right_answer(self, sample: Sample) -> str:
        return sample.references[0] if sample.references else NO_CALL


def wanted_call(right: Mapping[str, Mapping[str, Sequence[Any]]]) -> Wanted:
    """What must be there: arguments none of whose right values is empty."""
    (name, arguments), *_ = right.items()
    return Wanted(name, [key for key, each in arguments.items() if not any(map(is_empty, each))])


def references(asked: Asked) -> tuple[str, ...]:
    """A right answer; none where an answer that calls nothing is right."""
    return (asked.right,) if asked.is_wanted else ()


def before_question(renderer: Renderer, index: int, text: str) -> str:
    """What stands before the user's last words, which are put there anew with another beginning."""
    messages = list(renderer.talk.messages)
    last = messages[index - 1]["content"]
    messages[index - 1] = {"role": "user", "content": "B" if last.startswith("A") else "A"}
    talk = replace(renderer.talk, messages=messages)
    other = Renderer(renderer.tokenizer, talk, "plain" if renderer.is_plain else "auto").before(index)
    return text[: n_alike(text, other)]

"""Agent traces: a fixed history of calls and outputs; at each decision a method gives the next action.

Names       agent traces; work on drawn records
Asks        an agent's next call, or what it has seen, on one growing conversation
Lengths     2k to 9k tokens a trace, several in a row with task.sessions; any with source=embedded
Answers     those of the recorded action and 32 more
Licence     MIT (tau-bench)

A score says how often a method acts as recorded, not whether the job is done: the trace's own action and its output are
fed afterwards, whatever was answered, so that all methods see the same history.

Sources     agent_traces/NAME.jsonl, NAME_policy.md and NAME_tools.json of the data folder; `task.sessions` traces stand
            one after the other, and the last one's decisions are asked (`task.points=all`: those of all). With
            `source=embedded` work on records is drawn (`made.py`), and questions on it come in between.
Asked       of a trace those calls whose every value stands in an earlier message (`task.ask=grounded`); `calls` all
            calls, `all` texts, too, of which only the kind is compared.
Modes       `golden`: every turn's output is fed and compressed, then the next action is asked. `independent` compresses
            the policy and earlier sessions alone. `query_aware` reads each decision's whole history in a prompt of its
            own. A trace is fixed, so that there is no `dialogue`.
Score       1 where kind, name and all arguments agree. `name` and `arguments` stand next to it; of drawn work `fresh`
            (what was seen last), `stale` (what was seen before) and `count`. `invalid` is the share of answers that are
            no action: blank ones, and calls whose JSON is broken. Where a call was recorded, the kind of damage
            (`tasks/calls/damage.py`) is told, too, as a share of such answers.
Age         `age` is how many tokens lie between what an action needs and the decision: the oldest of its values, at
            the last place where it stands. A finished run's agents.csv has scores by turn and by age, in percent.

Not here: actions (`actions.py`), templates (`render.py`), the same traces token by token (`tasks/agent_forced.py`).
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from kvbench.engine.declared import Count, Once
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, read_json, read_text, write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.agent_traces import made
from kvbench.tasks.agent_traces.actions import Point, action_of, agreement, points_of, recorded, values
from kvbench.tasks.agent_traces.render import Message, Renderer, Talk, spoken
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.calls.damage import Wanted, damage, shares
from kvbench.tasks.calls.read import read_calls
from kvbench.tasks.checks import OnBadRow, check_lengths
from kvbench.tasks.lazy import Drawn, fitting, most_units, note_left_out
from kvbench.tasks.prompt import first_ids
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow
from kvbench.tasks.texts import sentences
from kvbench.tasks.turns.conversation import Asking, Base, Conversation, Feed, Turn
from kvbench.tasks.turns.questions import apart

FOLDER, ENDS = "agent_traces", (".jsonl", "_policy.md", "_tools.json")
UPSTREAM = "GitHub sierra-research/tau-bench (historical_trajectories, as the README of that folder says)"
EXTRA = 32  # tokens that an answer may have beyond the recorded action
AGES = (500, 2000, 8000)  # tokens: bins of a run's table
NOTE = "a score says how often a method acts as recorded, not whether the job is done"
ROLES = ("user", "assistant", "tool")


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local", "embedded"]  # auto: the files; embedded: drawn work
    domain: str  # NAME of the files
    sessions: Count  # traces in one context
    points: Literal["last", "all"]  # decisions of the last session, or of all
    ask: Literal["grounded", "calls", "all"]
    lengths: Annotated[tuple[Annotated[int, Ge(1000)], ...], Once()]  # tokens of drawn work, the last answer included
    turns: Count  # questions on drawn work
    output_tokens: Count  # of a drawn output, about
    rows: Count | None  # samples; None: as many as there are traces, or 10 drawn ones
    template: Literal["auto", "plain"]
    max_new_tokens: Count | None  # None: the recorded action's and 32
    on_bad_row: OnBadRow
    mode: Literal["golden", "independent", "query_aware"]
    feed: Feed
    budget_base: Base | None  # None: conversation in golden, else context

    @property
    def asking(self) -> Asking:
        usual = "conversation" if self.mode == "golden" else "context"
        return Asking(self.mode, self.feed, self.budget_base or usual)


@dataclass(frozen=True)
class Decision:
    """A decision that is asked: the message that was recorded, and what is right."""

    index: int  # of the message
    reference: str  # the recorded action or value in words
    fields: Mapping[str, Any]
    needs: tuple[str, ...] = ()  # texts of which the oldest says how far back one must look


@dataclass(frozen=True)
class Trace:
    """One sample: a talk, where its context ends, and the decisions after that."""

    id: str
    talk: Talk
    n_context: int  # messages that are compressed before the first turn
    decisions: Sequence[Decision]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


class AgentTraces(RowsTask):
    """A conversation for each sample, a turn for each decision."""

    asking: Asking
    name = "agent_traces"
    version = 3  # 2 told no kind of damage; 1 took a call whose JSON is broken for text, right where text was recorded
    Params = Params
    data: ClassVar[Data | None] = Data(
        tuple(f"{FOLDER}/airline{end}" for end in ENDS), "without them drawn work (task.source=embedded)",
        by_hand=UPSTREAM,
    )  # fmt: skip
    upstream, unique = UPSTREAM, "id"
    fields: ClassVar[Fields] = {"id": int | str, "messages": list[Any]}
    policy = made.POLICY
    tools: Sequence[Any] = ()
    three: Sequence[Path] = ()  # files of a domain

    def title(self) -> str:
        params = self.params
        if self.is_embedded:
            return f"{'+'.join(map(str, params.lengths))}-tokens/{params.turns}-turns"
        return f"{params.domain}/{params.sessions}-sessions/{params.ask}"

    def prepare(self, shape: ModelShape) -> None:
        self.notes = [NOTE]
        if self.is_embedded:
            check_lengths(self.params.lengths, shape)
            self.tools = [schema(*tool) for tool in made.TOOLS]
            self.notes.append(f"drawn work; notes in outputs: {prose.prose_name()}")

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        """Of the domain's three files that with rows; the others are read here."""
        names = [f"{FOLDER}/{self.params.domain}{end}" for end in ENDS]
        self.three = sources.obtain(names, "local", self.data_dir, UPSTREAM, instead="drawn work")
        return {self.params.domain: self.three[0]}

    def digested(self, files: Sequence[Path]) -> Sequence[Path]:
        return self.three

    def read(self) -> None:
        super().read()
        rows, policy, tools = self.three
        self.traces = [(str(row["id"]), row["messages"]) for _, row in self.rows[self.params.domain]]
        self.policy, self.tools = read_text(policy), read_json(tools, f"get it again from {UPSTREAM}")
        if not isinstance(self.tools, list) or not all(isinstance(tool, dict) for tool in self.tools):
            raise ConfigError(f"{tools} holds no list of tools; get it again from {UPSTREAM}")
        if self.params.sessions > len(self.traces):
            raise ConfigError(
                f"task.sessions={self.params.sessions} is more than the {len(self.traces)} traces of {rows}; give fewer"
            )

    def check_row(self, name: str, row: Row) -> None:
        if not row["messages"]:
            raise BadRow("field 'messages' is empty")
        for i, message in enumerate(row["messages"]):
            if problem := wrong_with(message):
                raise BadRow(f"message {i} {problem}")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        params = self.params
        if self.is_embedded:
            cells = dict.fromkeys([(length,) for length in params.lengths], params.rows or 10)
            return apart(Days(self, tokenizer, cells), params.asking, params.turns)
        return apart(self.recorded(tokenizer), params.asking)

    def recorded(self, tokenizer: Any) -> list[Sample]:
        """The traces that fit, each after others in an order that is drawn."""
        without = 0

        def make(i: int) -> Sample | None:
            nonlocal without
            trace = self.in_a_row(i)
            if not trace.decisions:
                without += 1
                return None
            sample = self.talk(tokenizer, trace)
            return None if sample.fields["tokens"] > self.window else sample

        found, left_out = fitting(range(len(self.traces)), self.params.rows, make)
        note_left_out(self.notes, left_out - without, "traces", self.window)
        note = f"{without} traces left out without a decision that task.ask={self.params.ask} asks"
        self.notes += [note] if without and note not in self.notes else []
        if not found:
            raise ConfigError(
                f"no trace fits the {self.window} tokens of the model and has a decision to ask; give fewer "
                "task.sessions, another task.ask, or use a longer model"
            )
        return found

    def in_a_row(self, last: int) -> Trace:
        """A trace after as many others as there are sessions."""
        others = [i for i in range(len(self.traces)) if i != last]
        id = self.traces[last][0]
        rng = random.Random(f"agent_traces {self.seed} {id} {self.params.sessions}")
        order = [*rng.sample(others, self.params.sessions - 1), last]
        messages = [message for i in order for message in self.traces[i][1]]
        first = len(messages) - len(self.traces[last][1])
        n_context = first if self.params.points == "last" else 0
        decisions = [
            decision_of(messages, point) for point in points_of(messages)
            if point.index >= n_context and self.is_asked(point)
        ]  # fmt: skip
        return Trace(id, Talk(self.policy, self.tools, messages), n_context, decisions, {"sessions": len(order)})

    def is_asked(self, point: Point) -> bool:
        is_call = point.action["kind"] == "call"
        return {"all": True, "calls": is_call, "grounded": is_call and point.is_grounded}[self.params.ask]

    def talk(self, tokenizer: Any, trace: Trace) -> Sample:
        """A trace as a conversation: what is new since the last decision, then the next one."""
        renderer = Renderer(tokenizer, trace.talk, self.params.template)
        note = f"template: {renderer.name}"
        self.notes = self.notes if note in self.notes else [*self.notes, note]
        texts = renderer.steps([decision.index for decision in trace.decisions])
        context = self.context(renderer, trace, texts[0])
        keeps, is_own = not self.params.asking.takes_back, self.params.asking.mode == "dialogue"
        before, turns = context, list[Turn]()
        tools = {"tools": [name_of(tool) for tool in trace.talk.tools]}
        for text, decision in zip(texts, trace.decisions, strict=True):
            ids = tokenizer.encode(decision.reference, add_special_tokens=False)
            said = turns[-1].references[0] if is_own and turns else ""  # the model's own words stand in its place
            turns.append(
                Turn(
                    question=text.removeprefix(before if keeps else context).removeprefix(said),
                    references=(decision.reference,),
                    max_new_tokens=self.params.max_new_tokens or len(ids) + EXTRA,
                    fields={**decision.fields, "age": age(tokenizer, text, decision.needs), **tools},
                )
            )
            before = text
        used = self.size(tokenizer, trace, texts[-1])
        return Sample(
            id=trace.id,
            context=context,
            question="",
            max_new_tokens=max(turn.max_new_tokens for turn in turns),
            is_rendered=bool(tokenizer.chat_template),
            use_chat=False,
            conversation=Conversation(tuple(turns), self.params.asking, is_rendered=True),
            fields={"dataset": self.params.domain if not self.is_embedded else "drawn", "tokens": used, **trace.fields},
        )

    def size(self, tokenizer: Any, trace: Trace, text: str | None = None) -> int:
        """Tokens of the whole conversation, with room for the last answer; `text` is all that stands before that."""
        last = trace.decisions[-1]
        if text is None:
            text = Renderer(tokenizer, trace.talk, self.params.template).before(last.index)
        n_last = len(tokenizer.encode(last.reference, add_special_tokens=False))
        return len(first_ids(tokenizer, text)) + (self.params.max_new_tokens or n_last + EXTRA)

    def context(self, renderer: Renderer, trace: Trace, first: str) -> str:
        """The policy and what stands before the first session that is asked, as far as its first prompt has it so."""
        text = renderer.before(trace.n_context)
        n = next((i for i, (a, b) in enumerate(zip(text, first, strict=False)) if a != b), min(len(text), len(first)))
        return first[:n]

    @property
    def fewest(self) -> int:
        """Outputs of drawn work at least."""
        return 2 * self.params.turns + 4

    def work(self, length: int, number: int, n_units: int, n_padding: int) -> Trace:
        """Drawn work with so many outputs and words of padding."""
        return Work(self, length, number, n_units, n_padding).trace()

    # -- scores --

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        fields, action = sample.fields, action_of(prediction)
        invalid = {"invalid": float(action["kind"] == "invalid")}
        if fields.get("kind") in made.GROUPS and fields["kind"] not in made.CALLS:
            found = made.score(prediction, fields["value"], fields["superseded"])
            return found, {fields["group"]: found, **invalid}
        wanted = fields["action"]
        same = agreement(action, wanted)
        groups = {fields["group"]: same.action} if "group" in fields else {}
        kind = None
        if wanted["kind"] == "call" and "tools" in fields:
            kind = damage(read_calls(prediction), [Wanted.of(wanted)], fields["tools"], is_right=same.action == 1)
        return same.action, {"name": same.name, "arguments": same.arguments, **groups, **invalid, **shares(kind)}

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """agents.csv: scores by turn, by age and by what is asked."""
        scores: dict[tuple[str, Any], list[float]] = {}
        for row in rows:
            if row["score"] is not None:
                for key in self.keys(row):
                    scores.setdefault(key, []).append(row["score"])
        lines: list[list[Any]] = [
            [*key, len(each), round(100 * sum(each) / len(each), 2)] for key, each in scores.items()
        ]
        order = ("turn", "age", "group", "kind")
        lines = sorted(lines, key=lambda line: (order.index(str(line[0])), line[1] if line[0] == "turn" else 0))
        write_csv(folder / "agents.csv", ["by", "of", "turns", "score_percent"], lines)

    @staticmethod
    def keys(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The lines of the table that a turn counts for."""
        yield "turn", row["turn"]
        yield "age", age_bin(row["age"])
        yield from ((key, row[key]) for key in ("group", "kind") if key in row)


def age(tokenizer: Any, text: str, needs: Sequence[str]) -> int | None:
    """Tokens after the oldest text that is needed, each at the last place where it stands."""
    places = [at for need in needs if (at := text.rfind(need)) >= 0]
    return len(tokenizer.encode(text[min(places) :], add_special_tokens=False)) if places else None


def age_bin(tokens: int | None) -> str:
    if tokens is None:
        return "unknown"
    above = [0, *(edge for edge in AGES if tokens > edge)][-1]
    return next((f"{above}-{edge}" for edge in AGES if tokens <= edge), f"above {AGES[-1]}")


def decision_of(messages: Sequence[Message], point: Point) -> Decision:
    fields = {
        "kind": point.action["kind"], "action": dict(point.action), "n_values": point.n_values,
        "distance": None if point.oldest is None else point.index - point.oldest,
    }  # fmt: skip
    needs = tuple(values(point.action["arguments"])) if point.action["kind"] == "call" else ()
    return Decision(point.index, spoken(messages[point.index]), fields, needs)


def name_of(tool: Mapping[str, Any]) -> str:
    """A tool's name, as chat templates take it or alone."""
    return str(tool.get("function", tool).get("name"))


def schema(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A tool as chat templates take it."""
    properties = {key: {} if kind == "any" else {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# --- drawn work --------------------------------------------------------------------------------


class Work:
    """One sample's work: events with padded outputs, and questions in its second half."""

    def __init__(self, task: AgentTraces, length: int, number: int, n_events: int, n_padding: int) -> None:
        params = task.params
        self.rng = random.Random(f"agent_traces {task.seed} {length} {number}")
        self.events = made.draw_events(self.rng, n_events, n_records=max(4, params.lengths[0] // 800))
        self.id, self.length, self.n_turns = f"drawn-{length}-{number}", length, params.turns
        self.notes, self.n_padding = Notes(self.rng, params.output_tokens), n_padding
        self.task = task

    def trace(self) -> Trace:
        n, messages, decisions = len(self.events), list[Message](), list[Decision]()
        asked = {n // 2 + (i + 1) * (n - n // 2) // self.n_turns for i in range(self.n_turns)}
        kinds, outputs, n_context = [*made.KINDS], list[str](), 0
        self.rng.shuffle(kinds)
        messages.append({"role": "user", "content": "Please keep the records in order today."})
        for i, event in enumerate(self.events, start=1):
            output = event["output"] | {"notes": self.notes.one()}
            if i == 1:
                output["more"] = self.notes.padding(self.n_padding)
            outputs.append(json.dumps(output, ensure_ascii=False))
            call = {"function": {"name": event["tool"], "arguments": json.dumps(event["arguments"])}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "name": event["tool"], "content": outputs[-1]})
            n_context = len(messages) - 1 if i == n // 2 else n_context
            if i in asked and (question := made.draw_some(self.rng, self.events[:i], kinds)):
                kinds.remove(question["kind"])
                kinds.append(question["kind"])
                decisions.append(self.decision(question, i, outputs, messages))
        return Trace(
            self.id, Talk(made.POLICY, self.task.tools, messages), n_context, decisions, {"length": self.length}
        )

    def decision(self, question: made.Question, i: int, outputs: Sequence[str], messages: list[Message]) -> Decision:
        """Ask after event number i, and put question, answer and what follows into the messages."""
        right, oldest = made.answer_at(self.events[:i], question)
        kind = question["kind"]
        messages.append({"role": "user", "content": made.asks(question)})
        fields: dict[str, Any] = {"kind": kind, "group": made.GROUPS[kind], "asked_at": i}
        if kind in made.CALLS:
            call = {"function": {"name": right["name"], "arguments": right["arguments"]}}
            reply: Message = {"role": "assistant", "content": spoken({"role": "assistant", "tool_calls": [call]})}
            fields["action"] = {"kind": "call", **right}
        else:
            reply = {"role": "assistant", "content": right if isinstance(right, str) else json.dumps(right)}
            fields |= {"value": right, "superseded": made.superseded(self.events[:i], question)}
        fields["events_ago"] = None if oldest is None else i - 1 - oldest
        index = len(messages)
        messages.extend([reply, {"role": "user", "content": made.GO_ON}])
        return Decision(index, str(reply["content"]), fields, () if oldest is None else (outputs[oldest],))


@cache
def words() -> tuple[str, ...]:
    """Words of the embedded prose."""
    return tuple(" ".join(sentences()).split())


class Notes:
    """Words of the embedded prose, from a drawn place on, which outputs carry."""

    def __init__(self, rng: random.Random, output_tokens: int) -> None:
        self.words = words()
        self.at = rng.randrange(len(self.words))
        self.n = max(0, output_tokens - 40) * 3 // 4

    def one(self) -> str:
        """The note of the next output."""
        start, self.at = self.at % len(self.words), self.at + self.n
        return " ".join((self.words[start:] + self.words[:start])[: self.n])

    def padding(self, n: int) -> str:
        """So many words that fill a length."""
        return " ".join(self.words[:n])


class Days(Drawn):
    """Drawn work, whose units are outputs; words of a note fill what is left."""

    def __init__(self, task: AgentTraces, tokenizer: Any, cells: Mapping[tuple[int], int]) -> None:
        super().__init__(task, tokenizer, cells)
        self.fewest, self.per_unit = task.fewest, task.params.output_tokens + 60

    def sample(self, i: int) -> Sample:
        length, number = self.places[i]

        def work(n_events: int, n_padding: int = 0) -> Trace:
            return self.task.work(length, number, n_events, n_padding)

        def size(n_events: int, n_padding: int = 0) -> int:
            return self.task.size(self.tokenizer, work(n_events, n_padding))

        n = self.filling(length, size, self.fewest)
        if n is None:
            raise ConfigError(
                f"task.lengths={length} is too short for {self.fewest} outputs and the questions on them; "
                "give more tokens, fewer task.turns or a smaller task.output_tokens"
            )
        padding = most_units(lambda words: size(n, words), length, 0, (length - size(n)) // 2)
        return self.task.talk(self.tokenizer, work(n, padding or 0))


# --- rows of files -----------------------------------------------------------------------------


def wrong_with(message: Any) -> str | None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return "has no role of user, assistant and tool"
    calls = message.get("tool_calls")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and calls):
        return "has no content"
    if calls is None:
        return None
    if (
        message["role"] != "assistant"
        or not isinstance(calls, list)
        or len(calls) != 1
        or not isinstance(calls[0], dict)
    ):
        return "has other than one call of an assistant"
    function = calls[0].get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "has a call without a name"
    if not isinstance(function.get("arguments"), str):
        return "has a call whose arguments are no JSON in a text"
    try:
        arguments = recorded(message)["arguments"]
    except NoJson as error:
        return f"has a call whose arguments are no JSON ({error})"
    return None if isinstance(arguments, dict) else "has a call whose arguments are no object"

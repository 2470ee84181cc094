"""Tool calls: a small set of tools, and calls whose arguments stand far back in the outputs of earlier ones.

Names       tool calls
Asks        calls of five tools, whose arguments were looked up long before, one after the other
Lengths     any, from 1,000 tokens
Answers     those of the call and 32 more
Licence     none needed: it is made here

An agent has looked records up, a call and an output each; the outputs are what fills the context, and what a call needs
stands in the first half of them. Then it is asked for calls, turn by turn. All is drawn from the seed, so that no model
can have seen it, and made so that one of 0.5 billion parameters mostly succeeds with its whole cache.

Levels      1 all values stand in the request; 2 code and number of a record are wanted; 3 its code, and a number of the
            request; 4 its code, and the number of another record. `task.levels` are asked in turns, and the next sample
            begins with the next one.
Modes       `golden`: after each turn the right call and its output are fed, whatever was answered. `dialogue`: the
            model's own call stays, with the same output. `independent`: each call is asked after the records alone.
            `query_aware`: each has a prompt of its own.
Again       the last turn asks for the first call once more (`task.again`). The measures `first`, `later` and `again`
            are the scores of those turns: whether the damage of a compressed cache stays.
Score       1 where name and all arguments agree, as in agent_traces. The kinds of damage (`tasks/calls/damage.py`) are
            shares of answers. A finished run's agents.csv has scores by turn, by age and by level.

Not here: how calls are read and what is wrong with them (`tasks/calls/`), recorded work (`tasks/agent_traces/`).
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Once
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks.agent_traces.render import Message, Talk, spoken
from kvbench.tasks.agent_traces.task import AgentTraces, Decision, Notes, Trace, schema
from kvbench.tasks.checks import check_lengths
from kvbench.tasks.longbench.facts import FIRST_NAMES, LAST_NAMES
from kvbench.tasks.turns.conversation import Asking, Base, Feed


class Kind(NamedTuple):
    """What a record is, and the tool that takes its code and its number."""

    noun: str
    tool: str
    code: str
    number: str
    does: str  # in a request


KINDS = (
    Kind("invoice", "pay_invoice", "invoice_id", "euros", "Pay"),
    Kind("machine", "start_machine", "machine_id", "minutes", "Start"),
    Kind("parcel", "send_parcel", "parcel_id", "grams", "Send"),
    Kind("room", "book_room", "room_id", "seats", "Book"),
    Kind("tank", "fill_tank", "tank_id", "litres", "Fill"),
)
LOOK_UP = "look_up"
DONE = json.dumps({"ok": True})  # the output of every call but a look-up
POLICY = """\
You look records up and act on them with the tools below. Codes and numbers come from the records that you have looked \
up or from the request. Reply to a request with one call of a tool and nothing else."""
WANTS = {
    1: "{does} the {noun}: {code} {id}, {number} {n}.",
    2: "{does} the {noun} of {owner}: {code} and {number} as in the record.",
    3: "{does} the {noun} of {owner}: {number} {n}, and {code} as in the record.",
    4: "{does} the {noun} of {owner}: {number} as in the record of {other}, and {code} as in the record of {owner}.",
}
ONCE_MORE = " Do it once more."


class Record(NamedTuple):
    """What was looked up of an owner."""

    kind: Kind
    owner: str
    code: str
    n: int

    def output(self, notes: str, **more: str) -> str:
        kind = self.kind
        return json.dumps({"owner": self.owner, kind.code: self.code, kind.number: self.n, "notes": notes, **more})


class Request(NamedTuple):
    """A call that is asked for, and the records that it needs."""

    words: str
    call: Mapping[str, Any]
    level: int
    needs: Sequence[Record]


@dataclass(frozen=True)
class Params:
    source: ClassVar[str] = "embedded"
    levels: Annotated[tuple[Annotated[int, Ge(1), Le(4)], ...], Once()]
    lengths: Annotated[tuple[Annotated[int, Ge(1000)], ...], Once()]  # tokens, the last answer included
    turns: Count
    again: bool  # the last turn asks for the first call once more
    output_tokens: Count  # of an output, about
    rows: Count  # samples of each length
    template: Literal["auto", "plain"]
    max_new_tokens: Count | None  # None: the call's and 32
    mode: Literal["golden", "dialogue", "independent", "query_aware"]
    feed: Feed
    budget_base: Base

    def __post_init__(self) -> None:
        if self.again and self.turns < 2:
            raise ConfigError("task.again=true needs two turns; give task.turns=2 or more, or task.again=false")

    @property
    def asking(self) -> Asking:
        return Asking(self.mode, self.feed, self.budget_base)


class ToolCalls(AgentTraces):
    """A conversation for each sample, a call for each turn."""

    name = "tool_calls"
    version = 1
    Params: Any = Params
    data = None

    def title(self) -> str:
        params = self.params
        levels, lengths = ("+".join(map(str, each)) for each in (params.levels, params.lengths))
        return f"level-{levels}/{lengths}-tokens/{params.turns}-turns"

    def prepare(self, shape: ModelShape) -> None:
        check_lengths(self.params.lengths, shape)
        acts = [(one.tool, f"{one.does} one {one.noun}.", {one.code: "string", one.number: "integer"}) for one in KINDS]
        look_up = (LOOK_UP, "Look up the record of an owner.", {"what": "string", "owner": "string"})
        self.tools = [schema(*tool) for tool in (look_up, *acts)]
        self.notes = [f"drawn records; notes in outputs: {prose.prose_name()}"]

    @property
    def fewest(self) -> int:
        """Records of a sample: half of them have two of a kind, and one for each turn."""
        return max(12, 2 * self.params.turns + 2)

    def work(self, length: int, number: int, n_units: int, n_padding: int) -> Trace:
        """The sample of a length and number, with so many records and words of padding."""
        params = self.params
        rng = random.Random(f"tool_calls {self.seed} {length} {number}")
        notes = Notes(rng, params.output_tokens)
        first, *others = draw_records(rng, n_units)
        outputs = {first: first.output(notes.one(), more=notes.padding(n_padding))}
        outputs |= {record: record.output(notes.one()) for record in others}
        messages: list[Message] = [{"role": "user", "content": "Please look the records up."}]
        for record, output in outputs.items():
            looks = {"name": LOOK_UP, "arguments": {"what": record.kind.noun, "owner": record.owner}}
            messages += [{"role": "assistant", "content": spoken_call(looks)}]
            messages += [{"role": "tool", "name": LOOK_UP, "content": output}]
        n_context, decisions = len(messages), list[Decision]()
        requests = self.requests(rng, number, [*outputs][: n_units // 2])
        for i, request in enumerate(requests):
            is_again = i > 0 and request is requests[0]
            fields: dict[str, Any] = {"kind": f"level-{request.level}", "level": request.level}
            fields |= {"group": "again" if is_again else "later" if i else "first"}
            fields |= {"action": {"kind": "call", **request.call}}
            right = spoken_call(request.call)
            messages += [{"role": "user", "content": request.words + ONCE_MORE * is_again}]
            needs = tuple(outputs[record] for record in request.needs)
            decisions += [Decision(len(messages), right, fields, needs)]
            messages += [{"role": "assistant", "content": right}]
            messages += [{"role": "tool", "name": request.call["name"], "content": DONE}]
        talk = Talk(POLICY, self.tools, messages)
        return Trace(f"calls-{length}-{number}", talk, n_context, decisions, {"length": length})

    def requests(self, rng: random.Random, number: int, records: Sequence[Record]) -> list[Request]:
        """What the turns of a sample ask for, of records that stand far back."""
        levels, again = self.params.levels, self.params.again
        found = [
            draw_request(rng, levels[i % len(levels)], record, records)
            for i, record in enumerate(rng.sample(records, self.params.turns - again), number)
        ]
        return [*found, *found[:again]]


def draw_records(rng: random.Random, n: int) -> list[Record]:
    """Records of each kind in turns, each of another owner."""
    found = dict[str, Record]()
    while len(found) < n:
        owner = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        owner = f"{owner} {rng.choice('IJKLMNOPQRST')}." if owner in found else owner
        found.setdefault(owner, Record(KINDS[len(found) % len(KINDS)], owner, draw_code(rng), draw_number(rng)))
    return [*found.values()]


def draw_code(rng: random.Random) -> str:
    return f"{rng.choice('ABCDEFGHKLMPRST')}-{rng.randint(1000, 9999)}"


def draw_number(rng: random.Random) -> int:
    return rng.randint(100, 999)


def draw_request(rng: random.Random, level: int, record: Record, records: Sequence[Record]) -> Request:
    """A call of this level on a record, or on one that another one stands beside where two are needed."""
    kind, needs = record.kind, [record]
    if level == 1:
        record, needs = record._replace(code=draw_code(rng)), []
    n = record.n if level == 2 else draw_number(rng)
    other = record
    if level == 4:
        pairs = [(one, two) for one in records for two in records if one is not two and one.kind is two.kind]
        same = [(one, two) for one, two in pairs if one is record]
        record, other = rng.choice(same or pairs)
        kind, needs, n = record.kind, [record, other], other.n
    words = WANTS[level].format(
        does=kind.does, noun=kind.noun, owner=record.owner, code=kind.code, id=record.code, number=kind.number, n=n,
        other=other.owner,
    )  # fmt: skip
    return Request(words, {"name": kind.tool, "arguments": {kind.code: record.code, kind.number: n}}, level, needs)


def spoken_call(call: Mapping[str, Any]) -> str:
    return spoken({"role": "assistant", "tool_calls": [{"function": call}]})

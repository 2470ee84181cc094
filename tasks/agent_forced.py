"""Agent traces, token by token: what is recorded is fed, and how often the next token would have been the recorded one.

Names       agent traces, forced; work on drawn records, forced
Asks        each token of an agent's recorded action
Lengths     as agent_traces
Answers     none: the recorded action is fed
Licence     MIT (tau-bench)

The same samples as `task=agent_traces task.mode=query_aware`: each decision's whole history is one prompt, which is
compressed, and the recorded action is read through the compressed cache. Nothing is parsed and nothing diverges within
an action, so that small models can be told apart by the paired difference to full attention.

Score       the share of tokens whose likeliest next token was the recorded one. `nll` is the mean loss in nats;
            `value_agreement` and `value_nll` are of the tokens of argument values alone.
Damage      where a greedy answer would first part from a recorded call: before or at its opening (`no_call`), in the
            tool's name (`other_calls`), in an argument's name (`missing_arguments`), in a value (`wrong_value`), in the
            JSON around them or at its end (`broken_json`), or nowhere (`right`). These are shares of calls.

Not here: traces and what is asked of them (`tasks/agent_traces/`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvbench.engine.shapes import ModelShape
from kvbench.tasks.agent_traces.actions import action_of, values
from kvbench.tasks.agent_traces.task import AgentTraces
from kvbench.tasks.base import Sample
from kvbench.tasks.calls.read import OPEN
from kvbench.tasks.forced_answers import FedTask, answer_ids, places_of

SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')  # of JSON, names of keys among them


class AgentForced(FedTask, AgentTraces):
    """A sample for each decision, whose recorded action is fed."""

    name = "agent_forced"
    version = 3
    part = "value"
    asking: Any = None  # no turns: each decision has a prompt of its own

    def __init__(self, params: Any, data_dir: str | None, seed: int) -> None:
        AgentTraces.__init__(self, replace(params, mode="query_aware"), data_dir, seed)
        self.asking = None

    def check(self, shape: ModelShape) -> None:
        AgentTraces.check(self, shape)
        self.notes[0] = "a score says how often a token is the recorded one, not whether the job is done"

    def part_of(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[int]:
        """Which tokens of an action hold argument values; all of them where a value is the whole answer."""
        action = action_of(answer)
        if action["kind"] != "call":
            return range(len(tokenizer.encode(answer, add_special_tokens=False)))
        return places_of(tokenizer, answer, spans(answer, values(action["arguments"])))

    def partings(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[str]:
        action = action_of(answer)
        if action["kind"] != "call":
            return ()
        opening = answer.index("{", max(0, answer.find(OPEN)))
        arguments = answer.index('"arguments"', opening) + len('"arguments"')
        found = ["broken_json"] * len(answer_ids(tokenizer, answer))
        places = {"no_call": [(0, opening)]}
        for part in SCALAR.finditer(answer, answer.index(":", opening)):
            is_key = answer[part.end() :].startswith(":")
            kind = "missing_arguments" if is_key else "wrong_value"
            if part.start() < arguments:
                kind = "broken_json" if is_key else "other_calls"
            places.setdefault(kind, []).append(part.span())
        for kind, of_kind in places.items():
            for at in places_of(tokenizer, answer, of_kind):
                found[at] = kind
        return found


def spans(text: str, parts: Iterable[str]) -> list[tuple[int, int]]:
    """Where each part stands last."""
    return [(at, at + len(part)) for part in parts if (at := text.rfind(part)) >= 0]

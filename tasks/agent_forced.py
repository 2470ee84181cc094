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

Not here: traces and what is asked of them (`tasks/agent_traces/`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.engine.shapes import ModelShape
from kvbench.tasks.agent_traces.actions import action_of, values
from kvbench.tasks.agent_traces.task import AgentTraces
from kvbench.tasks.base import Sample
from kvbench.tasks.forced_answers import FedTask, places_of


class AgentForced(FedTask, AgentTraces):
    """A sample for each decision, whose recorded action is fed."""

    name = "agent_forced"
    version = 2
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
        spans = [(at, at + len(value)) for value in values(action["arguments"]) if (at := answer.rfind(value)) >= 0]
        return places_of(tokenizer, answer, spans)
